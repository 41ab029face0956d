"""`boost eval`: evaluates a checkpoint on held-out text, or on tasks."""

import argparse
from collections.abc import Mapping
from typing import Any

from boost.cli.eval_tasks import add_task_arguments, evaluate_tasks, require_tasks
from boost.cli.inference import add_checkpoint_arguments, dump, open_model, run_on_mesh
from boost.errors import ConfigError


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "eval",
        help="evaluate a checkpoint on held-out text, or on tasks",
        description="Computes cross-entropy, perplexity and bits per byte over every token of a split, and the unigram entropy\n"
        "of the same text as a baseline. Works with checkpoints from any mesh and layout.\n"
        "With --tasks, runs tasks of lm-evaluation-harness instead.",
        epilog="examples:\n"
        "  boost eval runs/demo\n"
        "  boost eval runs/demo/checkpoints/step-00000200 --tp 2 --json\n"
        "  boost eval runs/demo@best                             the checkpoint with the lowest held-out loss (train.keep_best)\n"
        "  boost eval runs/demo --store data/other --split train --max-tokens 100000\n"
        "  boost eval runs/demo --tasks arc_easy,hellaswag --limit 200\n"
        "  boost eval runs/demo --tasks mine --task-folder my-tasks",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_checkpoint_arguments(parser)
    parser.add_argument(
        "--store", metavar="PATH", help="token store (default: the one used for training, or the mixture)"
    )
    parser.add_argument("--split", choices=("heldout", "train"), default="heldout", help="default: heldout")
    parser.add_argument(
        "--batch", type=int, default=0, metavar="N", help="sequences per batch (default: train.micro_batch)"
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=0,
        metavar="N",
        help="evaluate about N tokens, spread evenly over the split (default: all)",
    )
    parser.add_argument(
        "--by-document",
        action="store_true",
        help="evaluate the first train.seq_len tokens of each document, as GaLore, LORO and CoLA do, instead of all tokens",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_task_arguments(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    for flag, value in (("--batch", args.batch), ("--max-tokens", args.max_tokens)):
        if value < 0:
            raise ConfigError(f"{flag} = {value} is too small; smallest valid value: 0 (the default)")
    require_tasks(args)
    return run_on_mesh(evaluate_process, args)


def by_source(losses: Mapping[str, float], as_json: bool) -> dict[str, Any]:
    """Entries of the output for the losses of a mixture's stores."""
    if as_json:
        return {"losses": dict(losses)} if losses else {}
    return {f"loss on {name}": loss for name, loss in losses.items()}


def evaluate_process(args: argparse.Namespace) -> int:
    """Runs the evaluation on one process of the mesh; the main process prints the result."""
    from boost.data.fit import check_vocabulary
    from boost.data.mixture import Corpus
    from boost.parallel.mesh import close_mesh
    from boost.train.evaluate import evaluate

    checkpoint, config, mesh, decoder = opened = open_model(args)
    if args.tasks:
        evaluate_tasks(args, opened)
        mesh.barrier()
        close_mesh()
        return 0
    corpus = Corpus.open({args.store: 1.0} if args.store else config.data.sources)
    for store in corpus.stores:
        store.require_tokenizer(checkpoint.require_tokenizer(), f"'{checkpoint.path}'")
        check_vocabulary(config, store)
    split = corpus.split(args.split)
    result = evaluate(
        decoder,
        split,
        config.train.seq_len,
        args.batch or config.train.micro_batch,
        config.data.isolate_documents,
        mesh,
        args.max_tokens or None,
        by_document=args.by_document,
    )
    if mesh.is_main:
        facts = {
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
        losses = {name: each.loss for name, each in result.sources.items()}
        dump(facts | by_source(losses, args.json), args.json)
    mesh.barrier()
    close_mesh()
    return 0
