"""`boost plan --write`: writes the best plan as a configuration for `boost train`, and lists what the plan did not decide."""

import argparse
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from boost.config import Config, to_toml
from boost.config.architecture import parameter_count
from boost.config.load import parse_overrides, read_source
from boost.format import format_bytes, format_count, format_rate, format_seconds

if TYPE_CHECKING:
    from boost.cli.plan_report import PlanReport

EVALUATIONS = 20
"""Default number of evaluations in a run."""

EVALUATED = 2**20
"""Default tokens per evaluation. The final evaluation covers the whole split."""

TOKENS_PER_PARAMETER = 20
"""Tokens per parameter of a compute-optimal run (arXiv 2203.15556)."""


def runnable(config: Config, name: str, asked: frozenset[str]) -> Config:
    """Adds periodic evaluations and a separate run directory to a configuration, unless the user set them."""
    train, run = {}, {}
    if config.train.eval_every == 0 and "train.eval_every" not in asked:
        train["eval_every"] = max(config.train.steps // EVALUATIONS, 1)
        if config.train.eval_tokens == 0 and "train.eval_tokens" not in asked:
            train["eval_tokens"] = max(EVALUATED, config.train.seq_len)
    if config.run.dir == type(config.run)().dir and "run.dir" not in asked:
        run["dir"] = f"runs/{name}"
    return config.model_copy(
        update={"train": config.train.model_copy(update=train), "run": config.run.model_copy(update=run)}
    )


def undecided(config: Config, asked: frozenset[str]) -> Iterator[str]:
    """Yields one line per setting that neither the plan nor the user decided."""
    train, optim = config.train, config.optim
    tokens, parameters = train.global_batch * train.seq_len, parameter_count(config.model)
    if "optim.lr" not in asked:
        yield f"optim.lr = {optim.lr:g} is not tuned for {tokens:,} tokens per step"
    if "train.steps" not in asked:
        whole = train.steps * tokens
        enough = -(-TOKENS_PER_PARAMETER * parameters // tokens)
        yield (
            f"train.steps = {train.steps:,} is {format_count(whole)} tokens, {whole / parameters:,.3g} per parameter; "
            f"{TOKENS_PER_PARAMETER} per parameter take {enough:,} steps"
        )
    if not asked & {"data.store", "data.mixture"}:
        yield (
            f"data.store = '{config.data.store}' must be prepared with a tokenizer of at most {config.model.vocab_size:,} tokens "
            "('boost prepare')"
        )
    yield f"checkpoints every {train.save_minutes:g} minutes" + (
        f" and {train.save_every:,} steps" if train.save_every else "; set train.save_every to also save by steps"
    )


def asked_keys(args: argparse.Namespace) -> frozenset[str]:
    """Dotted keys that the user set: on the command line, or in a file of their own."""
    keys = {key for key, _ in parse_overrides(args.overrides)}
    keys |= {"train.steps"} if args.steps is not None else set()
    if args.model.endswith(".toml"):
        keys |= {f"{section}.{key}" for section, table in read_source(args.model).items() for key in table}
    return frozenset(keys)


def written(report: "PlanReport") -> str:
    """Returns the file, with the request, the prediction and undecided settings as comments."""
    from boost.cli.plan_report import asked_words

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
