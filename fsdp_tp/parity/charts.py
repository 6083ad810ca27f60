"""The curves of one level, as charts for a page."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.ticker import FixedFormatter, FixedLocator, MaxNLocator, NullLocator

from fsdp_tp.parity.judge import BOUNDS, NOISE_FACTOR, Comparison
from fsdp_tp.parity.report import LevelReport, Result, number
from fsdp_tp.parity.svg import INK, inline_svg

# Of Okabe and Ito: told apart with every kind of colour blindness, and seen on white as on a dark page.
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
# From solid to sparse, drawn in this order: of curves that coincide, each shows in the next one's gaps.
_DASHES: tuple[tuple[float, ...], ...] = ((), (9, 3), (6, 2, 1.5, 2), (5, 5), (2, 3), (1.5, 7))
_FEW_STEPS = 25
_MOST_TICKS = 7
_LARGEST_POWER = 250.0  # so that the powers beyond can be computed with


class Line(NamedTuple):
    """How a curve is drawn, here and in the legend."""

    label: str
    color: str = INK
    dash: tuple[float, ...] = ()
    width: float = 1.6
    opacity: float = 1.0

    @property
    def css_color(self) -> str:
        return "currentColor" if self.color == INK else self.color


REFERENCE = Line("reference", width=5, opacity=0.25)
NOISE = Line("noise: the reference again with all weights perturbed", width=10, opacity=0.14)
CONTROL = Line("control: the reference again with one sum in another order", dash=(6, 2, 1, 2), width=1, opacity=0.7)
LIMIT = Line("limit: above it the loss counts as different", dash=(1, 1.5), width=1.2)


@dataclass(frozen=True)
class Charts:
    """Of one level."""

    legend: list[Line]
    panels: list[tuple[str, str]]
    """Title and SVG."""


def charts(level: LevelReport, name: str) -> Charts:
    """The curves of the layouts that were compared. ``name`` is unique in the page."""
    runs = list(_compared(level))
    background = list(_background(level))
    whose = "of the reference and " + (", ".join(result.layout for result, _, _ in runs) or "no layout")
    largest = "; ".join(f"{run.layout} up to {number(found.max_relative_loss_gap)}" for run, found, _ in runs)

    def curves(of: Callable[[LevelReport | Result], list[float]]) -> Callable[[Axes], None]:
        def draw(axes: Axes) -> None:
            _draw(axes, REFERENCE, of(level), order=1)
            for result, _, line in runs:
                _draw(axes, line, of(result)[: len(level.losses)])  # a recorded reference may be shorter
            _count_steps(axes, len(level.losses))

        return draw

    def gaps(axes: Axes) -> None:
        scale = _GapScale([found.loss_gaps for _, found, _ in runs] + [values for _, values in background])
        for line, values in background:
            _draw_background(axes, line, scale.places(values), scale.bottom)
        for _, found, line in runs:
            _draw(axes, line, scale.places(found.loss_gaps))
        _count_steps(axes, len(level.losses))
        scale.label(axes)

    panels = [
        ("Loss", f"Loss by step {whose}", curves(lambda run: run.losses)),
        ("Loss: relative gap to the reference, log scale", f"Relative gap of the loss by step: {largest}", gaps),
        ("Gradient norm, before clipping", f"Gradient norm by step {whose}", curves(lambda run: run.norms)),
    ]
    if not any(map(math.isfinite, level.norms)):  # a recorded curve may hold losses alone
        panels.pop()
    return Charts(
        [REFERENCE, *(line for _, _, line in runs), *(line for line, _ in background)],
        [(title, inline_svg(draw, f"{name}-{index}", label)) for index, (title, label, draw) in enumerate(panels)],
    )


class _GapScale:
    """A log scale that has a place for 0, below all other gaps, and one for infinity, above."""

    def __init__(self, series: Sequence[Sequence[float]]) -> None:
        values = [value for each in series for value in each]
        sizes = [math.log10(value) for value in values if 0 < value < math.inf] or [-16.0]
        sizes = [min(max(size, -_LARGEST_POWER), _LARGEST_POWER) for size in sizes]
        self._low, self._high = math.floor(min(sizes)), math.ceil(max(sizes))
        self._high = max(self._high, self._low + 1)
        self._zero = 10.0 ** (self._low - 1)
        self._infinity = 10.0 ** (self._high + 1)
        self._has_zero, self._has_infinity = 0.0 in values, any(map(math.isinf, values))
        self.bottom = 10.0 ** (self._low - 1.4 if self._has_zero else self._low)
        self._top = 10.0 ** (self._high + (1.4 if self._has_infinity else 0.1))

    def places(self, gaps: Sequence[float]) -> list[float]:
        return [self._zero if gap == 0 else min(gap, self._infinity) for gap in gaps]

    def label(self, axes: Axes) -> None:
        decades = range(self._low, self._high + 1, math.ceil((self._high - self._low + 1) / _MOST_TICKS))
        ticks = {10.0**decade: f"1e{decade}" for decade in decades}
        if self._has_zero:
            ticks[self._zero] = "0"
        if self._has_infinity:
            ticks[self._infinity] = "inf"
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(FixedLocator(list(ticks)))
        axes.yaxis.set_major_formatter(FixedFormatter(list(ticks.values())))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.set_ylim(self.bottom, self._top)


def _compared(level: LevelReport) -> Iterator[tuple[Result, Comparison, Line]]:
    for index, result in enumerate(level.results):
        if result.comparison is not None:
            turn, color = divmod(index, len(_COLORS))
            dash = _DASHES[(color + turn) % len(_DASHES)]
            width = 2.4 if result.verdict == "different" else 1.6
            yield result, result.comparison, Line(result.layout, _COLORS[color], dash, width)


def _background(level: LevelReport) -> Iterator[tuple[Line, list[float]]]:
    """What the gaps are held against, where there is something: noise, control, limit."""
    if any(level.noise):
        yield NOISE, level.noise
    if level.control:
        yield CONTROL, level.control
    limits = [max(BOUNDS[level.level].curve, NOISE_FACTOR * noise) for noise in level.noise]
    if any(limits):
        yield LIMIT, limits


def _draw(axes: Axes, line: Line, values: Sequence[float], *, order: float | None = None) -> None:
    axes.plot(
        range(1, len(values) + 1),
        values,
        color=line.color,
        linestyle=(0, line.dash),
        linewidth=line.width,
        alpha=line.opacity,
        marker="o" if len(values) <= (1 if line is REFERENCE else _FEW_STEPS) else "",
        markersize=line.width + 2,
        markeredgewidth=0,
        zorder=3 + _DASHES.index(line.dash) / 10 if order is None else order,
    )


def _draw_background(axes: Axes, line: Line, values: Sequence[float], bottom: float) -> None:
    """From edge to edge, so that it is seen where there is only one step."""
    steps = [0.0, *range(1, len(values) + 1), len(values) + 1.0]
    values = [values[0], *values, values[-1]]
    if line is NOISE:
        axes.fill_between(steps, bottom, values, color=INK, alpha=line.opacity, linewidth=0)
    else:
        axes.plot(steps, values, color=INK, alpha=line.opacity, linewidth=line.width, linestyle=(0, line.dash))


def _count_steps(axes: Axes, steps: int) -> None:
    margin = max(0.5, steps / 60)
    axes.set_xlim(1 - margin, steps + margin)
    round_ones = MaxNLocator(8, steps=[1, 2, 5, 10], integer=True).tick_values(1, steps)
    axes.xaxis.set_major_locator(FixedLocator([1, *(step for step in round_ones if 1 < step <= steps)]))
    axes.set_xlabel("optimizer step")
