"""Which layout is fastest, by tokens in a step and TP size: what is sent once a step weighs less, the more tokens a step has."""

import html
from collections.abc import Sequence
from dataclasses import dataclass, replace

from boost.plan.bars import HUES
from boost.plan.candidates import Request, powers_of_two
from boost.plan.search import Plan, Search, Tick
from boost.plan.svg import INK, LINE, MUTED, PAPER, SANS

MOST_TOKENS = 1 << 22
"""In a step."""


@dataclass(frozen=True)
class Cell:
    """The fastest configuration of one TP size for steps of so many tokens."""

    tokens: int
    tp: int
    plan: Plan | None
    why_none: str = ""
    """Why there is none, in few words."""

    @property
    def layout(self) -> str:
        """The layout, 'DP' or 'CP' without TP; '' if none fits."""
        if self.plan is None:
            return ""
        if self.tp == 1 and self.plan.config.parallel.cp > 1:
            return "CP"
        return "DP" if self.tp == 1 else self.plan.config.parallel.layout


def by_tokens(request: Request, tick: Tick | None = None) -> list[list[Cell]]:
    """A row for each number of tokens, in powers of two sequences: TP sizes inside a node, and no pipeline unless one is fixed."""
    base, fixed = request.base, request.fixed | {"parallel.tp", "parallel.pp", "train.global_batch"}
    inside = [tp for tp in powers_of_two(request.gpus) if tp <= request.hardware.per_node]
    sizes = list(request.choices("parallel.tp", inside))
    most, sequences = max(MOST_TOKENS // base.train.seq_len, 1), max(request.gpus // max(sizes), 1)
    batches = [sequences << n for n in range(40) if sequences << n <= most] or [sequences]
    rows: list[list[Cell]] = []
    for batch in batches:
        train, row = base.train.model_copy(update={"global_batch": batch}), list[Cell]()
        for tp in sizes:
            asked = base.model_copy(update={"train": train, "parallel": base.parallel.model_copy(update={"tp": tp})})
            plan = Search(replace(request, base=asked, fixed=fixed)).fastest()
            why = "" if plan else "too few sequences" if batch % (request.gpus // tp) else "does not fit"
            row.append(Cell(batch * base.train.seq_len, tp, plan, why))
            if tick:
                tick(len(rows) * len(sizes) + len(row), len(batches) * len(sizes))
        rows.append(row)
    return rows


def fastest(row: Sequence[Cell]) -> Cell | None:
    """The fastest cell of a row, the smaller TP size of two that are equal."""
    found = [cell for cell in row if cell.plan is not None]
    return min(found, key=_seconds, default=None)


def slower(cell: Cell, row: Sequence[Cell]) -> float:
    """How many times the step of the row's fastest a cell's takes."""
    best = fastest(row)
    assert best is not None and cell.plan is not None
    return _seconds(cell) / _seconds(best)


def changes(rows: Sequence[Sequence[Cell]]) -> list[Cell]:
    """The fastest cell where it is of another kind than with fewer tokens."""
    result: list[Cell] = []
    for row in rows:
        best = fastest(row)
        if best is not None and (not result or (best.layout, best.tp) != (result[-1].layout, result[-1].tp)):
            result.append(best)
    return result


def _seconds(cell: Cell) -> float:
    assert cell.plan is not None
    return cell.plan.time.seconds


WIDTH, LEFT, TOP, ROW, MARGIN = 900, 150, 128, 40, 26


def picture(title: str, subtitle: str, rows: Sequence[Sequence[Cell]]) -> str:
    """A grid as SVG: a layout's color, the fastest of each row framed. The same input gives the same bytes."""
    layouts = sorted({cell.layout for row in rows for cell in row if cell.plan is not None})
    hue = dict(zip(layouts, HUES, strict=False))
    width = (WIDTH - LEFT - MARGIN) / len(rows[0])
    lines = [_text(title, MARGIN, 40, 19, INK, True), _text(subtitle, MARGIN, 62, 13, MUTED)]
    lines += [_text("tokens a step", MARGIN, TOP - 12, 13, MUTED)]
    lines += [_text(f"TP {cell.tp}", LEFT + i * width + 12, TOP - 12, 13, MUTED) for i, cell in enumerate(rows[0])]
    for number, row in enumerate(rows):
        y, best = TOP + number * ROW, fastest(row)
        lines.append(_text(f"{row[0].tokens:,}", MARGIN, y + 25, 13, INK))
        for column, cell in enumerate(row):
            x = LEFT + column * width
            words = cell.why_none if cell.plan is None else f"{cell.layout}, {slower(cell, row):.2f} x"
            color, ink = (PAPER, MUTED) if cell.plan is None else (hue[cell.layout], "#ffffff")
            frame = f'stroke="{INK}" stroke-width="3"' if cell is best else f'stroke="{LINE}"'
            lines.append(
                f'<rect x="{x + 3:.1f}" y="{y + 3:g}" width="{width - 6:.1f}" height="{ROW - 6}" rx="4" fill="{color}" {frame}/>'
            )
            lines.append(_text(words, x + 12, y + 25, 13, ink, cell is best))
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
