"""``verify`` of :func:`fsdp_tp.parallelize`: one tiny batch through the original and the parallel model.

Every rank runs the original by itself. Outputs of modules are compared in the order in which
the forward returns them, then the gradients of parameters in the order of the backward.

A gap is an error on all ranks of the tensor axis. But where the parallel forward fails on one rank alone, its
peers are in a collective already: they wait for it until the collective's timeout.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_tp.comm.functional import all_reduce
from fsdp_tp.layers.canonical import arranged_parameters, own_part_of
from fsdp_tp.locate import Rows, first_floating, locate
from fsdp_tp.mesh import ParallelMesh
from fsdp_tp.paths import parent_of

Verify = bool | Sequence[Any] | Mapping[str, Any]

BOUNDS = {torch.float64: 1e-8, torch.float32: 1e-4, torch.float16: 0.05, torch.bfloat16: 0.1}
"""Largest gap of a tensor, relative to its largest element, that counts as rounding.

A sum of 10^4 terms in another order differs by about 100 machine epsilons, 1e-5 in fp32, and layers
add up; a missing or doubled part of a sum is a gap of the size of the sum. fp64 models often cast
norms and rotary embeddings to fp32, which agree to 1e-9. In sixteen bits only coarse errors show."""

_ROWS = Rows(0, 1, 1)
_NOTHING = 2**30


@dataclass
class _Run:
    """What a model did with the batch."""

    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor | None]


class Verification:
    """Made before the model is split: runs a copy of it, whose outputs and gradients are kept.

    Raises:
        ValueError: no batch can be made, the original fails on it, or the model is on the meta device.
    """

    def __init__(
        self, model: nn.Module, mesh: ParallelMesh, verify: Verify, styles: Mapping[str, str], *, cut: bool
    ) -> None:
        if any(parameter.is_meta for parameter in model.parameters()):
            raise ValueError(
                "verify needs weights, but the model is on the meta device: verify a small model of the same classes "
                "with real weights instead"
            )
        self._mesh, self._styles, self._cut = mesh, styles, cut
        self._home = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self._device = mesh.device if self._home.type != mesh.device.type else self._home
        self._args, self._kwargs = torch.utils._pytree.tree_map(
            lambda leaf: leaf.to(self._device) if isinstance(leaf, Tensor) else leaf,
            _batch(model, verify, mesh.tensor_size, cut=cut),
        )
        self._weights: Tensor | None = None
        self._dtypes = [parameter.dtype for parameter in model.parameters()]
        try:
            self._expected = self._run(copy.deepcopy(model).to(self._device))
        except Exception as error:  # whatever the model's forward raises
            given = "True" if verify is True else "the given batch"
            passed = ", ".join([*(type(arg).__name__ for arg in self._args), *self._kwargs])
            raise ValueError(
                f"verify={given}: the original {type(model).__name__} fails on the batch ({passed}), before anything "
                f"is split: {error}. Pass as verify= a batch that its forward works with: a tuple of arguments or a "
                "dict of keyword arguments, the same on every rank"
            ) from error

    def __call__(self, model: nn.Module) -> None:
        """Compares ``model``, which is split by now.

        Raises:
            ValueError: it differs, on all ranks of the tensor axis; names the module and the gap.
        """
        try:
            model.to(self._device)
            try:
                actual = self._run(model)
            except Exception as error:  # whatever the model's forward raises with parts of its weights
                raise ValueError(
                    f"verify: the parallel model fails where the original works, so the plan does not suit it: {error}"
                ) from error
            self._judge(model, self._expected, actual)
        finally:
            model.to(self._home)
            del self._expected

    def _run(self, model: nn.Module) -> _Run:
        def weigh(output: Tensor) -> Tensor:
            """Of the original: random, so that no part of a gradient cancels. Then this rank's part of the same."""
            if self._weights is None:
                generator = torch.Generator().manual_seed(0)
                self._weights = torch.randn(output.shape, generator=generator).to(output)
            part = self._part(self._weights, output)
            return (output * (self._weights if part is None else part)).sum()

        return _run(model, self._args, self._kwargs, weigh)

    def _judge(self, model: nn.Module, expected: _Run, actual: _Run) -> None:
        dtypes = [*self._dtypes, *(output.dtype for output in expected.outputs.values())]
        bound = max((BOUNDS[dtype] for dtype in dtypes if dtype in BOUNDS), default=BOUNDS[torch.float32])
        gaps = self._output_gaps(expected, actual, bound)
        self._raise_together(list(expected.outputs), gaps, bound, self._output_sentence)
        gradients = dict(reversed(expected.gradients.items()))
        gaps = self._gradient_gaps(model, gradients, actual.gradients, bound)
        self._raise_together(list(gradients), gaps, bound, self._gradient_sentence)

    def _output_gaps(self, expected: _Run, actual: _Run, bound: float) -> dict[int, float]:
        """Those over the bound, by number of the event."""
        gaps: dict[int, float] = {}
        pending: dict[int, float] = {}
        for number, (event, whole) in enumerate(expected.outputs.items()):
            local = actual.outputs.get(event)
            part = None if local is None else self._part(whole, local)
            if local is None or part is None:
                continue  # of a shape that does not tell where it lies
            gap = _gap(local, part, whole)
            if _lies_in_order(local, whole, self._cut):
                gaps |= pending if not gap <= bound else {}
                gaps |= {number: gap} if not gap <= bound else {}
                pending = {}
            elif not gap <= bound:
                pending[number] = gap  # features may be split in another order: what is made of them tells
        return gaps

    def _gradient_gaps(
        self, model: nn.Module, expected: Mapping[str, Tensor | None], actual: Mapping[str, Tensor | None], bound: float
    ) -> dict[int, float]:
        parameters, arranged = dict(model.named_parameters()), arranged_parameters(model)
        largest = max((float(whole.abs().max()) for whole in expected.values() if whole is not None), default=0.0)
        gaps = {}
        for number, (name, whole) in enumerate(expected.items()):
            if whole is None or name not in parameters:
                continue
            gradient = actual[name]
            part = own_part_of(whole, parameters[name], arranged.get(name))
            local = torch.zeros_like(part) if gradient is None else gradient
            # A gradient that is zero but for rounding (a key bias) is as uncertain as the others: in fp32 to 1e-6.
            gap = _gap(local, part, whole, floor=largest / 100)
            if not gap <= bound:
                gaps[number] = gap
        return gaps

    def _raise_together(
        self, events: list[str], gaps: dict[int, float], bound: float, sentence: Callable[[str], str]
    ) -> None:
        """The same error on all ranks of the tensor axis: none goes on to wait for others."""
        group, device = self._mesh.tensor.get_group(), self._mesh.device
        first = torch.tensor([min(gaps, default=_NOTHING)], device=device)
        number = int(all_reduce(first, group, "min"))
        if number == _NOTHING:
            return
        gap = torch.tensor([gaps.get(number, 0.0)], dtype=torch.float64, device=device).nan_to_num(nan=torch.inf)
        gap = all_reduce(gap, group, "max")
        raise ValueError(
            f"verify: {sentence(events[number])}: relative gap {float(gap):.1e}; rounding explains {bound:.0e} at most"
        )

    def _output_sentence(self, event: str) -> str:
        path = event.partition("#")[0]
        style = self._styles.get(path)
        return (
            f"the first module whose output differs from the original's is {path or 'the model itself'}"
            + (f" (style {style!r})" if style else "")
            + "; the plan does not suit it or a module before it"
        )

    def _gradient_sentence(self, name: str) -> str:
        style = self._styles.get(name) or self._styles.get(parent_of(name))
        return (
            f"all outputs agree, but the gradient of {name}"
            + (f" (style {style!r})" if style else "")
            + " does not, as the first one in the backward: parts of its sum are missing or counted twice, here or at "
            "a shared_input"
        )

    def _part(self, whole: Tensor, local: Tensor) -> Tensor | None:
        place = locate(local.shape, whole.shape, _ROWS, 0, self._mesh.tensor_rank, self._mesh.tensor_size)
        if place is None:
            return None
        part = whole
        for dim, (start, length) in enumerate(zip(place.starts, local.shape, strict=True)):
            part = part.narrow(dim, start, length)
        return part


def _batch(model: Any, verify: Verify, size: int, *, cut: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(verify, Mapping):
        return (), dict(verify)
    if isinstance(verify, Sequence) and not isinstance(verify, str):
        return tuple(verify), {}
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", None)
    if verify is not True or not isinstance(vocabulary, int):
        raise ValueError(
            f"verify={verify!r} is not enough for {type(model).__name__}: only a Hugging Face model with a vocab_size "
            "in its config gets a batch by itself. Pass one as verify=: a tuple of arguments or a dict of keyword "
            "arguments of its forward, the same on every rank"
        )
    generator = torch.Generator().manual_seed(0)
    length = 2 * size if cut else 2 * size + 1  # odd, unless sequences are split: that of a batch may be so too
    names = ["input_ids", *(["decoder_input_ids"] if getattr(model.config, "is_encoder_decoder", False) else [])]
    ids = {name: torch.randint(vocabulary, (2, length), generator=generator) for name in names}
    return (), {**ids, "use_cache": False}


def _run(model: nn.Module, args: Any, kwargs: Any, weigh: Callable[[Tensor], Tensor]) -> _Run:
    outputs: dict[str, Tensor] = {}
    calls: dict[str, int] = {}
    handles = [module.register_forward_hook(_note(path, outputs, calls)) for path, module in model.named_modules()]
    try:
        with _untouched(model), torch.enable_grad():
            output = first_floating(model(*args, **kwargs))
            if output is None:
                raise ValueError("the model returns no floating-point tensor")
            if output.requires_grad:
                weigh(output).backward()
            gradients = {name: _local(parameter.grad) for name, parameter in model.named_parameters()}
    finally:
        for handle in handles:
            handle.remove()
    return _Run(outputs, gradients)


@contextlib.contextmanager
def _untouched(model: nn.Module) -> Generator[None, None, None]:
    """In eval mode; afterwards modes, buffers, gradients and random numbers are as they were."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
    try:
        for parameter, _ in gradients:
            parameter.grad = None
        model.eval()
        with torch.random.fork_rng(list(devices)):
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        for parameter, gradient in gradients:
            parameter.grad = gradient


def _note(path: str, outputs: dict[str, Tensor], calls: dict[str, int]) -> Any:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        call = calls[path] = calls.get(path, -1) + 1
        tensor = first_floating(output)
        if tensor is not None and not isinstance(tensor, DTensor):
            outputs[f"{path}#{call}" if call else path] = tensor.detach().clone()

    return hook


def _local(gradient: Tensor | None) -> Tensor | None:
    return gradient._local_tensor if isinstance(gradient, DTensor) else gradient


def _lies_in_order(local: Tensor, whole: Tensor, cut: bool) -> bool:
    """Whether it is whole, or a slice of the sequence."""
    if local.shape == whole.shape:
        return True
    return cut and local.ndim <= 3 and local.shape[-1] == whole.shape[-1]


def _gap(local: Tensor, part: Tensor, whole: Tensor, *, floor: float = 0.0) -> float:
    """The largest difference, relative to the largest element of the whole; nan where only one is finite."""
    same = (local == part) | (local.isnan() & part.isnan())
    gap = torch.where(same, 0.0, (local.double() - part.double()).abs()).max()
    finite = whole.abs().nan_to_num(nan=0.0, posinf=0.0)
    return float(gap) / max(float(finite.max()), floor, torch.finfo(torch.float64).tiny)
