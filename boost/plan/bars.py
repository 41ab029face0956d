"""Stacked-bar charts of a step's time and memory, as SVG. Standard library only."""

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from boost.plan.svg import INK, LINE, MUTED, PAPER, SANS

HUES = (
    "#3b6cb3", "#23877a", "#a8690f", "#a44f80", "#6b7a2c", "#7a5fb0", "#b5533c", "#4c8fb8", "#8a7a5c", "#5c6470", "#9aa3b2",
)  # fmt: skip
WIDTH, MARGIN, BAR, ROW = 900, 26, 30, 22


@dataclass(frozen=True)
class StackedBar:
    """One bar: its parts, then free space."""

    title: str
    parts: Mapping[str, float]
    words: Mapping[str, str]
    """The label of each part, such as '12 ms'."""
    room: float = 0.0
    """Free space, drawn as an empty segment after the parts."""
    room_words: str = ""


def bars_picture(title: str, subtitle: str, bars: Sequence[StackedBar]) -> str:
    """Returns the SVG document. Output is deterministic, byte for byte."""
    lines: list[str] = []
    y = _heading(lines, title, subtitle)
    for bar in bars:
        y = _bar(lines, bar, y)
    height = y + MARGIN / 2
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" font-family="{SANS}" viewBox="0 0 {WIDTH} {height:g}" '
        f'width="{WIDTH}" height="{height:g}">'
    )
    words = html.escape(f"{title}. {subtitle}")
    paper = f'<rect width="{WIDTH}" height="{height:g}" fill="{PAPER}"/>'
    return "\n".join([head, f"<title>{words}</title>", paper, *lines, "</svg>"]) + "\n"


def _heading(lines: list[str], title: str, subtitle: str) -> float:
    _text(lines, title, MARGIN, 40, 19, INK, bold=True)
    _text(lines, subtitle, MARGIN, 62, 13, MUTED)
    return 92.0


def _bar(lines: list[str], bar: StackedBar, y: float) -> float:
    """Draws one bar with its legend and returns the y of the next one."""
    _text(lines, bar.title, MARGIN, y, 14, INK, bold=True)
    y += 12
    width, whole = WIDTH - 2 * MARGIN, sum(bar.parts.values()) + max(bar.room, 0.0)
    x = float(MARGIN)
    for hue, size in zip(HUES, bar.parts.values(), strict=False):
        here = width * size / whole
        lines.append(f'<rect x="{x:.2f}" y="{y:g}" width="{here:.2f}" height="{BAR}" fill="{hue}"/>')
        x += here
    lines.append(f'<rect x="{MARGIN}" y="{y:g}" width="{width}" height="{BAR}" fill="none" stroke="{LINE}"/>')
    y += BAR + ROW
    entries = list(zip(HUES, bar.parts, strict=False))
    columns = 3
    for index, (hue, part) in enumerate(entries):
        left, top = MARGIN + index % columns * width / columns, y + index // columns * ROW
        lines.append(f'<rect x="{left:.2f}" y="{top - 10:g}" width="11" height="11" rx="2" fill="{hue}"/>')
        _text(lines, f"{part}: {bar.words[part]}", left + 17, top, 13, INK)
    y += (len(entries) + columns - 1) // columns * ROW
    if bar.room_words:
        _text(lines, bar.room_words, MARGIN, y, 13, MUTED)
        y += ROW
    return y + 16


def _text(lines: list[str], words: str, x: float, y: float, size: int, color: str, bold: bool = False) -> None:
    weight = ' font-weight="600"' if bold else ""
    lines.append(f'<text x="{x:.2f}" y="{y:g}" font-size="{size}" fill="{color}"{weight}>{html.escape(words)}</text>')
