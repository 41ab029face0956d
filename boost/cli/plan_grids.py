"""`boost plan --by-tokens` and `--by-gpus`: the fastest layout over a grid, as a table, JSON, and a picture."""

import argparse
import json

from boost.cli.plan_report import SCHEMA, as_json, asked_words, console, model_words
from boost.cli.terminal import print_table, searching
from boost.errors import ConfigError
from boost.format import format_seconds
from boost.plan.candidates import Request
from boost.plan.grids import Grid, by_gpus, by_tokens, changes, fastest, slower
from boost.plan.pictures import GridCell, draw_grid


def print_grid(args: argparse.Namespace, request: Request) -> int:
    """Searches and prints the grid that `args` ask for, and draws it for --svg. Raises ConfigError if nothing fits."""
    with searching("configurations") as tick:
        rows = by_tokens(request, tick) if args.by_tokens else by_gpus(request, tick)
    if not any(cell.plan for row in rows for cell in row):
        raise ConfigError(
            f"{args.model} does not fit on {args.gpus} x {args.gpu} without a pipeline; add --parallel.pp"
        )
    if args.json:
        column = "tp" if args.by_tokens else "gpus"
        answers = [
            {"tokens": cell.tokens, column: cell.column, "label": cell.label}
            | ({} if cell.plan is None else as_json(cell.plan, request.hardware))
            for row in rows
            for cell in row
        ]
        question = f"fastest layout by tokens per step and {'TP size' if args.by_tokens else 'number of GPUs'}"
        facts = {"schema": SCHEMA, "argv": asked_words(args), "question": question, "answers": answers}
        print(json.dumps(facts, indent=2))
    else:
        _print_table(args, request, rows)
    if args.svg is not None:
        _draw(args, request, rows)
        if not args.json:
            print(f"\n{args.svg} written")
    return 0


def _print_table(args: argparse.Namespace, request: Request, rows: Grid) -> None:
    from rich.table import Table
    from rich.text import Text

    out = console()
    count = f"{args.gpus} x " if args.by_tokens else ""
    out.print(Text(f"{model_words(request.base, args.model)}\n{count}{request.hardware.title}"), soft_wrap=True)
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    columns = [f"TP {cell.column}" if args.by_tokens else f"{cell.column} GPUs" for cell in rows[0]]
    for name in ("tokens per step", *columns):
        table.add_column(name, justify="right", no_wrap=args.by_tokens)
    for row in rows:
        cells, best = [Text(f"{row[0].tokens:,}")], fastest(row)
        for cell in row:
            if cell.plan is None:
                cells.append(Text(cell.why_none))
            elif args.by_tokens:
                cells.append(Text(f"{cell.kind} {slower(cell, row):.2f} x", style="bold" if cell is best else ""))
            else:
                cells.append(Text(f"{cell.label}\n{format_seconds(cell.seconds)}"))
        table.add_row(*cells)
    print_table(out, table)
    close = "Without a pipeline. Differences below 5% are within the prediction error."
    if not args.by_tokens:
        out.print(Text(f"\n{close}"))
        return
    ways = {"DP": "pure data parallelism", "CP": "context parallelism"}
    said = "; ".join(
        f"{ways.get(cell.kind) or f'{cell.kind} with TP {cell.column}'} from {cell.tokens:,} tokens"
        for cell in changes(rows)
    )
    out.print(Text(f"\nfastest: {said}"))
    out.print(Text(f"Times are relative to the fastest in the row. {close}"))


def _draw(args: argparse.Namespace, request: Request, rows: Grid) -> None:
    """Draws the grid, with one color per layout. By TP size, a frame marks the fastest cell of each row."""
    model = f"{args.model}, {request.base.model.title}"
    if args.by_tokens:
        title = f"Layout by tokens per step and TP size: {model}"
        cell_words = "the fastest configuration per cell, and its time relative to the fastest in the row"
        subtitle = f"On {args.gpus} x {args.gpu}: {cell_words}"
        columns = [f"TP {cell.column}" for cell in rows[0]]
    else:
        title = f"Layout by tokens per step and number of GPUs: {model}"
        subtitle = (
            f"{args.gpu}, sequences of {request.base.train.seq_len:,}: the fastest configuration without a pipeline"
        )
        columns = [f"{cell.column} GPUs" for cell in rows[0]]
    drawn = []
    for row in rows:
        best, cells = fastest(row), []
        for cell in row:
            if cell.plan is None:
                cells.append(GridCell(cell.why_none))
            elif args.by_tokens:
                cells.append(GridCell(f"{cell.kind}, {slower(cell, row):.2f} x", cell.kind, cell is best))
            else:
                cells.append(GridCell(cell.label, cell.kind))
        drawn.append((f"{row[0].tokens:,}", cells))
    draw_grid(title, subtitle, "tokens per step", columns, drawn, args.svg)
