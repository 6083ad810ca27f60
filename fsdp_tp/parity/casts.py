"""Lifts casts to float32 while a model runs in float64.

Hugging Face's norms and rotary embeddings compute in float32 whatever their input is. In fp64
that would round at 6e-8 in the middle of a comparison to 1e-10.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_CAST = torch.ops.aten._to_copy.default


class LiftedCasts(TorchDispatchMode):
    """While entered, an operation on float64 or integers that is asked for float32 gives float64.

    Args:
        model: whose modules are named in ``unlifted``.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._names = {module: path for path, module in model.named_modules()}
        self.unlifted: dict[str, str] = {}
        """Modules in which something in float64 still became float32, with the operation."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled():
            return func(*args, **kwargs)  # autograd's own casts; a recomputed forward has gradients enabled
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        wide = any(tensor.dtype == torch.float64 for tensor in tensors)
        integer = func is _CAST and not tensors[0].dtype.is_floating_point
        if kwargs.get("dtype") == torch.float32 and (wide or integer):
            kwargs = {**kwargs, "dtype": torch.float64}
        result = func(*args, **kwargs)
        if wide and any(isinstance(leaf, Tensor) and leaf.dtype == torch.float32 for leaf in tree_leaves(result)):
            self.unlifted.setdefault(self._current_module(), str(func))
        return result

    def _current_module(self) -> str:
        frame = sys._getframe(2)
        while frame is not None:
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module) and owner in self._names:
                return self._names[owner]
            frame = frame.f_back  # type: ignore[assignment]
        return ""
