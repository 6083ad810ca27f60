"""Whether a checkpoint fits what it is to be loaded into: looked at before anything is read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp_tp.checkpoint.files import DTYPES
from fsdp_tp.checkpoint.manifest import Manifest
from fsdp_tp.checkpoint.state import OPTIMIZER, own_names, saved_groups, settings_of


def require_parts(path: Path, manifest: Manifest, *, optimizer: Any, scheduler: Any) -> None:
    """Raises ValueError if the checkpoint has none of one that is to be loaded."""
    has = {"optimizer": "groups" in manifest.values, "scheduler": "scheduler" in manifest.values}
    stored = ", ".join(["a model", *(f"its {kind}" for kind, is_there in has.items() if is_there)])
    for kind, wanted in (("optimizer", optimizer), ("scheduler", scheduler)):
        if wanted is not None and not has[kind]:
            raise ValueError(
                f"{path} has no {kind}: it has {stored}. Load it with {kind}=None, or load one that was saved with "
                f"{kind}="
            )


def require_model(path: Path, manifest: Manifest, tensors: Mapping[str, Tensor], aliases: Mapping[str, str]) -> None:
    """Raises ValueError, in which all that does not fit is listed."""
    stored = {name for name in (*manifest.tensors, *manifest.aliases) if not name.startswith(OPTIMIZER)}
    here = {*tensors, *aliases}
    shared = {
        name: (manifest.tensors[manifest.aliases.get(name, name)], tensor)
        for name, tensor in tensors.items()
        if name in stored
    }
    problems = {
        "missing": sorted(here - stored),
        "unexpected": sorted(stored - here),
        "of another shape": [
            f"{name} is {its.shape} in the checkpoint and {tuple(tensor.shape)} here"
            for name, (its, tensor) in shared.items()
            if its.shape != tuple(tensor.shape)
        ],
        "of another kind": [
            f"{name} is {dtype} in the checkpoint and {tensor.dtype} here"
            for name, (its, tensor) in shared.items()
            if (dtype := DTYPES[its.dtype]) != tensor.dtype
            and not (dtype.is_floating_point and tensor.is_floating_point())
        ],
        # One of two stored tensors would be lost.
        "of other ties": [
            f"{name} is tied to {other} here and not there"
            for name, other in aliases.items()
            if manifest.find(name) is not manifest.find(other)
        ],
    }
    _require_none(f"{path} is not a checkpoint of this model", problems)
    if on_meta := [name for name, tensor in tensors.items() if tensor.is_meta]:
        raise ValueError(f"on the meta device: {', '.join(on_meta[:5])}; fsdp_tp.wrap(model, mesh) gives them memory")


def require_optimizer(path: Path, manifest: Manifest, model: nn.Module, optimizer: Optimizer) -> None:
    """Raises ValueError if it is of another kind, or of other parameters, which are listed."""
    groups, names = manifest.values["groups"], own_names(model, optimizer)
    stored, here = {name for group in groups for name in group["params"]}, set(names.values())
    what = f"{path} has the state of another optimizer"
    _require_none(what, {"missing": sorted(here - stored), "unexpected": sorted(stored - here)})
    settings = {key for group in groups for key in group}
    kinds = manifest.values["optimizer"], type(optimizer).__name__
    if kinds[0] != kinds[1] and (lacking := sorted(settings_of(optimizer.defaults).keys() - settings)):
        raise ValueError(f"{what}: it was {kinds[0]}, without {', '.join(lacking)}, and here is {kinds[1]}")
    for index, saved in enumerate(saved_groups(names, optimizer, groups)):
        if any(settings_of(each) != settings_of(saved[0]) for each in saved):
            listed = "; ".join(", ".join(each["params"]) for each in saved)
            raise ValueError(f"{what}: group {index} here has parameters of groups there that differ: {listed}")


def _require_none(what: str, problems: Mapping[str, list[str]]) -> None:
    if sentences := [f"{problem}: {', '.join(names)}" for problem, names in problems.items() if names]:
        raise ValueError(f"{what}; {'; '.join(sentences)}")
