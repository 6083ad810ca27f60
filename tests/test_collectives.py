"""Counted collectives. If one fails, a layer reduces a gradient too often or too rarely."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import transformers

import fsdp_tp
from tests import families, models
from tests.collectives import CollectiveCounter
from tests.ranks import run

LAYERS = 3
MICRO_BATCHES = 4


def _count(degrees, options, family, micro_batches):
    mesh = fsdp_tp.init_mesh(**degrees)
    model = models.hugging_face(family, num_hidden_layers=LAYERS)
    fsdp_tp.wrap(model, mesh, **options)
    ids = models.batch(rows=8 * micro_batches).chunk(mesh.data_size)[mesh.data_rank]
    pieces = ids.chunk(micro_batches)
    model(ids[:, :-1])  # the first forward also checks that the tensor axis got one batch
    with CollectiveCounter(mesh) as counter:
        for index, piece in enumerate(pieces):
            with fsdp_tp.accumulate(model, last=index == micro_batches - 1):
                logits = model(piece[:, :-1]).logits
                F.cross_entropy(logits.flatten(0, 1), piece[:, 1:].flatten()).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    return dict(counter.counts)


def _same_on_all(results):
    assert all(result == results[0] for result in results)
    return results[0]


def test_tensor_axis_without_sequence_parallelism():
    """2 forward and 2 backward all-reduces a layer; the embedding's and lm_head's input gradient."""
    counts = _same_on_all(run(2, _count, {"tensor_parallel_degree": 2}, {}, "llama", 1))
    assert counts == {
        ("all_reduce", "tensor"): 4 * LAYERS + 1 + 1,
        ("all_gather", "tensor"): 1,  # of the logits
    }


def test_per_head_norms_cost_one_more_all_reduce_a_block():
    counts = _same_on_all(run(2, _count, {"tensor_parallel_degree": 2}, {}, "qwen3", 1))
    assert counts[("all_reduce", "tensor")] == (4 + 1) * LAYERS + 2


def test_tensor_axis_with_sequence_parallelism():
    """A layer: forward 2 gathers + 2 reduce-scatters, backward the same again, and one sum for all norms."""
    options = {"sequence_parallel": True}
    counts = _same_on_all(run(2, _count, {"tensor_parallel_degree": 2}, options, "llama", 1))
    assert counts == {
        ("all_gather", "tensor"): 4 * LAYERS + 1 + 1 + 1,  # after the last norm, the logits, backward of the split
        ("reduce_scatter", "tensor"): 4 * LAYERS,  # the gathered last norm is whole for every reader
        ("all_reduce", "tensor"): LAYERS + 1 + 1 + 1,  # norms of a block, last norm, head's input, embedding
    }


def _count_t5(layers):
    mesh = fsdp_tp.init_mesh(tensor_parallel_degree=2)
    config = transformers.T5Config(**{**families.SIZES["t5"], "num_layers": 1}, num_decoder_layers=layers)
    model = fsdp_tp.wrap(transformers.T5ForConditionalGeneration(config), mesh)
    ids = models.batch()
    families.sequence_to_sequence_loss(model, ids, None, None)
    with CollectiveCounter(mesh) as counter:
        families.sequence_to_sequence_loss(model, ids, None, None).backward()
    return dict(counter.counts)


def test_the_encoder_output_is_shared_by_all_decoder_layers():
    """A decoder layer has three pairs of all-reduces, and none for the gradient of what the encoder returns."""
    few, more = (_same_on_all(run(2, _count_t5, layers))[("all_reduce", "tensor")] for layers in (1, 3))
    assert more - few == 2 * 6


@pytest.mark.parametrize("micro_batches", [1, MICRO_BATCHES])
def test_one_replicate_all_reduce_a_group_and_step_whatever_the_accumulation(micro_batches):
    """FSDP reduces one group a block and one for the root; replicas add up on the last micro-batch only."""
    degrees = {"tensor_parallel_degree": 2, "hybrid_shard_degree": 2}
    options = {"comm": "torch"}  # ours do not go through torch.distributed, where they are counted
    counts = _same_on_all(run(8, _count, degrees, options, "llama", micro_batches))
    groups = LAYERS + 1
    assert counts[("all_reduce", "replicate")] == groups
    assert counts[("reduce_scatter", "shard")] == groups * micro_batches
    assert counts[("all_reduce", "tensor")] == (4 * LAYERS + 2) * micro_batches


def test_no_sharding_means_no_gathers():
    counts = _same_on_all(run(4, _count, {"hybrid_shard_degree": 1}, {}, "llama", 1))
    assert counts == {("all_reduce", "replicate"): LAYERS + 1}


def _forgotten_last():
    mesh = fsdp_tp.init_mesh(hybrid_shard_degree=1)
    model = torch.nn.Linear(4, 4)
    fsdp_tp.fully_shard(model, mesh=mesh)
    with fsdp_tp.accumulate(model, last=False):
        model(torch.ones(1, 4)).sum().backward()
    assert model.weight.grad is None
    plain = torch.nn.Linear(4, 4)
    with fsdp_tp.accumulate(plain, last=False):  # no FSDP: nothing to defer
        plain(torch.ones(1, 4)).sum().backward()
    assert plain.weight.grad is not None


def test_accumulate_defers_only_what_fsdp_replicates():
    run(2, _forgotten_last)
