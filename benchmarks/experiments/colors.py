"""Figure colors, one per layout, each with a counterpart for dark pages, and labels at line ends."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from boost.drawing import INK, LINE, MUTED, PAPER, SERIES


@dataclass(frozen=True)
class Tone:
    """A color for a white page and its counterpart for a dark one."""

    light: str
    dark: str


TONES = {
    "ink": Tone(INK, "#e4e7ec"),
    "muted": Tone(MUTED, "#9aa4b2"),
    "line": Tone(LINE, "#303641"),
    "paper": Tone(PAPER, "#181c22"),
    "megatron": Tone("#7a7075", "#a9b2b1"),
    "megatron-sp": Tone("#20262f", "#fdfdec"),
    "ulysses": Tone("#8428fe", "#c8ccfe"),
    "vanilla-published": Tone("#bb5a06", "#fdce78"),
    "vanilla": Tone("#c00434", "#db8f74"),
    "btp": Tone("#143ab6", "#4996f7"),
    "btp-sp": Tone("#006490", "#2696b5"),
    "btp-cp": Tone("#054603", "#acec22"),
}
"""Every figure color by name. Color-blind readers can tell layouts apart (tested); text in these colors is readable."""

PEER = "#868e98"
"""Color of bars without an assigned one: other libraries, and the first step of the ladder."""

_NAMES = (
    *(("vanilla-published", words) for words in ("vanilla, published", "vanilla-published", "published vanilla")),
    *((name, name) for name in ("megatron-sp", "ulysses", "vanilla", "btp-cp", "btp-sp", "btp")),
    *(("megatron", words) for words in ("megatron", "full-rank", "dense")),
    ("btp", "BOOST"),
)
"""(tone, part of a name); the first match wins."""


def color_of(name: str, number: int = 0) -> str:
    """The color of the layout that a contender's name contains, otherwise entry `number` of SERIES."""
    tone = next((tone for tone, words in _NAMES if words in name), None)
    return TONES[tone].light if tone else SERIES[number % len(SERIES)]


def label_ends(axis: Any, labels: Sequence[tuple[str, float, str]], x: float, least: float = 11.0) -> None:
    """Writes line labels (text, y, color) to the right of the line ends at `x`, at least `least` points apart.

    Call this after the axis limits are final.
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
