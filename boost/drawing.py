"""Wraps matplotlib, an optional dependency: imports it only for drawing, and writes reproducible files in one style."""

import importlib.util
import io
import re
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from boost.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, MUTED, LINE, PAPER = "#1b212c", "#5c6573", "#dfe2e7", "#ffffff"
SERIES = ("#5c7cfa", "#d97706", "#0e9aa0", "#e64980", "#7a9a12", "#9775fa", "#b08400", "#7d8794", "#b5557f", "#2f9e6b")
"""Line and bar colors, in order; visible on both light and dark pages."""

SUFFIXES = (".svg", ".png", ".pdf")

STYLE: dict[Any, Any] = {
    "svg.hashsalt": "boost",
    "svg.fonttype": "none",  # keep text as text
    "path.simplify_threshold": 0.2,
    "font.size": 9.5,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 9.5,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": MUTED,
    "axes.linewidth": 0.7,
    "axes.axisbelow": True,
    "axes.grid": False,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": LINE,
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.6,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "hatch.linewidth": 0.8,
}
"""matplotlib settings for every figure."""


def needs_matplotlib() -> None:
    """Raises ConfigError if matplotlib is missing; call it before anything slow."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("drawing requires matplotlib, which is not installed; run: pip install matplotlib")


def require_drawable(path: Path) -> None:
    """Raises ConfigError if no picture can be written to `path`; call it before anything slow."""
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"'{path}' is not a valid picture file name; use one that ends with {' or '.join(SUFFIXES)}")
    needs_matplotlib()


def pyplot() -> ModuleType:
    """matplotlib's pyplot, without a display. Raises ConfigError if it is missing."""
    needs_matplotlib()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update({**STYLE, "axes.prop_cycle": pyplot.cycler(color=SERIES)})
    return pyplot


def write(figure: "Figure", path: Path) -> None:
    """Writes a figure in the format that the suffix of `path` selects, and closes it. Equal figures give equal SVG files."""
    if path.suffix == ".svg":
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None, "Creator": None})
        # Without the line breaks that matplotlib writes after every point and element.
        svg = re.sub(r'(?<= d=")[^"]*', lambda points: " ".join(points[0].split()), drawn.getvalue())
        path.write_text(re.sub(r">\s+<", "><", svg), encoding="utf-8")
    else:
        figure.savefig(path)
    pyplot().close(figure)


# Diagrams.

WIDTH, MARGIN = 900.0, 26.0


class Canvas:
    """A page of boxes, lines and text, in pixels."""

    def __init__(self, height: float, title: str, subtitle: str) -> None:
        self.figure = pyplot().figure(figsize=(WIDTH / 100, height / 100), facecolor=PAPER)
        self.axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set(xlim=(0, WIDTH), ylim=(height, 0))
        self.axes.axis("off")
        self.text(title, MARGIN, 42, 20, bold=True, room=WIDTH - 2 * MARGIN)
        self.text(subtitle, MARGIN, 65, 13, MUTED, room=WIDTH - 2 * MARGIN)

    def box(
        self, x: float, y: float, width: float, height: float, fill: str, edge: str = "none", *, radius: float = 0.0,
        alpha: float = 1.0, line: float = 1.0, hatch: str = "",
    ) -> None:  # fmt: skip
        """Draws a rectangle. `alpha`: opacity of the fill. `hatch`: color of the hatching; empty: none."""
        from matplotlib.colors import to_rgba
        from matplotlib.patches import FancyBboxPatch

        style = f"round,pad=0,rounding_size={radius}" if radius else "square,pad=0"
        face = "none" if fill == "none" else to_rgba(fill, alpha)
        looks: list[dict[str, Any]] = [{"facecolor": face, "edgecolor": edge, "linewidth": 0.72 * line}]
        if hatch:
            looks.append({"facecolor": "none", "edgecolor": hatch, "hatch": "////", "linewidth": 0})
        for look in looks:
            self.axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=style, **look))

    def line(
        self, points: Sequence[tuple[float, float]], color: str, *, arrow: bool = False, alpha: float = 1.0
    ) -> None:
        """Draws a line through points, optionally with an arrowhead at its end."""
        style = {"color": color, "alpha": alpha, "zorder": 1}  # as for boxes, so that later shapes are on top
        self.axes.plot(*zip(*points, strict=True), linewidth=1.1, solid_joinstyle="miter", **style)
        if arrow:
            self.axes.plot(*points[-1], marker="<", markersize=5, markeredgewidth=0, **style)

    def text(
        self, words: str, x: float, y: float, size: float = 12.0, color: str = INK, align: str = "left", *,
        bold: bool = False, room: float = 0.0,
    ) -> None:  # fmt: skip
        """Draws text on a baseline, in a smaller size if it would not fit in `room`. Assumes letters 0.56 em wide."""
        words = words.replace(" x ", " \u00d7 ").replace("$", r"\$")
        if room:
            size = min(size, room / ((0.62 if bold else 0.56) * len(words)))
        weight = "bold" if bold else "normal"
        self.axes.text(x, y, words, fontsize=0.72 * size, color=color, ha=align, va="baseline", fontweight=weight)

    def write(self, path: Path) -> None:
        """Writes the picture in the format that the suffix of `path` selects."""
        write(self.figure, path)
