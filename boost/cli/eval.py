"""`boost eval`: evaluates a checkpoint on held-out text, or on tasks."""

import argparse
import importlib.util
import json
import sys
from typing import TYPE_CHECKING

from boost.cli.inference import add_checkpoint_arguments, dump, open_model, run_on_mesh
from boost.cli.terminal import add_options, print_rows
from boost.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from boost.parallel.mesh import Mesh
    from boost.train.checkpoint import Checkpoint


OPTIONS = {
    "--store PATH": "token store to evaluate (default: the store or mixture used for training)",
    "--split {heldout,train}": "split (default: heldout)",
    "--batch N": "sequences per batch (default: train.micro_batch)",
    "--max-tokens N": "evaluate about N tokens, spread evenly over the split (default: all)",
    "--by-document": "evaluate the first train.seq_len tokens of each document, as GaLore, LORO and CoLA do, instead of all tokens",
    "--json": "print JSON",
}
OF_TASKS = {
    "--tasks NAME[,NAME]": "evaluate these tasks instead of a split",
    "--task-folder DIR": "folder with more tasks (YAML files); needs --trust-task-code",
    "--trust-task-code": "allow --task-folder, whose files can run any code: Python functions (!function) and Jinja templates",
    "--fewshot N": "few-shot examples per question (default: set by the task)",
    "--limit N": "evaluate only the first N questions of each task",
}


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "eval",
        description="Computes cross-entropy, perplexity and bits per byte over every token of a split, and the unigram entropy\n"
        "of the same text as a baseline. Works with checkpoints from any mesh and layout.\n"
        "With --tasks, runs tasks from lm-evaluation-harness instead.",
        epilog="examples:\n"
        "  boost eval runs/demo\n"
        "  boost eval runs/demo/checkpoints/step-00000200 --tp 2 --json\n"
        "  boost eval runs/demo@best                             the checkpoint with the lowest held-out loss (train.keep_best)\n"
        "  boost eval runs/demo --store data/other --split train --max-tokens 100000\n"
        "  boost eval runs/demo --tasks arc_easy,hellaswag --limit 200\n"
        "  boost eval runs/demo --tasks mine --task-folder my-tasks --trust-task-code",
    )
    add_checkpoint_arguments(parser)
    add_options(parser, OPTIONS, split="heldout", batch=0, max_tokens=0)
    add_options(parser.add_argument_group("tasks from lm-evaluation-harness (pip install lm_eval)"), OF_TASKS)
    return parser


def run(args: argparse.Namespace) -> int:
    for flag, value in (("--batch", args.batch), ("--max-tokens", args.max_tokens)):
        if value < 0:
            raise ConfigError(f"{flag} = {value} is too small; smallest valid value: 0 (the default)")
    _check_task_flags(args)
    return run_on_mesh(evaluate_process, args)


def _check_task_flags(args: argparse.Namespace) -> None:
    """Raises ConfigError for conflicting flags, or if the harness is not installed."""
    for flag, value in (("--task-folder", args.task_folder), ("--fewshot", args.fewshot), ("--limit", args.limit)):
        if value is not None and not args.tasks:
            raise ConfigError(f"{flag} = {value} has no effect without --tasks; add --tasks NAME")
    if not args.tasks:
        return
    for flag, value in (("--store", args.store), ("--max-tokens", args.max_tokens)):
        if value:
            raise ConfigError(f"{flag} = {value} has no effect with --tasks; remove one of them")
    for flag, value, least in (("--fewshot", args.fewshot, 0), ("--limit", args.limit, 1)):
        if value is not None and value < least:
            raise ConfigError(f"{flag} = {value} is too small; smallest valid value: {least}")
    if args.task_folder is not None and not args.task_folder.is_dir():
        raise ConfigError(f"--task-folder = '{args.task_folder}' is not a folder; pass one with task YAML files")
    if args.task_folder is not None and not args.trust_task_code:
        raise ConfigError(
            f"--task-folder = '{args.task_folder}': task files can run any code (!function, Jinja templates); read them, then add "
            "--trust-task-code"
        )
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError("--tasks requires lm-evaluation-harness, which is not installed; run: pip install lm_eval")


def evaluate_process(args: argparse.Namespace) -> int:
    """Runs the evaluation in one process of the mesh."""
    from boost.train.rendezvous import close_mesh

    mesh = (_evaluate_tasks if args.tasks else _evaluate_split)(args)
    mesh.barrier()
    close_mesh()
    return 0


def _evaluate_split(args: argparse.Namespace) -> "Mesh":
    """Evaluates the split in this process of the mesh, which it returns; the main process prints the result. Raises BoostError."""
    from boost.data.fit import check_vocabulary
    from boost.data.mixture import Corpus
    from boost.train.evaluate import evaluate

    checkpoint, config, mesh, decoder = open_model(args)
    corpus = Corpus.open({args.store: 1.0} if args.store else config.data.sources)
    for store in corpus.stores:
        store.require_tokenizer(checkpoint.require_tokenizer(), f"'{checkpoint.path}'")
        check_vocabulary(config, store)
    split, train = corpus.split(args.split), config.train
    batch, isolate = args.batch or train.micro_batch, config.data.isolate_documents
    most = args.max_tokens or None
    result = evaluate(decoder, split, train.seq_len, batch, isolate, mesh, most, by_document=args.by_document)
    if mesh.is_main:
        facts: dict[str, object] = {
            "checkpoint": str(checkpoint.path),
            "step": checkpoint.position.step,
            "split": args.split,
            **({"by_document": True} if args.by_document else {}),
            "tokens": result.tokens,
            "loss": result.loss,
            "unigram_entropy": split.unigram_entropy(),
            "perplexity": result.perplexity,
            "bits_per_byte": result.bits_per_byte,
        }
        losses = {name: of_store.loss for name, of_store in result.sources.items()}  # only for a mixture
        if args.json and losses:
            facts["losses"] = losses
        elif losses:
            facts |= {f"loss on {name}": loss for name, loss in losses.items()}
        dump(facts, args.json)
    return mesh


def _evaluate_tasks(args: argparse.Namespace) -> "Mesh":
    """Evaluates the tasks in this process of the mesh, which it returns; the main process prints the result. Raises ConfigError and
    DataError."""
    from boost.convert.vocabulary import BOS, end_tokens
    from boost.data.tokenizer import load_tokenizer
    from boost.train.checkpoint import HUB
    from boost.train.harness import HarnessModel, rows_of, run_tasks

    tokenizers: list[Tokenizer] = []

    def read_tokenizer(checkpoint: "Checkpoint") -> None:
        checkpoint.require_tokenizer()
        tokenizers[:] = [load_tokenizer(checkpoint.tokenizer)]

    checkpoint, config, mesh, decoder = open_model(args, read_tokenizer)
    (tokenizer,) = tokenizers
    bos, eos = checkpoint.data.get("bos"), checkpoint.data.get("eos")
    if bos is None and eos is None:
        raise ConfigError(
            f"'{checkpoint.path}' has no bos or eos token, but --tasks requires one; import the model with a tokenizer that has one"
        )
    batch = args.batch or config.train.micro_batch
    named = (checkpoint.data.get(HUB) or {}).get(BOS)  # the harness asks for a named bos only
    length = checkpoint.context
    model = HarnessModel(decoder, tokenizer, bos, eos, end_tokens(checkpoint.data), length, batch, mesh.is_main, named)
    names = [name.strip() for name in args.tasks.split(",") if name.strip()]
    rows = rows_of(run_tasks(model, names, args.task_folder, num_fewshot=args.fewshot, limit=args.limit))
    if not mesh.is_main:
        return mesh
    if model.truncated:
        what = f"{model.truncated:,} requests are longer than the context of {length:,} tokens"
        print(f"warning: {what}, so their beginning was left out", file=sys.stderr)
    if args.json:
        facts = {"checkpoint": str(checkpoint.path), "step": checkpoint.position.step}
        print(json.dumps({**facts, "fewshot": args.fewshot, "limit": args.limit, "tasks": rows}, indent=2))
        return mesh
    cells = []
    for row in rows:
        error = "" if row["stderr"] is None else f"{row['stderr']:.4f}"
        cells.append((row["task"], row["metric"], f"{row['value']:.4f}", error))
    print_rows(("task", "metric", "value", "standard error"), cells, right=("value", "standard error"))
    return mesh
