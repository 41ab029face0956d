"""Draws rows of tensors and collectives as SVG, for the picture of a block. Standard library only.

Legend: each panel shows one TP process; panels are side by side, and time runs downward. Lengths are in pixels.
"""

import itertools
import xml.etree.ElementTree as ET
from dataclasses import dataclass

COLORS = ("#3b6cb3", "#23877a", "#a8690f", "#a44f80")
INK, MUTED, LINE, PAPER = "#1f2937", "#667085", "#c3cad5", "#ffffff"
SANS = "-apple-system, BlinkMacSystemFont, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'Liberation Mono', monospace"

WIDTH, MARGIN, GUTTER, ROW_GAP, PIECE_GAP, ELLIPSIS = 900.0, 26.0, 208.0, 9.0, 3.0, 26.0
BAR, MAX_PANELS = 22.0, 4


@dataclass(frozen=True)
class DiagramTensor:
    """A tensor drawn as a rectangle in a panel, with the process's shard."""

    width: float
    height: float
    axis: str = ""
    """The sharded axis, 'x' or 'y'; '' if replicated."""
    partial: bool = False
    activation: bool = False


@dataclass(frozen=True)
class DiagramRow:
    """One line of the picture across all panels."""

    title: str
    details: tuple[str, ...] = ()
    pieces: tuple[DiagramTensor, ...] = ()
    stacked: bool = False
    """Whether pieces are stacked vertically, like the factors A of a group, instead of side by side."""
    boxes: tuple[str, ...] = ()
    """One label per panel, instead of pieces."""
    bars: tuple[tuple[str, str], ...] = ()
    """(forward, backward) collectives across all panels, instead of pieces; '' for none."""
    residual: bool = False

    @property
    def lines(self) -> tuple[tuple[int, str], ...]:
        """The bars from top to bottom, as (0 for forward or 1 for backward, text)."""
        return tuple((side, text) for sides in self.bars for side, text in enumerate(sides) if text)

    @property
    def size(self) -> tuple[float, float]:
        """Width and height of the drawing within a panel."""
        if self.boxes:
            return 0.0, 24.0
        widths, heights = [piece.width for piece in self.pieces], [piece.height for piece in self.pieces]
        gaps = PIECE_GAP * (len(self.pieces) - 1)
        return (max(widths), sum(heights) + gaps) if self.stacked else (sum(widths) + gaps, max(heights))

    @property
    def height(self) -> float:
        """Height of the row, including text."""
        if self.bars:
            return BAR * len(self.lines) + PIECE_GAP * (len(self.lines) - 1)
        return max(self.size[1], 16.0 + 14.0 * len(self.details))


def panel_width(processes: int) -> float:
    """Width of one panel. Up to 4 panels are drawn: all processes, or the first three and the last."""
    columns = min(processes, MAX_PANELS)
    gap = ELLIPSIS if processes > MAX_PANELS else 0.0
    return (WIDTH - 2 * MARGIN - GUTTER - gap) / columns


@dataclass(frozen=True)
class DiagramText:
    """Title and captions of the page."""

    layout: str
    model: str
    """Follows the layout in the title."""
    subtitle: str
    description: str
    """Text alternative for screen readers."""
    summary: str
    """Line below the legend."""


class Page:
    """Draws rows. Text width is estimated, and text is shrunk to fit."""

    def __init__(self, words: DiagramText, processes: int) -> None:
        self.words, self.processes = words, processes
        last = [processes - 1] if processes > MAX_PANELS else []
        self.panels = [*range(min(processes, MAX_PANELS) - len(last)), *last]
        self.panel = panel_width(processes)
        self.left, self.right = MARGIN + GUTTER, WIDTH - MARGIN
        self.svg = ET.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "role": "img", "font-family": SANS})

    def draw(self, rows: list[DiagramRow]) -> str:
        """Returns the SVG document. Output is deterministic, byte for byte."""
        top = 128.0
        tops = list(itertools.accumulate((row.height + ROW_GAP for row in rows[:-1]), initial=top))
        bottom = tops[-1] + rows[-1].height
        self._paper(bottom + 94)
        for index, rank in enumerate(self.panels):
            x, color = self._x(index), COLORS[index]
            self._add(
                "rect", x=x + 3, y=top - 36, width=self.panel - 6, height=bottom - top + 46, rx=8,
                fill=color, fill_opacity=0.055,
            )  # fmt: skip
            self._text(f"process {rank}", x + self.panel / 2, top - 17, 13, color, "middle", bold=True)
            self._paths(x, color, rows, tops)
        if len(self.panels) < self.processes:
            self._text("…", self._x(len(self.panels) - 1) - ELLIPSIS / 2, top - 17, 16, MUTED, "middle")
        for row, y in zip(rows, tops, strict=True):
            self._row(row, y)
        partial = any(piece.partial for row in rows for piece in row.pieces)
        self._legend(bottom + 34, partial)
        for element in self.svg:  # one element per line
            element.tail = "\n"
        self.svg.text = "\n"
        return ET.tostring(self.svg, encoding="unicode") + "\n"

    def _x(self, index: int) -> float:
        """Left edge of a panel."""
        skipped = ELLIPSIS if len(self.panels) < self.processes and index == len(self.panels) - 1 else 0.0
        return self.left + index * self.panel + skipped

    def _paper(self, height: float) -> None:
        """Background, title, and the pattern of partial gradients."""
        words = self.words
        for key, value in {
            "viewBox": f"0 0 {_n(WIDTH)} {_n(height)}",
            "width": _n(WIDTH),
            "height": _n(height),
        }.items():
            self.svg.set(key, value)
        ET.SubElement(self.svg, "title").text = f"{words.layout} · {words.model}"
        ET.SubElement(self.svg, "desc").text = words.description
        defs = ET.SubElement(self.svg, "defs")
        size = {"width": "6", "height": "6", "patternUnits": "userSpaceOnUse", "patternTransform": "rotate(45)"}
        pattern = ET.SubElement(defs, "pattern", {"id": "partial", **size})
        ET.SubElement(pattern, "rect", {"width": "2", "height": "6", "fill": PAPER, "fill-opacity": "0.5"})
        self._add("rect", x=0.5, y=0.5, width=WIDTH - 1, height=height - 1, rx=12, fill=PAPER, stroke="#e4e7ec")
        self._add("text", x=MARGIN, y=44, font_size=23, font_weight=700, font_family=MONO, fill=INK)
        self.svg[-1].text = words.layout
        after = MARGIN + 14.4 * len(words.layout) + 8
        self._text(f"· {words.model}", after, 44, 20, INK, room=WIDTH - MARGIN - after)
        self._text(words.subtitle, MARGIN, 69, 13, MUTED, room=WIDTH - 2 * MARGIN)

    def _paths(self, x: float, color: str, rows: list[DiagramRow], tops: list[float]) -> None:
        """Arrows of a process from row to row, and the residual stream around each half of the block."""
        middle, edge = x + self.panel / 2, x + self.panel / 2 + min(self.panel / 2 - 11, 145)
        for (row, y), (next_row, next_y) in itertools.pairwise(zip(rows, tops, strict=True)):
            start, stop = y + self._drawn(row, 1), next_y + self._drawn(next_row, 0)
            self._add("path", d=f"M{_n(middle)} {_n(start)}V{_n(stop)}", stroke=LINE, stroke_width=1.5)
        stops = [(row, y) for row, y in zip(rows, tops, strict=True) if row.residual]
        for (row, y), (_, end) in itertools.pairwise(stops):
            half = row.size[0] / 2
            start, stop = y + row.height / 2 + 6, end + row.height / 2 - 6
            d = f"M{_n(middle + half)} {_n(start)}H{_n(edge)}V{_n(stop)}H{_n(middle + half + 5)}"
            self._add("path", d=d, fill="none", stroke=color, stroke_width=1.5, stroke_opacity=0.45)
            tip = f"M{_n(middle + half + 1)} {_n(stop)}l6 -3.5v7z"
            self._add("path", d=tip, fill=color, fill_opacity=0.6)

    def _drawn(self, row: DiagramRow, end: int) -> float:
        """Offset of the drawing's top (end 0) or bottom (1) within its row; drawings are centered vertically."""
        size = row.height if row.bars else row.size[1]
        return (row.height - size) / 2 + end * size

    def _row(self, row: DiagramRow, y: float) -> None:
        if row.bars:
            for position, (side, text) in enumerate(row.lines):
                self._bar(side, text, y + position * (BAR + PIECE_GAP))
            return
        words = y + (row.height - 16 - 14 * len(row.details)) / 2
        self._text(row.title, MARGIN, words + 12, 13, INK, bold=True)
        for line, detail in enumerate(row.details):
            self._text(detail, MARGIN, words + 27 + 14 * line, 11.5, MUTED, room=GUTTER - 8)
        for index, rank in enumerate(self.panels):
            if row.boxes:
                self._box(row, y + self._drawn(row, 0), index, rank)
            else:
                self._pieces(row, y + self._drawn(row, 0), index, rank)

    def _box(self, row: DiagramRow, y: float, index: int, rank: int) -> None:
        """A framed label centered in its panel; the longest label of the row sets the font size."""
        middle, width, color = self._x(index) + self.panel / 2, min(self.panel - 36, 160.0), COLORS[index]
        left = middle - width / 2
        self._add("rect", x=left, y=y, width=width, height=24, rx=12, fill=PAPER, stroke=color, stroke_width=1.2)
        size = _fitting(max(row.boxes, key=len), 11.5, width - 12)
        self._text(row.boxes[rank], middle, y + 16, size, color, "middle")

    def _pieces(self, row: DiagramRow, y: float, index: int, rank: int) -> None:
        """The tensors of a row, centered in their panel."""
        width = row.size[0]
        left = self._x(index) + (self.panel - width) / 2
        for piece in row.pieces:
            x = left + (width - piece.width) / 2 if row.stacked else left
            self._piece(piece, x, y, COLORS[index], rank, self.processes)
            if row.stacked:
                y += piece.height + PIECE_GAP
            else:
                left += piece.width + PIECE_GAP

    def _piece(self, piece: DiagramTensor, x: float, y: float, color: str, rank: int, parts: int) -> None:
        """The whole tensor as an outline, with shard `rank` filled."""
        self._add("rect", x=x, y=y, width=piece.width, height=piece.height, fill=PAPER)
        held = {"x": x, "y": y, "width": piece.width, "height": piece.height}
        if piece.axis:
            side = "width" if piece.axis == "x" else "height"
            # Shards that are too thin to see are drawn thicker.
            whole, part = held[side], max(held[side] / parts, 3.0)
            held[side], held[piece.axis] = part, held[piece.axis] + min(rank * whole / parts, whole - part)
        self._add("rect", **held, fill=color, fill_opacity=0.5 if piece.activation else 1)
        if piece.partial:
            self._add("rect", **held, fill="url(#partial)")
        outline = {"x": x, "y": y, "width": piece.width, "height": piece.height, "rx": 1}
        self._add("rect", **outline, fill="none", stroke=color, stroke_width=1, stroke_opacity=0.8)

    def _bar(self, side: int, text: str, y: float) -> None:
        """One collective across all panels: dark for forward, light for backward."""
        fill, ink = (("#344054", PAPER), ("#dde3ec", "#344054"))[side]
        width = self.right - self.left
        self._add("rect", x=self.left, y=y, width=width, height=BAR, rx=5, fill=fill)
        says = f"{('forward', 'backward')[side]}: {text}"
        self._text(says, self.left + width / 2, y + 15, 12, ink, "middle", room=width - 12)

    def _legend(self, y: float, partial: bool) -> None:
        entries = [
            (DiagramTensor(22, 12, "x"), "weight: shard of this process"),
            (DiagramTensor(22, 12, "x", activation=True), "activation: shard of this process"),
        ]
        if partial:
            entries.append((DiagramTensor(22, 12, partial=True), "replicated: gradient summed once per step"))
        for position, (piece, words) in enumerate(entries):
            x = MARGIN + 284 * position
            self._piece(piece, x, y, COLORS[0], 0, 3)
            self._text(words, x + 30, y + 10.5, 12, INK)
        self._text(self.words.summary, MARGIN, y + 40, 12.5, INK, room=WIDTH - 2 * MARGIN)

    def _text(
        self,
        text: str,
        x: float,
        y: float,
        size: float,
        fill: str,
        anchor: str = "start",
        bold: bool = False,
        room: float = 0,
    ) -> None:
        text = text.replace(" x ", " \u00d7 ")
        if room:
            size = _fitting(text, size, room)
        weight = {"font_weight": 600} if bold else {}
        self._add("text", x=x, y=y, font_size=size, fill=fill, text_anchor=anchor, **weight)
        self.svg[-1].text = text

    def _add(self, tag: str, **attributes: float | str) -> None:
        """Adds an element; `font_size=12` becomes font-size="12"."""
        values = {k.replace("_", "-"): v if isinstance(v, str) else _n(v) for k, v in attributes.items()}
        ET.SubElement(self.svg, tag, values)


def _fitting(text: str, size: float, room: float) -> float:
    """Returns the font size, reduced if the text would not fit. Assumes letters 0.55 em wide."""
    return min(size, round(room / (0.55 * len(text)), 1))


def _n(number: float) -> str:
    """Formats a number with at most two decimals, since pictures are compared byte for byte."""
    return f"{round(number, 2):g}" if abs(number) < 1000 else f"{round(number, 1):.1f}".removesuffix(".0")
