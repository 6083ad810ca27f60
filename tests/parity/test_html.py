"""The page of a comparison: what it says, that it needs no network, and in a browser that its curves are seen.
If these fail, look in fsdp_tp/parity/html.py, charts.py and report.html.jinja."""

import json
import math
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from fsdp_tp.parity.html import write_html
from fsdp_tp.parity.judge import Comparison, ModuleRow
from fsdp_tp.parity.report import LevelReport, Report, Result

MODULES = ("model.embed", "model.layers.0.self_attn", "model.layers.1.self_attn", "model.layers.1.mlp", "model.<head>")
STEPS = 30
FIRST_BAD = 3
WITHIN, DIFFERENT, FAILED = "tensor=2", "tensor=2,shard=2<b>", "shard=4"
COLORS = {WITHIN: (0x00, 0x72, 0xB2), DIFFERENT: (0xD5, 0x5E, 0x00)}
VERDICT = {"different": (0xC0, 0x2A, 0x1D), "within_noise": (0x0F, 0x6F, 0x7D)}


def _result(layout, losses, gaps, verdict, **values):
    comparison = Comparison(
        verdict=verdict,
        loss_gaps=gaps,
        norm_gaps=gaps,
        max_relative_loss_gap=max(gaps),
        max_relative_gradient_gap=max(gaps),
        noise=1e-7,
        control=5e-8,
        first_bad=None,
        modules=[ModuleRow(path, 1.25e-7, 2e-7, 3e-7, 4e-7, 5e-7) for path in MODULES],
    )
    run = [loss * (1 + gap) for loss, gap in zip(losses, gaps, strict=True)]
    return Result(layout, 2, verdict, comparison=comparison, losses=run, norms=run, **values)


def _report():
    losses = [2 + 4 * math.exp(-step / 8) for step in range(STEPS)]
    bad = MODULES[2]
    results = [
        _result(
            WITHIN, losses, [0.0, *[2e-7] * (STEPS - 1)], "within_noise", sentence="differs by no more than rounding"
        ),
        _result(
            DIFFERENT,
            losses,
            [1e-7 if step < FIRST_BAD else 0.2 for step in range(1, STEPS + 1)],
            "different",
            first_bad_step=FIRST_BAD,
            first_bad_module=bad,
            sentence=f"step {FIRST_BAD}: the output of {bad} differs",
        ),
        Result(FAILED, 2, error="rank 1 of 4 (1 failed):\nTraceback: <frames>\nRuntimeError: out of memory"),
    ]
    results[1].comparison.modules[2].bad_step = FIRST_BAD
    noise, control = [1e-7] * STEPS, [5e-8] * STEPS
    return Report([LevelReport(2, "one process", losses, losses, noise, control, ["control: a <note>"], results)])


def _written(report, directory):
    path = directory / "new" / "page.html"
    write_html(report, path)
    assert [each.name for each in path.parent.iterdir()] == ["page.html"]
    return path.read_text()


def _without_charts(page):
    return re.sub("<svg.*?</svg>", "", page, flags=re.DOTALL)


def test_the_page_names_verdicts_the_first_bad_module_and_what_did_not_finish(tmp_path):
    page = _written(_report(), tmp_path)
    assert "<strong>different</strong>" in page
    assert "3 comparisons: 1 within noise, 1 different, 1 did not finish." in page
    assert f"did not run to the end: {FAILED}: RuntimeError: out of memory" in page
    assert f"{FAILED} is not in the charts" in page
    assert page.count("Traceback: &lt;frames&gt;") == 1
    rows = re.findall(r'<tr class="bad">.*?</tr>', page, flags=re.DOTALL)
    assert len(rows) == 1
    assert MODULES[2] in rows[0]
    assert f'<td class="number">{FIRST_BAD}</td>' in rows[0]
    assert [("open" in tag) for tag in re.findall(r"<details[^>]*>", page)] == [False, True, False]
    assert "1.2e-07" in page


def test_the_page_fetches_nothing(tmp_path):
    page = _written(_report(), tmp_path)
    assert page.count('<svg role="img" aria-label=') == 3
    for word in ("http:", "https:", "src=", "<script", "<link", "@import", "xmlns", "<?xml", "<!DOCTYPE svg"):
        assert word not in page, word
    assert set(re.findall(r"url\((.)", page)) <= {"#"}
    assert set(re.findall(r'href="(.)', page)) <= {"#"}


def test_identifiers_are_unique_and_everything_referred_to_is_there(tmp_path):
    report = _report()
    report.levels *= 2
    page = _written(report, tmp_path)
    names = re.findall(r'\bid="([^"]+)"', page)
    assert len(names) == len(set(names))
    referred = set(re.findall(r'(?:url\(|href="|labelledby=")#?([^")]+)', page))
    assert referred <= set(names)
    assert len(referred) > 10


def test_names_are_escaped(tmp_path):
    page = _written(_report(), tmp_path)
    for name in ("<b>", "<head>\n", "model.<head>", "<frames>", "<note>"):
        assert name not in page.partition("<body>")[2], name
    assert "model.&lt;head&gt;" in page


def test_the_same_report_is_the_same_page(tmp_path):
    assert _written(_report(), tmp_path / "a") == _written(_report(), tmp_path / "b")


def test_without_matplotlib_the_tables_are_written(tmp_path, monkeypatch):
    with_curves = _written(_report(), tmp_path / "a")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for name in ("charts", "svg"):
        monkeypatch.delitem(sys.modules, f"fsdp_tp.parity.{name}", raising=False)
    page = _written(_report(), tmp_path / "b")
    assert "<svg" not in page
    assert page.count("pip install matplotlib") == 1
    assert "pip install matplotlib" not in with_curves
    assert page.count("<table") == with_curves.count("<table") == 3


@pytest.mark.parametrize(
    "level",
    [
        LevelReport(0, "", results=[Result("tensor=2", 0, "different", sentence="mlp: is partial")]),
        LevelReport(2, "one process", [1.0], [math.nan]),
        LevelReport(3, "one process", [1.0], [1.0], [0.0], None, [], [_result("tensor=2", [1.0], [0.0], "equal")]),
        LevelReport(1, "one process", [1.0] * 2, [1.0] * 2, [math.inf] * 2, None, [], [
            _result("tensor=2", [math.nan, math.inf], [5e-324, 1e308], "different"),
        ]),
        LevelReport(4, "before", [1.0] * 3, [1.0] * 3, results=[
            _result(f"micro_batches={n}", [1.0] * 3, [0.0] * 3, "equal") for n in range(1, 9)
        ]),
    ],
    ids=["types", "only the reference", "one step", "not finite", "eight layouts"],
)  # fmt: skip
def test_any_report_can_be_written(level, tmp_path):
    page = _written(Report([level]), tmp_path)
    for result in level.results:
        assert result.layout in page
    assert page.count("<figure") == (0 if level.level == 0 else 2 if math.isnan(level.norms[0]) else 3)


def test_a_page_without_results_does_not_say_equal(tmp_path):
    page = _written(Report([LevelReport(2, "one process", [1.0], [1.0])]), tmp_path)
    assert "<strong>nothing compared</strong>" in page
    failed = Report([LevelReport(2, "one process", results=[Result("tensor=2", 2, error="out of memory")])])
    assert "<strong>did not finish</strong>" in _written(failed, tmp_path / "failed")


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
in_a_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium or google-chrome on PATH to look at pages with")

# Where the browser puts things, left in the page for --dump-dom.
PROBE = """<script>
const box = e => { const r = e.getBoundingClientRect(); return [r.left, r.top, r.right, r.bottom].map(Math.round); };
document.body.dataset.boxes = JSON.stringify({
  verdict: box(document.querySelector(".verdict")), charts: [...document.querySelectorAll(".chart > svg")].map(box),
  width: document.documentElement.scrollWidth, window: innerWidth,
  open: document.querySelectorAll("details[open]").length,
  loaded: performance.getEntriesByType("resource").length,
});
</script>"""


def _browse(directory, page, *arguments, width=1200):
    profile = directory / "profile"
    profile.mkdir()
    options = (
        "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking "
        "--disable-component-update --disable-sync --disable-quic --hide-scrollbars"
    )
    try:
        return subprocess.run(
            [
                BROWSER,
                *options.split(),
                "--host-resolver-rules=MAP * ~NOTFOUND",
                f"--user-data-dir={profile}",
                f"--window-size={width},2400",
                *arguments,
                page.as_uri(),
            ],
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        ).stdout
    finally:
        shutil.rmtree(profile, ignore_errors=True)


def _look(directory, report, *arguments, **options):
    """The page as it is seen, and where its parts are."""
    image = pytest.importorskip("PIL.Image")
    page, probed, picture = directory / "page.html", directory / "probed.html", directory / "page.png"
    write_html(report, page)
    probed.write_text(page.read_text().replace("</body>", PROBE + "</body>"))
    _browse(directory, page, f"--screenshot={picture}", *arguments, **options)
    dom = _browse(directory, probed, "--dump-dom", *arguments, **options)
    found = re.search(r'data-boxes="([^"]+)"', dom)
    boxes = json.loads(found[1].replace("&quot;", '"'))
    return np.asarray(image.open(picture).convert("RGB")).astype(int), SimpleNamespace(**boxes)


def _crop(pixels, box):
    left, top, right, bottom = box
    return pixels[top:bottom, left:right]


def _near(pixels, color, tolerance=40):
    return np.abs(pixels - np.array(color)).max(-1) <= tolerance


def _curve(chart, color):
    """The middle of a curve's pixels in each column where it is seen, as fractions of the chart from its top left."""
    seen = _near(chart, color)
    columns = np.flatnonzero(seen.any(0))
    rows = np.array([np.flatnonzero(seen[:, column]).mean() for column in columns])
    return columns / chart.shape[1], rows / chart.shape[0]


def _end(chart, layout):
    columns, rows = _curve(chart, COLORS[layout])
    return rows[columns > 0.9].mean()


@in_a_browser
def test_the_curves_are_seen_in_a_browser(tmp_path):
    pixels, boxes = _look(tmp_path, _report())
    assert boxes.loaded == 0
    assert boxes.open == 1
    assert boxes.width <= boxes.window == 1200

    banner = _crop(pixels, boxes.verdict)
    assert _near(banner, VERDICT["different"], 8).mean() > 0.7
    assert not _near(banner, VERDICT["within_noise"], 8).any()
    common = np.unique(pixels[:2000].reshape(-1, 3), axis=0, return_counts=True)[1].max()
    assert common < 0.8 * pixels[:2000, :, 0].size  # not blank

    assert len(boxes.charts) == 3
    loss, gap, norm = (_crop(pixels, box) for box in boxes.charts)
    for chart in (loss, gap, norm):
        assert min(chart.shape[:2]) > 200
        for layout, color in COLORS.items():
            columns, rows = _curve(chart, color)
            assert columns.min() < 0.2, layout
            assert columns.max() > 0.9, layout
            assert len(columns) > 0.4 * chart.shape[1], layout
    for chart in (loss, norm):
        for color in COLORS.values():  # both fall
            columns, rows = _curve(chart, color)
            assert rows[columns < 0.2].min() < 0.3
            assert rows[columns > 0.9].mean() > rows[columns < 0.2].mean() + 0.2
        assert _end(chart, DIFFERENT) < _end(chart, WITHIN) - 0.05  # and one stays above the other
    assert _end(gap, DIFFERENT) < 0.2
    assert 0.5 < _end(gap, WITHIN) < 0.9
    columns, rows = _curve(gap, COLORS[DIFFERENT])
    jump = columns[rows < _end(gap, DIFFERENT) + 0.01].min()
    first, last = columns.min(), columns.max()
    assert abs((jump - first) / (last - first) * (STEPS - 1) + 1 - FIRST_BAD) < 0.3


@in_a_browser
def test_on_a_dark_phone_the_page_fits_and_the_axes_are_light(tmp_path):
    pixels, boxes = _look(tmp_path, _report(), "--blink-settings=preferredColorScheme=0", width=500)
    assert boxes.width <= boxes.window == 500  # the least that the browser lays out
    assert np.median(pixels) < 60
    for box in boxes.charts:
        chart = _crop(pixels, box)
        assert np.median(chart) < 60
        assert (chart.min(-1) > 180).mean() > 0.002
        for color in COLORS.values():
            assert _near(chart, np.minimum(np.array(color) * 1.3, 255)).any(0).mean() > 0.3  # brighter on dark
