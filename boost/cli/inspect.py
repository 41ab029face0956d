"""`boost inspect`: shows how a model is sharded over TP ranks, and its collectives, as text, JSON or a picture."""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from boost.cli.terminal import new_table, print_fact, print_table, result_console
from boost.config import Config, load
from boost.config.architecture import different_blocks, groups
from boost.config.attention import context_notes
from boost.config.layouts import spec_of
from boost.config.stages import stages
from boost.drawing import require_drawable
from boost.errors import ConfigError
from boost.format import format_bytes, format_count
from boost.text import printable

if TYPE_CHECKING:
    from rich.console import Console

    from boost.plan.inspection import CollectiveRow, Inspection
    from boost.plan.memory import Memory, PeakMemory


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "inspect",
        usage="boost inspect CONFIG [--layout L] [--tp N] [--memory] [--json] [--svg FILE] [--section.key value ...]",
        description="Prints the local shape of each weight on one TP rank, and every collective of an optimizer step with\n"
        "its shape and bytes. Starts no processes. Tests check the runtime against this table.",
        epilog="examples:\n"
        "  boost inspect demo                                     the demo preset\n"
        "  boost inspect boost-7b --layout btp-sp --tp 8\n"
        "  boost inspect boost-7b --layout megatron --model.family dense\n"
        "  boost inspect boost-7b --memory --train.recompute low-rank\n"
        "  boost inspect boost-13b --memory --pp-rank 1           the second of its two pipeline ranks\n"
        "  boost inspect boost-7b --layout vanilla --json         machine-readable: counts per kind and place\n"
        "  boost inspect boost-7b --layout btp --svg btp.svg      a picture of one block\n\n"
        "Bytes are counted as sent by one process: 2N(p-1)/p for an all-reduce of N bytes over p processes, N(p-1)/p for an\n"
        "all-gather, a reduce-scatter or an all-to-all. Units are decimal: 1 MB = 1,000,000 bytes.",
    )
    parser.add_argument("config", metavar="CONFIG", help="preset name or TOML file")
    parser.add_argument("--layout", metavar="L", help="short for --parallel.layout")
    parser.add_argument("--tp", metavar="N", help="short for --parallel.tp")
    parser.add_argument("--pp-rank", type=int, default=0, metavar="R", help="pipeline rank to show (default 0)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--memory", action="store_true", help="show memory by category, between the passes and at the peak"
    )
    parser.add_argument("--svg", type=Path, metavar="FILE", help="also draw one block (.svg, .png or .pdf)")
    parser.set_defaults(takes_overrides=True)
    return parser


def run(args: argparse.Namespace) -> int:
    short = {key: getattr(args, key) for key in ("layout", "tp") if getattr(args, key) is not None}
    config = load(args.config, [*args.overrides, *(f"--parallel.{key}={value}" for key, value in short.items())])
    pp = config.parallel.pp
    if not 0 <= args.pp_rank < pp:
        nearest = min(max(args.pp_rank, 0), pp - 1)
        raise ConfigError(
            f"--pp-rank = {args.pp_rank} is out of range for parallel.pp = {pp}; nearest valid value: {nearest}"
        )

    if args.svg is not None:
        require_drawable(args.svg)

    from boost.plan.inspection import inspect

    inspection = inspect(config, args.pp_rank)
    name, notes = printable(Path(args.config).name.removesuffix(".toml")), list(_notes(config))
    if args.svg is not None:
        from boost.plan.pictures import draw_block

        draw_block(inspection, name, args.svg)
    held: tuple[Memory, PeakMemory] | None = None
    if args.memory:
        from boost.plan import memory

        held = memory.memory(config, args.pp_rank), memory.peak(config, args.pp_rank)
    if args.json:
        facts = as_json(inspection)
        if held:  # bytes on one process
            predicted, peak = held
            moment = {"predicted_peak": peak.by_category, "moment": peak.during}
            facts["memory"] = {"predicted": predicted.by_category, **moment}
        print(json.dumps(facts | {"notes": notes}, indent=2))
        return 0
    print_report(inspection, name, notes)
    if held:
        print_memory(config, *held)
    if args.svg is not None:
        print(f"\n{args.svg} written")
    return 0


def _notes(config: Config) -> Iterator[str]:
    """Yields notes on what the tables do not show."""
    model, parallel = config.model, config.parallel
    yield from model.advice()
    if parallel.tp == 1:
        effective = spec_of(parallel).name
        same = "" if parallel.layout == effective else f" (parallel.layout = '{parallel.layout}' becomes '{effective}')"
        sends = "; the model has no collectives" if parallel.cp == 1 else ""
        yield f"parallel.tp = 1: one process holds all weights{same}{sends}"
    else:
        yield from spec_of(parallel).notes(model, parallel)
    yield from context_notes(model, parallel)


def as_json(inspection: "Inspection") -> dict[str, object]:
    """Converts the inspection to JSON values. Parameters are element counts, shapes are lists, bytes are what one process sends."""
    config = inspection.config
    attributes = (
        "layout", "pp_rank", "parameters", "parameters_per_process", "tokens", "micro_batches", "residual", "heads", "channels",
        "bytes_per_token", "bytes_per_micro_batch", "bytes_per_step", "bytes_of_exact_step",
    )  # fmt: skip
    return {
        "family": config.model.family,
        "layers": config.model.layers,
        **{name: getattr(config.parallel, name) for name in ("tp", "dp", "cp", "pp", "shard")},
        **{name: getattr(inspection, name) for name in attributes},
        "optimizer": config.optim.name,
        "exact_every": config.optim.exact_every,
        "stages": [{"index": s.index, "first_layer": s.first_layer, "layers": s.layers} for s in inspection.stages],
        "weights": [
            {"name": w.name, "global": w.shape, "local": w.local, "cut": w.where, "partial": w.placement.partial}
            for w in inspection.weights
        ],
        "collectives": [_row_as_json(row) for row in inspection.rows],
        "exact_step": [_row_as_json(row) for row in inspection.exact_rows],
    }


def _row_as_json(row: "CollectiveRow") -> dict[str, object]:
    c = row.collective
    return {
        "phase": c.phase, "kind": c.kind, "shape": c.shape, "dtype": c.dtype, "bytes": c.sent_bytes, "place": c.place,
        "processes": c.processes, "count": row.count,
    }  # fmt: skip


def print_report(inspection: "Inspection", name: str, notes: list[str]) -> None:
    # For a pipe, the default of 80 columns would wrap the rows of large models.
    console = result_console(100)
    config = inspection.config
    model, parallel, train = config.model, config.parallel, config.train
    mesh = [inspection.layout, f"TP {parallel.tp}"] + [f"DP {parallel.dp}"] * (parallel.dp > 1)
    mesh += [f"CP {parallel.cp}"] * (parallel.cp > 1)
    mesh += [f"PP {parallel.pp}, {parallel.schedule}"] * (parallel.pp > 1)
    mesh += [f"parallel.shard = {parallel.shard}"] * parallel.sharded
    if parallel.tp > 1:
        mesh += [f"parallel.{field} = {getattr(parallel, field)}" for field in inspection.spec.options]
        mesh += [f"parallel.grouping = {str(parallel.grouping).lower()}"]
    batches = "1 micro-batch" if inspection.micro_batches == 1 else f"{inspection.micro_batches} micro-batches"
    facts = {
        "model": f"{name}: {model.title}, {model.layers} blocks, d {model.dim}, f {model.ffn_dim}"
        + (f", r {model.rank}" if model.rank else ""),
        "parameters": f"{format_count(inspection.parameters)}; per process: {format_count(inspection.parameters_per_process)}",
        "layout": ", ".join(mesh),
        "tokens": f"{inspection.tokens} per micro-batch (T = {train.micro_batch} x {train.seq_len}"
        f"{f' / CP {parallel.cp}' * (parallel.cp > 1)}), {batches} per step",
        "residual": f"{_shape(inspection.residual)}  {_RESIDUAL[inspection.spec.residual]}",
        "activations": f"{_shape(inspection.heads)} heads, {_shape(inspection.channels)} channels",
    }
    if parallel.pp > 1:
        lengths = ", ".join(str(stage.layers) for stage in stages(config))
        shown = []
        for stage in inspection.stages:
            parts = ["embedding"] * stage.has_embedding + [f"blocks {stage.numbers[0]}-{stage.numbers[-1]}"]
            shown.append(", ".join(parts + ["head"] * stage.has_head))
        facts["stages"] = f"{lengths} blocks; pipeline rank {inspection.pp_rank}: {' and '.join(shown)}"
    for key, value in facts.items():
        print_fact(console, key, value)
    for note in notes:
        print_fact(console, "note:", note, 6)
    _print_weights(console, inspection)
    for phase, title in _PHASES.items():
        _print_collectives(console, [row for row in inspection.rows if row.collective.phase == phase], title)
    _print_collectives(console, inspection.exact_rows, f"every {config.optim.exact_every} steps, in the exact step")
    if not inspection.rows:
        print("\nno collectives: one process")
        return
    console.print("\nbytes sent by one process", style="bold")
    totals = {
        "per token": inspection.bytes_per_token,
        "per micro-batch": inspection.bytes_per_micro_batch,
        "per step": inspection.bytes_per_step,
    }
    if inspection.exact:
        totals["per exact step"] = inspection.bytes_per_step + inspection.bytes_of_exact_step
    for per, sent in totals.items():
        print(f"  {per:<15}{format_bytes(sent):>9}")


_RESIDUAL = {"tokens": "sharded along tokens", "hidden": "sharded along hidden", "replicated": "replicated"}
_PHASES = {"forward": "forward", "recompute": "recompute", "backward": "backward", "step": "once per step"}
_DTYPES = {"bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}


def _print_weights(console: "Console", inspection: "Inspection") -> None:
    model = inspection.config.model
    alike = "the same in every block"
    if len({groups(model, layer) for layer in different_blocks(model)}) > 1:
        alike = f"of block {inspection.layer}; others differ"
    console.print(f"\nweights ({alike})", style="bold")
    table = new_table(("name", "global", "local", "sharding"), right=("global", "local"))
    for weight in inspection.weights:
        cells = (weight.name.removeprefix("layers.N."), _shape(weight.shape), _shape(weight.local), weight.where)
        table.add_row(
            *cells, style="dim" if weight.placement.dim is None and inspection.config.parallel.tp > 1 else None
        )
    print_table(console, table)


def _print_collectives(console: "Console", rows: "Sequence[CollectiveRow]", title: str) -> None:
    """Prints the collectives in one phase of a step, summed over blocks and micro-batches."""
    if not rows:
        return
    console.print(f"\ncollectives, {title}", style="bold")
    numbers = ("bytes", "count", "total")
    table = new_table(("place", "kind", "shape", "dtype", *numbers), right=("shape", *numbers))
    for row in rows:
        c = row.collective
        times, sizes = f"x {row.count:,}", (format_bytes(c.sent_bytes), format_bytes(row.total_bytes))
        table.add_row(c.place, c.kind, _shape(c.shape), _DTYPES[c.dtype], sizes[0], times, sizes[1])
    print_table(console, table)


def print_memory(config: Config, predicted: "Memory", peak: "PeakMemory") -> None:
    """Prints the memory of one process between the forward and backward passes, and at the peak."""
    from boost.plan.categories import CATEGORIES

    console = result_console(100)
    train = config.train
    every = f", every {train.recompute_every} blocks" if train.recompute_every > 1 else ""
    console.print(f"\nmemory of one process, train.recompute = {train.recompute}{every}", style="bold")
    sides = predicted.by_category, peak.by_category
    headings = ("predicted", "at the peak")
    table = new_table(("category", *headings, "description"), right=headings)
    table.columns[-1].style = "dim"
    for category, words in CATEGORIES.items():
        if any(side.get(category) for side in sides):
            table.add_row(
                category, *(format_bytes(side[category]) if category in side else "" for side in sides), words
            )
    table.add_row("total", *(format_bytes(sum(side.values())) for side in sides), style="bold")
    print_table(console, table)
    console.print(
        f"The peak is predicted to occur in this phase: {peak.during}. The column 'predicted' shows memory between the passes."
    )


def _shape(shape: tuple[int, ...]) -> str:
    return f"[{', '.join(str(n) for n in shape)}]"
