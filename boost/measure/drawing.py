"""Common matplotlib setup for figures of experiments, imported lazily: one style, and one color per layout."""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from boost.errors import ConfigError
from boost.measure.svg import slim


@dataclass(frozen=True)
class Tone:
    """A color on a white page and its counterpart on a dark one."""

    light: str
    dark: str


TONES = {
    "ink": Tone("#1b212c", "#e4e7ec"),
    "muted": Tone("#5c6573", "#9aa4b2"),
    "line": Tone("#dfe2e7", "#303641"),
    "paper": Tone("#ffffff", "#181c22"),
    "megatron": Tone("#7a7075", "#a9b2b1"),
    "megatron-sp": Tone("#20262f", "#fdfdec"),
    "ulysses": Tone("#8428fe", "#c8ccfe"),
    "vanilla-published": Tone("#bb5a06", "#fdce78"),
    "vanilla": Tone("#c00434", "#db8f74"),
    "btp": Tone("#143ab6", "#4996f7"),
    "btp-sp": Tone("#006490", "#2696b5"),
    "btp-cp": Tone("#054603", "#acec22"),
}
"""Every color of a figure by name. Layouts differ for the color-blind too (tests check it), and are readable as text."""

SERIES = ("#5c7cfa", "#d97706", "#0e9aa0", "#e64980", "#7a9a12", "#9775fa", "#b08400", "#7d8794", "#b5557f", "#2f9e6b")
"""Colors of whatever is not a layout, in order: lighter than those of layouts, and visible on white and on dark pages."""

PEER = "#868e98"
"""Bars without a color of their own: other libraries, first steps, memory."""

_NAMES = (
    *(("vanilla-published", words) for words in ("vanilla, published", "vanilla-published", "published vanilla")),
    *((name, name) for name in ("megatron-sp", "ulysses", "vanilla", "btp-cp", "btp-sp", "btp")),
    *(("megatron", words) for words in ("megatron", "full-rank", "dense")),
    ("btp", "BOOST"),
)
"""(tone, part of a name), the first that matches decides."""

INK, MUTED, LINE = (TONES[name].light for name in ("ink", "muted", "line"))

STYLE: dict[Any, Any] = {
    "svg.hashsalt": "boost",
    "svg.fonttype": "none",
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
"""matplotlib settings of every figure."""


def pyplot() -> Any:
    """Returns matplotlib's pyplot, set up without a display and with deterministic output."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as found

    found.rcParams.update({**STYLE, "axes.prop_cycle": found.cycler(color=SERIES)})

    return found


def needs_matplotlib() -> None:
    """Raises ConfigError if matplotlib is missing, before anything is measured."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("the plot needs matplotlib, which is not installed: pip install matplotlib")


def color_of(name: str, number: int = 0) -> str:
    """The color of the layout that a contender's name contains; for others, that of place `number` in SERIES."""
    tone = next((tone for tone, words in _NAMES if words in name), None)
    return TONES[tone].light if tone else SERIES[number % len(SERIES)]


def tidy(axis: Any) -> None:
    """Removes the frame of an axes and adds a light grid."""
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(visible=True)


def label_ends(axis: Any, labels: Sequence[tuple[str, float, str]], x: float, least: float = 11.0) -> None:
    """Writes the labels of lines, (text, y, color), to the right of their ends at `x`, at least `least` points apart.

    Call it when the limits of the axes are final.
    """
    axis.figure.canvas.draw()
    scale = 72 / axis.figure.dpi
    at = [axis.transData.transform((x, y))[1] * scale for _, y, _ in labels]
    order, apart = sorted(range(len(labels)), key=lambda i: at[i]), list(at)
    for below, above in pairwise(order):
        apart[above] = max(apart[above], apart[below] + least)
    for (text, y, color), own, moved in zip(labels, at, apart, strict=True):
        axis.annotate(
            text, (x, y), (8, moved - own), textcoords="offset points", va="center", color=color,
            annotation_clip=False,
        )  # fmt: skip


def write(figure: Any, path: Path) -> None:
    """Writes a figure to a file, in the format of its suffix, and closes it. SVG files are made small (`boost.measure.svg`)."""
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot().close(figure)
    if path.suffix == ".svg":
        path.write_text(slim(path.read_text(encoding="utf-8")), encoding="utf-8", newline="\n")
