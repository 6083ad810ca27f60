"""What a piece of code allocates."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class AllocationTracker(TorchDispatchMode):
    """While entered, follows the storages that operations return, not those they got.

    What an operation allocates and frees inside itself is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        """The most bytes that were alive at once."""
        self.largest = 0
        """The bytes of the largest storage."""
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for storage in _storages((args, kwargs)):
            if storage._cdata not in self._known:
                self._known[storage._cdata] = (StorageWeakRef(storage), 0)
        result = func(*args, **(kwargs or {}))
        self._known = {key: known for key, known in self._known.items() if not known[0].expired()}
        for storage in _storages(result):
            if storage._cdata not in self._known:
                self._known[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
                self.largest = max(self.largest, storage.nbytes())
        self.peak = max(self.peak, sum(size for _, size in self._known.values()))
        return result


def _storages(value: Any) -> list[Any]:
    return [leaf.untyped_storage() for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
