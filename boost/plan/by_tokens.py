"""The fastest layout by tokens per step and TP size. More tokens per step amortize the communication that happens once per step."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from boost.plan.candidates import Request, powers_of_two
from boost.plan.pictures import GridCell, draw_grid
from boost.plan.search import Plan, Search, Tick

MOST_TOKENS = 1 << 22
"""Largest number of tokens per step in the grid."""


@dataclass(frozen=True)
class Cell:
    """The fastest configuration at one TP size and number of tokens per step."""

    tokens: int
    tp: int
    plan: Plan | None
    why_none: str = ""
    """Short reason if there is no plan."""

    @property
    def layout(self) -> str:
        """The layout, or 'CP' or 'DP' without TP; '' if nothing fits."""
        if self.plan is None:
            return ""
        if self.tp == 1 and self.plan.config.parallel.cp > 1:
            return "CP"
        return "DP" if self.tp == 1 else self.plan.config.parallel.layout


def by_tokens(request: Request, tick: Tick | None = None) -> list[list[Cell]]:
    """Computes the grid: one row per global batch (doubling), one column per TP size within a node. PP is not used unless fixed."""
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
    """Returns the fastest cell of a row; ties go to the smaller TP size."""
    found = [cell for cell in row if cell.plan is not None]
    return min(found, key=_seconds, default=None)


def slower(cell: Cell, row: Sequence[Cell]) -> float:
    """Step time of a cell relative to the fastest cell of its row."""
    best = fastest(row)
    assert best is not None and cell.plan is not None
    return _seconds(cell) / _seconds(best)


def changes(rows: Sequence[Sequence[Cell]]) -> list[Cell]:
    """Returns the fastest cell of each row whose layout or TP size differs from the previous row's."""
    result: list[Cell] = []
    for row in rows:
        best = fastest(row)
        if best is not None and (not result or (best.layout, best.tp) != (result[-1].layout, result[-1].tp)):
            result.append(best)
    return result


def _seconds(cell: Cell) -> float:
    assert cell.plan is not None
    return cell.plan.time.seconds


def draw(title: str, subtitle: str, rows: Sequence[Sequence[Cell]], path: Path) -> None:
    """Draws the grid, with one color per layout and a frame around the fastest cell of each row."""
    cells = []
    for row in rows:
        best = fastest(row)
        words = [cell.why_none if cell.plan is None else f"{cell.layout}, {slower(cell, row):.2f} x" for cell in row]
        drawn = [GridCell(each, cell.layout, cell is best) for each, cell in zip(words, row, strict=True)]
        cells.append((f"{row[0].tokens:,}", drawn))
    draw_grid(title, subtitle, "tokens per step", [f"TP {cell.tp}" for cell in rows[0]], cells, path)
