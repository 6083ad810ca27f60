"""What a comparison found: for the terminal and as JSON."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Column, Table
from rich.text import Text

from fsdp_tp.parity.files import write_whole
from fsdp_tp.parity.judge import Comparison, Verdict

LEVELS = {
    0: "types, without running",
    1: "fp64: the same mathematics",
    2: "fp32",
    3: "bf16 mixed precision",
    4: "the same layout twice, bit for bit",
}


@dataclass
class Result:
    """What was found of one layout at one level."""

    layout: str
    level: int
    verdict: Verdict | None = None
    """None if the run did not finish (``error`` then says why) or was not judged (``sentence`` does)."""
    first_bad_step: int | None = None
    first_bad_module: str | None = None
    sentence: str = ""
    """Why the verdict is what it is, if it is not ``equal``."""
    comparison: Comparison | None = None
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    error: str | None = None
    misfit: bool = False
    """The error is a setting that does not fit this layout."""

    @property
    def max_relative_loss_gap(self) -> float | None:
        return self.comparison.max_relative_loss_gap if self.comparison else None

    @property
    def max_relative_gradient_gap(self) -> float | None:
        return self.comparison.max_relative_gradient_gap if self.comparison else None

    @property
    def noise(self) -> float | None:
        """Largest relative gap of the loss that a perturbation by one machine epsilon makes."""
        return self.comparison.noise if self.comparison else None

    @property
    def control(self) -> float | None:
        """The same of a run that sums one layer's features in another order."""
        return self.comparison.control if self.comparison else None


@dataclass
class LevelReport:
    """All layouts at one level, beside their reference."""

    level: int
    reference: str
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    noise: list[float] = field(default_factory=list)
    """Relative gap of the loss, by step, that a perturbation of one machine epsilon makes."""
    control: list[float] | None = None
    """The same for a run that sums one layer's features in another order."""
    notes: list[str] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)


@dataclass
class Report:
    """Everything that was compared, level by level, and the verdict on it."""

    levels: list[LevelReport] = field(default_factory=list)
    complete: bool = True
    """False while layouts are still to come."""

    @property
    def results(self) -> list[Result]:
        return [result for level in self.levels for result in level.results]

    @property
    def verdict(self) -> Verdict | None:
        """The worst of all; None if none differs but one did not finish, or if nothing was judged."""
        found = {result.verdict for result in self.results}
        if "different" in found:
            return "different"
        if self.errors or not self.complete:
            return None
        return next((verdict for verdict in ("within_noise", "equal") if verdict in found), None)

    @property
    def errors(self) -> list[str]:
        """Of layouts that did not finish."""
        return [f"{result.layout}: {result.error}" for result in self.results if result.error]

    @property
    def exit_code(self) -> int:
        """0; or 1 if any layout differs; else 3 if one did not finish, or 2 if it could not because it does not fit."""
        if self.verdict == "different":
            return 1
        failed = [result for result in self.results if result.error]
        return (2 if all(result.misfit for result in failed) else 3) if failed else 0

    def sentence(self) -> str:
        """What differs, or that nothing does."""
        bad = [result for result in self.results if result.verdict == "different"]
        lines = [f"{each.layout} (level {each.level}) differs at {each.sentence}" for each in bad]
        lines += [f"did not run to the end: {error}" for error in self.errors]
        judged = sum(result.verdict is not None for result in self.results)
        verdict = "nothing to compare" if self.verdict is None else self.verdict.replace("_", " ")
        return "\n".join(lines) or f"{judged} comparison{'s' * (judged != 1)}: {verdict}"


def to_json(report: Report) -> dict[str, Any]:
    """As plain JSON values; a number that is not finite is null."""
    return {
        "verdict": report.verdict,
        "complete": report.complete,
        "references": [
            {"level": level.level, "reference": level.reference, "steps": len(level.losses)} for level in report.levels
        ],
        "layouts": [_result_to_json(result) for result in report.results],
    }


def _result_to_json(result: Result) -> dict[str, Any]:
    found = result.comparison
    return {
        "layout": result.layout,
        "level": result.level,
        "verdict": result.verdict,
        "max_relative_loss_gap": _finite(result.max_relative_loss_gap),
        "max_relative_gradient_gap": _finite(result.max_relative_gradient_gap),
        "first_relative_gradient_gap": _finite(found.first_gradient_gap if found else None),
        "noise": _finite(result.noise),
        "control": _finite(result.control),
        "first_bad_step": result.first_bad_step,
        "first_bad_module": result.first_bad_module,
        "not_compared": found.missing + found.unjudged if found else [],
        "sentence": result.sentence,
        "error": result.error,
    }


def write_json(report: Report, path: Path) -> None:
    write_whole(path, [json.dumps(to_json(report), indent=2), "\n"])


def table(report: Report) -> Table:
    """One row for each layout and level; what is to be said of them is too long for a table."""
    made = Table("level", Column("layout", overflow="fold"), "verdict", "loss gap", "noise", "control", "gradient gap")
    for result in report.results:
        color = "green" if result.verdict in ("equal", "within_noise") else "red"
        if result.verdict is None and not result.error:
            color = ""
        made.add_row(
            str(result.level),
            Text(result.layout),
            Text(verdict_of(result), style=color),
            number(result.max_relative_loss_gap),
            number(result.noise),
            number(result.control),
            number(result.max_relative_gradient_gap),
        )
    return made


def remarks(report: Report) -> list[str]:
    """A line for each result about which there is something to say."""
    lines = []
    for result in report.results:
        said = result.error.splitlines()[-1] if result.error else result.sentence
        if said:
            lines.append(f"{result.layout} (level {result.level}): {verdict_of(result)}: {said}")
    return lines


def verdict_of(result: Result) -> str:
    """In words."""
    if result.verdict is not None:
        return result.verdict.replace("_", " ")
    return ("does not fit" if result.misfit else "did not finish") if result.error else "not checked"


def number(value: float | None) -> str:
    """A gap for humans."""
    if value is None or math.isnan(value):
        return ""
    return "0" if value == 0 else f"{value:.1e}"


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
