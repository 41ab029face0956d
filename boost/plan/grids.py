"""The fastest layout over a grid of tokens per step and numbers of GPUs.

More tokens per step amortize the communication that happens once per step. With many GPUs or few tokens, DP alone runs out of
sequences. Pipelines are not used unless they are fixed.
"""

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
    gpus: int
    """Number of GPUs."""
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


Grid = list[list[GridPlan]]
"""Rows by tokens per step."""


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
