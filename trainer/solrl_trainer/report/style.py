"""House style of plots: colours, fonts and grid for matplotlib, which is imported where something is drawn."""

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SERIES = {
    "c0": ("#0f766e", "#3cc7b5"),
    "c1": ("#c2571a", "#f0914e"),
    "c2": ("#3b6fd4", "#7fa9f4"),
    "c3": ("#9a4fc4", "#c48fee"),
    "c4": ("#b3861a", "#e3bd52"),
    "c5": ("#cf3f74", "#f47fa6"),
    "c6": ("#58813a", "#9bc878"),
    "c7": ("#6d7a8d", "#a3aebd"),
}
"""Names of the colours of curves → colour on a light and on a dark background. In matplotlib, they are C0 to C7."""
COLOURS = SERIES | {"dim": ("#626a76", "#98a1ae"), "grid": ("#e9ebef", "#272b33")}
"""Colours of curves, of texts and of the grid."""

_VARIABLES = {light: f"var(--{name})" for name, (light, _) in COLOURS.items()}
_DIM, _GRID = COLOURS["dim"][0], COLOURS["grid"][0]
_LESS = re.compile(
    r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->|<g/>|(?<=>)\s+(?=<)"
    r'| id="[a-z0-9.]+_\d+"| transform="rotate\(-0 [^"]*"',
    re.S,
)
"""Parts of matplotlib's SVG that a page does not need: metadata, global styles, names of groups."""
_FURTHER_DECIMALS = re.compile(r"(?<=\.\d\d)\d+")


@contextmanager
def figure(width: float, height: float) -> Iterator[Any]:
    """An empty matplotlib figure in house style, `width` × `height` points; draw and save it inside the context."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_settings(mpl)):
        yield Figure(figsize=(width / 72, height / 72), layout="constrained")


def svg(drawn: Any) -> str:
    """SVG of a figure, to be put into a page that defines `COLOURS` as CSS variables; equal figures have equal SVG."""
    for background in (drawn.patch, *(axes.patch for axes in drawn.axes)):
        background.set_visible(False)
    buffer = io.StringIO()
    drawn.savefig(buffer, format="svg", metadata={"Date": None})
    text = _LESS.sub("", buffer.getvalue().partition("<svg")[2])
    # In tags only: texts are the axes' labels.
    text = re.sub("<[^>]*>", lambda tag: _FURTHER_DECIMALS.sub("", tag[0]), text)
    view = re.search(' viewBox="[^"]*"', text)
    text = f"<svg{view[0] if view else ''}{text[text.index('>') :]}"
    return re.sub("#[0-9a-f]{6}", lambda match: _VARIABLES.get(match[0], match[0]), text)


def _settings(mpl: Any) -> dict[str, Any]:
    return {
        "axes.axisbelow": True,
        "axes.edgecolor": _GRID,
        "axes.formatter.useoffset": False,
        "axes.grid": True,
        "axes.labelcolor": _DIM,
        "axes.prop_cycle": mpl.cycler(color=[light for light, _ in SERIES.values()]),
        "axes.spines.right": False,
        "axes.spines.top": False,
        "font.family": "DejaVu Sans",
        "font.size": 10,
        "grid.color": _GRID,
        "legend.frameon": False,
        "lines.linewidth": 2,
        "lines.solid_capstyle": "round",
        "lines.solid_joinstyle": "round",
        "svg.fonttype": "none",
        "svg.hashsalt": "solrl",
        "text.color": _DIM,
        "xtick.color": _GRID,
        "xtick.labelcolor": _DIM,
        "ytick.color": _GRID,
        "ytick.labelcolor": _DIM,
    }
