"""What a comparison found, as one page that needs no network: a verdict, curves and tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import Environment, StrictUndefined

from fsdp_tp.parity.files import write_whole
from fsdp_tp.parity.judge import BOUNDS, MEGATRON_C, MEGATRON_K, NOISE_FACTOR
from fsdp_tp.parity.report import LEVELS, LevelReport, Report, Result, number

if TYPE_CHECKING:
    from fsdp_tp.parity.charts import Charts

_TEMPLATE = "report.html.jinja"
_WORDS = {
    "equal": "equal",
    "within_noise": "within noise",
    "different": "different",
    "unfinished": "did not finish",
    "misfit": "does not fit",
    "unchecked": "not checked",
    "nothing": "nothing compared",
}


def write_html(report: Report, path: Path) -> None:
    """Writes the page; without curves where matplotlib is not installed."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(number=number, kind=_kind, last_line=_last_line)
    template = environment.from_string(files(__package__).joinpath(_TEMPLATE).read_text(encoding="utf-8"))
    has_matplotlib = find_spec("matplotlib") is not None
    page = template.render(
        report=report,
        kind=_overall(report),
        lines=_sentence(report).splitlines(),
        counts=_counts(report),
        levels=[
            (level, _charts(level, f"chart{index}") if has_matplotlib and level.losses else None, list(_remarks(level)))
            for index, level in enumerate(report.levels)
        ],
        has_matplotlib=has_matplotlib,
        words=_WORDS,
        level_names=LEVELS,
        bounds=BOUNDS,
        factor=NOISE_FACTOR,
        megatron_k=MEGATRON_K,
        megatron_c=MEGATRON_C,
    )
    write_whole(path, [page])


def _kind(result: Result) -> str:
    return result.verdict or (("misfit" if result.misfit else "unfinished") if result.error else "unchecked")


def _overall(report: Report) -> str:
    """As the exit status: a difference weighs more than a run that failed, and that more than what is well."""
    if report.verdict == "different":
        return "different"
    if report.errors or not report.complete:
        return "unfinished"
    return report.verdict or "nothing"


def _sentence(report: Report) -> str:
    """The report's, with the last line of an error instead of its traceback, which stands further down."""
    if not report.results:
        return "Only the reference ran." if report.levels else "Nothing ran."
    text = report.sentence()
    for error in sorted((result.error for result in report.results if result.error), key=len, reverse=True):
        text = text.replace(error, _last_line(error))
    return text


def _last_line(error: str) -> str:
    return error.strip().rpartition("\n")[2]


def _counts(report: Report) -> str:
    """How many there are of each verdict, where there are several."""
    counts = Counter(map(_kind, report.results))
    if len(counts) < 2:
        return ""
    return ", ".join(f"{counts[kind]} {words}" for kind, words in _WORDS.items() if counts[kind])


def _charts(level: LevelReport, name: str) -> Charts:
    from fsdp_tp.parity.charts import charts  # needs matplotlib

    return charts(level, name)


def _remarks(level: LevelReport) -> Iterator[str]:
    """What a reader of the curves must know."""
    for result in level.results:
        if level.losses and result.comparison is None:
            yield f"{result.layout} is not in the charts: it did not finish"
        elif result.comparison and result.comparison.steps < result.comparison.of_steps:
            steps = f"{result.comparison.steps} of {result.comparison.of_steps}"
            yield f"{result.layout} was compared over {steps} steps of the reference"
    if any(result.comparison and 0.0 in result.comparison.loss_gaps for result in level.results):
        yield "A gap of exactly 0 has no place on a log scale: it is drawn at the bottom, on the line marked 0"
    yield from level.notes
