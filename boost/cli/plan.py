"""`boost plan`: finds the fastest layout, mesh and batch for a number of GPUs, predicts its speed, and explains why it wins."""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from boost.cli.plan_request import hugging_face_folder, request_of, source_of
from boost.cli.terminal import searching
from boost.config import load
from boost.config.load import validated
from boost.drawing import needs_matplotlib
from boost.errors import ConfigError
from boost.format import format_bytes, format_seconds

if TYPE_CHECKING:
    from boost.plan.candidates import Request
    from boost.plan.hardware import Hardware
    from boost.plan.search import Plan


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "plan",
        help="find the fastest layout, mesh and batch for your GPUs",
        usage="boost plan --model M --gpus N --gpu PROFILE [--global-batch B] [--seq L] [--explain] [--write run.toml]\n"
        "       boost plan CONFIG --gpu PROFILE [--section.key value ...]      explain one configuration",
        description="Searches all valid configurations of a model on N GPUs for the fastest one that fits in memory, and\n"
        "explains why the others lose. Plans for 'boost train': other frameworks differ in time, memory and what is legal.\n"
        "Predicts only: starts no processes and takes seconds.",
        epilog="examples:\n"
        "  boost plan --model 7b --gpus 16 --gpu a100-80g --global-batch 1M-tokens --seq 4096\n"
        "  boost plan --model 7b --gpus 16 --gpu a100-80g --global-batch 256 --price 1.8      with the cost per 1B tokens\n"
        "  boost plan --model 7b --gpus 16 --gpu a100-80g --parallel.tp 4 --explain           explain the best with TP 4\n"
        "  boost plan --model 7b --gpus 16 --gpu a100-80g --write run.toml                    then: boost train run.toml\n"
        "  boost plan run.toml --gpu a100-80g                                                 explain your configuration\n"
        "  boost plan --model 7b --gpus 8 --gpu h100-80g --seq 4096 --by-tokens               where each layout is fastest\n\n"
        "--model takes a size (1b, 3b, 7b, 13b, 30b), a preset (llama3-8b, ...; see 'boost config'), a TOML file (its\n"
        "[parallel] and searched fields are ignored), or the config.json or folder of a Hugging Face model.\n"
        "--parallel.KEY, --train.micro_batch and --train.recompute restrict the search to a value.\n"
        "'boost plan calibrate' profiles this machine.\n"
        "A global batch is in sequences (256) or tokens (1M-tokens, 500k-tokens). Units are decimal: 1 GB = 10^9 bytes.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", metavar="CONFIG", nargs="?", help="preset or TOML file to explain without a search")
    parser.add_argument("--model", metavar="M", help="size, preset, TOML file, or Hugging Face folder")
    parser.add_argument("--family", metavar="F", help="short for --model.family")
    parser.add_argument("--gpus", type=int, metavar="N", help="number of GPUs")
    parser.add_argument(
        "--gpu", metavar="PROFILE", help="hardware profile: h100, a100-80g-8, a .toml file, or a datasheet line"
    )
    parser.add_argument("--per-node", type=int, metavar="N", help="GPUs per node (default: from the profile)")
    parser.add_argument("--global-batch", metavar="B", help="sequences or tokens per step (default: from the model)")
    parser.add_argument("--seq", type=int, metavar="L", help="tokens per sequence (default: from the model)")
    parser.add_argument("--steps", type=int, metavar="N", help="optimizer steps of the run")
    parser.add_argument(
        "--compute-dtype",
        metavar="D",
        help="short for --train.compute_dtype (default: bfloat16)",
    )
    parser.add_argument(
        "--memory-margin",
        metavar="M",
        type=_fraction,
        default=0.08,
        help="fraction of usable memory to leave free for fragmentation and prediction error: 8%% (default), 0.08, 0",
    )
    parser.add_argument("--price", type=float, metavar="P", help="USD per GPU-hour; prints the cost per 1B tokens")
    parser.add_argument("--top", type=int, default=8, metavar="K", help="number of runners-up to show (default 8)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--explain", action="store_true", help="break down time and memory of the best plan")
    parser.add_argument(
        "--svg", type=Path, metavar="FILE", help="draw the grid of --by-tokens or --by-gpus (.svg, .png or .pdf)"
    )
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="write the best plan as a configuration for 'boost train'"
    )
    parser.add_argument("--force", action="store_true", help="let --write overwrite an existing file")
    grids = parser.add_mutually_exclusive_group()
    grids.add_argument(
        "--by-tokens",
        action="store_true",
        help="find the fastest layout by tokens per step and TP size",
    )
    grids.add_argument(
        "--by-gpus",
        action="store_true",
        help="find the fastest layout by tokens per step and number of GPUs up to --gpus",
    )
    parser.set_defaults(takes_overrides=True)
    return parser


def _fraction(text: str) -> float:
    """Parses '8%' or '0.08': at least 0 and less than 1."""
    number = text.removesuffix("%")
    try:
        value = float(number) / (100 if number != text else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a fraction below 1; examples: 8%, 0.08")
    return value


def run(args: argparse.Namespace) -> int:
    from boost.plan.hardware import load_hardware, names

    if args.gpu is None:
        raise ConfigError(f"--gpu is missing; pass one of {', '.join(names())}, or a .toml file")
    hardware = load_hardware(args.gpu)
    for name in ("per_node", "gpus", "seq", "steps", "top"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} = {value} is too small; smallest valid value: 1")
    if args.price is not None and not args.price > 0:
        raise ConfigError(f"--price = {args.price:g} must be greater than 0 (USD per GPU-hour)")
    if args.compute_dtype is None and args.config is None and "bfloat16" not in hardware.speeds.gemm:
        args.compute_dtype = next(iter(hardware.speeds.gemm))  # a CPU profile
    if args.per_node is not None:
        hardware = hardware.model_copy(update={"per_node": args.per_node})
    if args.write is not None and args.write.exists() and not args.force:
        raise ConfigError(f"{args.write} already exists; add --force to overwrite it")
    if args.svg is not None:
        if not (args.by_tokens or args.by_gpus):
            raise ConfigError("--svg draws a grid; add --by-tokens or --by-gpus")
        needs_matplotlib()
    if args.config is not None:
        return _explain_config(args, hardware)
    for name in ("model", "gpus"):
        if getattr(args, name) is None:
            raise ConfigError(f"--{name} is missing; example: boost plan --model 7b --gpus 16 --gpu {args.gpu}")
    request = request_of(args, hardware)
    if args.by_tokens or args.by_gpus:
        from boost.cli.plan_grids import print_grid

        return print_grid(args, request)
    return _best(args, request)


def _best(args: argparse.Namespace, request: "Request") -> int:
    from boost.cli import plan_report
    from boost.plan.compare import alternatives, choices, mesh, notes
    from boost.plan.search import Search, require_legal, where_it_fits, with_fewer_gpus

    begun = time.perf_counter()
    with searching("configurations") as tick:
        search = Search(request, tick)
    require_legal(search)
    with searching("comparing") as tick:
        best, remarks = search.fastest(), list[str]()
        if (better := with_fewer_gpus(request, best)) is not None:
            remarks.append(_fewer_gpus_note(request, best, better[1]))
            search, best = better
            request = search.request
        if best is None:
            nearest = search.smallest()
            assert nearest is not None
            config, ways = nearest.config, where_it_fits(search)
            raise ConfigError(
                f"{args.model} ({config.model.family}) does not fit on {args.gpus} x {args.gpu} in any configuration: even the "
                f"smallest ({mesh(config.parallel)}, {choices(config)}) needs {format_bytes(nearest.memory)} of "
                f"{format_bytes(nearest.usable)}; "
                + (f"it fits {ways}" if ways else "it does not fit on more GPUs either; use a smaller model")
            )
        others = alternatives(search, best, tick)
        dense = _dense(request)
    remarks += notes(search, best, others, dense)
    source = source_of(args.model)
    if args.write is not None:
        command = ["train", str(args.write)]
    elif hugging_face_folder(source) is not None:
        command = ["train", "run.toml"]  # written by --write run.toml, because no preset has this shape
    else:
        command = ["train", source, *plan_report.flags(best.config, source)]
    report = plan_report.PlanReport(
        args, request, search, best, others[: args.top], remarks, command, time.perf_counter() - begun
    )
    if args.write is not None:
        args.write.write_text(plan_report.written(report), encoding="utf-8", newline="\n")
    if args.json:
        plan_report.print_json(report)
        return 0
    plan_report.print_report(report)
    if args.explain:
        from boost.cli.plan_explain import print_explanation

        print_explanation(best, request.hardware)
    return 0


def _fewer_gpus_note(request: "Request", best: "Plan | None", fewer: "Plan") -> str:
    from boost.plan.compare import choices, mesh

    used, batch = fewer.config.parallel.world_size, request.base.train.global_batch
    words = f"Uses {used} of {request.gpus} GPUs: {batch:,} sequences do not divide evenly over {request.gpus}"
    if best is None:
        return f"{words}, and no configuration that uses all of them fits."
    return (
        f"{words}; the fastest configuration that uses all of them ({mesh(best.config.parallel)}, {choices(best.config)}) takes "
        f"{format_seconds(best.time.seconds)}, {best.time.seconds / fewer.time.seconds - 1:.0%} longer."
    )


def _explain_config(args: argparse.Namespace, hardware: "Hardware") -> int:
    """Explains one configuration without a search."""
    from boost.cli.plan_explain import print_explanation
    from boost.cli.plan_report import SCHEMA, as_json, asked_words, console, print_plan
    from boost.plan.search import Plan, max_peak
    from boost.plan.timing import predict

    config = load(args.config, args.overrides)
    held, pp_rank = max_peak(config, hardware.is_gpu)
    plan = Plan(config, predict(config, hardware), held, pp_rank, hardware.usable_bytes, args.memory_margin)
    if args.json:
        facts = {"schema": SCHEMA, "argv": asked_words(args), **as_json(plan, args.price, hardware)}
        print(json.dumps(facts, indent=2))
    else:
        print_plan(console(), plan, args, hardware)
        print_explanation(plan, hardware)
    return 0


def _dense(request: "Request") -> "Plan | None":
    """Returns the fastest plan of the dense model of the same shape, or the one with the least memory if none fits."""
    from boost.plan.search import Search

    base = request.base
    if not base.model.low_rank or request.fixed & {"parallel.layout", "train.recompute"} or base.optim.for_factors:
        return None
    model = base.model.model_dump(exclude={"rank", "ranks", "latent_act", "factor_init", "over", "gate", "mlp_silu"})
    tree = base.model_dump(exclude_none=True) | {"model": {**model, "family": "dense"}}
    other = Search(replace(request, base=validated(tree)))
    return other.fastest() or other.smallest()
