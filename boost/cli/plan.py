"""`boost plan`: finds the fastest layout, mesh and batch for a number of GPUs, predicts its speed, and explains why it wins."""

import argparse
import gc
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING

from boost.cli.terminal import add_options
from boost.config import load, presets
from boost.config.architecture import parameter_count
from boost.config.load import change, parse_overrides, read_source, validated
from boost.config.rules import check
from boost.config.schema import ParallelConfig
from boost.data.store import STORE_FILE, read_meta
from boost.errors import ConfigError
from boost.text import JsonObject

if TYPE_CHECKING:
    from boost.plan.candidates import Request
    from boost.plan.hardware import Hardware


OPTIONS = {
    "--memory-margin FRACTION": "fraction of usable memory to leave free for fragmentation and prediction error (default 0.08)",
    "--json": "print JSON",
    "--explain": "break down the time and memory of the best plan",
    "--write FILE": "write the best plan as a configuration for 'boost train'",
    "--force": "let --write overwrite an existing file",
}


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "plan",
        usage="boost plan --model M --gpus N --gpu PROFILE [--global-batch B] [--seq L] [--explain] [--write run.toml]\n"
        "       boost plan CONFIG --gpu PROFILE [--section.key value ...]      explain one configuration",
        description="Searches all valid configurations of a model on N GPUs for the fastest one that fits in memory, and\n"
        "explains why it is better than the alternatives. Plans for 'boost train': other frameworks differ in time, memory and\n"
        "valid choices. Makes predictions only; starts no processes and takes seconds.",
        epilog="examples:\n"
        "  boost plan --model 7b --gpus 16 --gpu a100-80g --global-batch 1M-tokens --seq 4096\n"
        "  boost plan --model 7b --gpus 16 --gpu a100-80g --parallel.tp 4 --explain           explain the best plan with TP 4\n"
        "  boost plan --model 7b --gpus 16 --gpu a100-80g --write run.toml                    then: boost train run.toml\n"
        "  boost plan run.toml --gpu a100-80g                                                 explain your configuration\n\n"
        "--model takes a size (1b, 3b, 7b, 13b, 30b), a preset (llama3-8b, ...; see 'boost config'), a TOML file (its\n"
        "[parallel] and searched fields are ignored), or the config.json or folder of a Hugging Face model.\n"
        "--data.store STORE gives a preset the vocabulary of that store, if it is on this machine.\n"
        "--parallel.KEY, --train.micro_batch and --train.recompute restrict the search to the given value.\n"
        "'boost plan calibrate' profiles this machine.\n"
        "A global batch is in sequences (256) or tokens (1M-tokens, 500k-tokens). Units are decimal: 1 GB = 10^9 bytes.",
    )
    parser.add_argument("config", metavar="CONFIG", nargs="?", help="preset or TOML file to explain without a search")
    parser.add_argument("--model", metavar="M", help="size, preset, TOML file, or Hugging Face folder")
    parser.add_argument("--gpus", type=int, metavar="N", help="number of GPUs")
    parser.add_argument(
        "--gpu", metavar="PROFILE", help="hardware profile: h100, a100-80g-8, a .toml file, or a datasheet line"
    )
    parser.add_argument("--per-node", type=int, metavar="N", help="GPUs per node (default: from the profile)")
    parser.add_argument("--global-batch", metavar="B", help="sequences or tokens per step (default: from the model)")
    parser.add_argument("--seq", type=int, metavar="L", help="tokens per sequence (default: from the model)")
    add_options(parser, OPTIONS, memory_margin=0.08)
    parser.set_defaults(takes_overrides=True)
    return parser


def run(args: argparse.Namespace) -> int:
    # A search makes millions of objects, almost none of them in cycles, and looking for cycles takes a tenth of its time.
    gc.disable()
    try:
        return _run(args)
    finally:
        gc.enable()


def _run(args: argparse.Namespace) -> int:
    from boost.plan.hardware import load_hardware, names

    if args.gpu is None:
        raise ConfigError(f"--gpu is missing; pass one of {', '.join(names())}, or a .toml file")
    hardware = load_hardware(args.gpu)
    for name in ("per_node", "gpus", "seq"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} = {value} is too small; smallest valid value: 1")
    if not 0 <= args.memory_margin < 1:
        raise ConfigError(f"--memory-margin = {args.memory_margin:g} must be at least 0 and less than 1, such as 0.08")
    if args.per_node is not None:
        hardware = hardware.model_copy(update={"per_node": args.per_node, "per_host": None})
    if args.write is not None and args.write.exists() and not args.force:
        raise ConfigError(f"{args.write} already exists; add --force to overwrite it")
    if args.config is not None:
        for name in ("model", "gpus", "seq", "global_batch", "write"):
            if getattr(args, name) is not None:
                raise ConfigError(
                    f"--{name.replace('_', '-')} applies only to a search, but explaining CONFIG = '{args.config}' involves no "
                    "search; remove the option or CONFIG, or change the configuration with --section.key value"
                )
        from boost.cli.plan_report import explain

        return explain(load(args.config, args.overrides), args, hardware)
    for name in ("model", "gpus"):
        if getattr(args, name) is None:
            raise ConfigError(f"--{name} is missing; example: boost plan --model 7b --gpus 16 --gpu {args.gpu}")
    request = request_of(args, hardware)
    from boost.cli.plan_report import search_and_report

    source = source_of(args.model)
    return search_and_report(args, request, source, hugging_face_folder(source))


# The search request: the model, the batch and the fixed choices.

SEARCHED = ("train.micro_batch", "train.recompute", "train.recompute_every")
"""Keys to search in addition to parallel.*, unless the command line fixes them."""

USUAL_TOKENS = ((1e9, 500_000), (5e9, 1_000_000), (20e9, 2_000_000), (math.inf, 4_000_000))
"""(maximum number of parameters, tokens per step): GPT-3's batch sizes (arXiv 2005.14165, table 2.1)."""

LEAST_RECIPE = 100_000
"""A preset with at least this many tokens per step is a training recipe, not just a model size."""

VOCABULARY_MULTIPLE = 64
"""A vocabulary from a token store is rounded up to this multiple, so that TP ranks can share it and GEMMs have whole tiles."""

SLACK = 0.05
"""Maximum relative change when a global batch in tokens is rounded to a number of sequences that divides evenly."""

LONGEST = 8192
"""Maximum default of --seq, for Hugging Face models with a longer context."""


def request_of(args: argparse.Namespace, hardware: "Hardware") -> "Request":
    """Builds the search request. Raises ConfigError."""
    from boost.plan.candidates import Request

    changes = dict(parse_overrides(args.overrides))
    if args.seq is not None:
        changes["train.seq_len"] = args.seq
    tree = tree_of_model(args.model)
    tree.pop("parallel", None)
    train = tree.setdefault("train", {})
    for key in SEARCHED:
        train.pop(key.partition(".")[2], None)
    dtypes = hardware.speeds.gemm  # a CPU profile may have no bfloat16 speed
    train.update(compute_dtype="bfloat16" if "bfloat16" in dtypes else next(iter(dtypes)), micro_batch=1)
    store = Path(str(changes.get("data.store", "")))
    if "data.store" in changes and source_of(args.model) in presets() and (store / STORE_FILE).exists():
        changes.setdefault(
            "model.vocab_size", -(-read_meta(store)["vocab_size"] // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
        )
    change(tree, changes)
    base = validated(tree)

    words = args.global_batch
    is_recipe = base.train.global_batch * base.train.seq_len >= LEAST_RECIPE and hugging_face_folder(args.model) is None
    keeps_batch = is_recipe or args.model.endswith(".toml") or "train.global_batch" in changes
    if words is None and not keeps_batch:
        parameters = parameter_count(base.model)
        words = f"{next(tokens for most, tokens in USUAL_TOKENS if parameters <= most)}-tokens"
    if words is not None:
        sequences = global_batch(words, base.train.seq_len, args.gpus)
        base = base.changed(train={"global_batch": sequences})

    # The mesh is not known yet, so the rules are checked for one process.
    alone = {"micro_batch": 1, "recompute": "none", "recompute_every": 1}
    check(base.model_copy(update={"parallel": ParallelConfig(layout="single")}).changed(train=alone))
    fixed = frozenset(key for key in changes if key.startswith("parallel.") or key in SEARCHED)
    return Request(base, args.gpus, hardware, fixed, args.memory_margin)


def global_batch(words: str, seq_len: int, gpus: int) -> int:
    """Parses '256' (sequences) or '1M-tokens', '500k' (tokens, rounded by at most SLACK so that the sequences divide evenly)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgG]?)(-tokens|-sequences)?", words.replace(",", "").replace("_", ""))
    if not match:
        raise ConfigError(
            f"--global-batch = '{words}' is not a number of sequences (256) or tokens (1M-tokens, 500k-tokens, 4M)"
        )
    number, unit, of = match.groups()
    amount = float(number) * {"": 1, "k": 1e3, "m": 1e6, "g": 1e9}[unit.lower()]
    if of != "-tokens" and (not unit or of == "-sequences"):
        if amount < 1 or amount != int(amount) or amount > 2**31:
            raise ConfigError(f"--global-batch = '{words}' is not a whole number of sequences from 1 to {2**31:,}")
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
        # n & -n: the largest power of two that divides n
        return n % gpus == 0, n & -n, -abs(n - wanted)

    return max(reach, key=rank, default=round(wanted))


def hugging_face_folder(model: str) -> Path | None:
    """Returns the folder of a config.json; None if `model` is something else."""
    try:
        path = Path(model)
        if path.name == "config.json" and path.is_file():
            return path.parent
        return path if (path / "config.json").is_file() else None
    except (OSError, ValueError):  # the name is too long, or contains NUL
        return None


def source_of(model: str) -> str:
    """Returns the preset, file or folder for '7b', 'cola-1b', 'my.toml', 'llama/config.json'. Raises ConfigError."""
    sizes = [name.removeprefix("boost-") for name in presets() if name.startswith("boost-")]
    if model.lower() in sizes:
        return f"boost-{model.lower()}"
    if model not in presets() and not Path(model).is_file() and hugging_face_folder(model) is None:
        ordered = sorted(sizes, key=lambda size: int(size.rstrip("b")))
        alike = next((name for name in presets() if name.endswith(f"-{model.lower()}")), "")  # cola-60m for 60m
        meant = f"did you mean '{alike}'? " if alike else ""
        raise ConfigError(
            f"--model = '{model}' is not a size, preset, TOML file or Hugging Face folder; {meant}sizes: {', '.join(ordered)}; "
            "'boost config' lists the presets, such as llama3-8b"
        )
    return model


def tree_of_model(model: str) -> JsonObject:
    """Reads the document that `--model` names, without validating it. Raises ConfigError, including for a config.json with a
    field that our decoder does not implement."""
    folder = hugging_face_folder(model)
    if folder is None:
        return read_source(source_of(model))
    from boost.convert.formats import read_folder

    content = read_folder(folder)
    return {"model": content.model.model_dump(exclude_none=True), "train": {"seq_len": min(content.context, LONGEST)}}
