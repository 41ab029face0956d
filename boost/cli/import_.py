"""`boost import`: converts Hugging Face weights to a checkpoint."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from boost.cli.export import add_file_size, file_bytes
from boost.errors import ConfigError

if TYPE_CHECKING:
    from boost.convert.spectrum import Truncation

MOST_ROWS = 35
"""Maximum number of linears to print one by one. With more, the report has one row per slot, summarized over the blocks."""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "import",
        help="convert LLaMA or CoLA weights to a checkpoint",
        description="Converts a Hugging Face folder with safetensors weights (stock LLaMA, the official CoLA class, or the output\n"
        "of 'boost export') to a checkpoint at step 0, for 'boost eval', 'generate' and 'train --start-from'.\n"
        "--family svd factorizes dense weights, from a folder or a checkpoint, by truncated SVD and reports the\n"
        "error of each linear.",
        epilog="examples:\n"
        "  boost import models/llama-1b --out checkpoints/llama-1b\n"
        "  boost import models/cola-1b --out checkpoints/cola-1b --tokenizer data/c4\n"
        "  boost import models/llama-1b --out checkpoints/svd --family svd --rank 512\n"
        "  boost import runs/dense --out checkpoints/svd --family svd --energy 0.95 --multiple 8\n"
        "  boost train --start-from checkpoints/svd --data.store data/mine --run.dir runs/svd",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "source", metavar="DIR", help="Hugging Face folder; with --family svd, also a boost run or checkpoint"
    )
    parser.add_argument("--out", required=True, metavar="CHECKPOINT", help="output folder; must be empty or not exist")
    parser.add_argument("--tokenizer", metavar="PATH", help="tokenizer.json or its folder (default: the one in DIR)")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), help="dtype of the weights (default: as stored; factors: float32)"
    )
    parser.add_argument("--family", choices=("svd",), help="svd: factorize dense weights by truncated SVD")
    parser.add_argument("--rank", type=int, metavar="R", help="svd: rank of every linear")
    parser.add_argument(
        "--energy",
        type=float,
        metavar="FRACTION",
        help="svd: fraction of the squared singular values to keep, such as 0.95",
    )
    parser.add_argument(
        "--multiple",
        type=int,
        default=1,
        metavar="N",
        help="with --energy: round ranks up to a multiple of N (default 1)",
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="device for the SVD (default: a GPU if available)",
    )
    add_file_size(parser)
    parser.add_argument("--json", action="store_true", help="print JSON, including the error of every linear")
    return parser


def run(args: argparse.Namespace) -> int:
    limit = file_bytes(args)
    for flag, given in (("--rank", args.rank), ("--energy", args.energy), ("--multiple", args.multiple != 1)):
        if args.family is None and given not in (None, False):
            raise ConfigError(f"{flag} requires --family svd; add it, or remove {flag}")
    if args.multiple != 1 and args.energy is None:
        raise ConfigError("--multiple rounds the ranks that --energy chooses; add --energy, or remove --multiple")

    from boost.cli.inference import dump
    from boost.config.architecture import parameter_count
    from boost.convert.importing import import_weights

    named = Path(args.tokenizer) if args.tokenizer else None
    done = import_weights(Path(args.source), Path(args.out), args.dtype, named, _truncation(args), limit)
    facts: dict[str, Any] = {
        "checkpoint": str(done.path),
        "family": done.model.family,
        "parameters": parameter_count(done.model),
        "bytes": done.bytes,
        "dtype": done.dtype,
        "tokenizer": done.tokenizer,
    }
    if done.report and args.json:
        facts["report"] = done.report
    elif done.report:
        _print_report(done.report)
    dump(facts, args.json)
    if not done.tokenizer:
        print(f"warning: {_missing_tokenizer(Path(args.source))}", file=sys.stderr)
    return 0


def _missing_tokenizer(source: Path) -> str:
    """Returns the warning for a folder without tokenizer.json, such as one where only the model was saved."""
    slow = [name for name in ("tokenizer.model", "vocab.json") if (source / name).is_file()]
    if slow:
        return (
            f"'{source}' has {slow[0]} but no tokenizer.json, so the checkpoint has no tokenizer; convert it with "
            f"AutoTokenizer.from_pretrained('{source}').save_pretrained('{source}') and import again"
        )
    return (
        f"'{source}' has no tokenizer.json, so the checkpoint has no tokenizer; import again with --tokenizer PATH, for example "
        "the folder that the model was originally loaded from"
    )


def _truncation(args: argparse.Namespace) -> "Truncation | None":
    if args.family is None:
        return None
    from boost.convert.spectrum import Truncation
    from boost.parallel.mesh import choose_device

    return Truncation(args.rank, args.energy, args.multiple, choose_device(args.device).type)


def _print_report(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    linears, slots = report["linears"], report["slots"]
    table = Table(title="truncated SVD", title_justify="left", box=None, pad_edge=False)
    table.add_column("linear")
    for heading in ("shape", "rank", "energy kept", "relative error"):
        table.add_column(heading, justify="right")
    if len(linears) <= MOST_ROWS:
        for row in linears:
            shape = f"{row['d_out']} x {row['d_in']}"
            table.add_row(row["name"], shape, f"{row['rank']}", f"{row['energy']:.4f}", f"{row['error']:.4f}")
    else:
        shapes = {row["name"].split(".", 2)[2]: f"{row['d_out']} x {row['d_in']}" for row in linears}
        for row in slots:
            low, high = row["rank_min"], row["rank_max"]
            ranks = f"{low}" if low == high else f"{low}-{high}, mean {row['rank_mean']:.0f}"
            errors = f"{row['error_mean']:.4f}, at most {row['error_max']:.4f}"
            slot = f"{row['slot']} ({row['blocks']} blocks)"
            table.add_row(slot, shapes[row["slot"]], ranks, f"{row['energy']:.4f}", errors)
    console = Console()
    console.print(table)
    console.print("report.json lists every linear\n")
