"""What takes the place of ``nn.Linear`` and its neighbours on the tensor axis."""

from fsdp_tp.layers.attention import ParallelAttention
from fsdp_tp.layers.dropout import Dropout
from fsdp_tp.layers.embedding import VocabParallelEmbedding
from fsdp_tp.layers.linear import ColumnParallelLinear, RowParallelLinear
from fsdp_tp.layers.linear_loss import vocab_parallel_linear_cross_entropy
from fsdp_tp.layers.loss import vocab_parallel_cross_entropy
from fsdp_tp.layers.mlp import ParallelMLP
from fsdp_tp.layers.sequence import SequenceLength

__all__ = [
    "ColumnParallelLinear",
    "Dropout",
    "ParallelAttention",
    "ParallelMLP",
    "RowParallelLinear",
    "SequenceLength",
    "VocabParallelEmbedding",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_linear_cross_entropy",
]
