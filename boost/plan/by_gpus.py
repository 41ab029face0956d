"""The fastest layout by tokens per step and number of GPUs. With many GPUs or few tokens, DP alone runs out of sequences."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from boost.plan.candidates import Request, powers_of_two
from boost.plan.pictures import GridCell, draw_grid
from boost.plan.search import Plan, Search, Tick

MOST_TOKENS = 1 << 22
"""Largest number of tokens per step in the grid."""

MOST_COLUMNS = 6
"""Maximum number of GPU counts in the grid; the largest are kept."""

BATCH_RATIO = 4
"""Ratio of the global batch sizes of consecutive rows."""


@dataclass(frozen=True)
class GpusCell:
    """The fastest configuration for `gpus` GPUs and `tokens` tokens per step."""

    tokens: int
    gpus: int
    plan: Plan | None
    why_none: str = ""
    """Short reason if there is no plan."""

    @property
    def label(self) -> str:
        """Label such as 'DP', 'CP 4', 'btp-sp TP 2' or 'btp-cp TP 8 CP 2'; '' if nothing fits."""
        if self.plan is None:
            return ""
        parallel = self.plan.config.parallel
        words = [f"{parallel.layout} TP {parallel.tp}"] * (parallel.tp > 1) + [f"CP {parallel.cp}"] * (parallel.cp > 1)
        return " ".join(words) or ("DP" if parallel.dp > 1 else "one GPU")

    @property
    def kind(self) -> str:
        """The layout, or 'CP' or 'DP' without TP; '' if nothing fits."""
        if self.plan is None:
            return ""
        parallel = self.plan.config.parallel
        return parallel.layout if parallel.tp > 1 else "CP" if parallel.cp > 1 else "DP"


def by_gpus(request: Request, tick: Tick | None = None) -> list[list[GpusCell]]:
    """Computes the grid: one row per number of tokens, one column per power-of-two GPU count up to `request.gpus`. PP is not used
    unless it is fixed."""
    base, fixed = request.base, request.fixed | {"parallel.pp", "train.global_batch"}
    columns = [gpus for gpus in powers_of_two(1 << (request.gpus.bit_length() - 1)) if gpus >= 2 or request.gpus < 2]
    columns = columns[-MOST_COLUMNS:]
    most = max(MOST_TOKENS // base.train.seq_len, 1)
    batches = [BATCH_RATIO**n for n in range(16) if BATCH_RATIO**n <= most]
    rows: list[list[GpusCell]] = []
    for batch in batches:
        asked = base.model_copy(update={"train": base.train.model_copy(update={"global_batch": batch})})
        row = list[GpusCell]()
        for gpus in columns:
            search = Search(replace(request, base=asked, gpus=gpus, fixed=fixed))
            plan = search.fastest()
            why = "" if plan else "too few tokens" if search.empty else "does not fit"
            row.append(GpusCell(batch * base.train.seq_len, gpus, plan, why))
            if tick:
                tick(len(rows) * len(columns) + len(row), len(batches) * len(columns))
        rows.append(row)
    return rows


def draw(title: str, subtitle: str, rows: Sequence[Sequence[GpusCell]], path: Path) -> None:
    """Draws the grid, with one color per layout."""
    cells = [(f"{row[0].tokens:,}", [GridCell(cell.label or cell.why_none, cell.kind) for cell in row]) for row in rows]
    draw_grid(title, subtitle, "tokens per step", [f"{cell.gpus} GPUs" for cell in rows[0]], cells, path)
