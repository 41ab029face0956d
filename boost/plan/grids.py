"""The fastest layout over a grid: tokens per step, and TP size or number of GPUs.

More tokens per step amortize the communication that happens once per step. With many GPUs or few tokens, DP alone runs out of
sequences. Pipelines are not used unless they are fixed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from boost.plan.candidates import Request, powers_of_two
from boost.plan.search import Plan, Search, Tick

MOST_TOKENS = 1 << 22
"""Largest number of tokens per step in a grid."""

MOST_COLUMNS = 6
"""Maximum number of GPU counts in a grid; the largest are kept."""

BATCH_RATIO = 4
"""Ratio of the global batch sizes of consecutive rows, by number of GPUs."""


@dataclass(frozen=True)
class GridPlan:
    """The fastest configuration of one cell."""

    tokens: int
    """Tokens per step."""
    column: int
    """TP size, or number of GPUs."""
    plan: Plan | None
    why_none: str = ""
    """Short reason if there is no plan."""

    @property
    def kind(self) -> str:
        """The layout, or 'CP' or 'DP' without TP; '' if nothing fits."""
        if self.plan is None:
            return ""
        parallel = self.plan.config.parallel
        return parallel.layout if parallel.tp > 1 else "CP" if parallel.cp > 1 else "DP"

    @property
    def label(self) -> str:
        """Label such as 'DP', 'CP 4', 'btp-sp TP 2' or 'btp-cp TP 8 CP 2'; '' if nothing fits."""
        if self.plan is None:
            return ""
        parallel = self.plan.config.parallel
        words = [f"{parallel.layout} TP {parallel.tp}"] * (parallel.tp > 1) + [f"CP {parallel.cp}"] * (parallel.cp > 1)
        return " ".join(words) or ("DP" if parallel.dp > 1 else "one GPU")

    @property
    def seconds(self) -> float:
        """Step time."""
        assert self.plan is not None
        return self.plan.time.seconds


Grid = list[list[GridPlan]]
"""Rows by tokens per step."""


def by_tokens(request: Request, tick: Tick | None = None) -> Grid:
    """One row per global batch (doubling), one column per TP size within a node."""
    base, fixed = request.base, request.fixed | {"parallel.tp", "parallel.pp", "train.global_batch"}
    inside = [tp for tp in powers_of_two(request.gpus) if tp <= request.hardware.per_node]
    sizes = list(request.choices("parallel.tp", inside))
    most, sequences = max(MOST_TOKENS // base.train.seq_len, 1), max(request.gpus // max(sizes), 1)
    batches = [sequences << n for n in range(40) if sequences << n <= most] or [sequences]
    rows: Grid = []
    for batch in batches:
        train, row = base.train.model_copy(update={"global_batch": batch}), list[GridPlan]()
        for tp in sizes:
            asked = base.model_copy(update={"train": train, "parallel": base.parallel.model_copy(update={"tp": tp})})
            plan = Search(replace(request, base=asked, fixed=fixed)).fastest()
            why = "" if plan else "too few sequences" if batch % (request.gpus // tp) else "does not fit"
            row.append(GridPlan(batch * base.train.seq_len, tp, plan, why))
            if tick:
                tick(len(rows) * len(sizes) + len(row), len(batches) * len(sizes))
        rows.append(row)
    return rows


def by_gpus(request: Request, tick: Tick | None = None) -> Grid:
    """One row per global batch (times BATCH_RATIO), one column per power-of-two GPU count up to `request.gpus`."""
    base, fixed = request.base, request.fixed | {"parallel.pp", "train.global_batch"}
    counts = [gpus for gpus in powers_of_two(1 << (request.gpus.bit_length() - 1)) if gpus >= 2 or request.gpus < 2]
    counts = counts[-MOST_COLUMNS:]
    most = max(MOST_TOKENS // base.train.seq_len, 1)
    batches = [BATCH_RATIO**n for n in range(16) if BATCH_RATIO**n <= most]
    rows: Grid = []
    for batch in batches:
        asked = base.model_copy(update={"train": base.train.model_copy(update={"global_batch": batch})})
        row = list[GridPlan]()
        for gpus in counts:
            search = Search(replace(request, base=asked, gpus=gpus, fixed=fixed))
            plan = search.fastest()
            why = "" if plan else "too few tokens" if search.empty else "does not fit"
            row.append(GridPlan(batch * base.train.seq_len, gpus, plan, why))
            if tick:
                tick(len(rows) * len(counts) + len(row), len(batches) * len(counts))
        rows.append(row)
    return rows


def fastest(row: Iterable[GridPlan]) -> GridPlan | None:
    """Returns the fastest cell of a row; ties go to the smaller column."""
    return min((cell for cell in row if cell.plan is not None), key=lambda cell: cell.seconds, default=None)


def slower(cell: GridPlan, row: Sequence[GridPlan]) -> float:
    """Step time of a cell relative to the fastest cell of its row."""
    best = fastest(row)
    assert best is not None
    return cell.seconds / best.seconds


def changes(rows: Grid) -> list[GridPlan]:
    """Returns the fastest cell of each row whose layout or TP size differs from the previous row's."""
    result: list[GridPlan] = []
    for row in rows:
        best = fastest(row)
        if best is not None and (not result or (best.kind, best.column) != (result[-1].kind, result[-1].column)):
            result.append(best)
    return result
