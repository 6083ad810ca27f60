"""Methods other than forward, against one process. If these fail, look in fsdp_tp/methods.py."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp_tp
from tests import families, models
from tests.ranks import run

LAYOUTS = [
    (2, {"tensor_parallel_degree": 2}),
    (2, {}),
    (4, {"tensor_parallel_degree": 2}),
    (4, {"hybrid_shard_degree": 2}),
]


def _pair(degrees, family="llama", build=families.build, **options):
    """A plain model, and the same model over ``mesh``."""
    mesh = fsdp_tp.init_mesh(**degrees)
    plain, model = (fsdp_tp.initialize(build(family), seed=1).eval() for _ in range(2))
    return mesh, plain, fsdp_tp.wrap(model, mesh, **options)


def _generate(degrees, options):
    """Greedy texts of an equal length, of any lengths, and with beams; then training goes on."""
    mesh, plain, model = _pair(degrees, **options)
    ids = models.batch(rows=4, sequence=4).chunk(mesh.data_size)[mesh.data_rank]
    uneven = {"max_new_tokens": 2} if mesh.data_rank == 0 else {"max_new_tokens": 7}
    long = ids.repeat(1, 2) if mesh.data_rank == 0 else ids
    padded = torch.ones_like(long)
    padded[0, :2] = 0
    for use_cache in (True, False):
        for prompt, keywords in (
            (ids, {"max_new_tokens": 5}),
            (long, {"attention_mask": padded, **uneven}),
            (long, {"num_beams": 2, "return_dict_in_generate": True, **uneven}),
            (ids, {"eos_token_id": plain.generate(ids[:1], max_new_tokens=3, do_sample=False)[0, -1].item()}),
        ):
            keywords |= {"do_sample": False, "use_cache": use_cache, "pad_token_id": 0}
            expected, actual = (each.generate(prompt, **keywords) for each in (plain, model))
            assert torch.equal(torch.as_tensor(actual[0]), torch.as_tensor(expected[0])), keywords
    static = {"cache_implementation": "static", "do_sample": False, **uneven}
    assert torch.equal(model.generate(long, **static), plain.generate(long, **static))
    gradients = []
    for each in (plain, model):
        each(ids).logits[..., :8].square().mean().backward()
        gradients.append(models.gather(each.model.norm.weight.grad))
    if mesh.data_size == 1 and not options:
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-7)  # fp32, sums in another order


@pytest.mark.parametrize(("world_size", "degrees"), LAYOUTS)
def test_greedy_texts_are_those_of_one_process(world_size, degrees):
    """With and without a cache. A data rank that is done early must not leave the others waiting."""
    run(world_size, _generate, degrees, {})


@pytest.mark.parametrize("option", ["loss_parallel", "sequence_parallel"])
def test_options_that_split_activations(option):
    """Split logits are gathered; a rank without a token of the sequence goes along."""
    run(2, _generate, {"tensor_parallel_degree": 2}, {option: True})


def test_generation_when_everything_is_gathered_each_time():
    run(2, _generate, {}, {"reshard_after_forward": True})


def _short_positions():
    """A rank that has no position left while the other still generates."""
    _, plain, model = _pair({}, "opt")
    ids = models.batch(rows=2, sequence=61 if dist.get_rank() == 0 else 1).chunk(2)[dist.get_rank()]
    options = {"max_new_tokens": 2 if dist.get_rank() == 0 else 6, "do_sample": False, "eos_token_id": None}
    assert torch.equal(model.generate(ids, **options), plain.generate(ids, **options))


def test_a_rank_that_is_done_computes_no_further():
    run(2, _short_positions)


def _t5(family):
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = dict(vocab_size=models.VOCABULARY, d_model=16, d_kv=4, d_ff=16, num_heads=2, num_layers=2, dropout_rate=0.0)
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0))


def _encoder_and_decoder():
    """The encoder runs once, before the first forward, and needs the root's embedding."""
    _, plain, model = _pair({}, "t5", _t5)
    ids = models.batch(rows=2, sequence=4).chunk(2)[dist.get_rank()]
    options = {"max_new_tokens": 2 + 3 * dist.get_rank(), "do_sample": False, "eos_token_id": None}
    assert torch.equal(model.generate(ids, **options), plain.generate(ids, **options))


def test_an_encoder_sees_whole_weights():
    run(2, _encoder_and_decoder)


def _sample():
    """The ranks of a tensor axis start from different random states."""
    mesh, plain, model = _pair({"tensor_parallel_degree": 2})
    ids = models.batch(rows=4, sequence=4).chunk(mesh.data_size)[mesh.data_rank]
    torch.manual_seed(mesh.data_rank)
    expected = plain.generate(ids, max_new_tokens=5, do_sample=True)
    torch.manual_seed(mesh.data_rank if mesh.tensor_rank == 0 else 100 + mesh.tensor_rank)
    assert torch.equal(model.generate(ids, max_new_tokens=5, do_sample=True), expected)


def test_ranks_of_one_tensor_axis_sample_alike():
    run(4, _sample)


def _one_rank_fails():
    """After its second token rank 1 finds something wrong."""
    _, _, model = _pair({})

    def check(ids, scores, **_):
        if dist.get_rank() == 1 and ids.shape[1] == 7:
            raise KeyError("no such word")
        return torch.zeros(len(ids), dtype=torch.bool)

    error = KeyError if dist.get_rank() == 1 else RuntimeError
    sentence = "no such word" if dist.get_rank() == 1 else r"generate\(\) raised on rank 1, which shares"
    with pytest.raises(error, match=sentence):
        model.generate(models.batch()[:, :5], max_new_tokens=9, do_sample=False, stopping_criteria=[check])
    return model.generate(models.batch()[:, :5], max_new_tokens=2, do_sample=False).shape


def test_nothing_hangs_if_one_rank_fails_between_two_tokens():
    assert run(2, _one_rank_fails) == [(models.ROWS, 7)] * 2


class _Net(models.TwoLayerNet):
    """Methods of a user's own: one computes with parameters of the root, one generates."""

    def score(self, ids):
        temperature = self.norm(self.position).square().mean() + self.position.mean()
        return self(ids) * temperature

    @torch.no_grad()
    def generate(self, ids, count):
        for _ in range(count):
            ids = torch.cat([ids, self(ids)[:, -1].softmax(-1).multinomial(1)], 1)[:, -models.SEQUENCE :]
        return ids


def _own_methods(degrees, reshard_after_forward):
    mesh = fsdp_tp.init_mesh(**degrees)
    torch.manual_seed(3)
    plain, model = _Net(), _Net()
    model.load_state_dict(plain.state_dict())
    fsdp_tp.wrap(model, mesh, plan=models.TWO_LAYER_PLAN, reshard_after_forward=reshard_after_forward)
    ids = models.batch()[:, :-1]
    with pytest.raises(RuntimeError, match="mixed|fsdp_tp.register_forward_method"):
        model.score(ids)
    fsdp_tp.register_forward_method(model, "score")
    for _ in range(2):
        expected, actual = plain.score(ids), model.score(ids)
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
        expected.square().mean().backward()
        actual.square().mean().backward()
    for (name, parameter), reference in zip(model.named_parameters(), plain.parameters(), strict=True):
        gradient = models.gather(parameter.grad)
        torch.testing.assert_close(gradient, reference.grad, rtol=1e-9, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")
    torch.manual_seed(5)
    expected = plain.generate(ids, 2 + mesh.data_rank)
    torch.manual_seed(5 + mesh.tensor_rank)
    assert torch.equal(model.generate(ids, 2 + mesh.data_rank), expected)
    with pytest.raises(ValueError, match="_Net has no method 'scores'"):
        fsdp_tp.register_forward_method(model, "scores")


@pytest.mark.parametrize("reshard_after_forward", [None, True])
def test_methods_of_a_users_own(reshard_after_forward):
    """In fp64, sums of some 500 terms."""
    run(2, _own_methods, {"tensor_parallel_degree": 2}, reshard_after_forward)
    run(2, _own_methods, {}, reshard_after_forward)
    run(4, _own_methods, {"tensor_parallel_degree": 2}, reshard_after_forward)


def test_a_model_without_generate_is_left_alone():
    from fsdp_tp.methods import support_generate

    model = nn.Linear(2, 2)
    support_generate(model, None)
    assert type(model) is nn.Linear
