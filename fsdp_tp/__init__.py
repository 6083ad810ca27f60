"""Tensor parallelism and hybrid sharding for PyTorch FSDP scripts, in three lines."""

from fsdp_tp import checkpoint as checkpoint
from fsdp_tp.comm.backend import register as _register
from fsdp_tp.config import ParallelConfig
from fsdp_tp.fsdp import accumulate, fully_shard
from fsdp_tp.grad_norm import clip_grad_norm_
from fsdp_tp.initialize import initialize
from fsdp_tp.layers import (
    ColumnParallelLinear,
    ParallelAttention,
    ParallelMLP,
    RowParallelLinear,
    VocabParallelEmbedding,
    vocab_parallel_cross_entropy,
    vocab_parallel_linear_cross_entropy,
)
from fsdp_tp.loss import global_mean
from fsdp_tp.mesh import ParallelMesh, init_mesh
from fsdp_tp.methods import register_forward_method
from fsdp_tp.parallelize import parallelize
from fsdp_tp.wrap import wrap

__all__ = [
    "ColumnParallelLinear",
    "ParallelAttention",
    "ParallelConfig",
    "ParallelMLP",
    "ParallelMesh",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "accumulate",
    "clip_grad_norm_",
    "fully_shard",
    "global_mean",
    "init_mesh",
    "initialize",
    "parallelize",
    "register_forward_method",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_linear_cross_entropy",
    "wrap",
]
__version__ = "0.1.0"

_register()  # so that torch.distributed knows the backend by name
