"""fp64 against F.cross_entropy on whole logits. If these fail, look in fsdp_tp/layers/sliced_cross_entropy.py.

linear_loss.py and loss.py there put it to use; the last tests are on fsdp_tp/loss.py.
"""

import itertools
import random

import pytest
import torch
import torch.nn.functional as F

import fsdp_tp
from fsdp_tp.layers.sliced_cross_entropy import slice_of_classes
from tests.collectives import CollectiveCounter
from tests.memory import AllocationTracker
from tests.ranks import run

# One process and the ranks add V terms in another order: 1e-12 of the largest logit or loss, about 1e3.
CLOSE = dict(rtol=1e-12, atol=1e-12, equal_nan=True)


def _mesh():
    return fsdp_tp.init_mesh(tensor_parallel_degree=torch.distributed.get_world_size())


def _own(whole, mesh, dim=-1):
    """This rank's slice as torch.chunk cuts it; it makes fewer chunks where some would be empty."""
    chunks = whole.detach().chunk(mesh.tensor_size, dim)
    empty = whole.detach().narrow(dim, 0, 0)
    own = chunks[mesh.tensor_rank] if mesh.tensor_rank < len(chunks) else empty
    return own.clone().requires_grad_()


def _compare(mesh, shape, vocabulary, *, chunk_size=None, scale=300.0, ignored=False, weighted=False, **options):
    """Both losses and all their gradients against one process."""
    generator = torch.Generator().manual_seed(4)

    def randn(*size):
        return torch.randn(size, dtype=torch.float64, generator=generator)

    # Large logits: without the maximum over the whole vocabulary the exponentials overflow.
    x, linear_weight, linear_bias = (
        randn(*shape, 4).requires_grad_(),
        scale / 2 * randn(vocabulary, 4),
        randn(vocabulary),
    )
    linear_weight.requires_grad_()
    linear_bias.requires_grad_()
    logits = F.linear(x, linear_weight, linear_bias)
    logits.retain_grad()
    target = torch.randint(0, vocabulary, shape, generator=generator)
    if ignored:
        target[torch.rand(shape, generator=generator) < 0.4] = options.setdefault("ignore_index", -100)
    if weighted:
        options["weight"] = randn(vocabulary).abs()
        options["weight"][0] = 0
    expected = F.cross_entropy(logits.reshape(-1, vocabulary), target.flatten(), **options)
    expected = expected.view(shape) if options.get("reduction") == "none" else expected
    upstream = randn(*expected.shape)
    expected.backward(upstream)

    local = _own(logits, mesh)
    options |= dict(mesh=mesh, chunk_size=chunk_size)
    actual = fsdp_tp.vocab_parallel_cross_entropy(local, target, **options)
    actual.backward(upstream)
    torch.testing.assert_close(actual, expected, **CLOSE)
    torch.testing.assert_close(local.grad, _own(logits.grad, mesh).detach(), **CLOSE)

    own_x = x.detach().clone().requires_grad_()
    own_weight, own_bias = _own(linear_weight, mesh, 0), _own(linear_bias, mesh, 0)
    actual = fsdp_tp.vocab_parallel_linear_cross_entropy(own_x, own_weight, target, linear_bias=own_bias, **options)
    actual.backward(upstream)
    torch.testing.assert_close(actual, expected, **CLOSE)
    torch.testing.assert_close(own_x.grad, x.grad, rtol=1e-12, atol=1e-12 * scale, equal_nan=True)  # sums of grad * W
    torch.testing.assert_close(own_weight.grad, _own(linear_weight.grad, mesh, 0).detach(), **CLOSE)
    torch.testing.assert_close(own_bias.grad, _own(linear_bias.grad, mesh, 0).detach(), **CLOSE)


def _every_option(vocabularies):
    mesh = _mesh()
    options = itertools.product(vocabularies, (0.0, 0.1, 1.0), ("mean", "sum", "none"), (False, True), (False, True))
    for vocabulary, smoothing, reduction, ignored, weighted in options:
        chosen = dict(label_smoothing=smoothing, reduction=reduction, ignored=ignored, weighted=weighted)
        _compare(mesh, (3, 5), vocabulary, chunk_size=4, **chosen)


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_every_option_equals_the_whole_vocabulary(tensor):
    """3, 5 and 9 classes leave the last of four ranks without any."""
    run(tensor, _every_option, {1: [7], 2: [3, 8], 4: [3, 5, 7, 8, 9]}[tensor])


def _gpt2_vocabulary():
    mesh = _mesh()
    for options in ({}, dict(label_smoothing=0.1, weighted=True, ignored=True, chunk_size=3)):
        _compare(mesh, (8,), 50257, **options)


@pytest.mark.parametrize("tensor", [2, 4, 8])
def test_a_vocabulary_of_50257(tensor):
    run(tensor, _gpt2_vocabulary)


def _random_problems(count):
    mesh = _mesh()
    chance = random.Random(5)
    for _ in range(count):
        vocabulary = chance.randint(1, 40)
        _compare(
            mesh,
            [(), (1,), (6,), (2, 3), (2, 1, 4)][chance.randrange(5)],
            vocabulary,
            chunk_size=chance.choice([None, 1, 2, 5, 100]),
            scale=chance.choice([0.1, 1.0, 300.0]),
            ignored=chance.random() < 0.5,
            weighted=chance.random() < 0.5,
            ignore_index=chance.choice([-100, -1, 0, vocabulary - 1]),
            label_smoothing=chance.choice([0.0, chance.random()]),
            reduction=chance.choice(["mean", "sum", "none"]),
        )


@pytest.mark.parametrize("tensor", [2, 3, 8])
def test_random_problems(tensor):
    run(tensor, _random_problems, 60)


def _masked_classes():
    """Logits of -inf exclude a class, also where they are a rank's whole slice."""
    mesh = _mesh()
    whole = torch.randn(4, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole[:, 2] = -torch.inf
    whole[0, 4:] = -torch.inf
    target = torch.tensor([0, 3, 4, 6])
    whole.requires_grad_()
    expected = F.cross_entropy(whole, target)
    expected.backward()
    local = _own(whole, mesh)
    actual = fsdp_tp.vocab_parallel_cross_entropy(local, target, mesh=mesh)
    actual.backward()
    torch.testing.assert_close(actual, expected, **CLOSE)
    torch.testing.assert_close(local.grad, _own(whole.grad, mesh).detach(), **CLOSE)
    # A target of an excluded class has no probability, and smoothing asks for some on every class.
    for wrong, smoothing in ((torch.tensor([2, 3, 4, 6]), 0.0), (target, 0.1)):
        loss = fsdp_tp.vocab_parallel_cross_entropy(local, wrong, mesh=mesh, label_smoothing=smoothing)
        assert loss == F.cross_entropy(whole, wrong, label_smoothing=smoothing) == torch.inf


def test_masked_classes():
    run(2, _masked_classes)


def _wrong_inputs(sizes):
    mesh = _mesh()
    local = torch.zeros(4, sizes[mesh.tensor_rank])
    target = torch.tensor([0, 3, 4, 2])
    full = -(-sum(sizes) // len(sizes))
    if [min(full, max(0, sum(sizes) - rank * full)) for rank in range(len(sizes))] != sizes:
        try:
            fsdp_tp.vocab_parallel_cross_entropy(local, target, mesh=mesh)
        except RuntimeError as error:
            return str(error)
        return ""
    for wrong in (sum(sizes), -1):
        with pytest.raises(RuntimeError, match="a target is neither ignore_index nor in"):
            fsdp_tp.vocab_parallel_cross_entropy(local, torch.tensor([0, 1, 2, wrong]), mesh=mesh)
    with pytest.raises(ValueError, match=r"weight of shape \(3,\) must have one entry for each class of the whole"):
        fsdp_tp.vocab_parallel_cross_entropy(local, target, mesh=mesh, weight=torch.ones(3))
    return ""


def test_targets_out_of_range_and_slices_cut_in_another_way():
    assert not any(run(2, _wrong_inputs, [4, 3]))
    found = run(3, _wrong_inputs, [3, 2, 3])
    assert found[0] == ""
    assert "this rank has 2 classes, but of V classes on t ranks each must hold ceil(V / t)" in found[1]
    assert "this rank has 3 classes" in found[2]


def _refusals():
    mesh = fsdp_tp.init_mesh()
    logits, target = torch.zeros(2, 3, 8), torch.zeros(2, 3, dtype=torch.long)
    for wrong, sentence in (
        ({"reduction": "median"}, "reduction='median' must be 'mean', 'sum' or 'none'"),
        ({"label_smoothing": 2.0}, "label_smoothing=2.0 must lie between 0 and 1"),
        ({"chunk_size": 0}, "chunk_size=0 must be a positive number of tokens"),
        ({"weight": torch.ones(8, 1)}, r"weight of shape \(8, 1\) must have one entry for each class"),
    ):
        with pytest.raises(ValueError, match=sentence):
            fsdp_tp.vocab_parallel_cross_entropy(logits, target, mesh=mesh, **wrong)
        with pytest.raises(ValueError, match=sentence):
            fsdp_tp.vocab_parallel_linear_cross_entropy(logits, torch.zeros(8, 8), target, mesh=mesh, **wrong)
    with pytest.raises(ValueError, match=r"logits of shape \(2, 3, 8\) do not match targets of shape \(2, 2\)"):
        fsdp_tp.vocab_parallel_cross_entropy(logits, target[:, :2], mesh=mesh)
    with pytest.raises(ValueError, match=r"inputs of shape \(2, 3, 8\) do not match targets of shape \(2, 2\)"):
        fsdp_tp.vocab_parallel_linear_cross_entropy(logits, logits[0], target[:, :2], mesh=mesh)
    with pytest.raises(ValueError, match="token_count is 0 on every rank"):
        fsdp_tp.global_mean(torch.tensor(0.0), 0, mesh)


def test_refusals():
    run(1, _refusals)


def _half_precision():
    """bf16 in: fp32 inside, whatever the chunks; logits cut out of longer ones; the gradient once rounded."""
    mesh = _mesh()
    whole = 5 * torch.randn(2, 7, 33, generator=torch.Generator().manual_seed(1))
    whole = whole.bfloat16().float().requires_grad_()
    target = torch.randint(0, 33, (2, 6), generator=torch.Generator().manual_seed(2))
    expected = F.cross_entropy(whole[:, :-1].flatten(0, 1), target.flatten())
    expected.backward()
    local = _own(whole, mesh).detach().bfloat16().requires_grad_()
    for chunk_size in (None, 1, 5):
        local.grad = None
        loss = fsdp_tp.vocab_parallel_cross_entropy(local[:, :-1], target, mesh=mesh, chunk_size=chunk_size)
        loss.backward()
        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
        # bf16 has 8 bits: 2^-9 of relative rounding.
        torch.testing.assert_close(local.grad.float(), _own(whole.grad, mesh).detach(), rtol=2**-8, atol=1e-9)


def test_half_precision():
    run(2, _half_precision)


def _head(autocast):
    """The fused loss on the parameters of the head, in place of the head's forward and the loss."""
    mesh = _mesh()
    torch.manual_seed(7)
    head = fsdp_tp.ColumnParallelLinear(16, 48, mesh=mesh)
    x, target = torch.randn(3, 5, 16, requires_grad=True), torch.randint(0, 48, (3, 5))
    results = []
    for fused in (False, True):
        x.grad = None
        head.zero_grad()
        with CollectiveCounter(mesh) as counter:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                if fused:
                    loss = fsdp_tp.vocab_parallel_linear_cross_entropy(
                        x, head.weight, target, mesh=mesh, linear_bias=head.bias, chunk_size=4
                    )
                else:
                    loss = fsdp_tp.vocab_parallel_cross_entropy(head(x), target, mesh=mesh, chunk_size=4)
            loss.backward()
        assert counter.counts == {("all_reduce", "tensor"): 2 + 1}
        results.append((loss, x.grad, head.weight.grad.to_local(), head.bias.grad.to_local()))
    # The gradients of the logits are the same. What follows adds 15 tokens, or 24 classes a rank, in other chunks.
    rounding = 2**-8 if autocast else 1e-6
    for name, expected, actual in zip(("loss", "input", "weight", "bias"), *results, strict=True):
        torch.testing.assert_close(
            actual, expected, rtol=rounding, atol=rounding * float(expected.abs().max()), msg=name
        )


@pytest.mark.parametrize("autocast", [False, True])
def test_the_fused_loss_on_the_parameters_of_the_head(autocast):
    run(2, _head, autocast)


class _Tied(torch.nn.Module):
    """The embedding is the head too, and the loss is part of the forward."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(12, 8, dtype=torch.float64)

    def forward(self, ids, mesh):
        x, target = self.embedding(ids[:, :-1]), ids[:, 1:]
        if mesh is None:
            return F.cross_entropy((x @ self.embedding.weight.T).flatten(0, 1), target.flatten())
        return fsdp_tp.vocab_parallel_linear_cross_entropy(x, self.embedding.weight, target, mesh=mesh, chunk_size=4)


def _tied():
    mesh = fsdp_tp.init_mesh(tensor_parallel_degree=2, hybrid_shard_degree=2)
    torch.manual_seed(8)
    reference, model = _Tied(), _Tied()
    model.load_state_dict(reference.state_dict())
    ids = torch.randint(0, 12, (4, 6))
    expected = reference(ids, None)
    expected.backward()
    # FSDP's unit is the whole model: the embedding alone would be sharded again where the loss needs its weight.
    fsdp_tp.fully_shard(fsdp_tp.parallelize(model, mesh, plan={"embedding": "vocab"}), mesh=mesh)
    model(ids.chunk(mesh.data_size)[mesh.data_rank], mesh).backward()
    torch.testing.assert_close(model.embedding.weight.grad.full_tensor(), reference.embedding.weight.grad, **CLOSE)


def test_the_fused_loss_on_a_tied_embedding_under_fsdp():
    run(4, _tied)


def _compiled():
    mesh = _mesh()
    x, target = torch.randn(6, 4, requires_grad=True), torch.tensor([0, 6, 3, 4, -100, 2])
    slices = slice_of_classes(7, mesh.tensor.get_group())
    weight = torch.randn(7, 4)[slices].requires_grad_()
    class_weight = torch.rand(7)

    def both(x, weight):
        options = dict(mesh=mesh, weight=class_weight, label_smoothing=0.1, chunk_size=4)
        separate = fsdp_tp.vocab_parallel_cross_entropy(x @ weight.T, target, **options)
        return separate + fsdp_tp.vocab_parallel_linear_cross_entropy(x, weight, target, **options)

    results = []
    for function in (both, torch.compile(both, fullgraph=True, backend="aot_eager")):
        x.grad = weight.grad = None
        loss = function(x, weight)
        loss.backward()
        results.append((loss.detach(), x.grad, weight.grad))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


def test_it_compiles_without_a_graph_break():
    run(2, _compiled)


TOKENS, CLASSES, CHUNK, WIDTH = 64, 6000, 8, 32


def _memory(dtype, loss):
    """Bytes: peak of forward, peak of all, largest allocation, and what is kept for backward beside the arguments."""
    mesh = _mesh()
    target = torch.zeros(TOKENS, dtype=torch.long)
    classes = CLASSES // mesh.tensor_size
    x = torch.zeros(TOKENS, WIDTH, dtype=dtype, requires_grad=True)
    weight = torch.zeros(classes, WIDTH, dtype=dtype, requires_grad=True)
    logits = torch.zeros(TOKENS, classes, dtype=dtype, requires_grad=True)
    given = {argument.untyped_storage().data_ptr() for argument in (x, weight, logits)}
    kept = {}

    def keep(saved):
        kept[saved.untyped_storage().data_ptr()] = saved.untyped_storage().nbytes()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved), AllocationTracker() as tracker:
        if loss == "plain":
            value = F.cross_entropy(logits.float(), target)
        elif loss == "logits":
            value = fsdp_tp.vocab_parallel_cross_entropy(logits, target, mesh=mesh, chunk_size=CHUNK)
        else:
            value = fsdp_tp.vocab_parallel_linear_cross_entropy(x, weight, target, mesh=mesh, chunk_size=CHUNK)
        forward = tracker.peak
        value.backward()
    return forward, tracker.peak, tracker.largest, sum(size for storage, size in kept.items() if storage not in given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_memory_is_that_of_a_slice_and_a_chunk(tensor, dtype):
    classes = CLASSES // tensor
    fp32_chunk = 4 * CHUNK * classes
    per_token = 40 * 8 * TOKENS  # some forty numbers a token in fp64
    forward, peak, largest, kept = run(tensor, _memory, dtype, "logits")[0]
    gradient = dtype.itemsize * TOKENS * classes
    assert fp32_chunk <= forward <= fp32_chunk + per_token
    assert largest == gradient
    assert gradient < peak <= gradient + fp32_chunk + per_token
    assert kept <= per_token

    forward, peak, largest, kept = run(tensor, _memory, dtype, "linear")[0]
    weight = 4 * WIDTH * classes  # fp32: the sum of the chunks' gradients
    assert forward <= (dtype.itemsize + 4) * CHUNK * classes + per_token
    assert largest == max(weight, fp32_chunk)
    assert weight < peak <= 2 * weight + 2 * fp32_chunk + per_token + 3 * 4 * TOKENS * WIDTH
    assert kept <= per_token


def test_the_memory_of_torchs_own_loss_does_not_pass():
    _, _, largest, kept = run(1, _memory, torch.bfloat16, "plain")[0]
    assert min(largest, kept) >= 4 * TOKENS * CLASSES
