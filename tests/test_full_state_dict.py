"""Whole weights that one rank has. If these fail, look in fsdp_tp/checkpoint/full.py."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import fsdp_tp
from fsdp_tp import checkpoint
from tests import models
from tests.memory import AllocationTracker
from tests.ranks import run

SHAPE = dict(num_attention_heads=9, num_key_value_heads=3, hidden_size=72, intermediate_size=49, vocab_size=67)
LAYOUTS = [
    (1, {}),
    (2, {}),
    (2, {"tensor_parallel_degree": 2}),
    (3, {"tensor_parallel_degree": 3}),
    (8, {"tensor_parallel_degree": 4, "hybrid_shard_degree": 2}),
    (4, {"tensor_parallel_degree": 2}),
]


def _plain(tied=True):
    return fsdp_tp.initialize(models.hugging_face("llama", tie_word_embeddings=tied, **SHAPE), seed=5)


def _wrapped(degrees, **options):
    mesh = fsdp_tp.init_mesh(**degrees)
    with torch.device("meta"):
        model = models.hugging_face("llama", tie_word_embeddings=True, **SHAPE)
    return fsdp_tp.wrap(model, mesh, **options)


def _load(degrees):
    """Into a model that has computed already, whose root therefore holds gathered weights."""
    model = _wrapped(degrees)
    model(models.batch())
    for dtype in (torch.bfloat16, torch.float32):
        expected = _plain().to(dtype).state_dict()
        checkpoint.load_full_state_dict(model, expected if dist.get_rank() == 0 else None)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        loaded = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        assert loaded.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(loaded[name], tensor.float()), name
    logits = _plain()(models.batch()).logits
    torch.testing.assert_close(model(models.batch()).logits, logits, rtol=1e-4, atol=1e-5)  # sums in another order


@pytest.mark.parametrize(("world_size", "degrees"), LAYOUTS)
def test_every_layout_gets_the_whole_weights_bit_for_bit(world_size, degrees):
    """9 query and 3 key/value heads, uneven mlp and vocabulary, tied; from bf16 and from fp32."""
    run(world_size, _load, degrees)


def _one_name_of_two():
    model = _wrapped({"tensor_parallel_degree": 2})
    state = _plain().state_dict()
    del state["lm_head.weight"]
    checkpoint.load_full_state_dict(model, state)
    assert torch.equal(models.gather(model.lm_head.weight), state["model.embed_tokens.weight"])


def test_one_name_of_tied_weights_is_enough():
    """As in a safetensors file."""
    run(2, _one_name_of_two)


def _misfits():
    model = _wrapped({"tensor_parallel_degree": 2})
    before = [models.gather(parameter) for parameter in model.parameters()]
    state = _plain(tied=False).state_dict()
    assert not torch.equal(state["lm_head.weight"], state["model.embed_tokens.weight"])
    state["model.norm.bias"] = state["model.norm.weight"]
    del state["model.norm.weight"]
    key = "model.layers.1.self_attn.k_proj.weight"
    state[key] = state[key][:-8]
    with pytest.raises(ValueError, match="not one of this model") as caught:
        checkpoint.load_full_state_dict(model, state if dist.get_rank() == 0 else None)
    with pytest.raises(ValueError, match="state_dict=None on rank 0"):
        checkpoint.load_full_state_dict(model, None if dist.get_rank() == 0 else state)
    after = [models.gather(parameter) for parameter in model.parameters()]
    assert all(map(torch.equal, before, after))
    return str(caught.value)


def test_what_does_not_fit_is_listed_on_every_rank():
    sentence = (
        "the state dict is not one of this model; missing: model.norm.weight; unexpected: model.norm.bias; "
        "of another shape: model.layers.1.self_attn.k_proj.weight is (16, 72) and must be (24, 72); "
        "tied in the model and different here: model.embed_tokens.weight and lm_head.weight"
    )
    assert run(2, _misfits) == [sentence] * 2


class _Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("flags", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("cache", torch.zeros(2), persistent=False)


def _buffers():
    model = fsdp_tp.fully_shard(_Buffers())
    source = _Buffers()
    source.norm.running_mean.add_(3)
    source.norm.num_batches_tracked.add_(7)
    source.flags[1] = True
    checkpoint.load_full_state_dict(model, source.state_dict() if dist.get_rank() == 0 else None)
    for name, tensor in source.state_dict().items():
        assert torch.equal(models.gather(model.state_dict()[name]), tensor), name


def test_persistent_buffers_of_any_dtype():
    run(2, _buffers)


def test_without_a_process_group_and_without_memory():
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    checkpoint.load_full_state_dict(model, other.state_dict())
    assert torch.equal(model.weight, other.weight)
    with pytest.raises(ValueError, match=r"on the meta device: weight, bias; fsdp_tp.wrap\(model, mesh\)"):
        checkpoint.load_full_state_dict(nn.Linear(2, 2, device="meta"), other.state_dict())


def _peak():
    mesh = fsdp_tp.init_mesh(tensor_parallel_degree=2)
    model = fsdp_tp.wrap(models.hugging_face("llama", vocab_size=2000), mesh)
    state = models.hugging_face("llama", vocab_size=2000).state_dict() if dist.get_rank() == 0 else None
    with AllocationTracker() as tracker:
        checkpoint.load_full_state_dict(model, state)
    return tracker.peak, model.lm_head.weight.numel() * 4


def test_other_ranks_hold_one_whole_tensor_at_a_time():
    """Embedding and head are alike, and next to them everything else is small change."""
    peak, largest = run(2, _peak)[1]
    assert largest <= peak < 1.2 * largest
