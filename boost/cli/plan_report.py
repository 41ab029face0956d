"""Runs the search of `boost plan` and reports it as text, JSON or a configuration, with the command that runs the best plan."""

import argparse
import itertools
import json
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from boost.cli.terminal import new_table, print_fact, print_table, result_console, searching
from boost.config import Config, to_toml
from boost.config.architecture import parameter_count
from boost.config.load import change, dense_of, parse_overrides, read_source, tags, validated
from boost.config.schema import TOKENS_PER_PARAMETER
from boost.data.store import STORE_FILE, read_meta
from boost.errors import ConfigError
from boost.files import replace_text
from boost.format import format_bytes, format_count, format_rate, format_seconds
from boost.plan.candidates import Request
from boost.plan.categories import CATEGORIES
from boost.plan.explain import Alternative, alternatives, choices, mesh, notes, products
from boost.plan.hardware import Hardware, collective_seconds, link_of
from boost.plan.inspection import inspect
from boost.plan.search import TIE, TIE_SECONDS, Plan, Search, max_peak, require_legal
from boost.plan.step_time import PARTS, fit_probability, spread_of, unpublished
from boost.plan.timing import Predictor, predict
from boost.plan.ways import fewer_gpus, other_batches, way_out
from boost.text import printable

if TYPE_CHECKING:
    from rich.console import Console


SOFTWARE = "boost train as it compiles by default, with torch's attention"
"""The software whose speed is predicted."""

EVALUATIONS = 20
"""Default number of evaluations in a run."""

EVALUATED = 2**20
"""Default tokens per evaluation. The final evaluation covers the whole split."""

RUNNERS_UP = 8
"""Number of runners-up that are shown."""


@dataclass(frozen=True)
class PlanReport:
    args: argparse.Namespace
    request: Request
    search: Search
    best: Plan
    others: list[Alternative]
    notes: list[str]
    command: list[str]
    """Arguments for `boost`: train and its flags."""
    seconds: float
    """Duration of the search."""


def console() -> "Console":
    """A console as wide as the terminal, or 110 columns for a pipe."""
    return result_console(110)


def search_and_report(args: argparse.Namespace, request: Request, source: str, folder: Path | None) -> int:
    """Searches, and prints or writes the best plan. `source`: preset, file or folder of the model; `folder`: the source, if it is a
    Hugging Face folder. Raises ConfigError if no configuration is valid or fits."""
    begun = time.perf_counter()
    with searching("configurations") as tick:
        search = Search(request, tick)
    require_legal(search)
    with searching("comparing") as tick:
        fastest = search.fastest()
        if fastest is None:
            nearest = search.smallest()
            assert nearest is not None
            config, way = nearest.config, way_out(search)
            raise ConfigError(
                f"{args.model} ({config.model.family}) does not fit on {args.gpus} x {args.gpu} in any configuration: even the "
                f"smallest ({mesh(config.parallel)}, {choices(config)}) needs {format_bytes(nearest.memory)} "
                f"(usable: {format_bytes(nearest.usable)}); "
                + (f"it fits {way}" if way else "it does not fit on more GPUs either; use a smaller model")
            )
        best, remarks = _simplest(search, fastest)
        others = alternatives(search, best, tick)
        if (fewer := fewer_gpus(search, best, [other.plan for other in others])) is not None:
            few, ties = _simplest(*fewer)
            used = f"Using only {few.time.devices} of the {best.time.devices} GPUs"
            ways = [
                f"{format_seconds(p.time.seconds)} ({mesh(p.config.parallel)}; {choices(p.config)})"
                for p in (few, best)
            ]
            if few.time.seconds < best.time.seconds:
                search, best = fewer[0], few
                request, others = search.request, alternatives(search, best, tick)
                remarks = ties
                remarks.append(f"{used} is faster than using all of them: {ways[0]} per step instead of {ways[1]}.")
            else:
                longer = few.time.seconds / best.time.seconds - 1
                remarks.append(f"{used} takes just {longer:.1%} longer than using all of them: {ways[0]} per step.")
        if even := list(other_batches(search, best)):
            sizes = " or ".join(f"{plan.config.train.global_batch:,}" for plan in even)
            gains = " and ".join(f"{1 - best.time.tokens_per_second / p.time.tokens_per_second:.0%}" for p in even)
            remarks.append(
                f"{best.config.train.global_batch:,} sequences do not divide over {request.gpus} GPUs: {sizes} take {gains} less "
                "time per sequence."
            )
        dense = _dense(search)
    remarks += notes(search, best, others, dense)
    if args.write is not None:
        command = ["train", str(args.write)]
    elif folder is not None:
        command = ["train", "run.toml"]  # written by --write run.toml, because no preset has this shape
    else:
        command = ["train", source, *flags(best.config, source)]
    seconds = time.perf_counter() - begun
    report = PlanReport(args, request, search, best, others[:RUNNERS_UP], remarks, command, seconds)
    if args.write is not None:
        replace_text(args.write, written(report))
    if args.json:
        print_json(report)
        return 0
    print_report(report)
    if args.explain:
        print_explanation(best, request.hardware)
    return 0


def _simplest(search: Search, fastest: Plan) -> tuple[Plan, list[str]]:
    """The simplest plan that ties with the fastest, and a note if they differ."""
    best, config = search.simplest(fastest), fastest.config
    faster = 1 - fastest.time.seconds / best.time.seconds
    note = (
        f"A near-tie: {mesh(config.parallel)} ({choices(config)}) takes {faster:.1%} less time, but among plans within "
        f"{TIE:.0%} or {format_seconds(TIE_SECONDS)} of the fastest, the planner picks the simplest."
    )
    return best, [note] * (best is not fastest)


def explain(config: Config, args: argparse.Namespace, hardware: Hardware) -> int:
    """Explains one configuration without a search."""
    held, pp_rank = max_peak(config, hardware.is_gpu)
    usable = hardware.usable_in(config.parallel)
    plan = Plan(config, predict(config, hardware), held, pp_rank, usable, args.memory_margin)
    if args.json:
        print(json.dumps({"schema": SCHEMA, "argv": asked_words(args), **as_json(plan, hardware)}, indent=2))
    else:
        print_plan(console(), plan, hardware)
        print_explanation(plan, hardware)
    return 0


def _dense(search: Search) -> Plan | None:
    """Returns the fastest plan for the dense model of the same shape, or the one with the least memory if none fits."""
    request, base = search.request, search.request.base
    if not base.model.low_rank or request.fixed & {"parallel.layout", "train.recompute"} or base.optim.for_factors:
        return None
    other = Search(replace(request, base=dense_of(base)), known=search)
    return other.fastest() or other.smallest()


def flags(config: Config, source: str) -> list[str]:
    """Returns the `--section.key value` arguments that turn a preset or file into `config`."""
    words: list[str] = []
    tree = read_source(source)
    before, after = validated(tree).model_dump(), config.model_dump()
    for section, tag in tags():  # class selectors first: they change the defaults of other keys
        if after[section][tag] != before[section][tag]:
            words += [f"--{section}.{tag}", after[section][tag]]
            change(tree, {f"{section}.{tag}": after[section][tag]})
            before = validated(tree).model_dump()
    for section, table in after.items():
        for key, value in table.items():
            if value != before[section][key]:
                words += [f"--{section}.{key}", str(value).lower() if isinstance(value, bool) else str(value)]
    return words


def launch(report: PlanReport) -> list[str]:
    parallel, hardware = report.best.config.parallel, report.request.hardware
    per_node = hardware.per_host or hardware.per_node
    command, gpus = report.command, parallel.world_size
    if gpus <= per_node:
        return _wrapped("boost", command)
    nodes = -(-gpus // per_node)
    words = ["--nnodes", str(nodes), "--nproc-per-node", str(per_node), "--rdzv-backend", "c10d"]
    lines = ["boost launch " + shlex.join([*words, "--rdzv-endpoint", "FIRST_NODE:29400"]) + " \\"]
    lines += ["    " + line for line in _wrapped("--", command)]
    if gpus % per_node:
        lines.append(f"# on the last node: --nproc-per-node {gpus % per_node}")
    return lines


def _wrapped(first: str, words: Sequence[str]) -> list[str]:
    """Wraps a command with backslashes after about 96 characters. A flag stays on the same line as its value."""
    pieces = [first]
    for word in words:
        if word.startswith("--"):
            pieces.append(shlex.quote(word))
        else:
            pieces[-1] += f" {shlex.quote(word)}"
    lines = pieces[:1]
    for piece in pieces[1:]:
        if len(lines[-1]) + len(piece) > 96:
            lines[-1] += " \\"
            lines.append(f"    {piece}")
        else:
            lines[-1] += f" {piece}"
    return lines


def asked_words(args: argparse.Namespace) -> list[str]:
    """Returns the request as arguments for `boost`."""
    words = ["plan"] + ([args.config] if args.config else [])
    names = ("model", "gpus", "gpu", "per_node", "global_batch", "seq")
    for name in names:
        if (value := getattr(args, name)) is not None:
            words += [f"--{name.replace('_', '-')}", str(value)]
    return [*words, *args.overrides]


# JSON.

SCHEMA = 5
"""Version of the --json output; incremented if a key changes its meaning or is removed. 2: intervals, probabilities, both MFUs.
3: without the software stack. 4: without the cost. 5: without the GPU-hours that were asked for."""


def as_json(plan: Plan, hardware: Hardware) -> dict[str, object]:
    """Converts a configuration and its prediction to JSON values, in seconds and bytes."""
    time, spread = plan.time, spread_of(plan.config, hardware)
    return {
        "fits": plan.shortfall <= 0,
        "fits_probability": fit_probability(plan.memory, plan.usable),
        "step_seconds": time.seconds,
        "unpublished": unpublished(plan.config, hardware),
        "step_seconds_interval": [time.seconds * spread.low, time.seconds * spread.high],
        "step_parts": time.parts,
        "tokens_per_second": time.tokens_per_second,
        "mfu": time.mfu,
        "mfu_of_all_scores": time.mfu_of_all_scores,
        "memory_bytes": plan.memory,
        "memory_margin": plan.margin,
        "usable_bytes": plan.usable,
        "memory_by_category": plan.peak.by_category,
        "memory_moment": plan.peak.during,
        "pp_rank": plan.pp_rank,
        "config": plan.config.model_dump(),
    }


def print_json(report: PlanReport) -> None:
    args, search, hardware = report.args, report.search, report.request.hardware
    train = report.best.config.train
    result = {
        "schema": SCHEMA,
        "argv": asked_words(args),
        "model": args.model,
        "gpu": args.gpu,
        "gpus": args.gpus,
        "global_batch": train.global_batch,
        "tokens": train.global_batch * train.seq_len,
        "considered": search.considered,
        "best": as_json(report.best, hardware),
        "runners_up": [
            {"kinds": other.kinds, "why": other.why, **as_json(other.plan, hardware)} for other in report.others
        ],
        "notes": report.notes,
        "command": launch(report),
    }
    print(json.dumps(result, indent=2))


# Text.


def print_report(report: PlanReport) -> None:
    from rich.text import Text

    out, args, model = console(), report.args, report.best.config.model
    rank = f", r {model.rank}" if model.rank else ""
    facts = {
        "model": f"{args.model}: {model.family}, {model.layers} blocks, d {model.dim}, f {model.ffn_dim}{rank}; "
        f"{format_count(parameter_count(model))} parameters",
        "hardware": f"{args.gpus} x {report.request.hardware.title}",
    }
    train = report.best.config.train
    batch = f"{train.global_batch:,} sequences of {train.seq_len:,} tokens ({train.global_batch * train.seq_len:,} tokens) per step"
    if args.global_batch is None:
        batch += ", the default for this model; change it with --global-batch, such as 1M-tokens"
    elif args.global_batch != str(train.global_batch):
        batch += f" (from {args.global_batch}, rounded to a number of sequences that divides evenly)"
    facts["batch"] = batch
    for key, value in facts.items():
        print_fact(out, key, value)
    effort = f"{report.search.considered:,} configurations searched in {report.seconds:.1f} s"
    out.print(Text(f"\nfastest configuration that fits ({effort})", style="bold"))
    print_plan(out, report.best, report.request.hardware)
    if "train.steps" in asked_keys(args):
        seconds = train.steps * report.best.time.seconds
        hours = seconds * report.best.time.devices / 3600
        print_fact(out, "  run", f"{train.steps:,} steps take {format_seconds(seconds)}, {hours:,.1f} GPU-hours")
    written = " (after --write run.toml)" * (report.command == ["train", "run.toml"] and args.write is None)
    out.print(f"\ncommand{written}", style="bold")
    for line in launch(report):
        print(printable(f"  {line}"))
    _print_others(out, report)
    if report.notes:
        out.print()
    for note in report.notes:
        out.print(Text(f"- {note}"))
    if args.write is not None:
        print(printable(f"\n{args.write} written; settings not decided by the plan:", "\n"))
        for line in undecided(report.best.config, asked_keys(args)):
            print_fact(out, "-", line, 2)


def print_plan(out: "Console", plan: Plan, hardware: Hardware) -> None:
    time, parallel = plan.time, plan.config.parallel
    process = f", pipeline rank {plan.pp_rank}" if parallel.pp > 1 else ""
    room = f"{plan.memory / plan.usable:.0%}"
    if plan.shortfall > 0:
        room = f"OUT OF MEMORY by {format_bytes(plan.shortfall)}"
    spread = spread_of(plan.config, hardware)
    low, high = format_seconds(time.seconds * spread.low), format_seconds(time.seconds * spread.high)
    likely = f"{10 * spread.inside:.0f} in 10 runs take {low} to {high}"
    if lacks := unpublished(plan.config, hardware):
        likely = f"no published run of this kind ({lacks}), so no odds; rough guess: {low} to {high}"
    probability = fit_probability(plan.memory, plan.usable)
    chance = f"{probability:.0%}"
    if not 0.005 < probability < 0.995:
        chance = "over 99%" if probability > 0.5 else "under 1%"
    facts = {
        "mesh": mesh(parallel),
        "choices": choices(plan.config),
        "step": f"{format_seconds(time.seconds)} ({likely}), for {SOFTWARE}",
        "speed": f"{format_rate(time.tokens_per_second)}, MFU {time.mfu:.1%} ({time.mfu_of_all_scores:.1%} counting masked scores)",
        "memory": f"{format_bytes(plan.memory)} of {format_bytes(plan.usable)} usable per GPU ({room}{process}; "
        f"{plan.margin:.0%} left free); fits with a probability of {chance}",
    }
    for key, value in facts.items():
        print_fact(out, f"  {key}", value)
    parts = sorted(time.parts.items(), key=lambda part: -part[1])
    shares = [f"{part} {seconds / time.seconds:.0%}" for part, seconds in parts if seconds >= 0.01 * time.seconds]
    print_fact(out, "  breakdown", ", ".join(shares))


def _print_others(out: "Console", report: PlanReport) -> None:
    from rich.text import Text

    if not report.others:
        return
    out.print("\nrunners-up: the best of every other kind, and why each loses", style="bold")
    headings = ("best of", "step", "", "memory", "configuration, and why it loses")
    table = new_table(headings, right=("step", "", "memory"))
    table.columns[0].max_width = 24
    for other in report.others:
        plan, fits = other.plan, other.plan.shortfall <= 0
        words = Text(f"{mesh(plan.config.parallel)}; {choices(plan.config)}\n")
        words.append(other.why, style="dim" if fits else "red")
        ratio = f"{plan.time.seconds / report.best.time.seconds:.2f} x" if fits else ""
        step = format_seconds(plan.time.seconds) if fits else "-"
        table.add_row("; ".join(other.kinds), step, ratio, format_bytes(plan.memory), words)
    print_table(out, table)


# The configuration that --write writes.


def runnable(config: Config, name: str, asked: frozenset[str]) -> Config:
    """Adds periodic evaluations and a separate run directory to a configuration, unless the user set them."""
    train, run = {}, {}
    if config.train.eval_every == 0 and "train.eval_every" not in asked:
        train["eval_every"] = max(config.train.steps // EVALUATIONS, 1)
        if config.train.eval_tokens == 0 and "train.eval_tokens" not in asked:
            train["eval_tokens"] = max(EVALUATED, config.train.seq_len)
    if config.run.dir == type(config.run)().dir and "run.dir" not in asked:
        run["dir"] = f"runs/{name}"
    return config.changed(train=train, run=run)


def undecided(config: Config, asked: frozenset[str]) -> Iterator[str]:
    """Yields one line per setting that neither the plan nor the user decided."""
    train, optim = config.train, config.optim
    tokens, parameters = train.global_batch * train.seq_len, parameter_count(config.model)
    store = Path(config.data.store)
    known = not config.data.mixture and (store / STORE_FILE).exists()
    if "optim.lr" not in asked:
        yield f"optim.lr = {optim.lr:g} is not tuned for {tokens:,} tokens per step"
    if "train.steps" not in asked:
        whole = train.steps * tokens
        enough = -(-TOKENS_PER_PARAMETER * parameters // tokens)
        once = (
            f", one pass over {store} {-(-read_meta(store)['splits']['train']['tokens'] // tokens):,}" if known else ""
        )
        yield (
            f"train.steps = {train.steps:,} means {format_count(whole)} tokens, {whole / parameters:,.3g} per parameter; "
            f"{TOKENS_PER_PARAMETER} tokens per parameter take {enough:,} steps{once}"
        )
    if not asked & {"data.store", "data.mixture"}:
        yield (
            f"data.store = '{config.data.store}' must be prepared with a tokenizer of at most {config.model.vocab_size:,} tokens "
            "('boost prepare')"
        )
    yield f"checkpoints every {train.save_minutes:g} minutes" + (
        f" and {train.save_every:,} steps" if train.save_every else "; set train.save_every to also save every N steps"
    )


def asked_keys(args: argparse.Namespace) -> frozenset[str]:
    """Dotted keys that the user set: on the command line, or in their own TOML file."""
    keys = {key for key, _ in parse_overrides(args.overrides)}
    if args.model.endswith(".toml"):
        keys |= {f"{section}.{key}" for section, table in read_source(args.model).items() for key in table}
    return frozenset(keys)


def written(report: PlanReport) -> str:
    """Returns the file, with the request, the prediction and undecided settings as comments."""
    best, args = report.best, report.args
    asked = asked_keys(args)
    lines = [
        f"# Chosen by: boost {shlex.join(asked_words(args))}",
        f"# Predicted on {best.config.parallel.world_size} x {args.gpu}: {format_seconds(best.time.seconds)} per step, "
        f"{format_rate(best.time.tokens_per_second)}, MFU {best.time.mfu:.1%}, {format_bytes(best.memory)} of "
        f"{format_bytes(best.usable)} per GPU.",
        "# Not decided by the plan:",
        *(f"# - {line}" for line in undecided(best.config, asked)),
    ]
    return "\n".join(lines) + "\n" + to_toml(runnable(best.config, Path(args.write).stem, asked))


# --explain.

_PHASES = {"forward": "fwd", "recompute": "recompute", "backward": "bwd", "step": "step"}
_BAR = 28
SHOWN = 0.97
"""Fraction of the GEMM and attention time that the table lists."""


def print_explanation(plan: Plan, hardware: Hardware) -> None:
    out = console()
    passes = Predictor(hardware).passes(plan.config)
    rank = max(range(len(passes)), key=lambda rank: passes[rank].total)
    where = f", pipeline rank {rank} (the slowest)" if plan.config.parallel.pp > 1 else ""
    out.print(f"\ntime of a step{where}", style="bold")
    meanings = {part: meaning for part, (meaning, _) in PARTS.items()}
    _print_parts(out, plan.time.parts, {part: format_seconds(s) for part, s in plan.time.parts.items()}, meanings)
    if plan.time.hidden > 0:
        out.print(f"DP and TP collectives overlapped with computation: {format_seconds(plan.time.hidden)}", style="dim")
    _print_products(out, plan, hardware, rank)
    _print_sent(out, plan, hardware, rank)
    where = f", pipeline rank {plan.pp_rank} (the highest)" if plan.config.parallel.pp > 1 else ""
    out.print(f"\npeak memory on one GPU: {plan.peak.during}{where}", style="bold")
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

    whole = sum(parts.values())
    headings = ("part", "amount", "share", "bar", "meaning")
    table = new_table(headings, right=("amount", "share"))
    table.show_header = False
    table.columns[3].width, table.columns[4].style = _BAR, "dim"
    begin = 0.0
    for part, size in parts.items():
        bar = RichBar(whole, begin, begin + size, width=_BAR, color="cyan")
        table.add_row(part, words[part], f"{size / whole:.0%}", bar, meaning[part])
        begin += size
    print_table(out, table)


def _print_products(out: "Console", plan: Plan, hardware: Hardware, rank: int) -> None:
    listed = products(plan.config, hardware, rank)
    # The longest operations, until they cover nearly all of the time.
    before = itertools.accumulate((total.seconds for total in listed), initial=0.0)
    whole = sum(total.seconds for total in listed)
    shown = [total for total, seconds in zip(listed, before, strict=False) if seconds < SHOWN * whole]
    out.print("\nGEMMs and attention per step on one process", style="bold")
    numbers = ("m x n x k", "calls", "TFLOP", "bytes", "FLOP/byte", "time", "of peak")
    table = new_table(("place", "pass", *numbers), right=numbers)
    for total in shown:
        work, flops = total.work, total.calls * total.work.flops
        shape = work.shape if work.shape[0] > 1 else work.shape[1:]
        table.add_row(
            work.place, _PHASES[work.phase], " x ".join(f"{n}" for n in shape), f"{total.calls:,}", f"{flops / 1e12:,.1f}",
            format_bytes(total.calls * work.bytes), f"{work.intensity:,.0f}", format_seconds(total.seconds),
            f"{flops / total.seconds / total.peak_flops:.0%}",
        )  # fmt: skip
    print_table(out, table)
    rest = listed[len(shown) :]
    if rest:
        out.print(f"other shapes ({len(rest)}): {format_seconds(sum(total.seconds for total in rest))}", style="dim")
    out.print(
        "Attention shapes: sequences x heads x key/value heads x tokens x head dimension (x key tokens, if different).",
        style="dim",
    )


def _print_sent(out: "Console", plan: Plan, hardware: Hardware, rank: int) -> None:
    rows, parallel = inspect(plan.config, rank).rows, plan.config.parallel
    out.print("\ncollectives per step on one process", style="bold")
    if not rows:
        out.print("none: one process")
        return
    numbers = ("processes", "count", "sent", "time")
    table = new_table(("axis", "place", "pass", "kind", "over", *numbers), right=numbers)
    for row in rows:
        c = row.collective
        link = link_of(c.axis, parallel, hardware)
        seconds = row.count * collective_seconds(c, parallel, hardware)
        table.add_row(
            c.axis, c.place, _PHASES[c.phase], c.kind, link.name, f"{c.processes}", f"{row.count:,}",
            format_bytes(row.total_bytes), format_seconds(seconds),
        )  # fmt: skip
    print_table(out, table)
