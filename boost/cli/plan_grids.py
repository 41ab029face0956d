"""`boost plan --by-tokens` and `--by-gpus`: finds the fastest layout over a grid, as a table, JSON, or a picture."""

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from boost.cli.plan_progress import progress, without_gc
from boost.cli.plan_report import SCHEMA, as_json, asked_words, console, model_words
from boost.cli.terminal import print_table
from boost.errors import ConfigError
from boost.format import format_seconds
from boost.plan import by_gpus as gpus_grid
from boost.plan import by_tokens as tokens_grid
from boost.plan.by_gpus import GpusCell
from boost.plan.by_tokens import Cell, changes, fastest, slower
from boost.plan.candidates import Request

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def by_tokens(args: argparse.Namespace, request: Request) -> int:
    """Answers --by-tokens."""
    with without_gc(), progress("configurations") as tick:
        rows = tokens_grid.by_tokens(request, tick)
    if not any(fastest(row) for row in rows):
        raise ConfigError(
            f"{args.model} does not fit on {args.gpus} x {args.gpu} without a pipeline; add --parallel.pp"
        )
    print_by_tokens(args, request, rows)
    subtitle = f"On {args.gpus} x {args.gpu}: the fastest configuration per cell, and its time relative to the fastest in the row"
    title = f"Layout by tokens per step and TP size: {args.model}, {request.base.model.title}"
    _draw(args, lambda path: tokens_grid.draw(title, subtitle, rows, path))
    return 0


def by_gpus(args: argparse.Namespace, request: Request) -> int:
    """Answers --by-gpus."""
    with without_gc(), progress("configurations") as tick:
        rows = gpus_grid.by_gpus(request, tick)
    if not any(cell.plan for row in rows for cell in row):
        raise ConfigError(
            f"{args.model} does not fit on {args.gpus} x {args.gpu} without a pipeline; add --parallel.pp"
        )
    print_by_gpus(args, request, rows)
    title = f"Layout by tokens per step and number of GPUs: {args.model}, {request.base.model.title}"
    subtitle = f"{args.gpu}, sequences of {request.base.train.seq_len:,}: the fastest configuration without a pipeline"
    _draw(args, lambda path: gpus_grid.draw(title, subtitle, rows, path))
    return 0


def _draw(args: argparse.Namespace, draw: "Callable[[Path], None]") -> None:
    if args.svg is not None:
        draw(args.svg)
        if not args.json:
            print(f"\n{args.svg} written")


def print_by_gpus(args: argparse.Namespace, request: Request, rows: Sequence[Sequence[GpusCell]]) -> None:
    """Prints the fastest layout and its step time by tokens per step and number of GPUs."""
    from rich.table import Table
    from rich.text import Text

    if args.json:
        listed = [
            {"tokens": cell.tokens, "gpus": cell.gpus, "label": cell.label}
            | ({} if cell.plan is None else as_json(cell.plan, args.price, request.hardware))
            for row in rows
            for cell in row
        ]
        question = "fastest layout by tokens per step and number of GPUs"
        print(
            json.dumps({"schema": SCHEMA, "argv": asked_words(args), "question": question, "answers": listed}, indent=2)
        )
        return
    out = console()
    out.print(Text(f"{model_words(request.base, args.model)}\n{request.hardware.title}"), soft_wrap=True)
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for name in ("tokens per step", *(f"{cell.gpus} GPUs" for cell in rows[0])):
        table.add_column(name, justify="right")
    for row in rows:
        words = [
            f"{cell.label}\n{format_seconds(cell.plan.time.seconds)}" if cell.plan else cell.why_none for cell in row
        ]
        table.add_row(f"{row[0].tokens:,}", *words)
    print_table(out, table)
    out.print(Text("\nWithout a pipeline. Differences below 5% are within the prediction error."))


def print_by_tokens(args: argparse.Namespace, request: Request, rows: Sequence[Sequence[Cell]]) -> None:
    """Prints the fastest layout by tokens per step and TP size, and where it changes."""
    from rich.table import Table
    from rich.text import Text

    if args.json:
        listed = [
            {
                "tokens": cell.tokens,
                "tp": cell.tp,
                **({} if cell.plan is None else as_json(cell.plan, args.price, request.hardware)),
            }
            for row in rows
            for cell in row
        ]
        question = "fastest layout by tokens per step and TP size"
        print(
            json.dumps({"schema": SCHEMA, "argv": asked_words(args), "question": question, "answers": listed}, indent=2)
        )
        return
    out = console()
    heading = f"{model_words(request.base, args.model)}\n{args.gpus} x {request.hardware.title}"
    out.print(Text(heading), soft_wrap=True)
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for name in ("tokens per step", *(f"TP {cell.tp}" for cell in rows[0])):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        best = fastest(row)
        words = [cell.why_none if cell.plan is None else f"{cell.layout} {slower(cell, row):.2f} x" for cell in row]
        table.add_row(
            f"{row[0].tokens:,}",
            *(Text(w, style="bold" if cell is best else "") for w, cell in zip(words, row, strict=True)),
        )
    print_table(out, table)
    said = "; ".join(f"{_way(cell)} from {cell.tokens:,} tokens" for cell in changes(rows))
    out.print(Text(f"\nfastest: {said}"))
    out.print(
        Text(
            "Times are relative to the fastest in the row. Without a pipeline. Differences below 5% are within the prediction "
            "error."
        )
    )


def _way(cell: Cell) -> str:
    if cell.tp > 1:
        return f"{cell.layout} with TP {cell.tp}"
    shared = cell.plan is not None and cell.plan.config.parallel.cp > 1
    return "context parallelism" if shared else "pure data parallelism"
