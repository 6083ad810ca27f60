"""What the losses on a split vocabulary share: the arithmetic of a chunk of tokens, and what crosses the axis."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_tp.comm.functional import all_reduce, chunk_of

# fp32 logits of a chunk: 4 MiB stay in a CPU's cache, 64 MiB outweigh an accelerator's launches.
CHUNK_ELEMENTS_CPU, CHUNK_ELEMENTS = 2**20, 2**24


@dataclass(frozen=True)
class SlicedCrossEntropy:
    """Cross entropy of all tokens, of which this rank sees one slice of the classes.

    Per-token numbers are fp64: few, they hold every class count exactly.
    """

    target: Tensor
    """``(tokens,)`` global ids."""
    weight: Tensor | None
    """``(V,)`` class weights."""
    ignore_index: int
    smoothing: float
    classes: int
    """V_r: the classes of this rank."""
    group: dist.ProcessGroup

    def chunks(self, chunk_size: int | None) -> list[slice]:
        elements = CHUNK_ELEMENTS_CPU if self.target.device.type == "cpu" else CHUNK_ELEMENTS
        size = chunk_size or max(1, elements // max(1, self.classes))
        # Without any token one empty chunk: its results have the right shapes.
        return [slice(start, start + size) for start in range(0, max(1, self.target.numel()), size)]

    def statistics(self, z: Tensor) -> Tensor:
        """``(3, chunk)``: max, sum of exp(z - max) and, with smoothing, of w (z - max) over this rank's classes."""
        if not self.classes:
            empty = torch.zeros(3, z.shape[0], dtype=torch.float64, device=z.device)
            empty[0] = -torch.inf
            return empty
        maximum = z.amax(-1).to(computed_in(z))
        z = z - _finite(maximum).unsqueeze(-1)
        # Without smoothing a masked class, z = -inf, must not enter.
        weighted = torch.zeros_like(maximum)
        if self.smoothing:
            weighted = (z if self.weight is None else z * self._own_weight(z.dtype)).sum(-1)
        return torch.stack([maximum, z.exp_().sum(-1), weighted]).double()

    def maximum(self, statistics: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens' maxima over all classes, and R. One all-reduce."""
        own = torch.cat([statistics[0], statistics.new_full((1,), self.classes)])
        maximum = all_reduce(own, self.group, "max")
        return maximum[:-1], maximum[-1]

    def own_targets(self, size: Tensor | int) -> tuple[Tensor, Tensor]:
        """Each target's place in this rank's slice, and whether it is there (if not, the place is 0)."""
        first = size * self.group.rank()
        index = self.target - (first.long() if isinstance(first, Tensor) else first)
        here = (self.target != self.ignore_index) & (index >= 0) & (index < self.classes)
        return index.masked_fill(~here, 0), here

    def losses(
        self, statistics: Tensor, maximum: Tensor, size: Tensor, z_target: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The tokens' losses, sums of exp(z - maximum), and V. One all-reduce.

        ``z_target`` is zero for targets of other ranks.
        """
        own_maximum, exponentials, weighted = statistics
        terms = [exponentials * (own_maximum - maximum).exp(), z_target]
        if self.smoothing:
            own = self.classes if self.weight is None else self._own_weight(maximum.dtype).sum()
            terms.append(weighted + own * (_finite(own_maximum) - maximum))
        # Not V_r, but how many classes R exceeds it by: in a fake world, whose collectives do nothing, V is right too.
        sums = all_reduce(torch.cat([*terms, (size - self.classes).view(1)]), self.group)
        vocabulary = size * self.group.size() - sums[-1]
        sums = sums[:-1].view(len(terms), maximum.numel())
        self._check(vocabulary, size)
        logarithm = sums[0].log()
        # The difference of the two largest numbers first: it is exact or nearly so.
        losses = (1 - self.smoothing) * self._target_weight() * (logarithm + (maximum - sums[1]))
        if self.smoothing:
            total = vocabulary if self.weight is None else self.weight.double().sum()
            losses = losses + self.smoothing / vocabulary * (total * logarithm - sums[2])
        return losses.masked_fill(self.target == self.ignore_index, 0), sums[0], vocabulary

    def gradient_terms(
        self,
        grad_losses: Tensor,
        maximum: Tensor,
        denominator: Tensor,
        size: Tensor | int,
        vocabulary: Tensor,
        *,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        """``(4, tokens)``: maximum, factors of exp(z - maximum), -onehot(y), -w in the gradient; and y's places."""
        index, here = self.own_targets(size)
        grad = grad_losses.double().masked_fill(self.target == self.ignore_index, 0)
        at_target = grad * (1 - self.smoothing) * self._target_weight()
        spread = grad * (self.smoothing / vocabulary)
        total = vocabulary if self.weight is None else self.weight.double().sum()
        softmax = (at_target + spread * total) / denominator
        return torch.stack([maximum, softmax, at_target * here, spread]).to(dtype), index

    def gradient(self, z: Tensor, chunk: slice, terms: Tensor, index: Tensor) -> Tensor:
        """``(chunk, V_r)``: of the logits z of one chunk, from what :meth:`gradient_terms` gives."""
        maximum, softmax, at_target, spread = terms[:, chunk].unsqueeze(-1)
        grad = (z - maximum).exp_().mul_(softmax)
        if not self.classes:
            return grad
        if self.smoothing and self.weight is None:
            grad.sub_(spread)
        elif self.smoothing:
            grad.addcmul_(spread, self._own_weight(grad.dtype), value=-1)
        return grad.scatter_add_(-1, index[chunk].unsqueeze(-1), -at_target)

    def _own_weight(self, dtype: torch.dtype) -> Tensor:
        assert self.weight is not None
        return self.weight[slice_of_classes(self.weight.shape[0], self.group)].to(dtype)

    def _target_weight(self) -> Tensor | float:
        if self.weight is None:
            return 1.0
        return self.weight[self.target.masked_fill(self.target == self.ignore_index, 0)].double()

    def _check(self, vocabulary: Tensor, size: Tensor) -> None:
        counts = self.target != self.ignore_index
        torch._assert_async(
            ((self.target >= 0) & (self.target < vocabulary) | ~counts).all(),
            "a target is neither ignore_index nor in [0, V), V the sum of the ranks' classes",
        )
        first = size * self.group.rank()
        torch._assert_async(
            torch.minimum((vocabulary - first).clamp(min=0), size) == self.classes,
            f"this rank has {self.classes} classes, but of V classes on t ranks each must hold ceil(V / t), "
            "only the last ones fewer",
        )


def slice_of_classes(vocabulary: int, group: dist.ProcessGroup) -> slice:
    """Which of ``vocabulary`` classes, or rows of a weight, belong to this rank."""
    start, length = chunk_of(vocabulary, group.size(), group.rank())
    return slice(start, start + length)


def computed_in(z: Tensor) -> torch.dtype:
    return torch.promote_types(z.dtype, torch.float32)


def _finite(maximum: Tensor) -> Tensor:
    """A slice may be all -inf, or have no class at all: nothing is subtracted then."""
    return maximum.masked_fill(maximum == -torch.inf, 0)


def check_arguments(
    x: Tensor, target: Tensor, reduction: str, label_smoothing: float, chunk_size: int | None, name: str
) -> None:
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction={reduction!r} must be 'mean', 'sum' or 'none'")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing={label_smoothing} must lie between 0 and 1")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size} must be a positive number of tokens, or None")
    if x.shape[:-1] != target.shape:
        raise ValueError(f"{name} of shape {tuple(x.shape)} do not match targets of shape {tuple(target.shape)}")


def check_class_weight(weight: Tensor | None, classes: int, group: dist.ProcessGroup) -> Tensor | None:
    """``weight`` as a constant, if its length fits the slice of ``classes`` that this rank has."""
    if weight is None:
        return None
    own = slice_of_classes(weight.shape[0], group) if weight.ndim == 1 else None
    if own is None or own.stop - own.start != classes:
        raise ValueError(
            f"weight of shape {tuple(weight.shape)} must have one entry for each class of the whole vocabulary, "
            f"of which rank {group.rank()} of {group.size()} has {classes}"
        )
    return weight.detach()


def reduce_losses(losses: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, reduction: str) -> Tensor:
    if reduction == "none":
        return losses
    total = losses.sum()
    if reduction == "sum":
        return total
    counts = target != ignore_index
    if weight is None:
        return total / counts.sum()
    return total / weight.to(losses.dtype)[target.masked_fill(~counts, 0)].masked_fill(~counts, 0).sum()
