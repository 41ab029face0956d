"""`boost plan --by-gpus`: the fastest layout by tokens per step and number of GPUs, as a table, JSON, and a picture."""

import argparse
import json
import math
from dataclasses import dataclass, replace

from boost.cli.plan_report import SCHEMA, as_json, asked_words, console, model_words
from boost.cli.terminal import new_table, print_table, searching
from boost.errors import ConfigError
from boost.format import format_seconds
from boost.plan.candidates import Request, powers_of_two
from boost.plan.pictures import draw_grid
from boost.plan.search import Plan, Search, Tick

# A grid of searches. More tokens per step amortize the communication that happens once per step; with many GPUs or few tokens, DP
# alone runs out of sequences. Pipelines are not used unless the user fixed them.

MOST_TOKENS = 1 << 22
"""Largest number of tokens per step in a grid."""

MOST_COLUMNS = 6
"""Maximum number of GPU counts in a grid; the largest are kept."""

BATCH_RATIO = 4
"""Ratio of the global batch sizes in consecutive rows of a grid."""


@dataclass(frozen=True)
class GridPlan:
    """The fastest configuration for one cell."""

    tokens: int
    """Tokens per step."""
    gpus: int
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
"""One row per number of tokens per step."""


def by_gpus(request: Request, tick: Tick | None = None) -> Grid:
    """One row per global batch size (powers of BATCH_RATIO), one column per power-of-two GPU count up to `request.gpus`."""
    base, fixed = request.base, request.fixed | {"parallel.pp", "train.global_batch"}
    counts = [gpus for gpus in powers_of_two(1 << (request.gpus.bit_length() - 1)) if gpus >= 2 or request.gpus < 2]
    counts = counts[-MOST_COLUMNS:]
    most = max(MOST_TOKENS // base.train.seq_len, 1)
    batches = [BATCH_RATIO**n for n in range(16) if BATCH_RATIO**n <= most]
    rows: Grid = []
    for batch in batches:
        asked = base.changed(train={"global_batch": batch})
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


def slower_than(row: list[GridPlan], cell: GridPlan) -> int | None:
    """The fastest of the smaller GPU counts in the row, if it is faster than this cell; else None."""
    smaller = [other for other in row if other.gpus < cell.gpus and other.plan is not None]
    best = min(smaller, key=lambda other: other.plan.time.seconds if other.plan else math.inf, default=None)
    if cell.plan is None or best is None or best.plan is None or best.plan.time.seconds >= cell.plan.time.seconds:
        return None
    return best.gpus


def print_grid(args: argparse.Namespace, request: Request) -> int:
    """Searches for the best plans in the grid and prints it; with --svg, also draws it. Raises ConfigError if nothing fits."""
    with searching("configurations") as tick:
        rows = by_gpus(request, tick)
    pp = request.base.parallel.pp
    pipeline = "without a pipeline" if pp == 1 else f"with parallel.pp = {pp}"
    if not any(cell.plan for row in rows for cell in row):
        raise ConfigError(f"{args.model} does not fit on {args.gpus} x {args.gpu} {pipeline}; increase parallel.pp")
    columns = [f"{cell.gpus} GPUs" for cell in rows[0]]
    if args.json:
        answers = [
            {"tokens": cell.tokens, "gpus": cell.gpus, "label": cell.label, "slower_than_gpus": slower_than(row, cell)}
            | ({} if cell.plan is None else as_json(cell.plan, request.hardware))
            for row in rows
            for cell in row
        ]
        question = "fastest layout by tokens per step and number of GPUs"
        facts = {"schema": SCHEMA, "argv": asked_words(args), "question": question, "answers": answers}
        print(json.dumps(facts, indent=2))
    else:
        from rich.text import Text

        out = console()
        out.print(Text(f"{model_words(request.base, args.model)}\n{request.hardware.title}"), soft_wrap=True)
        headings = ("tokens per step", *columns)
        table = new_table(headings, right=headings)
        for row in rows:
            cells = []
            for cell in row:
                fewer = slower_than(row, cell)
                slower = "" if fewer is None else f"\nslower than {fewer}"
                words = (
                    f"{cell.label}\n{format_seconds(cell.plan.time.seconds)}{slower}" if cell.plan else cell.why_none
                )
                cells.append(words)
            table.add_row(*map(Text, (f"{row[0].tokens:,}", *cells)))
        print_table(out, table)
        out.print(Text(f"\nAll plans are {pipeline}. Differences below 5% are within the prediction error."))
    if args.svg is not None:
        drawn = [(f"{row[0].tokens:,}", [(cell.label or cell.why_none, cell.kind) for cell in row]) for row in rows]
        title = (
            f"Predicted fastest layout by tokens per step and number of GPUs: {args.model}, {request.base.model.title}"
        )
        length = f"{request.base.train.seq_len:,}"
        subtitle = f"{args.gpu}, sequences of {length}: the fastest configuration {pipeline}"
        draw_grid(title, subtitle, "tokens per step", columns, drawn, args.svg)
        if not args.json:
            print(f"\n{args.svg} written")
    return 0
