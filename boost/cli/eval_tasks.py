"""`boost eval --tasks`: runs tasks of lm-evaluation-harness."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from boost.errors import ConfigError

if TYPE_CHECKING:
    from boost.cli.inference import OpenModel


def add_task_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds --tasks and its options."""
    group = parser.add_argument_group("tasks of lm-evaluation-harness (pip install 'boost-llm[tasks]')")
    group.add_argument("--tasks", metavar="NAME[,NAME]", help="evaluate these tasks instead of a split")
    group.add_argument("--task-folder", type=Path, metavar="DIR", help="folder with more tasks (YAML files)")
    group.add_argument(
        "--fewshot", type=int, metavar="N", help="few-shot examples per question (default: set by the task)"
    )
    group.add_argument("--limit", type=int, metavar="N", help="evaluate only the first N questions of each task")


def require_tasks(args: argparse.Namespace) -> None:
    """Raises ConfigError for conflicting flags, or if the harness is not installed."""
    for flag, value in (("--task-folder", args.task_folder), ("--fewshot", args.fewshot), ("--limit", args.limit)):
        if value is not None and not args.tasks:
            raise ConfigError(f"{flag} = {value} has no effect without --tasks; add --tasks NAME")
    if not args.tasks:
        return
    for flag, value in (("--store", args.store), ("--max-tokens", args.max_tokens)):
        if value:
            raise ConfigError(f"{flag} = {value} has no effect with --tasks; remove one of them")
    if args.fewshot is not None and args.fewshot < 0:
        raise ConfigError(f"--fewshot = {args.fewshot} is too small; smallest valid value: 0")
    if args.limit is not None and args.limit < 1:
        raise ConfigError(f"--limit = {args.limit} is too small; smallest valid value: 1")
    if args.task_folder is not None and not args.task_folder.is_dir():
        raise ConfigError(f"--task-folder = '{args.task_folder}' is not a folder; pass one with task YAML files")
    try:
        import lm_eval  # noqa: F401
    except ImportError:
        raise ConfigError(
            "--tasks needs lm-evaluation-harness; install it with: pip install 'boost-llm[tasks]'"
        ) from None


def evaluate_tasks(args: argparse.Namespace, opened: "OpenModel") -> None:
    """Evaluates the tasks on this process of the mesh; the main process prints the result. Raises ConfigError and DataError."""
    from boost.data.tokenizer import load_tokenizer
    from boost.train.harness import HarnessModel, rows_of, run_tasks

    checkpoint, config, mesh, decoder = opened
    checkpoint.require_tokenizer()
    bos, eos = checkpoint.data.get("bos"), checkpoint.data["eos"]
    if bos is None and eos is None:
        raise ConfigError(
            f"'{checkpoint.path}' has no start-of-document token, which --tasks requires; import it with one"
        )
    tokenizer = load_tokenizer(checkpoint.tokenizer)
    batch = args.batch or config.train.micro_batch
    model = HarnessModel(decoder, tokenizer, bos, eos, config.train.seq_len, batch, mesh.is_main)
    names = [name.strip() for name in args.tasks.split(",") if name.strip()]
    rows = rows_of(run_tasks(model, names, args.task_folder, args.fewshot, args.limit))
    if mesh.is_main:
        _print(rows, args, str(checkpoint.path), checkpoint.position.step)


def _print(rows: list[dict[str, Any]], args: argparse.Namespace, path: str, step: int) -> None:
    if args.json:
        facts = {"checkpoint": path, "step": step, "fewshot": args.fewshot, "limit": args.limit, "tasks": rows}
        print(json.dumps(facts, indent=2))
        return
    from rich.table import Table

    from boost.cli.terminal import print_table, result_console

    table = Table(box=None, pad_edge=False)
    table.add_column("task")
    table.add_column("metric")
    for heading in ("value", "standard error"):
        table.add_column(heading, justify="right")
    for row in rows:
        error = "" if row["stderr"] is None else f"{row['stderr']:.4f}"
        table.add_row(row["task"], row["metric"], f"{row['value']:.4f}", error)
    print_table(result_console(100), table)
