"""`boost export`: writes a checkpoint as a Hugging Face folder."""

import argparse
import sys
from pathlib import Path

from boost.cli.terminal import add_options
from boost.train.rundir import require_checkpoint_folder

FILE_BYTES = 5 * 10**9
"""Maximum size of a weight file. Only one file at a time is held in memory."""


OPTIONS = {
    "--dtype {bfloat16,float16,float32}": "dtype of the weights (default: as stored)",
    "--no-merge": "keep A and B instead of merging them into W = B A where nothing is between them, as in svd",
    "--own-format": "cola: write BoostForCausalLM, which transformers can shard (TP), instead of the official CoLA format",
    "--json": "print JSON",
}


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "export",
        description="Writes a folder that transformers loads with AutoModelForCausalLM.from_pretrained: weights, configuration,\n"
        "tokenizer and a model card. dense, and svd with merged factors, become a stock class (Llama, Qwen2, Qwen3,\n"
        "SmolLM3). cola with one rank, plain RoPE and no grouped-query attention uses the official CoLA format, and all other\n"
        "models use our own format; both include a modeling file (trust_remote_code=True).",
        epilog="examples:\n"
        "  boost export runs/demo --out exported/demo\n"
        "  boost export runs/demo/checkpoints/step-00000600 --out exported/demo-600 --dtype bfloat16\n"
        "  boost export runs/svd --out exported/svd --no-merge      keep the factors\n"
        "  hf upload me/demo exported/demo                          then publish it (huggingface_hub's command)",
    )
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="run directory (latest checkpoint), RUN@best (best checkpoint), or step-... folder",
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="output folder; must be empty or not exist")
    add_options(parser, OPTIONS)
    return parser


def run(args: argparse.Namespace) -> int:
    require_checkpoint_folder(args.checkpoint)

    from boost.cli.inference import dump
    from boost.convert.export import export
    from boost.convert.formats import STOCK
    from boost.train.checkpoint import read_checkpoint

    options = args.dtype, not args.no_merge, FILE_BYTES, not args.own_format
    done = read_checkpoint(Path(args.checkpoint), lambda checkpoint: export(checkpoint, Path(args.out), *options))
    facts = {
        "folder": str(done.path),
        "format": done.class_name,
        "trust_remote_code": done.form not in STOCK,
        **{name: getattr(done, name) for name in ("parameters", "bytes", "files", "dtype", "tokenizer")},
        **({"notes": done.notes} if args.json else {}),
    }
    dump(facts, args.json)
    for note in done.notes:
        print(f"note: {note}", file=sys.stderr)
    return 0
