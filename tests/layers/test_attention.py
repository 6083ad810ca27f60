"""fp64 against attention written out on one process. If these fail, look in fsdp_tp/layers/attention.py, then
heads.py and split.py (which heads a rank has).

The bounds: fp64 rounds at 1e-16, and sums here have up to some hundred terms of order 1, behind one another: 1e-12
for outputs; weight gradients sum over all tokens too: 1e-11. A missing or doubled sum is wrong by O(0.01) and more.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import fsdp_tp
from fsdp_tp.layers import ParallelAttention, SequenceLength
from fsdp_tp.layers.canonical import arrangement_of
from fsdp_tp.layers.split import ZERO
from tests.collectives import CollectiveCounter
from tests.models import gather
from tests.ranks import run

ROWS, SEQUENCE, HEAD_DIM = 2, 7, 4


class Plain(nn.Module):
    """Grouped-query attention with one head after another in a loop."""

    def __init__(self, heads, kv, *, bias=False, qk_norm=False, rotary_base=None, causal=True, hidden=None):
        super().__init__()
        self.heads, self.kv, self.causal, self.rotary_base = heads, kv, causal, rotary_base
        hidden = hidden or heads * HEAD_DIM
        self.q_proj = nn.Linear(hidden, heads * HEAD_DIM, bias, dtype=torch.float64)
        self.k_proj = nn.Linear(hidden, kv * HEAD_DIM, bias, dtype=torch.float64)
        self.v_proj = nn.Linear(hidden, kv * HEAD_DIM, bias, dtype=torch.float64)
        self.o_proj = nn.Linear(heads * HEAD_DIM, hidden, bias, dtype=torch.float64)
        self.q_norm = nn.RMSNorm(HEAD_DIM, 1e-6, dtype=torch.float64) if qk_norm else None
        self.k_norm = nn.RMSNorm(HEAD_DIM, 1e-6, dtype=torch.float64) if qk_norm else None

    def turn(self, x, positions):
        """Multiplies the pair (i, i + d/2) as a complex number by e^(i m theta)."""
        half = HEAD_DIM // 2
        theta = self.rotary_base ** (-2 * torch.arange(half, dtype=torch.float64) / HEAD_DIM)
        turned = torch.complex(x[..., :half], x[..., half:]) * torch.exp(1j * positions[..., None] * theta)
        return torch.cat([turned.real, turned.imag], -1)

    def forward(self, x, mask=None, positions=None):
        length = x.shape[-2]
        positions = torch.arange(length) if positions is None else positions
        q, k, v = (each(x).split(HEAD_DIM, -1) for each in (self.q_proj, self.k_proj, self.v_proj))
        outputs = []
        for head in range(self.heads):
            own = q[head], k[head // (self.heads // self.kv)], v[head // (self.heads // self.kv)]
            query, key = own[:2] if self.q_norm is None else (self.q_norm(own[0]), self.k_norm(own[1]))
            if self.rotary_base:
                query, key = self.turn(query, positions), self.turn(key, positions)
            scores = query @ key.mT / HEAD_DIM**0.5
            if mask is not None:
                of_head = mask if mask.ndim < 3 else mask[..., head if mask.shape[-3] > 1 else 0, :, :]
                scores = scores.masked_fill(~of_head, -torch.inf) if mask.dtype == torch.bool else scores + of_head
            if self.causal:
                scores = scores.masked_fill(torch.ones(length, length).tril() == 0, -torch.inf)
            outputs.append(scores.softmax(-1) @ own[2])
        return self.o_proj(torch.cat(outputs, -1))


def _own(x, dim, mesh):
    step = -(-x.shape[dim] // mesh.tensor_size)
    return x.split(step, dim)[mesh.tensor_rank] if mesh.tensor_rank * step < x.shape[dim] else x.narrow(dim, 0, 0)


def _parallel(plain, mesh, hidden=None, **options):
    layer = ParallelAttention(
        hidden or plain.heads * HEAD_DIM, plain.heads, num_kv_heads=plain.kv, head_dim=HEAD_DIM,
        bias=plain.q_proj.bias is not None, qk_norm=plain.q_norm is not None, causal=plain.causal,
        rotary_base=plain.rotary_base, mesh=mesh, dtype=torch.float64, **options,
    )  # fmt: skip
    layer.load_state_dict({name: _distributed(value, layer, name) for name, value in plain.state_dict().items()})
    return layer


def _distributed(whole, layer, name):
    """As distributed checkpoints hand it over: the DTensor of the canonical shape."""
    like = layer.state_dict()[name]
    if not isinstance(like, DTensor):
        return whole
    assert like.shape == whole.shape, name
    return torch.distributed.tensor.distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def _gradient(layer, name):
    """That of the whole parameter, in the order of one process."""
    path, _, own = name.rpartition(".")
    module = layer.get_submodule(path)
    grad = gather(module._parameters[own].grad)
    arrangement = arrangement_of(module, own)
    return grad if arrangement is None else arrangement[0].restore(grad, arrangement[1])


def _compare(mesh, heads, kv, *, mask=None, positions=None, sequence_parallel=False, hidden=None, seed=0, **options):
    torch.manual_seed(seed)
    plain = Plain(heads, kv, hidden=hidden, **options)
    for norm in (plain.q_norm, plain.k_norm):
        if norm is not None:
            nn.init.uniform_(norm.weight, 0.5, 1.5)
    layer = _parallel(plain, mesh, hidden, sequence_parallel=sequence_parallel)
    x = torch.randn(ROWS, SEQUENCE, hidden or heads * HEAD_DIM, dtype=torch.float64, requires_grad=True)
    grad = torch.randn_like(x)
    expected = plain(x, mask, positions)
    expected_mask = None
    if mask is not None and mask.requires_grad:
        expected_mask, mask = mask, mask.detach().clone().requires_grad_()
    expected.backward(grad)
    local = x.detach().clone()
    if sequence_parallel:
        layer.sequence_length = SequenceLength()
        layer.sequence_length.note(x)
        local, expected, grad = (_own(each, 1, mesh) for each in (local, expected, grad))
    local.requires_grad_()
    actual = layer(local, mask, positions)
    actual.backward(grad)
    what = f"{heads}/{kv} heads on {mesh.tensor_size}, {options}"
    bounds = dict(rtol=0, atol=1e-12, msg=lambda text: f"{what}: {text}")
    torch.testing.assert_close(actual, expected, **bounds)
    torch.testing.assert_close(local.grad, _own(x.grad, 1, mesh) if sequence_parallel else x.grad, **bounds)
    if expected_mask is not None:
        torch.testing.assert_close(mask.grad, expected_mask.grad, **bounds)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(_gradient(layer, name), parameter.grad, rtol=0, atol=1e-11, msg=f"{what}: {name}")
    return plain, layer, (local, grad)


def _steps_leave_padding_zero(plain, layer, data, sequence_parallel):
    """Five AdamW steps with weight decay: equal to one process, zeros where no row of the whole is stored."""
    local, grad = data
    for module in (plain, layer):
        module.zero_grad()
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2, weight_decay=0.3) for each in (plain, layer)]
    whole = local.detach() if not sequence_parallel else None
    for _ in range(5):
        plain(whole).backward(grad)
        layer(local.detach()).backward(grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    # AdamW divides by the root of the second moment, so that rounding of small gradients grows: 1e-9.
    for name, value in layer.state_dict().items():
        torch.testing.assert_close(gather(value), plain.state_dict()[name], rtol=0, atol=1e-9, msg=name)
    padded = 0
    for module in (layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj):
        for name, (split, dim) in getattr(module, "_arranged", {}).items():
            zeros = gather(module._parameters[name]).index_select(dim, (split.stored == ZERO).nonzero().flatten())
            padded += zeros.numel()
            assert torch.equal(zeros, torch.zeros_like(zeros)), name
    return padded


def _variants(mesh, heads, kv):
    """Every option at least once, and those together that touch each other."""
    generator = torch.Generator().manual_seed(3)
    everything = dict(bias=True, qk_norm=True, rotary_base=100.0)
    shape = (ROWS, heads, SEQUENCE, SEQUENCE)
    allowed = (torch.rand(shape[-2:], generator=generator) < 0.7) | torch.eye(SEQUENCE, dtype=torch.bool)
    added = torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
    positions = torch.randint(0, 50, (ROWS, SEQUENCE), generator=generator)
    plain, layer, data = _compare(mesh, heads, kv)
    padded = _steps_leave_padding_zero(plain, layer, data, False)
    _compare(mesh, heads, kv, sequence_parallel=True, **everything)
    _compare(mesh, heads, kv, positions=positions, mask=added, hidden=10, **everything)
    _compare(mesh, heads, kv, mask=allowed, causal=False, qk_norm=True)
    return padded


def _on(ranks, shapes):
    mesh = fsdp_tp.init_mesh(tensor_parallel_degree=ranks)
    return {shape: _variants(mesh, *shape) for shape in shapes}


@pytest.mark.parametrize(
    ("ranks", "shapes"),
    [(1, [(9, 3)]), (2, [(9, 3), (5, 5), (4, 4)]), (4, [(9, 3), (8, 1), (8, 2)]), (8, [(12, 4)])],
)
def test_any_heads_on_any_degree_equal_one_process(ranks, shapes):
    padded = run(ranks, _on, ranks, shapes)[0]
    if ranks == 2:
        assert padded[9, 3] > 0, "two and one of three key/value heads: the case with padding was not met"
        assert padded[5, 5] > 0


def _one_more_rank_than_heads():
    mesh = fsdp_tp.init_mesh(tensor_parallel_degree=4)
    _variants(mesh, 3, 3)  # one rank computes a head of zeros


def test_a_rank_without_a_head():
    run(4, _one_more_rank_than_heads)


def _traffic(sequence_parallel, qk_norm):
    mesh = fsdp_tp.init_mesh(tensor_parallel_degree=2)
    layer = ParallelAttention(16, 4, mesh=mesh, sequence_parallel=sequence_parallel, qk_norm=qk_norm, rotary_base=1e4)
    x = torch.randn(2, 6, 16, requires_grad=True)
    with CollectiveCounter(mesh) as counter:
        layer(x).sum().backward()
    return dict(counter.counts)


def test_two_collectives_a_module_and_step_and_one_for_both_norms():
    assert run(2, _traffic, False, False)[0] == {("all_reduce", "tensor"): 2}
    assert run(2, _traffic, False, True)[0] == {("all_reduce", "tensor"): 3}
    # Sequence parallelism: in and out, forward and backward; an all-reduce's traffic in two halves.
    assert run(2, _traffic, True, False)[0] == {("all_gather", "tensor"): 2, ("reduce_scatter", "tensor"): 2}


def _details():
    mesh = fsdp_tp.init_mesh(tensor_parallel_degree=2)
    torch.manual_seed(4)
    layer = ParallelAttention(18, 9, num_kv_heads=3, bias=True, qk_norm=True, mesh=mesh, dtype=torch.float64)
    torch.manual_seed(4)
    for name, rows in (("q_proj", 18), ("k_proj", 6), ("v_proj", 6), ("o_proj", 18)):
        drawn = nn.Linear(18, rows, dtype=torch.float64).state_dict()
        for own, value in layer.get_submodule(name).state_dict().items():
            assert torch.equal(gather(value), drawn[own]), "initial weights are those of nn.Linear, bit for bit"
    assert all(isinstance(parameter, DTensor) for parameter in layer.parameters())
    assert layer(torch.zeros(5, 18, dtype=torch.float64)).shape == (5, 18)  # no batch dim
    with pytest.raises(ValueError, match="num_heads=5 does not divide hidden_size=18"):
        ParallelAttention(18, 5, mesh=mesh)
    with pytest.raises(ValueError, match="num_kv_heads=4 must divide num_heads=6"):
        ParallelAttention(18, 6, num_kv_heads=4, mesh=mesh)
    with pytest.raises(ValueError, match=r"rotary_base=10000.0 turns pairs of features, but head_dim=3 is odd"):
        ParallelAttention(18, 6, rotary_base=10000.0, mesh=mesh)
    for heads in (3, 5):  # the batch, this rank's heads
        with pytest.raises(ValueError, match=rf"\({heads}, 5, 5\): .*, \(..., 1, 5, 5\) or \(..., 9, 5, 5\)"):
            layer(torch.zeros(3, 5, 18, dtype=torch.float64), torch.ones(heads, 5, 5, dtype=torch.bool))
    with torch.device("meta"):
        layer = ParallelAttention(18, 9, num_kv_heads=3, qk_norm=True, mesh=mesh)
    layer = layer.to_empty(device="cpu")
    fsdp_tp.initialize(layer, seed=1)
    assert layer(torch.ones(1, 5, 18)).isfinite().all()


def test_initial_weights_do_not_depend_on_the_layout_and_errors_name_the_setting():
    run(2, _details)
