"""`boost plan --families`: compares the best plan of the dense model with the best plan of each low-rank family of the same
shape."""

import argparse
import json
from typing import TYPE_CHECKING

from boost.cli.plan_report import SCHEMA, as_json, asked_words, console
from boost.cli.terminal import print_table
from boost.config.architecture import parameter_count
from boost.config.schema import ModelConfig
from boost.errors import ConfigError
from boost.format import format_bytes, format_count, format_seconds
from boost.plan.candidates import Request
from boost.plan.compare import choices, mesh
from boost.plan.search import Plan, Search, Tick

if TYPE_CHECKING:
    from boost.plan.hardware import Hardware

DENSE = "dense"


def families() -> list[str]:
    """Names of all families, the dense one first."""
    return [DENSE, *(name for name in ModelConfig.choices if name != DENSE)]


def best_of(request: Request, tick: Tick | None = None) -> Plan | None:
    """Returns the fastest plan that fits, or else the one with the least memory; None if no configuration is valid."""
    search = Search(request, tick)
    return None if search.empty else search.fastest() or search.smallest()


def print_families(args: argparse.Namespace, hardware: "Hardware", found: dict[str, Plan]) -> None:
    """Prints the table, or JSON. Raises ConfigError if no family has a valid configuration."""
    if not found:
        raise ConfigError(f"no family of {args.model} has a valid configuration on {args.gpus} GPUs")
    if args.json:
        listed = {name: as_json(plan, args.price, hardware) for name, plan in found.items()}
        print(json.dumps({"schema": SCHEMA, "argv": asked_words(args), "families": listed}, indent=2))
        return
    from rich.table import Table
    from rich.text import Text

    out, dense = console(), found.get(DENSE)
    first = next(iter(found.values())).config
    batch = f"{first.train.global_batch:,} sequences of {first.train.seq_len:,} per step"
    out.print(Text(f"{args.model}, d {first.model.dim}, {first.model.layers} blocks; {batch}"), soft_wrap=True)
    out.print(Text(f"{args.gpus} x {hardware.title}\n"), soft_wrap=True)
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("family", no_wrap=True)
    price = [f"USD at {args.price:g}/hour"] if args.price is not None else []
    for heading in ("parameters", "step", "tokens/s", "memory", "GPU-hours", *price, "vs. dense"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, plan in found.items():
        fits = plan.shortfall <= 0
        model = plan.config.model
        rank = f" r {model.rank}" if model.rank else ""
        cells = [f"{name}{rank}", format_count(parameter_count(model))]
        if fits:
            cells += [format_seconds(plan.time.seconds), f"{plan.time.tokens_per_second:,.0f}"]
        else:
            cells += ["-", "-"]
        cells += [format_bytes(plan.memory), f"{plan.time.cost_per_billion(1.0):,.1f}" if fits else "-"]
        if args.price is not None:
            cells.append(f"{plan.time.cost_per_billion(args.price):,.2f}" if fits else "-")
        table.add_row(*cells, _against(dense, plan))
    print_table(out, table)
    out.print()
    for name, plan in found.items():
        lacks = f"out of memory by {format_bytes(plan.shortfall)}: " if plan.shortfall > 0 else ""
        out.print(Text(f"{name:<6}{lacks}{mesh(plan.config.parallel)}; {choices(plan.config)}"), soft_wrap=True)
    out.print(
        Text(
            "\nBest configuration of each family; GPU-hours and cost are per 1B tokens. Compares speed only, not loss per token."
        )
    )


def _against(dense: Plan | None, plan: Plan) -> str:
    if dense is None or plan.shortfall > 0:
        return "-"
    if dense.shortfall > 0:
        return "dense does not fit"
    return f"{dense.time.seconds / plan.time.seconds:.2f} x"
