"""`boost plan --explain`: breaks down time and memory of one configuration, as tables."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from boost.cli.terminal import print_table
from boost.format import format_bytes, format_seconds
from boost.plan.categories import CATEGORIES
from boost.plan.explain import busiest, products, rows_that_matter, sent
from boost.plan.hardware import Hardware
from boost.plan.search import Plan
from boost.plan.step_time import PARTS
from boost.plan.timing import Predictor

if TYPE_CHECKING:
    from rich.console import Console

_PHASES = {"forward": "fwd", "recompute": "recompute", "backward": "bwd", "step": "step"}
_BAR = 28


def print_explanation(plan: Plan, hardware: Hardware) -> None:
    """Prints the breakdown of time, GEMMs, collectives and memory."""
    from boost.cli.plan_report import console

    out = console()
    rank = busiest(plan.config, Predictor(hardware))
    where = f", pipeline rank {rank} (the slowest)" if plan.config.parallel.pp > 1 else ""
    out.print(f"\ntime of a step{where}", style="bold")
    _print_parts(out, plan.time.parts, {part: format_seconds(s) for part, s in plan.time.parts.items()}, PARTS)
    if plan.time.hidden > 0:
        out.print(f"DP and TP collectives overlapped with computation: {format_seconds(plan.time.hidden)}", style="dim")
    _print_products(out, plan, hardware, rank)
    _print_sent(out, plan, hardware, rank)
    where = f", pipeline rank {plan.pp_rank} (the highest)" if plan.config.parallel.pp > 1 else ""
    out.print(f"\npeak memory of one GPU: {plan.peak.during}{where}", style="bold")
    by_category = plan.peak.by_category
    held = {category: float(by_category[category]) for category in CATEGORIES if by_category.get(category)}
    _print_parts(out, held, {category: format_bytes(size) for category, size in held.items()}, CATEGORIES)
    if plan.shortfall > 0:
        out.print(f"out of memory by {format_bytes(plan.shortfall)}", style="red")
    else:
        out.print(f"free: {format_bytes(-plan.shortfall)} of {format_bytes(plan.usable)}", style="dim")


def _print_parts(
    out: "Console", parts: Mapping[str, float], words: Mapping[str, str], meaning: Mapping[str, str]
) -> None:
    from rich.bar import Bar as RichBar
    from rich.table import Table

    whole = sum(parts.values())
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(width=_BAR)
    table.add_column(style="dim")
    begin = 0.0
    for part, size in parts.items():
        bar = RichBar(whole, begin, begin + size, width=_BAR, color="cyan")
        table.add_row(part, words[part], f"{size / whole:.0%}", bar, meaning[part])
        begin += size
    print_table(out, table)


def _print_products(out: "Console", plan: Plan, hardware: Hardware, rank: int) -> None:
    from rich.table import Table

    listed = products(plan.config, hardware, rank)
    shown = list(rows_that_matter(listed))
    out.print("\nGEMMs and attention of one process per step", style="bold")
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for heading in ("place", "pass"):
        table.add_column(heading, no_wrap=True)
    for heading in ("m x n x k", "calls", "TFLOP", "bytes", "FLOP/byte", "time", "of peak"):
        table.add_column(heading, justify="right", no_wrap=True)
    for total in shown:
        work = total.work
        shape = work.shape if work.shape[0] > 1 else work.shape[1:]
        table.add_row(
            work.place, _PHASES[work.phase], " x ".join(f"{n}" for n in shape), f"{total.calls:,}", f"{total.flops / 1e12:,.1f}",
            format_bytes(total.bytes), f"{work.intensity:,.0f}", format_seconds(total.seconds), f"{total.share_of_peak:.0%}",
        )  # fmt: skip
    print_table(out, table)
    rest = listed[len(shown) :]
    if rest:
        out.print(
            f"and {len(rest)} smaller shapes: {format_seconds(sum(total.seconds for total in rest))}", style="dim"
        )
    out.print(
        "Attention shapes: sequences x heads x key/value heads x tokens x head dimension (x key tokens, if different).",
        style="dim",
    )


def _print_sent(out: "Console", plan: Plan, hardware: Hardware, rank: int) -> None:
    from rich.table import Table

    listed = sent(plan.config, hardware, rank)
    out.print("\ncollectives of one process per step", style="bold")
    if not listed:
        out.print("none: one process")
        return
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for heading in ("axis", "place", "pass", "kind", "over"):
        table.add_column(heading, no_wrap=True)
    for heading in ("processes", "count", "sent", "time"):
        table.add_column(heading, justify="right", no_wrap=True)
    for total in listed:
        c = total.collective
        table.add_row(
            c.axis, c.place, _PHASES[c.phase], c.kind, total.link, f"{c.processes}", f"{total.times:,}", format_bytes(total.bytes),
            format_seconds(total.seconds),
        )  # fmt: skip
    print_table(out, table)
