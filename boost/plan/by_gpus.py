"""Which layout is fastest, by tokens in a step and number of GPUs: with many GPUs or few tokens, replicas run out of sequences."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from boost.plan.candidates import Request, powers_of_two
from boost.plan.grid import GridCell, grid
from boost.plan.search import Plan, Search, Tick

MOST_TOKENS = 1 << 22
"""In a step."""

MOST_COLUMNS = 6
"""Numbers of GPUs, the largest ones."""

TIMES = 4
"""How many times the sequences of a row those of the next are."""


@dataclass(frozen=True)
class GpusCell:
    """The fastest configuration on so many GPUs for steps of so many tokens."""

    tokens: int
    gpus: int
    plan: Plan | None
    why_none: str = ""
    """Why there is none, in few words."""

    @property
    def way(self) -> str:
        """'DP', 'CP 4', 'btp-sp TP 2', 'btp-cp TP 8 CP 2'; '' if none fits."""
        if self.plan is None:
            return ""
        parallel = self.plan.config.parallel
        words = [f"{parallel.layout} TP {parallel.tp}"] * (parallel.tp > 1) + [f"CP {parallel.cp}"] * (parallel.cp > 1)
        return " ".join(words) or ("DP" if parallel.dp > 1 else "one GPU")

    @property
    def kind(self) -> str:
        """The layout, 'CP' or 'DP' without TP."""
        if self.plan is None:
            return ""
        parallel = self.plan.config.parallel
        return parallel.layout if parallel.tp > 1 else "CP" if parallel.cp > 1 else "DP"


def by_gpus(request: Request, tick: Tick | None = None) -> list[list[GpusCell]]:
    """A row for each number of tokens, a column for each power of two of GPUs up to the request's; no pipeline unless one is
    fixed."""
    base, fixed = request.base, request.fixed | {"parallel.pp", "train.global_batch"}
    columns = [gpus for gpus in powers_of_two(1 << (request.gpus.bit_length() - 1)) if gpus >= 2 or request.gpus < 2]
    columns = columns[-MOST_COLUMNS:]
    most = max(MOST_TOKENS // base.train.seq_len, 1)
    batches = [TIMES**n for n in range(16) if TIMES**n <= most]
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


def picture(title: str, subtitle: str, rows: Sequence[Sequence[GpusCell]]) -> str:
    """A grid as SVG: a layout's color."""
    cells = [(f"{row[0].tokens:,}", [GridCell(cell.way or cell.why_none, cell.kind) for cell in row]) for row in rows]
    return grid(title, subtitle, "tokens a step", [f"{cell.gpus} GPUs" for cell in rows[0]], cells)
