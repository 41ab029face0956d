"""Draws a grid of colored cells as SVG: the best choice as a function of two quantities."""

import html
from collections.abc import Sequence
from dataclasses import dataclass

from boost.plan.bars import HUES
from boost.plan.svg import INK, LINE, MUTED, PAPER, SANS

WIDTH, LEFT, TOP, ROW, MARGIN = 900, 150, 128, 40, 26


@dataclass(frozen=True)
class GridCell:
    """One cell of a grid."""

    words: str
    kind: str = ""
    """Selects the color; '' leaves the cell uncolored."""
    framed: bool = False


def grid(
    title: str, subtitle: str, corner: str, columns: Sequence[str], rows: Sequence[tuple[str, Sequence[GridCell]]]
) -> str:
    """Returns the SVG document. `corner`: heading of the row labels. Output is deterministic, byte for byte."""
    kinds = sorted({cell.kind for _, cells in rows for cell in cells if cell.kind})
    hue = dict(zip(kinds, HUES, strict=False))
    width = (WIDTH - LEFT - MARGIN) / len(columns)
    lines = [_text(title, MARGIN, 40, 19, INK, True), _text(subtitle, MARGIN, 62, 13, MUTED)]
    lines += [_text(corner, MARGIN, TOP - 12, 13, MUTED)]
    lines += [_text(column, LEFT + i * width + 12, TOP - 12, 13, MUTED) for i, column in enumerate(columns)]
    for number, (label, cells) in enumerate(rows):
        y = TOP + number * ROW
        lines.append(_text(label, MARGIN, y + 25, 13, INK))
        for column, cell in enumerate(cells):
            x = LEFT + column * width
            color, ink = (hue[cell.kind], "#ffffff") if cell.kind else (PAPER, MUTED)
            frame = f'stroke="{INK}" stroke-width="3"' if cell.framed else f'stroke="{LINE}"'
            lines.append(
                f'<rect x="{x + 3:.1f}" y="{y + 3:g}" width="{width - 6:.1f}" height="{ROW - 6}" rx="4" fill="{color}" {frame}/>'
            )
            lines.append(_text(cell.words, x + 12, y + 25, 13, ink, cell.framed))
    height = TOP + len(rows) * ROW + MARGIN
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" font-family="{SANS}" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}">'
    )
    paper = f'<rect width="{WIDTH}" height="{height}" fill="{PAPER}"/>'
    return "\n".join([head, f"<title>{html.escape(f'{title}. {subtitle}')}</title>", paper, *lines, "</svg>"]) + "\n"


def _text(words: str, x: float, y: float, size: int, color: str, bold: bool = False) -> str:
    weight = ' font-weight="600"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:g}" font-size="{size}" fill="{color}"{weight}>{html.escape(words)}</text>'
