"""Plans that are wrong by the shapes of what they split: fsdp_tp/plans/check.py."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp_tp
from fsdp_tp.layers.heads import HeadLayout
from fsdp_tp.plans import check_plan, check_sequence_is_split, match_plan
from fsdp_tp.plans.own_heads import splits_by_head
from tests import models
from tests.ranks import run


def _check(model, plan):
    return check_plan(model, match_plan(model, plan))


def test_a_norm_over_all_heads_is_not_per_head():
    from transformers import AutoConfig, AutoModelForCausalLM

    plan = {f"model.layers.*.self_attn.{name}_proj": "column" for name in "qkv"}
    plan |= {"model.layers.*.self_attn.o_proj": "row", "model.layers.*.self_attn.*_norm": "per_head"}
    sizes = {**models.SIZES, "head_dim": 8, "pad_token_id": 0}
    over_all, of_each = (
        AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes)) for family in ("olmo2", "qwen3")
    )
    with pytest.raises(ValueError, match=r"layers.0.self_attn.q_norm.weight is per_head, but has 32 elements, one for"):
        _check(over_all, plan)
    assert _check(of_each, plan) == match_plan(of_each, plan)


def test_multi_query_keys_that_stay_whole_are_per_head():
    """A whole linear of one head is no norm, whatever its sizes."""
    attention = nn.ModuleDict({"q": nn.Linear(8, 8), "k": nn.Linear(8, 2), "o": nn.Linear(8, 8)})
    plan = {"a.q": "column", "a.k": "per_head", "a.o": "row"}
    assert _check(nn.ModuleDict({"a": attention}), plan) == plan


@pytest.mark.parametrize(
    ("packed", "row", "returns", "reads"),
    [("self_attn.qkv_proj", "self_attn.o_proj", 64, 32), ("mlp.gate_up_proj", "mlp.down_proj", 96, 48)],
)
def test_a_packed_projection_is_not_split_as_a_plain_one(packed, row, returns, reads):
    model = models.hugging_face("phi3", pad_token_id=0)
    plan = {f"model.layers.*.{packed}": "column", f"model.layers.*.{row}": "row"}
    with pytest.raises(
        ValueError, match=f"{packed} is column and returns {returns} .*{row} reads {reads}: it is packed"
    ):
        _check(model, plan)
    by_head = _check(model, {**plan, f"model.layers.*.{packed}": "column_by_head"})
    assert by_head == match_plan(model, plan), "then it is a plain column layer"


def test_heads_are_not_cut():
    model = models.hugging_face("llama", num_attention_heads=9, num_key_value_heads=3, hidden_size=72)
    styles = {f"model.layers.*.self_attn.{name}_proj": "column" for name in "qkv"}
    styles = match_plan(model, styles | {"model.layers.*.self_attn.o_proj": "row"})
    check_plan(model, styles, ranks=3)
    with pytest.raises(ValueError, match="q_proj is column and returns 9 heads of head_dim=8: over a tensor axis of 2"):
        check_plan(model, styles, ranks=2)
    layout = HeadLayout(9, 3, 2)
    splits = {
        path: layout.queries if "q_" in path else layout.kv for path, style in styles.items() if style == "column"
    }
    check_plan(model, styles, splits=splits, ranks=2)


def test_a_column_layer_needs_a_row_layer_after_it():
    plan = models.TWO_LAYER_PLAN
    model = models.TwoLayerNet()
    assert _check(model, plan) == match_plan(model, plan)
    with pytest.raises(
        ValueError, match="head is column, but the model has no row layer that .*'column_gather' of the"
    ):
        _check(model, {**plan, "head": "column"})
    with pytest.raises(ValueError, match=r"layers.0.mlp.gate is column, but layers.0 has no row layer"):
        _check(model, {**plan, "layers.*.mlp.down": "replicate"})


def test_a_row_layer_elsewhere_in_the_block_is_not_the_one_that_is_needed():
    block = {"wq": nn.Linear(8, 8), "wo": nn.Linear(8, 8), "up": nn.Linear(8, 20), "down": nn.Linear(20, 8)}
    model = nn.ModuleDict({"block": nn.ModuleDict(block)})
    plan = {"block.wq": "column", "block.wo": "row", "block.up": "column", "block.down": "row"}
    assert _check(model, plan) == plan
    with pytest.raises(ValueError, match=r"block.up is column, but block.down beside it, .* \(20\), is replicate: it"):
        _check(model, {**plan, "block.down": "replicate"})
    del plan["block.down"]
    with pytest.raises(ValueError, match="is not in the plan: it would take"):
        _check(model, plan)


def test_norms_of_slices_need_something_that_makes_slices():
    plan = {"layers.0": "split_sequence", "layers.*.norm": "sequence"}
    check_sequence_is_split(plan)
    with pytest.raises(
        ValueError, match="norm is sequence, .* nothing in the plan splits the sequence: say 'vocab' of"
    ):
        check_sequence_is_split({"embed": "replicate", "layers.0.norm": "sequence"})


class _Attention(nn.Module):
    """That knows only how wide a head is."""

    head_dim = 4

    def __init__(self, heads, kv_heads):
        super().__init__()
        for name, inputs, outputs in (("q", 12, heads), ("k", 12, kv_heads), ("v", 12, kv_heads)):
            setattr(self, name, nn.Linear(inputs, outputs * 4, dtype=torch.float64))
        self.o = nn.Linear(heads * 4, 12, dtype=torch.float64)

    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (-1, 4)).transpose(-3, -2) for layer in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.o(y.transpose(-3, -2).flatten(-2))


def _whole_heads(cases):
    mesh = fsdp_tp.init_mesh(tensor_parallel_degree=dist.get_world_size())
    x = (torch.randn(2, 5, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0)),)
    plan = {"a": "shared_input", "a.q": "column", "a.k": "column", "a.v": "column", "a.o": "row"}
    for heads, kv_heads in cases:
        torch.manual_seed(0)
        model = nn.Sequential()
        model.add_module("a", _Attention(heads, kv_heads))
        fsdp_tp.parallelize(model, mesh, plan=plan, verify=x)  # compares outputs and gradients, in fp64 to 1e-10


def test_own_attention_that_says_how_wide_a_head_is_splits_into_whole_heads():
    run(2, _whole_heads, [(9, 3), (5, 5), (6, 2)])
    run(4, _whole_heads, [(9, 9), (5, 5), (8, 4)])


def test_heads_whose_groups_would_differ_are_refused():
    """Three key/value heads on four ranks: one has none; its code may expect three queries for each."""
    attention = nn.ModuleDict({"a": _Attention(9, 3)})
    styles = {"a.q": "column", "a.k": "column", "a.v": "column", "a.o": "row"}
    assert splits_by_head(attention, styles, 4) == {}
    with pytest.raises(ValueError, match="a.q is column and returns 9 heads of head_dim=4: over a tensor axis of 4"):
        check_plan(attention, styles, ranks=4)


class _ByHead(nn.Module):
    """Attention whose packed rows are those of one head after another, or of all queries, keys, values."""

    def __init__(self, heads_first):
        super().__init__()
        self.heads_first = heads_first
        self.qkv = nn.Linear(8, 24, dtype=torch.float64)
        self.out = nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, x):
        packed = self.qkv(x)
        parts = packed.unflatten(-1, (-1, 3, 2) if self.heads_first else (3, -1, 2))
        q, k, v = (part.transpose(-3, -2) for part in parts.unbind(-2 if self.heads_first else -3))
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(-3, -2).flatten(-2))


def _by_head():
    mesh = fsdp_tp.init_mesh(tensor_parallel_degree=2)
    x = (torch.randn(2, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)),)
    for heads_first in (True, False):
        model = nn.Sequential(_ByHead(heads_first))
        with pytest.raises(
            ValueError, match="0.qkv is column and returns 24 features, but 0.out reads 8: it is packed"
        ):
            fsdp_tp.parallelize(model, mesh, plan={"0.qkv": "column", "0.out": "row"})
        plan = {"0.qkv": "column_by_head", "0.out": "row"}
        if heads_first:
            fsdp_tp.parallelize(model, mesh, plan=plan, verify=x)
        else:  # which only numbers tell
            with pytest.raises(ValueError, match="first module whose output differs from the original's is 0.out"):
                fsdp_tp.parallelize(model, mesh, plan=plan, verify=x)


def test_rows_of_one_head_after_another_can_be_split():
    run(2, _by_head)
