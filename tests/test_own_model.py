"""A model that is built from our layers, under FSDP, against one process. If these fail while tests/layers passes,
look in fsdp_tp/fsdp.py and grad_norm.py (parameters of two meshes in one model).

Bounds: fp64, five AdamW steps. A step divides by the root of the second moment, which makes rounding of small
gradients larger: 1e-9 for weights of order 1 that moved by 0.05.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

import fsdp_tp
from fsdp_tp.comm.functional import all_reduce
from tests.layers.test_attention import HEAD_DIM, Plain
from tests.models import VOCABULARY, batch, gather
from tests.ranks import run

HEADS, KV, WIDTH, HIDDEN = 9, 3, 29, 36
MATH = dict(qk_norm=True, rotary_base=100.0, bias=True)


class Block(nn.Module):
    def __init__(self, attention, mlp):
        super().__init__()
        self.norm1, self.norm2 = (nn.RMSNorm(HIDDEN, 1e-6, dtype=torch.float64) for _ in range(2))
        self.attention, self.mlp = attention, mlp

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    def __init__(self, embed, blocks, head):
        super().__init__()
        self.embed, self.blocks, self.head = embed, nn.ModuleList(blocks), head

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class PlainMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(HIDDEN, WIDTH, False, dtype=torch.float64) for _ in range(2))
        self.down_proj = nn.Linear(WIDTH, HIDDEN, False, dtype=torch.float64)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def plain():
    torch.manual_seed(0)
    return Decoder(
        nn.Embedding(VOCABULARY, HIDDEN, dtype=torch.float64),
        [Block(Plain(HEADS, KV, **MATH), PlainMLP()) for _ in range(2)],
        nn.Linear(HIDDEN, VOCABULARY, dtype=torch.float64),
    )


def parallel(mesh, **more):
    options = dict(mesh=mesh, dtype=torch.float64, **more)
    torch.manual_seed(0)
    return Decoder(
        fsdp_tp.VocabParallelEmbedding(VOCABULARY, HIDDEN, **options),
        [
            Block(
                fsdp_tp.ParallelAttention(HIDDEN, HEADS, num_kv_heads=KV, head_dim=HEAD_DIM, **MATH, **options),
                fsdp_tp.ParallelMLP(HIDDEN, WIDTH, **options),
            )
            for _ in range(2)
        ],
        fsdp_tp.ColumnParallelLinear(HIDDEN, VOCABULARY, gather_output=True, **options),
    )


def _train(model, mesh):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    losses, norms = [], []
    for step in range(5):
        ids = batch(step, sequence=7)
        if mesh is not None:
            ids = ids.chunk(mesh.data_size)[mesh.data_rank]
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        clip = torch.nn.utils.clip_grad_norm_ if mesh is None else fsdp_tp.clip_grad_norm_
        norms.append(clip(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append((loss.detach() if mesh is None else _mean(loss.detach(), mesh)).item())
    return torch.tensor([losses, norms], dtype=torch.float64)


def _mean(loss, mesh):
    return all_reduce(loss, mesh.data.get_group()) / mesh.data_size


def _compare(tensor, shard, sequence_parallel, wrapped):
    mesh = fsdp_tp.init_mesh(tensor_parallel_degree=tensor, hybrid_shard_degree=shard)
    model = parallel(mesh, sequence_parallel=sequence_parallel)
    assert all(isinstance(each, DTensor) for block in model.blocks for each in block.attention.parameters())
    if wrapped:
        fsdp_tp.wrap(
            model, mesh, plan={"blocks.*.norm*": "sequence"}, sequence_parallel=sequence_parallel,
            activation_checkpointing="full",
        )  # fmt: skip
    else:
        for block in model.blocks:
            fsdp_tp.fully_shard(block, mesh=mesh)
        fsdp_tp.fully_shard(model, mesh=mesh)
    reference = plain()
    for name, value in model.state_dict().items():
        assert torch.equal(gather(value), reference.state_dict()[name]), name
    expected, actual = _train(reference, None), _train(model, mesh)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-9)
    assert expected[0, -1] < expected[0, 0] - 0.1, "the reference did not learn: the curve proves nothing"
    for name, value in model.state_dict().items():
        torch.testing.assert_close(gather(value), reference.state_dict()[name], rtol=0, atol=1e-9, msg=name)


def _ways(tensor, shard):
    _compare(tensor, shard, False, False)
    for sequence_parallel in (False, True):
        _compare(tensor, shard, sequence_parallel, True)


def test_five_steps_on_tensor_2_shard_2_equal_one_process():
    """With fully_shard alone; with wrap; and with norms between the blocks that see a slice of 7 tokens."""
    run(4, _ways, 2, 2)
