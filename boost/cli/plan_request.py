"""What `boost plan` searches for: the model, the batch and the fixed choices, from the command line."""

import argparse
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from boost.config import presets
from boost.config.architecture import parameter_count
from boost.config.load import change, parse_overrides, read_source, validated
from boost.config.rules import check
from boost.config.schema import ParallelConfig
from boost.errors import ConfigError

if TYPE_CHECKING:
    from boost.plan.candidates import Request
    from boost.plan.hardware import Hardware

SEARCHED = ("train.micro_batch", "train.recompute", "train.recompute_every")
"""Keys to search in addition to parallel.*, unless the command line fixes them."""

USUAL_TOKENS = ((1e9, 500_000), (5e9, 1_000_000), (20e9, 2_000_000), (math.inf, 4_000_000))
"""(maximum number of parameters, tokens per step): GPT-3's batch sizes (arXiv 2005.14165, table 2.1)."""

LEAST_RECIPE = 100_000
"""A preset with at least this many tokens per step is a training recipe and not only a model size."""

SLACK = 0.05
"""Maximum relative change when a global batch in tokens is rounded to a divisible number of sequences."""

LONGEST = 8192
"""Maximum default of --seq, for Hugging Face models with a longer context."""


def request_of(args: argparse.Namespace, hardware: "Hardware") -> "Request":
    """Builds the search request. Raises ConfigError."""
    from boost.plan.candidates import Request

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

    words = args.global_batch
    is_recipe = base.train.global_batch * base.train.seq_len >= LEAST_RECIPE and hugging_face_folder(args.model) is None
    keeps_batch = is_recipe or args.model.endswith(".toml") or "train.global_batch" in changes
    if words is None and not keeps_batch:
        parameters = parameter_count(base.model)
        words = f"{next(tokens for most, tokens in USUAL_TOKENS if parameters <= most)}-tokens"
    if words is not None:
        sequences = global_batch(words, base.train.seq_len, args.gpus)
        base = base.model_copy(update={"train": base.train.model_copy(update={"global_batch": sequences})})

    # What is searched is not known yet, so the rules are checked for one process.
    alone = {"micro_batch": 1, "recompute": "none", "recompute_every": 1}
    single = {"parallel": ParallelConfig(layout="single"), "train": base.train.model_copy(update=alone)}
    check(base.model_copy(update=single))
    fixed = frozenset(key for key in changes if key.startswith("parallel.") or key in SEARCHED)
    return Request(base, args.gpus, hardware, fixed, args.memory_margin)


def global_batch(words: str, seq_len: int, gpus: int) -> int:
    """Parses '256' (sequences) or '1M-tokens', '500k' (tokens, rounded by at most SLACK to a divisible number of sequences)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgG]?)(-tokens|-sequences)?", words.replace(",", "").replace("_", ""))
    if not match:
        raise ConfigError(
            f"--global-batch = '{words}' is not a number of sequences (256) or tokens (1M-tokens, 500k-tokens, 4M)"
        )
    number, unit, of = match.groups()
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
        raise ConfigError(
            f"--model = '{model}' is not a size, preset, TOML file or Hugging Face folder; sizes: {', '.join(ordered)}; "
            "'boost config' lists the presets, such as llama3-8b"
        )
    return model


def tree_of_model(model: str) -> dict[str, Any]:
    """Reads the document that `--model` names, without validating it. Raises ConfigError, including for a config.json with a
    field that our decoder does not implement."""
    folder = hugging_face_folder(model)
    if folder is None:
        return read_source(source_of(model))
    from boost.convert.formats import read_folder

    content = read_folder(folder)
    return {"model": content.model.model_dump(exclude_none=True), "train": {"seq_len": min(content.context, LONGEST)}}
