"""The budget of `boost recipe`: tokens, disk, time on this machine, and GPU-hours by the planner."""

import argparse
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from boost.cli.terminal import print_fact, result_console
from boost.config import Config
from boost.config.architecture import parameter_count
from boost.config.recipes import Recipe, tokens_of
from boost.errors import BoostError
from boost.format import format_bytes, format_count, format_duration, format_rate

if TYPE_CHECKING:
    from boost.data.prepare import PrepareOptions

COLUMN = 14
CHECKPOINT_BYTES = 12
"""Bytes of a checkpoint per parameter: weight and two moments in fp32."""


def print_budget(args: argparse.Namespace, recipe: Recipe, config: Config, options: "PrepareOptions") -> None:
    """Prints what a run needs before it starts."""
    out = result_console(140)
    train, published = config.train, recipe.config()
    tokens, parameters = tokens_of(config), parameter_count(config.model)
    facts = {"recipe": f"{recipe.name}: {config.model.title} {format_count(parameters)} parameters, {recipe.source}"}
    step = format_count(train.global_batch * train.seq_len)
    held_out = format_count(options.max_heldout_tokens or 0)
    facts["tokens"] = f"{format_count(tokens)} ({train.steps:,} steps of {step}), {held_out} held out"
    if tokens != tokens_of(published):
        facts["tokens"] += f"; the publication: {format_count(tokens_of(published))}"
    facts["data"] = _data(args, recipe, options, tokens)
    facts["disk"] = _disk(config, options, tokens, parameters)
    for key, value in facts.items():
        print_fact(out, key, value, COLUMN)
    print_fact(out, "here", _time_here(config, options, tokens), COLUMN)
    print_fact(out, f"{args.gpus} x {args.gpu.removesuffix('.toml')}"[:COLUMN], _plan(args, config, tokens), COLUMN)
    perplexity = "-" if recipe.perplexity is None else f"{recipe.perplexity:.2f}"
    print_fact(out, "published", f"perplexity {perplexity}", COLUMN)


def _data(args: argparse.Namespace, recipe: Recipe, options: "PrepareOptions", tokens: int) -> str:
    where = args.data
    if where is None:
        transfer = format_bytes((tokens + (options.max_heldout_tokens or 0)) * recipe.corpus.transfer_bytes, 2)
        where = f"{options.hf} from the Hugging Face Hub, about {transfer} to transfer (streamed, not stored)"
    return f"{where}; tokenizer {options.tokenizer}"


def _disk(config: Config, options: "PrepareOptions", tokens: int, parameters: int) -> str:
    """The token store and the checkpoints, next to what is free."""
    size = 2 if config.model.vocab_size <= 1 << 16 else 4
    store = (tokens + (options.max_heldout_tokens or 0)) * size
    kept = config.train.keep + 1
    checkpoints = kept * parameters * CHECKPOINT_BYTES
    free = shutil.disk_usage(_existing(options.out)).free
    words = (
        f"{format_bytes(store)} for {options.out}, {format_bytes(checkpoints)} for {kept} checkpoints in {config.run.dir}; "
        f"{format_bytes(free)} are free"
    )
    return words + (": NOT ENOUGH" if store + checkpoints > free else "")


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.absolute().parent
    return path


def _time_here(config: Config, options: "PrepareOptions", tokens: int) -> str:
    """Training at a measured or estimated speed, and preparing if the tokenizer can be loaded now."""
    from boost.measure.pace import training_pace

    pace = training_pace(config)
    devices = config.parallel.world_size if pace.device == "cuda" else 1
    speed = pace.tokens_per_second * devices
    how = "a step was timed" if pace.measured else "estimated from the speed of a GEMM"
    device = f"{devices} x {pace.device}" if pace.device == "cuda" else f"{os.cpu_count()} CPU cores"
    words = f"{format_duration(tokens / speed)} of training at {format_rate(speed)} ({device}; {how})"
    preparing = _time_of_preparing(options, tokens)
    return words + (f", after {format_duration(preparing)} of tokenizing" if preparing is not None else "")


def _time_of_preparing(options: "PrepareOptions", tokens: int) -> float | None:
    """Seconds; None if there is nothing to do, or the tokenizer is still to be trained or cannot be loaded now."""
    from boost.data.hub import quiet_hub
    from boost.data.store import is_missing
    from boost.data.tokenizer import load_tokenizer, parse_training
    from boost.measure.pace import encoding_pace

    try:
        if not is_missing(options.out) or parse_training(options.tokenizer) is not None:
            return None
        with quiet_hub():
            tokenizer = load_tokenizer(options.tokenizer)
        return tokens / encoding_pace(tokenizer)
    except BoostError:
        return None


def _plan(args: argparse.Namespace, config: Config, tokens: int) -> str:
    """The fastest configuration on GPUs, by the planner."""
    from boost.cli.terminal import searching
    from boost.config.schema import ParallelConfig
    from boost.plan.candidates import Request
    from boost.plan.compare import choices, mesh
    from boost.plan.hardware import load_hardware
    from boost.plan.search import Search

    hardware = load_hardware(args.gpu)
    alone = ParallelConfig.model_validate({"layout": "single"})
    train = config.train.model_copy(update={"micro_batch": 1, "recompute": "none", "compute_dtype": "bfloat16"})
    base = config.model_copy(update={"parallel": alone, "train": train})
    with searching("configurations") as tick:
        search = Search(Request(base, args.gpus, hardware, frozenset(), 0.08), tick)
        best = None if search.empty else search.fastest()
    if best is None:
        return f"does not fit on {args.gpus} x {args.gpu}; try --gpus {2 * args.gpus}"
    seconds = tokens / best.time.tokens_per_second
    hours = seconds * args.gpus / 3600
    return (
        f"{format_duration(seconds)} predicted ({mesh(best.config.parallel)}, {choices(best.config)}): {hours:.3g} GPU-hours, "
        f"{hours * args.price:,.2f} USD at an assumed {args.price:g} USD per GPU-hour (--price)"
    )
