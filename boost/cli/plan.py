"""`boost plan`: finds the fastest layout, mesh and batch for a number of GPUs, predicts its speed, and explains why it wins."""

import argparse
import math
import re
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from boost.cli.plan_model import hugging_face_folder, source_of, tree_of_model
from boost.cli.plan_progress import progress, without_gc
from boost.config import Config, load, presets
from boost.config.architecture import parameter_count
from boost.config.load import change, parse_overrides, validated
from boost.config.rules import check
from boost.config.schema import ParallelConfig
from boost.drawing import needs_matplotlib
from boost.errors import ConfigError

if TYPE_CHECKING:
    from boost.plan.candidates import Request
    from boost.plan.hardware import Hardware
    from boost.plan.search import Plan, Search

SEARCHED = ("train.micro_batch", "train.recompute", "train.recompute_every")
"""Keys to search in addition to parallel.*, unless the command line fixes them."""

USUAL_TOKENS = ((1e9, 500_000), (5e9, 1_000_000), (20e9, 2_000_000), (math.inf, 4_000_000))
"""(maximum number of parameters, tokens per step)."""

LEAST_RECIPE = 100_000
"""A preset with at least this many tokens per step is a training recipe and not only a model size."""

SLACK = 0.05
"""Maximum relative change when a global batch in tokens is rounded to a divisible number of sequences."""


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
        "  boost plan run.toml --gpu a100-80g --svg run.svg                                   explain your configuration\n"
        "  boost plan --model 7b --gpus 4 --gpu a100-80g --longest-sequence                   or --largest-batch\n"
        "  boost plan --model 7b --gpus 8 --gpu h100-80g --seq 4096 --by-tokens               where one layout overtakes another\n"
        "  boost plan --family cola --gpus 8 --gpu a100-80g --seq 4096 --largest-model\n\n"
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
    _add_outputs(parser)
    _add_questions(parser)
    parser.set_defaults(takes_overrides=True)
    return parser


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--explain", action="store_true", help="break down time and memory of the best plan")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the breakdown (.svg, .png or .pdf)")
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="write the best plan as a configuration for 'boost train'"
    )
    parser.add_argument(
        "--export",
        nargs=2,
        metavar=("FRAMEWORK", "FILE"),
        help="write the best plan of a dense model for torchtitan (TOML) or megatron (flags)",
    )
    parser.add_argument("--force", action="store_true", help="let --write and --export overwrite existing files")


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


def _add_questions(parser: argparse.ArgumentParser) -> None:
    questions = parser.add_mutually_exclusive_group()
    questions.add_argument("--longest-sequence", action="store_true", help="find the longest sequence that fits")
    questions.add_argument("--largest-batch", action="store_true", help="find the largest micro-batch that fits")
    questions.add_argument(
        "--largest-model",
        action="store_true",
        help="find the largest boost-* shape that fits, and its maximum number of blocks",
    )
    questions.add_argument(
        "--by-tokens",
        action="store_true",
        help="find the fastest layout by tokens per step and TP size (--svg FILE draws it)",
    )
    questions.add_argument(
        "--by-gpus",
        action="store_true",
        help="find the fastest layout by tokens per step and number of GPUs up to --gpus (--svg FILE draws it)",
    )
    questions.add_argument(
        "--families",
        action="store_true",
        help="compare the best plan of the dense model with the best plan of each low-rank family of the same shape",
    )


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
    _require_files(args)
    if args.svg is not None:
        needs_matplotlib()
    if args.config is not None:
        return _explain_config(args, hardware)
    if args.largest_model and args.model is None:
        args.model = "1b"
    for name in ("model", "gpus"):
        if getattr(args, name) is None:
            raise ConfigError(f"--{name} is missing; example: boost plan --model 7b --gpus 16 --gpu {args.gpu}")
    if args.families:
        return _families(args, hardware)
    request = request_of(args, hardware)
    if args.by_tokens or args.by_gpus:
        from boost.cli import plan_grids

        return (plan_grids.by_tokens if args.by_tokens else plan_grids.by_gpus)(args, request)
    if args.longest_sequence or args.largest_batch or args.largest_model:
        return _question(args, request)
    return _best(args, request)


def _require_files(args: argparse.Namespace) -> None:
    """Raises ConfigError for an unknown framework, and for output files that already exist unless --force is given."""
    from boost.plan.export import FRAMEWORKS

    if args.export is not None and args.export[0] not in FRAMEWORKS:
        raise ConfigError(f"--export {args.export[0]} is not a framework; valid values: {', '.join(FRAMEWORKS)}")
    for path in (args.write, Path(args.export[1]) if args.export else None):
        if path is not None and path.exists() and not args.force:
            raise ConfigError(f"{path} already exists; add --force to overwrite it")


def _best(args: argparse.Namespace, request: "Request") -> int:
    from boost.cli import plan_report
    from boost.cli.plan_write import written
    from boost.plan.compare import alternatives, notes
    from boost.plan.fewer import with_fewer
    from boost.plan.search import Search, require_legal

    begun = time.perf_counter()
    with without_gc():
        with progress("configurations") as tick:
            search = Search(request, tick)
        require_legal(search)
        with progress("comparing") as tick:
            best, remarks = search.fastest(), list[str]()
            if (better := with_fewer(request, best)) is not None:
                remarks.append(_fewer_gpus_note(request, best, better[1]))
                search, best = better
                request = search.request
            if best is None:
                raise ConfigError(_fits_nowhere(args, search))
            others = alternatives(search, best, tick)
            dense = _dense(request)
    remarks += notes(search, best, others, dense)
    command = plan_report.command_line(args, best.config, source_of(args.model))
    report = plan_report.PlanReport(
        args, request, search, best, others[: args.top], remarks, command, time.perf_counter() - begun
    )
    if args.write is not None:
        args.write.write_text(written(report), encoding="utf-8", newline="\n")
    if args.export is not None:
        from boost.plan.export import exported

        Path(args.export[1]).write_text(exported(best.config, args.export[0]), encoding="utf-8", newline="\n")
    if args.json:
        plan_report.print_json(report)
    else:
        plan_report.print_report(report)
    if args.explain or args.svg is not None:
        _explained(args, best, request.hardware)
    return 0


def _fewer_gpus_note(request: "Request", best: "Plan | None", fewer: "Plan") -> str:
    from boost.format import format_seconds
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
    from boost.plan.search import Plan, max_peak
    from boost.plan.timing import predict

    config = load(args.config, args.overrides)
    held, pp_rank = max_peak(config, hardware.is_gpu)
    plan = Plan(config, predict(config, hardware), held, pp_rank, hardware.usable_bytes, args.memory_margin)
    if args.json:
        import json

        from boost.cli.plan_report import SCHEMA, as_json, asked_words

        print(
            json.dumps({"schema": SCHEMA, "argv": asked_words(args), **as_json(plan, args.price, hardware)}, indent=2)
        )
    else:
        from boost.cli.plan_report import console, print_plan

        print_plan(console(), plan, args, hardware)
    _explained(args, plan, hardware)
    return 0


def _explained(args: argparse.Namespace, plan: "Plan", hardware: "Hardware") -> None:
    from boost.cli import plan_explain

    if not args.json:
        plan_explain.print_explanation(plan, hardware)
    if args.svg is not None:
        name = Path(args.config or args.model).name.removesuffix(".toml")
        plan_explain.draw(plan, name, args.gpu, args.svg)
        if not args.json:
            print(f"\n{args.svg} written")


def _families(args: argparse.Namespace, hardware: "Hardware") -> int:
    from boost.cli.plan_families import best_of, families, print_families

    if args.family is not None:
        raise ConfigError("--families compares all families; remove --family")
    found = {}
    with without_gc():
        for name in families():
            with progress(name) as tick:
                request = request_of(argparse.Namespace(**{**vars(args), "family": name}), hardware)
                if (plan := best_of(request, tick)) is not None:
                    found[name] = plan
    print_families(args, hardware, found)
    return 0


def _question(args: argparse.Namespace, request: "Request") -> int:
    from boost.cli import plan_report
    from boost.plan import questions

    with progress("configurations") as tick:
        if args.largest_model:
            shapes = [(name, _shape(args, name)) for name in presets() if name.startswith("boost-")]
            found = questions.largest_model(request, shapes)
            if found is None:
                raise ConfigError(
                    f"none of the boost-* models fits on {args.gpus} x {args.gpu}; use more GPUs or a shorter --seq"
                )
            name, model = found
            args.model = name
            request = replace(request, base=request.base.model_copy(update={"model": model}))
            answers = questions.max_layers(request, tick)
            what = f"blocks of the {name} shape"
        elif args.longest_sequence:
            answers, what = questions.longest_sequence(request, tick), "tokens per sequence"
        else:
            answers, what = questions.largest_batch(request, tick), "sequences per micro-batch"
    plan_report.print_answers(args, request, answers, what)
    return 0


def _shape(args: argparse.Namespace, name: str) -> Any:
    return base_of(argparse.Namespace(**{**vars(args), "model": name}))[0].model


def request_of(args: argparse.Namespace, hardware: "Hardware") -> "Request":
    """Builds the search request. Raises ConfigError."""
    from boost.plan.candidates import Request

    base, fixed = base_of(args)
    return Request(base, args.gpus, hardware, fixed, args.memory_margin)


def base_of(args: argparse.Namespace) -> tuple[Config, frozenset[str]]:
    """Returns (base configuration, fixed keys)."""
    changes = dict(parse_overrides(args.overrides))
    for key, value in (
        ("model.family", args.family), ("train.compute_dtype", args.compute_dtype), ("train.steps", args.steps),
        ("train.seq_len", args.seq),
    ):  # fmt: skip
        if value is not None:
            changes[key] = value
    tree = tree_of_model(args.model)
    tree.pop("parallel", None)
    train = tree.setdefault("train", {})
    for key in SEARCHED:
        train.pop(key.partition(".")[2], None)
    train.update(compute_dtype="bfloat16", micro_batch=1)
    change(tree, changes)
    base = validated(tree)
    alone = {"parallel": ParallelConfig(layout="single"), "train": base.train.model_copy(update={"micro_batch": 1})}
    words = args.global_batch or usual_batch(base, changes, args.model)
    if words is not None:
        sequences = global_batch(words, base.train.seq_len, args.gpus)
        alone["train"] = alone["train"].model_copy(update={"global_batch": sequences})
        base = base.model_copy(update={"train": base.train.model_copy(update={"global_batch": sequences})})
    check(
        base.model_copy(
            update={**alone, "train": alone["train"].model_copy(update={"recompute": "none", "recompute_every": 1})}
        )
    )
    return base, frozenset(key for key in changes if key.startswith("parallel.") or key in SEARCHED)


def usual_batch(base: Config, changes: Mapping[str, Any], model: str) -> str | None:
    """Returns the default of --global-batch: None to keep the batch of a file or recipe, otherwise GPT-3's for this number of
    parameters (arXiv 2005.14165, table 2.1)."""
    recipe = base.train.global_batch * base.train.seq_len >= LEAST_RECIPE and hugging_face_folder(model) is None
    if recipe or model.endswith(".toml") or "train.global_batch" in changes:
        return None
    parameters = parameter_count(base.model)
    tokens = next(tokens for most, tokens in USUAL_TOKENS if parameters <= most)
    return f"{tokens}-tokens"


def global_batch(words: str, seq_len: int, gpus: int) -> int:
    """Parses '256' (sequences) or '1M-tokens', '500k' (tokens, rounded by at most SLACK to a divisible number of sequences)."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgG]?)(-tokens|-sequences)?", words.replace(",", "").replace("_", ""))
    if not found:
        raise ConfigError(
            f"--global-batch = '{words}' is not a number of sequences (256) or tokens (1M-tokens, 500k-tokens, 4M)"
        )
    number, unit, of = found.groups()
    amount = float(number) * {"": 1, "k": 1e3, "m": 1e6, "g": 1e9}[unit.lower()]
    if of != "-tokens" and (not unit or of == "-sequences"):
        if amount < 1 or amount != int(amount) or amount > 2**31:
            raise ConfigError(f"--global-batch = '{words}': sequences must be an integer from 1 to {2**31:,}")
        return int(amount)
    wanted = amount / seq_len
    if wanted < 1:
        raise ConfigError(
            f"--global-batch = '{words}' is less than one sequence of {seq_len:,} tokens; smallest valid value: {seq_len}-tokens"
        )
    if wanted > 2**31:
        raise ConfigError(f"--global-batch = '{words}' is too large; largest valid value: {2**31} sequences")
    reach = range(max(round(wanted * (1 - SLACK)), 1), min(round(wanted * (1 + SLACK)), round(wanted) + 5000) + 1)

    def rank(n: int) -> tuple[bool, int, float]:
        return n % gpus == 0, n & -n, -abs(n - wanted)

    return max(reach, key=rank, default=round(wanted))


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


def _fits_nowhere(args: argparse.Namespace, search: "Search") -> str:
    from boost.format import format_bytes
    from boost.plan.compare import choices, mesh
    from boost.plan.questions import where_it_fits

    nearest = search.smallest()
    assert nearest is not None
    config, ways = nearest.config, where_it_fits(search)
    return (
        f"{args.model} ({config.model.family}) does not fit on {args.gpus} x {args.gpu} in any configuration: even the smallest "
        f"({mesh(config.parallel)}, {choices(config)}) needs {format_bytes(nearest.memory)} of {format_bytes(nearest.usable)}; "
        + (f"it fits {ways}" if ways else "it does not fit on more GPUs either; use a smaller model")
    )
