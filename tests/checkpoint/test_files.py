"""What a checkpoint's files hold, who writes and reads them, and what happens if they are damaged. If these fail,
look in fsdp_tp/checkpoint: writing.py, reading.py, manifest.py, files.py."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import random

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

import fsdp_tp
from fsdp_tp import checkpoint
from fsdp_tp.checkpoint import files, new_file
from fsdp_tp.checkpoint import manifest as manifest_module
from fsdp_tp.checkpoint.chunks import Box, box_of
from fsdp_tp.checkpoint.manifest import Damaged, Manifest
from fsdp_tp.layers.canonical import arranged_parameters, restore
from fsdp_tp.layers.parameter import own_part
from tests import models
from tests.ranks import run


def _net(seed=0):
    """Shapes that nothing divides, and a bias of fewer rows than there are ranks."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3, bias=False), nn.Linear(3, 9), nn.LayerNorm(9))


def _trained(degree, seed=0, steps=2, comm="auto"):
    mesh = fsdp_tp.init_mesh(hybrid_shard_degree=degree)
    model = _net(seed)
    for unit in (*model, model):
        fsdp_tp.fully_shard(unit, mesh=mesh, comm=comm)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        model(torch.full((2, 7), step + 1.0)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def _contents(model, optimizer):
    """As one process would have it."""
    found, arranged = {}, arranged_parameters(model)
    for name, parameter in model.named_parameters():
        values = {name: parameter}
        values.update({f"optimizer.state.{name}.{key}": value for key, value in optimizer.state[parameter].items()})
        for key, value in values.items():
            in_order = name in arranged and value.shape == parameter.shape
            found[key] = models.gather(restore(value, *arranged[name]) if in_order else value)
    return found


def _save(path, degree, **options):
    model, optimizer = _trained(degree)
    checkpoint.save(path, model=model, optimizer=optimizer, **options)
    return _contents(model, optimizer)


def test_replicas_share_the_writing_and_a_value_is_written_once(tmp_path):
    """Fault: hybrid-shard checkpoints with duplicated writes."""
    saved = run(4, _save, tmp_path / "step-2", 2)[0]
    found, size = {}, 0
    for rank in range(4):
        written = [load_file(path) for path in (tmp_path / "step-2").glob(f"*-{rank:05}.safetensors")]
        assert written, f"rank {rank} wrote nothing"
        for name, tensor in (each for file in written for each in file.items()):
            found.setdefault(name, []).append((rank, tensor))
            size += tensor.numel()
    assert found.keys() == saved.keys()
    assert size == sum(tensor.numel() for tensor in saved.values())
    for name, parts in found.items():  # ranks 0 and 1, or 2 and 3, have the rows in order
        assert torch.equal(torch.cat([part for _, part in parts]) if parts[0][1].ndim else parts[0][1], saved[name])


def _load(path, degree):
    """What was read, and how many bytes of it from files."""
    model, optimizer = _trained(degree, seed=1, steps=0)
    counted, preadv = [], os.preadv

    def counting(*arguments):
        counted.append(preadv(*arguments))
        return counted[-1]

    os.preadv = counting
    try:
        checkpoint.load(path, model=model, optimizer=optimizer, verify=False)
    finally:
        os.preadv = preadv
    mine = sum(box_of(parameter).numel for parameter in model.parameters())
    return _contents(model, optimizer), sum(counted), 4 * (3 * mine + len(list(model.parameters())))


@pytest.mark.parametrize(("world", "degree"), [(4, 0), (4, 2), (3, 0), (1, 0)])
def test_a_rank_reads_the_bytes_it_needs_and_no_others(tmp_path, world, degree):
    saved = run(2, _save, tmp_path / "step-2", 0)[0]
    for loaded, read, needed in run(world, _load, tmp_path / "step-2", degree):
        assert read == needed  # its part of a parameter and of two moments, and each one's count of steps
        assert loaded.keys() == saved.keys()
        assert all(torch.equal(loaded[name], tensor) for name, tensor in saved.items())


# World, tensor degree and hybrid shard degree.
_LAYOUTS = {
    "one": [(1, 1, 1)],
    "replicate": [(2, 1, 1), (3, 1, 1), (4, 1, 1)],
    "shard": [(2, 1, 2), (3, 1, 3), (4, 1, 4)],
    "tensor": [(2, 2, 1), (3, 3, 1), (4, 4, 1)],
    "replicate x shard": [(4, 1, 2)],
    "replicate x tensor": [(4, 2, 1)],
    "shard x tensor": [(4, 2, 2)],
}


def _llama(tensor, shard, family, sizes, dtype, seed):
    mesh = fsdp_tp.init_mesh(tensor_parallel_degree=tensor, hybrid_shard_degree=shard)
    torch.manual_seed(0)
    model = fsdp_tp.wrap(models.hugging_face(family, **sizes).to(dtype), mesh, seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(models.batch() % sizes["vocab_size"]).logits.square().mean().backward()
    optimizer.step()
    return model, optimizer


def _save_llama(path, *job):
    model, optimizer = _llama(*job)
    checkpoint.save(path, model=model, optimizer=optimizer)
    return _contents(model, optimizer)


def _load_llama(path, *job):
    model, optimizer = _llama(*job)
    checkpoint.load(path, model=model, optimizer=optimizer)
    return _contents(model, optimizer)


@pytest.mark.parametrize(
    ("seed", "source", "target", "dtype"),
    [
        (0, "shard x tensor", "shard", torch.float32),
        (1, "shard", "shard x tensor", torch.bfloat16),
        (2, "tensor", "shard", torch.float32),
        (3, "replicate x shard", "tensor", torch.bfloat16),
        (4, "one", "shard x tensor", torch.float32),
        (5, "shard x tensor", "replicate x tensor", torch.bfloat16),
        (6, "shard", "replicate", torch.float32),
    ],
)
def test_any_layout_reads_any_other_whatever_the_shapes(tmp_path, seed, source, target, dtype):
    draw = random.Random(seed)
    heads = draw.choice([3, 4, 5])
    sizes = {
        "vocab_size": draw.randint(30, 60), "intermediate_size": draw.randint(20, 50), "hidden_size": 8 * heads,
        "num_attention_heads": heads, "num_key_value_heads": draw.choice([1, heads]), "num_hidden_layers": 1,
        "tie_word_embeddings": draw.random() < 0.5,
    }  # fmt: skip
    family = draw.choice(["llama", "qwen3", "phi3"])
    if family == "phi3":
        sizes["pad_token_id"] = 0
    (world, *degrees), (other_world, *other_degrees) = draw.choice(_LAYOUTS[source]), draw.choice(_LAYOUTS[target])
    saved = run(world, _save_llama, tmp_path / "step-1", *degrees, family, sizes, dtype, 1)[0]
    assert saved["model.norm.weight"].dtype == dtype
    for loaded in run(other_world, _load_llama, tmp_path / "step-1", *other_degrees, family, sizes, dtype, 2):
        assert loaded.keys() == saved.keys()
        differing = [name for name in loaded if not torch.equal(loaded[name], saved[name])]
        assert not differing, (degrees, other_degrees, family, sizes)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (4, 6), (3, 4, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_every_box_of_a_file_is_read(tmp_path, shape, dtype):
    draw = random.Random(0)
    value = torch.randint(0, 100, shape).to(dtype)
    written = files.write_tensors(tmp_path / "a", {"odd": torch.ones(3, dtype=torch.uint8), "value": value})
    assert written.size == (tmp_path / "a").stat().st_size
    assert torch.equal(load_file(tmp_path / "a")["value"], value)
    for _ in range(20):
        offset = tuple(draw.randint(0, size) for size in shape)
        box = Box(offset, tuple(draw.randint(0, size - start) for start, size in zip(offset, shape, strict=True)))
        part = box.within(Box((0,) * len(shape), shape))
        out = torch.empty(box.shape, dtype=dtype)
        if (first := files.run_start(shape, part)) is None:
            files.read_apart(tmp_path / "a", written.starts["value"], shape, part, out)
        else:
            files.read_into(tmp_path / "a", written.starts["value"] + first * out.itemsize, out)
        assert torch.equal(out, value[part])


def _saved_twice(directory):
    model = _net()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 7)).sum().backward()
    optimizer.step()
    for step in (1, 2):
        checkpoint.save(directory / f"step-{step}", model=model, optimizer=optimizer, extra={"step": step})
    return model, optimizer


def _flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(
    ("damage", "file", "said"),
    [
        (_flip, "model-00000.safetensors", "is damaged: its digest is not what was written"),
        (_flip, "optimizer-00000.safetensors", "is damaged"),
        (_flip, "manifest.json", "is damaged"),
        (lambda path: os.truncate(path, 100), "model-00000.safetensors", "has 100 bytes and had"),
        (lambda path: os.truncate(path, 100), "manifest.json", "is damaged"),
        (lambda path: path.unlink(), "optimizer-00000.safetensors", "cannot be read"),
    ],
)
def test_a_damaged_file_is_named_and_the_checkpoint_before_is_taken(tmp_path, caplog, damage, file, said):
    model, optimizer = _saved_twice(tmp_path)
    assert checkpoint.latest(tmp_path) == tmp_path / "step-2"
    damage(tmp_path / "step-2" / file)
    with caplog.at_level(logging.WARNING, "fsdp_tp"):
        assert checkpoint.latest(tmp_path) == tmp_path / "step-1"
    (message,) = caplog.messages
    assert f"step-2/{file}" in message
    assert said in message
    assert checkpoint.load(tmp_path / "step-1", model=model, optimizer=optimizer) == {"step": 1}
    caplog.clear()
    with caplog.at_level(logging.WARNING, "fsdp_tp"):
        found = checkpoint.load_latest(tmp_path, model=model, optimizer=optimizer)
    assert found == (tmp_path / "step-1", {"step": 1})
    (message,) = caplog.messages
    assert f"step-2/{file}" in message
    damage(tmp_path / "step-1" / file)
    with pytest.raises(Damaged, match="all 2 checkpoints in .* are damaged; mend them, or move them away"):
        checkpoint.load_latest(tmp_path, model=model, optimizer=optimizer)


@pytest.mark.usefixtures("one_process")
def test_the_newest_is_loaded_or_nothing(tmp_path):
    model, other = _net(), _net(1)
    assert checkpoint.load_latest(tmp_path, model=model) is None
    checkpoint.save(tmp_path / "step-3", model=model, extra={"step": 3})
    assert checkpoint.load_latest(tmp_path, model=other) == (tmp_path / "step-3", {"step": 3})
    assert torch.equal(model[0].weight, other[0].weight)
    with pytest.raises(ValueError, match="is not a checkpoint of this model"):
        checkpoint.load_latest(tmp_path, model=nn.Linear(7, 5))


def _load_damaged(path, verify, columns):
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Linear(40, 30, bias=False)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(1 if columns else 0)]))
    try:
        checkpoint.load(path, model=model, verify=verify)
    except Damaged as damage:
        return str(damage)
    return None


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("world", [1, 2])
def test_a_flipped_bit_is_found_by_a_load_in_any_layout(tmp_path, world, columns, monkeypatch):
    """Also where no rank reads all that a digest is of; wherever the bit is."""
    torch.manual_seed(0)
    checkpoint.save(tmp_path / "step-1", model=nn.Linear(40, 30, bias=False))
    file = tmp_path / "step-1/model-00000.safetensors"
    good = file.read_bytes()
    assert run(world, _load_damaged, tmp_path / "step-1", True, columns) == [None] * world
    for at in (-1, -4 * 40 * 30, -2500):
        bad = bytearray(good)
        bad[at] ^= 1
        file.write_bytes(bad)
        found = run(world, _load_damaged, tmp_path / "step-1", True, columns)
        assert all(f"{file} is damaged" in each for each in found), (at, found)
        assert run(world, _load_damaged, tmp_path / "step-1", False, columns) == [None] * world


@pytest.mark.usefixtures("one_process")
def test_tensors_larger_than_a_piece(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "PIECE", 100)
    monkeypatch.setattr(manifest_module, "PIECE", 100)
    model, other = _net(), _net(1)
    checkpoint.save(tmp_path / "step-1", model=model)
    pieces = Manifest.read(tmp_path / "step-1").tensors["0.weight"].pieces()
    assert [piece.size for piece in pieces] == [100, 40]
    checkpoint.load(tmp_path / "step-1", model=other)
    assert torch.equal(model[0].weight, other[0].weight)
    assert checkpoint.latest(tmp_path) == tmp_path / "step-1"
    data = bytearray((tmp_path / "step-1/model-00000.safetensors").read_bytes())
    data[pieces[1].start] ^= 1
    (tmp_path / "step-1/model-00000.safetensors").write_bytes(data)
    assert checkpoint.latest(tmp_path) is None
    with pytest.raises(Damaged, match="model-00000.safetensors is damaged"):
        checkpoint.load(tmp_path / "step-1", model=other)


@pytest.mark.usefixtures("one_process")
def test_files_larger_than_the_buffer_and_file_systems_that_have_no_way_past_the_page_cache(tmp_path, monkeypatch):
    def refusing(file, what, *flags):
        if what == fcntl.F_SETFL:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return original(file, what, *flags)

    monkeypatch.setattr(new_file, "_BUFFER", 3 * 4096)
    data = {"a": torch.randn(5, 1000), "b": torch.arange(7, dtype=torch.uint8), "c": torch.randn(4096)}
    files.write_tensors(tmp_path / "direct", data)
    original = fcntl.fcntl
    monkeypatch.setattr(fcntl, "fcntl", refusing)
    files.write_tensors(tmp_path / "cached", data)
    for name in ("direct", "cached"):
        assert all(torch.equal(tensor, data[key]) for key, tensor in load_file(tmp_path / name).items())
    assert (tmp_path / "direct").read_bytes() == (tmp_path / "cached").read_bytes()
    with pytest.raises(FileExistsError):
        files.write_tensors(tmp_path / "direct", data)


@pytest.mark.usefixtures("one_process")
def test_blocks_of_another_size_than_expected(tmp_path, monkeypatch):
    """A write may be refused though the file was opened for it, or may end anywhere."""

    def picky(file, data):
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
            if len(data) % 8192:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return write(file, data)
        return write(file, data[:1000])

    write = os.write
    monkeypatch.setattr(os, "write", picky)
    monkeypatch.setattr(new_file, "_BUFFER", 3 * 4096)
    data = {"a": torch.randn(5, 1000), "c": torch.randn(4097)}
    files.write_tensors(tmp_path / "file", data)
    assert all(torch.equal(tensor, data[key]) for key, tensor in load_file(tmp_path / "file").items())


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("content", ["[]", "3", '{"version": 2}', "\xff"])
def test_what_is_no_manifest_is_damaged(tmp_path, content):
    _saved_twice(tmp_path)
    (tmp_path / "step-2/manifest.json").write_bytes(content.encode("latin1"))
    assert checkpoint.latest(tmp_path) == tmp_path / "step-1"
    (tmp_path / "step-2/manifest.json").unlink()
    (tmp_path / "step-2/manifest.json").symlink_to(tmp_path / "loop")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert checkpoint.latest(tmp_path) == tmp_path / "step-1"


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("save", [checkpoint.save, checkpoint.async_save])
def test_the_step_of_a_damaged_checkpoint_is_saved_again_and_the_damaged_one_kept(tmp_path, caplog, save):
    model, _ = _saved_twice(tmp_path)
    with pytest.raises(ValueError, match="step-2 exists already"):
        save(tmp_path / "step-2", model=model)
    _flip(tmp_path / "step-2/model-00000.safetensors")
    (tmp_path / "step-1/manifest.json").unlink()
    (tmp_path / "step-3").mkdir()
    (tmp_path / "step-3/notes").touch()
    with caplog.at_level(logging.WARNING, "fsdp_tp"):
        for step in (1, 2):
            save(tmp_path / f"step-{step}", model=model)
        checkpoint.wait()
    assert "step-2 is damaged and now called step-2.damaged-1.old" in caplog.text
    with pytest.raises(ValueError, match="step-3 exists already"):
        save(tmp_path / "step-3", model=model)
    names = ["step-1", "step-1.damaged-1.old", "step-2", "step-2.damaged-1.old", "step-3"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert checkpoint.latest(tmp_path) == tmp_path / "step-2"


@pytest.mark.usefixtures("one_process")
def test_what_does_not_count_is_named(tmp_path, caplog):
    model, _ = _saved_twice(tmp_path)
    with caplog.at_level(logging.WARNING, "fsdp_tp"):
        checkpoint.save(tmp_path / "final", model=model)
    assert "final has no number at its end" in caplog.text
    (tmp_path / "step-2/manifest.json").unlink()
    caplog.clear()
    with caplog.at_level(logging.WARNING, "fsdp_tp"):
        found = checkpoint.load_latest(tmp_path, model=model)
    assert found == (tmp_path / "step-1", {"step": 1})
    assert [message.partition(" is passed over: ")[2] for message in caplog.messages] == [
        "its name does not end in a number", "it has no manifest.json"
    ]  # fmt: skip
    with pytest.raises(ValueError, match="step-1 is a checkpoint itself"):
        checkpoint.load_latest(tmp_path / "step-1", model=model)


@pytest.mark.usefixtures("one_process")
def test_another_kind_of_optimizer_is_refused(tmp_path):
    model, _ = _saved_twice(tmp_path)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    with pytest.raises(ValueError, match="it was AdamW, without dampening, momentum, nesterov, and here is SGD"):
        checkpoint.load(tmp_path / "step-2", model=model, optimizer=optimizer)


@pytest.mark.usefixtures("one_process")
def test_links_are_not_followed(tmp_path):
    _saved_twice(tmp_path)
    file = tmp_path / "step-2/model-00000.safetensors"
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Damaged, match="model-00000.safetensors is a link, and was a file"):
        checkpoint.load(tmp_path / "step-2", model=_net())
    assert checkpoint.latest(tmp_path) == tmp_path / "step-1"


@pytest.mark.usefixtures("one_process")
def test_a_manifest_names_files_of_its_directory_only(tmp_path):
    _saved_twice(tmp_path)
    manifest = Manifest.read(tmp_path / "step-1")
    for name in ("../step-2/model-00000.safetensors", "/etc/passwd", ".."):
        (tmp_path / "step-1/manifest.json").unlink()
        Manifest(
            manifest.extra, "", {name: next(iter(manifest.files.values()))}, {}, {}, manifest.values
        ).write(tmp_path / "step-1")  # fmt: skip
        with pytest.raises(Damaged, match="which is not one of its directory"):
            checkpoint.read_extra(tmp_path / "step-1")


@pytest.mark.usefixtures("one_process")
def test_another_models_checkpoint_is_refused_with_the_names(tmp_path):
    _saved_twice(tmp_path)
    other = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    with pytest.raises(ValueError, match=r"of this model; missing: 1.bias; unexpected: 2.bias, 2.weight, 3"):
        checkpoint.load(tmp_path / "step-1", model=other)
    other = _net()
    other[0] = nn.Linear(8, 5)
    with pytest.raises(ValueError, match=r"0.weight is \(5, 7\) in the checkpoint and \(5, 8\) here"):
        checkpoint.load(tmp_path / "step-1", model=other)


@pytest.mark.usefixtures("one_process")
def test_only_the_last_ones_stay(tmp_path):
    model = _net()
    (tmp_path / "other-1").mkdir()
    checkpoint.save(tmp_path / "best-3", model=model)
    for step in range(8, 12):
        checkpoint.save(tmp_path / f"step-{step}", model=model, keep_last=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best-3", "other-1", "step-10", "step-11"]
    with pytest.raises(ValueError, match="keep_last=0 must be at least 1"):
        checkpoint.save(tmp_path / "step-12", model=model, keep_last=0)


@pytest.mark.usefixtures("one_process")
def test_scheduler_and_random_generators_go_on(tmp_path):
    model = _net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    checkpoint.save(tmp_path / "step-3", model=model, optimizer=optimizer, scheduler=scheduler)
    expected = torch.rand(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    checkpoint.load(tmp_path / "step-3", model=model, optimizer=optimizer, scheduler=scheduler)
    assert torch.equal(torch.rand(3), expected)
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert scheduler.last_epoch == 3


@pytest.mark.usefixtures("one_process")
def test_state_of_a_parameter_that_was_frozen_later_is_kept(tmp_path):
    """Fault: pytorch#192202. And of one that never had a gradient there is none."""
    model, other = _net(), _net(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model[1].weight.requires_grad_(False)
    model(torch.ones(1, 7)).square().sum().backward()
    optimizer.step()
    model[0].weight.requires_grad_(False)
    checkpoint.save(tmp_path / "step-1", model=model, optimizer=optimizer)
    optimizer_after = torch.optim.AdamW(other.parameters(), lr=0.3, betas=(0.5, 0.6))
    other(torch.ones(1, 7)).square().sum().backward()
    optimizer_after.step()
    checkpoint.load(tmp_path / "step-1", model=other, optimizer=optimizer_after)
    assert not optimizer_after.state.get(other[1].weight)
    for key, value in optimizer.state[model[0].weight].items():
        assert torch.equal(optimizer_after.state[other[0].weight][key], value)
    group = optimizer_after.param_groups[0]
    assert (group["lr"], group["betas"]) == (0.1, (0.9, 0.999))


@pytest.mark.usefixtures("one_process")
def test_the_files_are_json_and_safetensors(tmp_path):
    """Nothing in them can be unpickled."""
    _saved_twice(tmp_path)
    names = sorted(path.name for path in (tmp_path / "step-1").iterdir())
    assert names == ["manifest.json", "model-00000.safetensors", "optimizer-00000.safetensors"]
    assert set(json.loads((tmp_path / "step-1/manifest.json").read_text())["files"]) == set(names[1:])


def _boxes():
    """Of all placements of a wrapped model, beside the cut that the layers use."""
    mesh = fsdp_tp.init_mesh(tensor_parallel_degree=2, hybrid_shard_degree=2)
    sizes = {"vocab_size": 37, "intermediate_size": 30, "hidden_size": 24, "num_attention_heads": 3}
    model = fsdp_tp.wrap(models.hugging_face("llama", num_key_value_heads=3, **sizes), mesh)
    for name, parameter in model.state_dict().items():
        whole = torch.arange(parameter.numel()).reshape(parameter.shape)
        box = box_of(parameter)
        assert torch.equal(whole[box.within(Box((0,) * whole.ndim, tuple(whole.shape)))], own_part(whole, parameter)), (
            name
        )


def test_a_box_is_what_the_layers_cut():
    run(4, _boxes)
