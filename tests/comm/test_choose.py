"""If these fail, look in fsdp_tp/comm/choose.py: which strategy a module gets, and what the log says of it."""

from __future__ import annotations

import io
import logging
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import Shard

import fsdp_tp
from fsdp_tp.comm import choose, native
from tests import models
from tests.ranks import run


def _said(shard):
    """What ``shard()`` logs of strategies, and which all-gather the module it returns has."""
    stream, logger = io.StringIO(), logging.getLogger("fsdp_tp")
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    choose._say.cache_clear()
    try:
        module = shard()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    said = ["".join(line for line in stream.getvalue().splitlines(keepends=True) if " comm=" in line)]
    assert dist.get_rank() == 0 or said == [""]
    dist.broadcast_object_list(said)
    return said[0], type(module._get_fsdp_state()._fsdp_param_groups[0]._all_gather_comm).__name__


def _net(rows=4):
    return nn.Linear(4, rows)


def _choices():
    on_one_host = "the 2 ranks of the shard group share the memory of one host"
    with torch.device("meta"):
        meta = _net()
    for comm, options, module, level, used, why, kind in (
        ("auto", {}, _net(), "INFO", "zero_copy", on_one_host, "ZeroCopyAllGather"),
        ("shared", {}, _net(), "INFO", "shared", on_one_host, "SharedAllGather"),
        ("fp32_accumulate", {}, _net(), "INFO", "fp32_accumulate", on_one_host, "SharedAllGather"),
        ("auto", {}, meta, "INFO", "shared", "the parameters are on the meta device", "SharedAllGather"),
        (
            "zero_copy",
            {"shard_placement_fn": lambda parameter: Shard(parameter.ndim - 1)},
            _net(),
            "WARNING",
            "shared",
            "a parameter is sharded on another dim than 0",
            "SharedAllGather",
        ),
        (
            "shared",
            {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
            _net(),
            "WARNING",
            "torch",
            "parameters are offloaded",
            "DefaultAllGather",
        ),
    ):
        text, found = _said(lambda c=comm, o=options, m=module: fsdp_tp.fully_shard(m, comm=c, **o))
        assert text.startswith(f"{level} comm={comm!r} uses {used!r}: {why}"), text
        assert found == kind
        assert text.count("\n") == 1
    text, _ = _said(lambda: fsdp_tp.fully_shard(_net(), comm="torch"))
    assert text == ""


def test_what_is_used_and_why_is_logged():
    run(2, _choices)


def _sub_groups():
    text, kind = _said(lambda: fsdp_tp.fully_shard(_net(), reshard_after_forward=2))
    assert "reshard_after_forward is a number" in text
    assert kind == "DefaultAllGather"
    text, kind = _said(lambda: fsdp_tp.fully_shard(_net(), hybrid_shard_degree=1))
    assert "uses 'torch': a group of one rank does not communicate" in text
    os.environ["FSDP_TP_HOST"] = f"host {dist.get_rank() // 2}"
    try:
        text, kind = _said(lambda: fsdp_tp.fully_shard(_net(), hybrid_shard_degree=2))
        assert kind == "ZeroCopyAllGather", text
        mesh = fsdp_tp.init_mesh()  # of groups that have not met before
        text, kind = _said(lambda: fsdp_tp.fully_shard(_net(), mesh=mesh, comm="shared"))
        assert text == "WARNING comm='shared' uses 'torch': its 4 ranks are on 2 hosts\n"
        assert kind == "DefaultAllGather"
    finally:
        del os.environ["FSDP_TP_HOST"]


def test_groups_that_cannot_share_memory_use_torchs_collectives():
    run(4, _sub_groups)


def _not_built():
    mesh = fsdp_tp.init_mesh()
    native.load.cache_clear()
    path = native._PATH
    if dist.get_rank() == 1:
        native._PATH = path.with_name("not-there.so")
    try:
        return _said(lambda: fsdp_tp.fully_shard(_net(), mesh=mesh))
    finally:
        native._PATH = path
        native.load.cache_clear()


def test_a_rank_without_the_library_is_enough_to_use_torchs_collectives():
    for text, kind in run(2, _not_built):
        assert "uses 'torch': rank 1: the kernels library is not built" in text
        assert kind == "DefaultAllGather"


def test_an_unknown_strategy_is_an_error_that_lists_the_known():
    with pytest.raises(ValueError, match="comm='x' must be one of 'auto', 'torch', 'shared', 'zero_copy', 'fp32_acc"):
        fsdp_tp.fully_shard(_net(), comm="x")


def _steps(model, optimizer, count):
    losses = []
    for step in range(count):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        loss = model(torch.randn(3, 4, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def _late(comm):
    """Parameters get their memory, and new memory, after fully_shard; optimizers hold them from before."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 1))
    for unit in (*model, model):
        fsdp_tp.fully_shard(unit, comm=comm)
    model.to_empty(device="cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fsdp_tp.initialize(model, seed=3)
    seen = _steps(model, optimizer, 2)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    seen += _steps(model, optimizer, 2)
    model.load_state_dict(before)
    seen += _steps(model, optimizer, 2)
    model.load_state_dict(before, assign=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen += _steps(model, optimizer, 2)
    kind = type(model[0]._get_fsdp_state()._fsdp_param_groups[0]._all_gather_comm).__name__
    shared = [hasattr(parameter._local_tensor, "fsdp_pre_all_gather") for parameter in model.parameters()]
    return [*seen, *map(models.gather, model.parameters())], kind, shared


def _replaced_parameters():
    expected, _, _ = _late("torch")
    ours, kind, shared = _late("zero_copy")
    assert kind == "ZeroCopyAllGather"
    assert all(shared)
    for a, b in zip(ours, expected, strict=True):
        assert torch.equal(a, b)


def test_parameters_that_are_replaced_move_into_shared_memory_again():
    run(2, _replaced_parameters)


def _files(directory):
    model = nn.Linear(4, 101)
    fsdp_tp.fully_shard(model, comm="zero_copy")
    model(torch.ones(1, 4)).sum().backward()
    path = f"{directory}/{dist.get_rank()}"
    torch.save({name: tensor.to_local() for name, tensor in model.state_dict().items()}, path)
    found = torch.load(path, weights_only=True)
    for name, tensor in model.state_dict().items():
        assert torch.equal(found[name], tensor.to_local())
    return os.path.getsize(path)


def test_a_saved_shard_is_as_large_as_a_shard(tmp_path):
    """51 of 101 rows of 4 and 51 biases, and what torch.save adds to two tensors."""
    for size in run(2, _files, str(tmp_path)):
        assert size < 51 * 5 * 4 + 2500
