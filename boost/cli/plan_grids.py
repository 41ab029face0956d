"""`boost plan --by-gpus`: the fastest layout by tokens per step and number of GPUs, as a table, JSON, and a picture."""

import argparse
import json
import math

from boost.cli.plan_report import SCHEMA, as_json, asked_words, console, model_words
from boost.cli.terminal import new_table, print_table, searching
from boost.errors import ConfigError
from boost.format import format_seconds
from boost.plan.candidates import Request
from boost.plan.pictures import draw_grid
from boost.plan.search import GridPlan, by_gpus


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
