"""`boost eval`: evaluates a checkpoint on held-out text."""

import argparse
import shlex
from pathlib import Path

from boost.cli.inference import add_checkpoint_arguments, dump, open_model, run_on_mesh
from boost.cli.terminal import add_options
from boost.errors import ConfigError
from boost.text import printable

OPTIONS = {
    "--store PATH": "token store to evaluate (default: the store or mixture used for training)",
    "--split {heldout,train}": "split (default: heldout)",
    "--batch N": "sequences per batch (default: train.micro_batch)",
    "--seq-len N": "tokens per sequence (default: train.seq_len)",
    "--max-tokens N": "evaluate about N tokens, spread evenly over the split (default: all)",
    "--by-document": "evaluate only the first sequence of each document, as GaLore, LORO and CoLA do, instead of all tokens",
    "--json": "print JSON",
}


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "eval",
        description="Computes cross-entropy, perplexity and bits per byte over every token of a split, and the unigram entropy\n"
        "of the same text as a baseline. Works with checkpoints from any mesh and layout.\n"
        "For tasks, export the model and run lm-evaluation-harness on it; the last line printed has the commands.",
        epilog="examples:\n"
        "  boost eval runs/demo\n"
        "  boost eval runs/demo/checkpoints/step-00000200 --tp 2 --json\n"
        "  boost eval runs/demo@best                             the checkpoint with the lowest held-out loss (train.keep_best)\n"
        "  boost eval runs/demo --store data/other --split train --max-tokens 100000",
    )
    add_checkpoint_arguments(parser)
    add_options(parser, OPTIONS, split="heldout", max_tokens=0)
    return parser


def run(args: argparse.Namespace) -> int:
    for flag, value in (("--batch", args.batch), ("--seq-len", args.seq_len), ("--max-tokens", args.max_tokens)):
        if value < 0:
            raise ConfigError(f"{flag} = {value} is too small; smallest valid value: 0 (the default)")
    return run_on_mesh(evaluate_process, args)


def evaluate_process(args: argparse.Namespace) -> int:
    """Runs the evaluation in one process of the mesh; the main process prints the result. Raises BoostError."""
    from boost.data.fit import check_vocabulary
    from boost.data.mixture import Corpus
    from boost.train.evaluate import evaluate
    from boost.train.rendezvous import close_mesh

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
        if not args.json:
            out = f"exported/{Path(args.checkpoint).name.partition('@')[0]}"
            model = f"pretrained={out},trust_remote_code=True"
            export = shlex.join(["boost", "export", args.checkpoint, "--out", out])
            tasks = shlex.join(["lm_eval", "--model", "hf", "--model_args", model, "--tasks", "arc_easy"])
            print(printable(f"on tasks: {export} && {tasks}"))
    mesh.barrier()
    close_mesh()
    return 0
