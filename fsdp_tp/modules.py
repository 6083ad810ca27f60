"""Questions that several parts ask about a model: its blocks, kinds of modules, who already holds its parameters."""

from __future__ import annotations

import gc

import torch
from torch import nn

from fsdp_tp.paths import join_path

_LISTS = (nn.ModuleList, nn.ModuleDict)  # have no forward, so cannot be blocks themselves
_CONTAINERS = (*_LISTS, nn.Sequential)


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The repeated layers of ``model`` by path: elements of its outermost ``nn.ModuleList``,
    ``nn.ModuleDict`` or ``nn.Sequential`` containers that hold parameters and have children of their own."""
    blocks: dict[str, nn.Module] = {}

    def visit(module: nn.Module, path: str) -> None:
        for name, child in module.named_children():
            child_path = join_path(path, name)
            in_container = isinstance(module, _CONTAINERS)
            is_block = in_container and any(True for _ in child.children()) and not isinstance(child, _LISTS)
            if is_block and any(True for _ in child.parameters()):
                blocks[child_path] = child
            else:
                visit(child, child_path)

    visit(model, "")
    return blocks


def is_norm(module: nn.Module) -> bool:
    """Whether the name of its class says that it norms each token by itself."""
    name = type(module).__name__.lower()
    return "norm" in name and not any(kind in name for kind in ("batch", "group", "instance"))


def is_conv1d(module: nn.Module) -> bool:
    """Whether it is transformers' ``Conv1D``, a linear layer that stores its weight transposed; imports nothing."""
    return (type(module).__module__, type(module).__name__) == ("transformers.pytorch_utils", "Conv1D")


def require_no_optimizer(model: nn.Module, step: str) -> None:
    """Raises ValueError if an optimizer already holds parameters that ``step`` is about to replace.

    Such an optimizer would go on updating tensors that the model no longer uses.
    """
    parameters = {id(parameter) for parameter in model.parameters()}
    for candidate in gc.get_objects():
        if not issubclass(type(candidate), torch.optim.Optimizer):
            continue
        for group in getattr(candidate, "param_groups", []):
            if any(id(parameter) in parameters for parameter in group["params"]):
                raise ValueError(
                    f"the optimizer ({type(candidate).__name__}) was built before {step}, which replaces the "
                    "parameters: it would train nothing. Build the optimizer afterwards"
                )
