"""A matplotlib figure as SVG to stand inside a page: no font, link or namespace, and identifiers of its own."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from html import escape

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK = "#010203"
"""Becomes the text colour of the page, which may be dark."""

_SIZE = (4.8, 2.9)
_STYLE = {
    "axes.edgecolor": INK,
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.7,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.constrained_layout.use": True,
    "font.size": 9,
    "grid.alpha": 0.13,
    "grid.color": INK,
    "grid.linewidth": 0.6,
    "lines.scale_dashes": False,
    "svg.fonttype": "none",
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


def inline_svg(draw: Callable[[Axes], None], name: str, label: str) -> str:
    """What ``draw`` draws. ``name`` is unique in the page; ``label`` is for who cannot see it."""
    text = io.StringIO()
    with style.context(["default", _STYLE, {"svg.hashsalt": name}]):
        figure = Figure(figsize=_SIZE)
        draw(figure.add_subplot(facecolor="none"))
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(text, format="svg", metadata=nothing, transparent=True)
    return _to_inline(text.getvalue(), name, label)


def _to_inline(svg: str, name: str, label: str) -> str:
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", svg, flags=re.DOTALL)  # would hold for the whole page
    head, end, body = svg.partition(">")
    head = re.sub(r' (xmlns(:\w+)?|width|height|version)="[^"]*"', "", head)
    head = head.replace("<svg", f'<svg role="img" aria-label="{escape(label)}"', 1)
    body = body.replace("xlink:href=", "href=").replace(INK, "currentColor")
    used = set(re.findall(r'(?:href="|url\()#([^")]+)', body))
    body = re.sub(r' id="([^"]*)"', lambda found: f' id="{name}-{found[1]}"' if found[1] in used else "", body)
    body = re.sub(r'(href="|url\()#', rf"\1#{name}-", body)
    return head + end + body
