"""What a checkpoint stores of a model, its optimizer and scheduler, and what it refuses.

If these fail, look in fsdp_tp/checkpoint/state.py (optimizer), values.py (settings), fits.py (refusals) or chunks.py.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adagrad, AdamW, NAdam, RMSprop, lr_scheduler

import fsdp_tp
from fsdp_tp import checkpoint
from fsdp_tp.checkpoint.chunks import Box, are_whole, box_of, is_written_here, local_of
from fsdp_tp.checkpoint.manifest import Manifest
from fsdp_tp.checkpoint.state import model_state
from fsdp_tp.checkpoint.values import from_json, to_json
from tests import families, models
from tests.ranks import run

OPTIMIZERS = {
    "SGD with momentum": lambda its: SGD(its, lr=0.05, momentum=0.9, nesterov=True),
    "Adagrad": lambda its: Adagrad(its, lr=0.05),
    "RMSprop": lambda its: RMSprop(its, lr=0.01, momentum=0.5, centered=True),
    "NAdam": lambda its: NAdam(its, lr=0.01),
    "AdamW with amsgrad": lambda its: AdamW(its, lr=0.01, amsgrad=True),
    "fused AdamW": lambda its: AdamW(its, lr=0.01, fused=True),
    "AdamW with lr in a tensor": lambda its: AdamW(its, lr=torch.tensor(0.01), foreach=False),
}


def _net(sizes=(7, 5, 3), seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(*pair) for pair in itertools.pairwise(sizes)))


def _sharded_net(seed=0):
    model = _net(seed=seed)
    for unit in (*model, model):
        fsdp_tp.fully_shard(unit)
    return model


def _step(model, optimizer, step=0):
    loss = model(torch.full((2, 7), 1.0 + step)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


# --- it goes on ---


def _interrupted(path):
    """Of each optimizer the losses after a save, and after a load into new objects."""
    fsdp_tp.init_mesh()
    found = {}
    cases = [(name, 2) for name in OPTIMIZERS]
    cases.append(("fused AdamW", 0))  # fault 26: before the first step there is no state
    for name, steps_before in cases:
        build, where = OPTIMIZERS[name], path / f"{name}-{steps_before}"
        model = _sharded_net()
        optimizer = build(model.parameters())
        for step in range(steps_before):
            _step(model, optimizer, step)
        checkpoint.save(where, model=model, optimizer=optimizer)
        expected = [_step(model, optimizer, step) for step in range(2, 5)]
        model = _sharded_net(seed=1)
        optimizer = build(model.parameters())
        _step(model, optimizer)
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * 2
        checkpoint.load(where, model=model, optimizer=optimizer)
        found[name, steps_before] = expected, [_step(model, optimizer, step) for step in range(2, 5)]
    return found


def test_every_optimizer_goes_on_bit_for_bit(tmp_path):
    for losses in run(2, _interrupted, tmp_path):
        assert len(losses) == len(OPTIMIZERS) + 1
        for name, (expected, found) in losses.items():
            assert found == expected, name
            assert len(set(expected)) == 3, f"{name} does not learn: nothing would show"


SCHEDULERS = {
    "LambdaLR": lambda its: lr_scheduler.LambdaLR(its, lambda step: 0.5**step),
    "MultiplicativeLR": lambda its: lr_scheduler.MultiplicativeLR(its, lambda step: 0.5),
    "StepLR": lambda its: lr_scheduler.StepLR(its, 2),
    "MultiStepLR": lambda its: lr_scheduler.MultiStepLR(its, [2, 5, 5]),
    "ConstantLR": lambda its: lr_scheduler.ConstantLR(its, 0.1, 5),
    "LinearLR": lambda its: lr_scheduler.LinearLR(its),
    "ExponentialLR": lambda its: lr_scheduler.ExponentialLR(its, 0.9),
    "SequentialLR": lambda its: lr_scheduler.SequentialLR(
        its, [lr_scheduler.ConstantLR(its, 0.1, 2), lr_scheduler.MultiStepLR(its, [1, 3])], [2]
    ),
    "PolynomialLR": lambda its: lr_scheduler.PolynomialLR(its, 9),
    "CosineAnnealingLR": lambda its: lr_scheduler.CosineAnnealingLR(its, 9),
    "ChainedScheduler": lambda its: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(its, 0.1, 5), lr_scheduler.ExponentialLR(its, 0.9)]
    ),
    "ReduceLROnPlateau": lambda its: lr_scheduler.ReduceLROnPlateau(its, patience=1),
    "CyclicLR": lambda its: lr_scheduler.CyclicLR(its, 0.1, 1.0, step_size_up=3),
    "CosineAnnealingWarmRestarts": lambda its: lr_scheduler.CosineAnnealingWarmRestarts(its, 3),
    "OneCycleLR": lambda its: lr_scheduler.OneCycleLR(its, 1.0, total_steps=9),
}


def _rates(scheduler, optimizer, steps):
    rates = []
    for _ in range(steps):
        optimizer.step()
        scheduler.step(*([1.0] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))
        rates.append(float(optimizer.param_groups[0]["lr"]))
    return rates


@pytest.mark.parametrize("in_a_tensor", [False, True])
def test_every_scheduler_of_torch_goes_on(tmp_path, in_a_tensor):
    def build(name):
        model = _net((2, 2))
        optimizer = SGD(model.parameters(), lr=torch.tensor(1.0) if in_a_tensor else 1.0, momentum=0.9)
        return model, optimizer, SCHEDULERS[name](optimizer)

    for name in SCHEDULERS:
        model, optimizer, scheduler = build(name)
        _rates(scheduler, optimizer, 3)
        checkpoint.save(tmp_path / name, model=model, optimizer=optimizer, scheduler=scheduler)
        state = copy.deepcopy(scheduler.state_dict())
        expected = _rates(scheduler, optimizer, 5)
        model, optimizer, scheduler = build(name)
        checkpoint.load(tmp_path / name, model=model, optimizer=optimizer, scheduler=scheduler)
        assert repr(scheduler.state_dict()) == repr(state), name
        assert _rates(scheduler, optimizer, 5) == expected, name


def test_these_are_all_of_them():
    classes = {
        name
        for name, each in vars(lr_scheduler).items()
        if isinstance(each, type) and issubclass(each, lr_scheduler.LRScheduler) and not name.startswith("_")
    }
    assert classes - {"LRScheduler"} == SCHEDULERS.keys()


def test_settings_come_back_as_they_were():
    state = {
        "a": (1, [2.5, (None,)], "text", True),
        "b": Counter({3: 2}),
        "kind": {1: "x", (2, 3): 0.1},
        "c": {"d": {}},
    }
    assert repr(from_json(json.loads(json.dumps(to_json(state, "state"))))) == repr(state)
    tensor = torch.tensor([0.1, 1e30], dtype=torch.bfloat16)
    again = from_json(json.loads(json.dumps(to_json(tensor, "tensor"))))
    assert again.dtype == tensor.dtype
    assert torch.equal(again, tensor)
    with pytest.raises(ValueError, match=r"the state.a\[1\] is a set, which cannot be stored"):
        to_json({"a": [0, {1}]}, "the state")


class _WithNumbers(SGD):
    """Keeps what is no tensor."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].update(count=7, rate=0.1, large=1e300, nothing=None)


def test_numbers_in_an_optimizers_state_come_back_exactly(tmp_path):
    model = _net()
    optimizer = _WithNumbers(model.parameters(), lr=0.1, momentum=0.9)
    _step(model, optimizer)
    checkpoint.save(tmp_path / "step-1", model=model, optimizer=optimizer)
    other = _WithNumbers(model.parameters(), lr=0.1, momentum=0.9)
    checkpoint.load(tmp_path / "step-1", model=model, optimizer=other)
    assert repr(other.state_dict()) == repr(optimizer.state_dict())
    optimizer.state[model[0].weight]["history"] = [torch.zeros(1)]
    with pytest.raises(ValueError, match=r"optimizer.state.0.weight.history is a list"):
        checkpoint.save(tmp_path / "step-2", model=model, optimizer=optimizer)


def test_settings_that_are_tensors_stay_tensors_and_none_is_dropped(tmp_path):
    def build(rate, *betas):
        parameters = [{"params": model[0].parameters()}, {"params": []}, {"params": model[1].parameters()}]
        return AdamW(parameters, lr=torch.tensor(rate), betas=tuple(map(torch.tensor, betas)), foreach=False)

    model = _net()
    optimizer = build(0.5, 0.25, 0.75)
    optimizer.param_groups[0]["of_mine"] = (1, "a")
    optimizer.param_groups[1]["weight_decay"] = 0.125
    _step(model, optimizer)
    checkpoint.save(tmp_path / "step-1", model=model, optimizer=optimizer)
    other = build(0.1, 0.9, 0.99)
    rate = other.param_groups[0]["lr"]
    checkpoint.load(tmp_path / "step-1", model=model, optimizer=other)
    assert repr(other.state_dict()["param_groups"]) == repr(optimizer.state_dict()["param_groups"])
    assert other.param_groups[0]["lr"] is rate
    plain = AdamW([{"params": each.parameters()} for each in model])
    optimizer.param_groups.pop(1)
    checkpoint.save(tmp_path / "step-2", model=model, optimizer=optimizer)
    checkpoint.load(tmp_path / "step-2", model=model, optimizer=plain)
    assert repr([plain.param_groups[1][key] for key in ("lr", "betas")]) == "[0.5, (0.25, 0.75)]"
    plain = AdamW(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="group 0 here has parameters of groups there that differ"):
        checkpoint.load(tmp_path / "step-1", model=model, optimizer=plain)
    optimizer.param_groups[1]["of_mine"] = {1}
    with pytest.raises(ValueError, match="'of_mine' of the optimizer's group 1 is a set"):
        checkpoint.save(tmp_path / "step-3", model=model, optimizer=optimizer)


@pytest.mark.parametrize("fused", [True, False])
def test_how_a_run_computes_is_not_loaded(tmp_path, fused):
    model, other = _net(), _net(seed=1)
    optimizer = AdamW(model.parameters(), lr=0.1, fused=fused)
    _step(model, optimizer)
    checkpoint.save(tmp_path / "step-1", model=model, optimizer=optimizer)
    there = AdamW(other.parameters(), lr=0.2, fused=not fused, foreach=False, differentiable=False)
    how = {key: there.param_groups[0][key] for key in ("fused", "foreach", "capturable", "differentiable")}
    checkpoint.load(tmp_path / "step-1", model=other, optimizer=there)
    assert {key: there.param_groups[0][key] for key in how} == how
    assert there.param_groups[0]["lr"] == 0.1
    # One step in fp32: the fused one rounds elsewhere.
    assert _step(other, there, 1) == _step(model, optimizer, 1)
    assert _step(other, there, 2) == pytest.approx(_step(model, optimizer, 2), rel=1e-5)


def test_keys_of_extra_are_strings(tmp_path):
    for extra in ({3: 1}, {"seen": [{"a": ({3: 1},)}]}):
        with pytest.raises(ValueError, match="has the key 3, a int; keys must be strings"):
            checkpoint.save(tmp_path / "step-1", model=_net(), extra=extra)
    assert not list(tmp_path.iterdir())
    checkpoint.save(tmp_path / "step-1", model=_net(), extra={"a": (1, 2), "b": Counter("x")})
    assert checkpoint.read_extra(tmp_path / "step-1") == {"a": [1, 2], "b": {"x": 1}}


# --- wrappers ---


def _whole(path, wrap_anew):
    """Everything stored, and what it is to be, of a job whose model has wrappers."""
    mesh = fsdp_tp.init_mesh(tensor_parallel_degree=2)

    def build(seed):
        torch.manual_seed(seed)
        return fsdp_tp.wrap(families.build("phi3", intermediate_size=49), mesh)

    model = build(0)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    model(models.batch()).logits.square().mean().backward()
    optimizer.step()
    checkpoint.save(path / "plain-1", model=model, optimizer=optimizer)
    expected = [models.gather(optimizer.state[parameter]["exp_avg"]) for parameter in model.parameters()]
    checkpoint.save(path / "wrapped-1", model=wrap_anew(model), optimizer=optimizer)
    for name in ("plain-1", "wrapped-1"):
        other = build(1)
        optimizer = AdamW(other.parameters(), lr=1e-1)
        checkpoint.load(path / name, model=wrap_anew(other), optimizer=optimizer)
        found = [models.gather(optimizer.state[parameter]["exp_avg"]) for parameter in other.parameters()]
        assert all(torch.equal(*both) for both in zip(found, expected, strict=True)), name
    return {name: (its.shape, its.dtype) for name, its in Manifest.read(path / "plain-1").tensors.items()}


def _blocks_checkpointed(model):
    blocks = set(model.model.layers)
    apply_activation_checkpointing(model, check_fn=lambda module: module in blocks)
    return model


def _wrappers(path):
    for name, wrap_anew in (("compiled", torch.compile), ("checkpointed", _blocks_checkpointed)):
        plain = _whole(path / name, wrap_anew)
        wrapped = {
            name_: (its.shape, its.dtype) for name_, its in Manifest.read(path / name / "wrapped-1").tensors.items()
        }
        assert wrapped == plain, name


def test_wrappers_leave_no_trace_in_rearranged_weights_and_their_state(tmp_path):
    run(2, _wrappers, tmp_path)


@pytest.mark.usefixtures("one_process")
def test_ddp_leaves_no_trace(tmp_path):
    model, other = _net(), _net(seed=1)
    model[1].weight = model[1].weight
    wrapped = DistributedDataParallel(model)
    optimizer = AdamW(wrapped.parameters(), lr=0.3)
    _step(wrapped, optimizer)
    checkpoint.save(tmp_path / "step-1", model=wrapped, optimizer=optimizer)
    assert not any("module" in name for name in Manifest.read(tmp_path / "step-1").tensors)
    there = AdamW(other.parameters(), lr=0.1)
    checkpoint.load(tmp_path / "step-1", model=other, optimizer=there)
    assert [_step(other, there, step) for step in (1, 2)] == [_step(wrapped, optimizer, step) for step in (1, 2)]
    checkpoint.load(tmp_path / "step-1", model=wrapped, optimizer=optimizer)
    checkpoint.load(tmp_path / "step-1", model=other, optimizer=there)
    assert _step(wrapped, optimizer, 1) == _step(other, there, 1)


# --- it is refused, and nothing is overwritten ---


def _refused(path, match, model, **others):
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=match) as caught:
        checkpoint.load(path, model=model, **others)
    assert all(tensor.is_meta or torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    return str(caught.value)


def test_an_optimizer_or_scheduler_that_is_not_there(tmp_path):
    model, other = _net(), _net(seed=1)
    optimizer = SGD(other.parameters(), lr=1.0)
    checkpoint.save(tmp_path / "step-1", model=model)
    _refused(tmp_path / "step-1", "has no optimizer: it has a model. Load it with opt", other, optimizer=optimizer)
    checkpoint.save(tmp_path / "step-2", model=other, optimizer=optimizer)
    scheduler = lr_scheduler.StepLR(optimizer, 1)
    _refused(tmp_path / "step-2", "no scheduler: it has a model, its optimizer. Load", model, scheduler=scheduler)


def test_an_optimizer_of_other_parameters(tmp_path):
    model, other = _net(), _net(seed=1)
    optimizer = AdamW(model[0].parameters())
    _step(model, optimizer)
    checkpoint.save(tmp_path / "step-1", model=model, optimizer=optimizer)
    there = AdamW([other[0].weight, other[1].bias])
    _refused(tmp_path / "step-1", "another optimizer; missing: 1.bias; unexpected: 0.bias$", other, optimizer=there)


def test_all_that_differs_is_listed(tmp_path):
    model, other = _net(), _net((7, 6, 3), seed=1)
    for each, dtype in ((model, torch.float32), (other, torch.int64)):
        each.register_buffer("count", torch.zeros(2, dtype=dtype))
    optimizer = AdamW(model.parameters())
    _step(model, optimizer)
    checkpoint.save(tmp_path / "step-1", model=model, optimizer=optimizer)
    said = _refused(
        tmp_path / "step-1", "of this model; of another shape: ", other, optimizer=AdamW(other.parameters())
    )
    for each in (
        "0.weight is (5, 7) in the checkpoint and (6, 7) here",
        "0.bias is (5,) in the checkpoint and (6,) here",
        "1.weight is (3, 5) in the checkpoint and (3, 6) here",
        "count is torch.float32 in the checkpoint and torch.int64 here",
    ):
        assert each in said


def test_floats_are_cast_and_nothing_else(tmp_path):
    model, other = _net(), _net(seed=1).bfloat16()
    checkpoint.save(tmp_path / "step-1", model=model)
    checkpoint.load(tmp_path / "step-1", model=other)
    assert torch.equal(other[0].weight, model[0].weight.bfloat16())
    for there, here in ((torch.int64, torch.float32), (torch.int32, torch.int64), (torch.bool, torch.uint8)):
        model.register_buffer("count", torch.ones(2, dtype=there))
        checkpoint.save(tmp_path / f"{there}-1", model=model)
        other.register_buffer("count", torch.zeros(2, dtype=here))
        _refused(tmp_path / f"{there}-1", f"count is {there} in the checkpoint and {here} here", other)


def test_a_model_without_memory(tmp_path):
    checkpoint.save(tmp_path / "step-1", model=_net())
    with torch.device("meta"):
        model = _net()
    _refused(tmp_path / "step-1", r"on the meta device: 0.weight, .*; fsdp_tp.wrap\(model, mesh\)", model)


# --- who has and writes what ---


def _in_every_rank(world_size, function):
    """Its results in worlds that are only played, one rank after the other: nothing may be communicated."""
    results = []
    for rank in range(world_size):
        dist.init_process_group("fake", rank=rank, world_size=world_size)
        try:
            results.append(function())
        finally:
            dist.destroy_process_group()
            _clear_sharding_prop_cache()  # it holds this rank's coordinate
    return results


def _torch_parallel(degrees, sizes, shard):
    """torch's own tensor parallelism, and FSDP over what it leaves."""
    mesh = init_device_mesh("cpu", degrees, mesh_dim_names=("replicate", "shard", "tensor"))
    model = _net(sizes)
    styles = (ColwiseParallel, RowwiseParallel)
    parallelize_module(model, mesh["tensor"], {str(layer): styles[layer % 2]() for layer in range(len(model))})
    if shard:
        for unit in (*model, model):
            torch.distributed.fsdp.fully_shard(unit, mesh=mesh["replicate", "shard"])
    return model


def _tensor_parallel_only():
    mesh = fsdp_tp.init_mesh(tensor_parallel_degree=2)
    return fsdp_tp.parallelize(models.hugging_face("llama"), mesh)


def _one_axis():
    """Sharded over the data axis, and the same on the tensor axis, of which it knows nothing."""
    mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("shard", "tensor"))
    model = _net()
    torch.distributed.fsdp.fully_shard(model, mesh=mesh["shard"])
    return model


LAYOUTS = {
    "tensor parallel only": (4, _tensor_parallel_only),
    "one axis of two": (6, _one_axis),
    "torch, tensor only": (8, lambda: _torch_parallel((2, 2, 2), (8,) * 7, shard=False)),
    "torch, uneven": (6, lambda: _torch_parallel((1, 3, 2), (3, 7, 4), shard=True)),
    "torch, replicated": (8, lambda: _torch_parallel((2, 2, 2), (3, 5, 2), shard=True)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_value_is_written_once_and_all_ranks_write(layout):
    world_size, build = LAYOUTS[layout]

    def written():
        boxes = {}
        for index, (name, tensor) in enumerate(build().state_dict().items()):
            box = box_of(tensor)
            assert box.shape == tuple(local_of(tensor).shape), f"{name}: the box is not what the rank has"
            boxes[name] = tuple(tensor.shape), [box] if is_written_here(tensor, index) else []
        return boxes

    ranks = _in_every_rank(world_size, written)
    for name, (shape, _) in ranks[0].items():
        assert are_whole(shape, [box for boxes in ranks for box in boxes[name][1]]), name
    assert all(any(boxes for _, boxes in rank.values()) for rank in ranks)


def _saved_tensor_parallel(path):
    mesh = fsdp_tp.init_mesh(tensor_parallel_degree=2)
    torch.manual_seed(1)
    model = fsdp_tp.parallelize(models.hugging_face("llama"), mesh)
    checkpoint.save(path, model=model)
    return {name: models.gather(tensor) for name, tensor in model.state_dict().items()}


def test_tensor_parallelism_alone_is_saved(tmp_path):
    expected = run(4, _saved_tensor_parallel, tmp_path / "step-1")[0]
    model = models.hugging_face("llama")
    checkpoint.load(tmp_path / "step-1", model=model)
    found = model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_shard_that_is_no_slice_is_refused():
    def attempt():
        mesh = init_device_mesh("cpu", (2,))
        said = []
        for placement in (_StridedShard(0, split_factor=2), Partial()):
            model = nn.Module()
            model.weight = nn.Parameter(DTensor.from_local(torch.zeros(4, 2), mesh, [placement], run_check=False))
            with pytest.raises(ValueError, match="weight has the placements .* no slice of the whole") as caught:
                model_state(model)
            said.append(str(caught.value))
        return said

    assert _in_every_rank(2, attempt)[0] == _in_every_rank(2, attempt)[1]


def test_a_dim_that_two_axes_shard_first_to_last():
    def boxes():
        mesh = init_device_mesh("cpu", (2, 2))
        tensor = DTensor.from_local(torch.zeros(2), mesh, [Shard(0), Shard(0)], run_check=False)
        return box_of(tensor).offset

    assert _in_every_rank(4, boxes) == [(0,), (2,), (4,), (6,)]


def _cut(generator, box, cuts):
    """A box, cut into two, and those again."""
    if not cuts:
        return [box]
    dim = int(torch.randint(len(box.shape), (), generator=generator))
    at = int(torch.randint(box.shape[dim] + 1, (), generator=generator))
    sizes = [list(box.shape), list(box.shape)]
    sizes[0][dim], sizes[1][dim] = at, box.shape[dim] - at
    second = [start + at * (each == dim) for each, start in enumerate(box.offset)]
    left = cuts // 2
    return [
        *_cut(generator, Box(box.offset, tuple(sizes[0])), left),
        *_cut(generator, Box(tuple(second), tuple(sizes[1])), cuts - 1 - left),
    ]


def _are_whole_by_counting(shape, boxes):
    count = torch.zeros(shape, dtype=torch.int64)
    whole = Box((0,) * len(shape), shape)
    for box in boxes:
        if any(end > size for end, size in zip(box.end, shape, strict=True)):
            return False
        count[box.within(whole)] += 1
    return bool((count == 1).all())


def test_what_is_whole_is_told_from_overlaps_and_holes():
    generator = torch.Generator().manual_seed(0)
    seen = Counter()
    for _ in range(300):
        shape = tuple(
            torch.randint(1, 6, (int(torch.randint(1, 4, (), generator=generator)),), generator=generator).tolist()
        )
        boxes = _cut(generator, Box((0,) * len(shape), shape), 6)
        assert are_whole(shape, boxes)
        index = int(torch.randint(len(boxes), (), generator=generator))
        offset = (
            max(boxes[index].offset[0] + int(torch.randint(-1, 2, (), generator=generator)), 0),
            *boxes[index].offset[1:],
        )
        boxes[index] = Box(offset, boxes[index].shape)  # as many values: an overlap, and a hole
        expected = _are_whole_by_counting(shape, boxes)
        seen[expected] += 1
        assert are_whole(shape, boxes) == expected
    assert min(seen.values()) > 30
    # A pinwheel: no plane has a box on each side only.
    pinwheel = [Box((0, 0), (1, 2)), Box((0, 2), (2, 1)), Box((2, 1), (1, 2)), Box((1, 0), (2, 1)), Box((1, 1), (1, 1))]
    assert are_whole((3, 3), pinwheel)
    assert not are_whole((3, 3), [*pinwheel[:3], Box((0, 0), (2, 1)), pinwheel[4]])
    assert are_whole((), [Box((), ())])
    assert are_whole((0, 3), [])
    assert not are_whole((2,), [Box((0,), (1,))])


def test_thousands_of_boxes_are_looked_at_one_by_one(monkeypatch):
    """Each pair would be eight million."""
    monkeypatch.setattr(Box, "__and__", None)
    boxes = [Box((row, 2 * column), (1, 2)) for row in range(64) for column in range(64)]
    assert are_whole((64, 128), boxes)
