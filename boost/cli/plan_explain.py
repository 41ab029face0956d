"""`boost plan --explain`: breaks down time and memory of one configuration, as tables and bars."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from boost.cli.terminal import print_table
from boost.format import format_bytes, format_rate, format_seconds
from boost.plan.categories import CATEGORIES
from boost.plan.compare import choices, mesh
from boost.plan.explain import busiest, elementwise, products, rows_that_matter, sent
from boost.plan.hardware import Hardware
from boost.plan.pictures import StackedBar, draw_bars
from boost.plan.search import Plan
from boost.plan.step_time import PARTS
from boost.plan.timing import Predictor
from boost.plan.work import KERNELS

if TYPE_CHECKING:
    from rich.console import Console

_PHASES = {"forward": "fwd", "recompute": "recompute", "backward": "bwd", "step": "step"}
_BAR = 28


def print_explanation(plan: Plan, hardware: Hardware) -> None:
    """Prints the breakdown of time, GEMMs, element-wise kernels, collectives and memory."""
    from boost.cli.plan_report import console

    out = console()
    rank = busiest(plan.config, Predictor(hardware))
    where = f", pipeline rank {rank} (the slowest)" if plan.config.parallel.pp > 1 else ""
    out.print(f"\ntime of a step{where}", style="bold")
    _print_parts(out, plan.time.parts, {part: format_seconds(s) for part, s in plan.time.parts.items()}, PARTS)
    if plan.time.hidden > 0:
        out.print(f"DP and TP collectives overlapped with computation: {format_seconds(plan.time.hidden)}", style="dim")
    _print_products(out, plan, hardware, rank)
    _print_elementwise(out, plan, hardware, rank)
    _print_sent(out, plan, hardware, rank)
    where = f", pipeline rank {plan.pp_rank} (the highest)" if plan.config.parallel.pp > 1 else ""
    out.print(f"\npeak memory of one GPU: {plan.peak.during}{where}", style="bold")
    held = _in_order(plan)
    _print_parts(out, held, {category: format_bytes(size) for category, size in held.items()}, CATEGORIES)
    if plan.shortfall > 0:
        out.print(f"out of memory by {format_bytes(plan.shortfall)}", style="red")
    else:
        out.print(f"free: {format_bytes(-plan.shortfall)} of {format_bytes(plan.usable)}", style="dim")


def _in_order(plan: Plan) -> dict[str, float]:
    held = plan.peak.by_category
    return {category: float(held[category]) for category in CATEGORIES if held.get(category)}


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
    for each in shown:
        work = each.work
        shape = work.shape if work.shape[0] > 1 else work.shape[1:]
        table.add_row(
            work.place, _PHASES[work.phase], " x ".join(f"{n}" for n in shape), f"{each.calls:,}", f"{each.flops / 1e12:,.1f}",
            format_bytes(each.bytes), f"{work.intensity:,.0f}", format_seconds(each.seconds), f"{each.share_of_peak:.0%}",
        )  # fmt: skip
    print_table(out, table)
    rest = listed[len(shown) :]
    if rest:
        out.print(f"and {len(rest)} smaller shapes: {format_seconds(sum(each.seconds for each in rest))}", style="dim")
    out.print(
        "Attention shapes: sequences x heads x key/value heads x tokens x head dimension (x key tokens, if different).",
        style="dim",
    )


def _print_elementwise(out: "Console", plan: Plan, hardware: Hardware, rank: int) -> None:
    from rich.table import Table

    listed = elementwise(plan.config, hardware, rank)
    shown = list(rows_that_matter(listed, 0.9))
    out.print("\nelement-wise kernels of one process per step", style="bold")
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for heading in ("place", "pass", "kernel"):
        table.add_column(heading, no_wrap=True)
    for heading in ("calls", "bytes", "time", "share"):
        table.add_column(heading, justify="right", no_wrap=True)
    whole = sum(each.seconds for each in listed)
    for each in shown:
        table.add_row(
            each.place, _PHASES[each.phase], KERNELS[each.kernel], f"{each.calls:,}", format_bytes(each.bytes),
            format_seconds(each.seconds), f"{each.seconds / whole:.0%}",
        )  # fmt: skip
    print_table(out, table)
    rest = listed[len(shown) :]
    if rest:
        out.print(f"and {len(rest)} smaller rows: {format_seconds(sum(each.seconds for each in rest))}", style="dim")


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
    for each in listed:
        c = each.collective
        table.add_row(
            c.axis, c.place, _PHASES[c.phase], c.kind, each.link, f"{c.processes}", f"{each.times:,}", format_bytes(each.bytes),
            format_seconds(each.seconds),
        )  # fmt: skip
    print_table(out, table)


def draw(plan: Plan, name: str, gpu: str, path: Path) -> None:
    """Draws both bars."""
    time, held = plan.time, _in_order(plan)
    left = max(-plan.shortfall, 0)
    bars = [
        StackedBar(
            f"Step time: {format_seconds(time.seconds)}, {format_rate(time.tokens_per_second)}, MFU {time.mfu:.1%}",
            time.parts,
            {part: format_seconds(seconds) for part, seconds in time.parts.items()},
        ),
        StackedBar(
            f"Peak memory of one GPU: {format_bytes(plan.memory)}",
            held,
            {category: format_bytes(size) for category, size in held.items()},
            float(left),
            f"{format_bytes(left)} of {format_bytes(plan.usable)} free" if left else "does not fit",
        ),
    ]
    parallel = plan.config.parallel
    title = f"{name} on {parallel.world_size} x {gpu.removesuffix('.toml')}"
    draw_bars(title, f"{mesh(parallel)}; {choices(plan.config)}", bars, path)
