"""`boost import`: converts Hugging Face weights to a checkpoint."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from boost.cli.export import add_file_size, file_bytes
from boost.errors import ConfigError

if TYPE_CHECKING:
    from boost.convert.compress import Compression
    from boost.convert.spectrum import Truncation

MOST_ROWS = 35
"""Maximum number of linears to print one by one. With more, the report has one row per slot, summarized over the blocks."""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "import",
        help="convert LLaMA or CoLA weights to a checkpoint",
        description="Converts a Hugging Face folder with safetensors weights (stock LLaMA, the official CoLA class, or the output\n"
        "of 'boost export') to a checkpoint at step 0, for 'boost eval', 'generate' and 'train --start-from'.\n"
        "--family factorizes dense weights, from a folder or a checkpoint, and reports the error of each linear:\n"
        "with --budget and --calibrate by what each direction costs on calibration text, else by truncated SVD.",
        epilog="examples:\n"
        "  boost import models/llama-1b --out checkpoints/llama-1b\n"
        "  boost import models/cola-1b --out checkpoints/cola-1b --tokenizer data/c4\n"
        "  boost import models/llama-1b --out checkpoints/svd --family svd --rank 512\n"
        "  boost import runs/dense --out checkpoints/svd --family svd --energy 0.95 --multiple 8\n"
        "  boost import runs/dense --out checkpoints/svd --family svd --budget 0.6 --calibrate data/mine\n"
        "  boost train --start-from checkpoints/svd --distill-from runs/dense --data.store data/mine --run.dir runs/svd",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "source", metavar="DIR", help="Hugging Face folder; with --family, also a boost run or checkpoint"
    )
    parser.add_argument("--out", required=True, metavar="CHECKPOINT", help="output folder; must be empty or not exist")
    parser.add_argument("--tokenizer", metavar="PATH", help="tokenizer.json or its folder (default: the one in DIR)")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), help="dtype of the weights (default: as stored; factors: float32)"
    )
    _add_factorization(parser)
    add_file_size(parser)
    parser.add_argument("--json", action="store_true", help="print JSON, including the error of every linear")
    return parser


def _add_factorization(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of factorization."""
    parser.add_argument("--family", choices=("svd", "cola"), help="factorize dense weights (cola: with --budget only)")
    parser.add_argument(
        "--budget",
        type=float,
        metavar="FRACTION",
        help="parameters of the factors, as a fraction of those of the linears that they replace, such as 0.6: of all together "
        "with --calibrate, else of each",
    )
    parser.add_argument(
        "--calibrate",
        metavar="STORE",
        help="with --budget: token store whose training split shows what the model must keep; ranks follow from what each "
        "direction costs the loss",
    )
    parser.add_argument(
        "--calibrate-tokens",
        type=int,
        metavar="N",
        help="with --calibrate: calibration tokens, spread evenly over the split (default 262144)",
    )
    parser.add_argument(
        "--mesh",
        action="append",
        default=[],
        metavar="LAYOUT:TP",
        help="with --calibrate: layout and TP size that the ranks must fit, such as vanilla:4; may be repeated",
    )
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
        metavar="N",
        help="with --energy: round ranks up to a multiple of N (default 1); with --budget: ranks are multiples of N (default 1; "
        "8 with --calibrate)",
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="device for calibration and SVD (default: a GPU if available)",
    )


def run(args: argparse.Namespace) -> int:
    limit = file_bytes(args)
    _check_flags(args)

    from boost.cli.inference import dump
    from boost.config.architecture import parameter_count
    from boost.convert.importing import import_weights

    named = Path(args.tokenizer) if args.tokenizer else None
    done = import_weights(Path(args.source), Path(args.out), args.dtype, named, _how(args), limit)
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


def _check_flags(args: argparse.Namespace) -> None:
    """Raises ConfigError for flags that have no effect together."""
    for flag, given in (
        ("--rank", args.rank),
        ("--energy", args.energy),
        ("--multiple", args.multiple),
        ("--budget", args.budget),
    ):
        if args.family is None and given is not None:
            raise ConfigError(f"{flag} requires --family svd; add it, or remove {flag}")
    if args.calibrate is not None and args.budget is None:
        raise ConfigError("--calibrate requires --budget FRACTION; add it, or remove --calibrate")
    for flag, given in (("--calibrate-tokens", args.calibrate_tokens), ("--mesh", args.mesh or None)):
        if args.calibrate is None and given is not None:
            raise ConfigError(f"{flag} requires --calibrate STORE; add it, or remove {flag}")
    if args.family == "cola" and args.calibrate is None:
        raise ConfigError(
            "--family cola requires --budget FRACTION and --calibrate STORE; add them, or use --family svd"
        )
    for flag, given in (("--rank", args.rank), ("--energy", args.energy)):
        if args.budget is not None and given is not None:
            raise ConfigError(f"{flag} and --budget both choose ranks; remove one of them")
    if args.multiple is not None and args.energy is None and args.budget is None:
        raise ConfigError(
            "--multiple rounds the ranks that --energy or --budget chooses; add one, or remove --multiple"
        )


def _how(args: argparse.Namespace) -> "Truncation | Compression | None":
    if args.family is None:
        return None
    from boost.convert.compress import Compression
    from boost.convert.spectrum import Truncation
    from boost.parallel.mesh import choose_device

    device = choose_device(args.device).type
    multiple = {} if args.multiple is None else {"multiple": args.multiple}
    if args.calibrate is None:
        return Truncation(args.rank, args.energy, device=device, budget=args.budget, **multiple)
    tokens = {} if args.calibrate_tokens is None else {"tokens": args.calibrate_tokens}
    meshes = tuple(args.mesh)
    return Compression(args.budget, args.calibrate, args.family, meshes=meshes, device=device, **multiple, **tokens)


def _print_report(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    linears, slots = report["linears"], report["slots"]
    calibrated = "calibration" in report
    title = "truncated SVD" if not calibrated else "truncated SVD, weighted by calibration text; cost: nats per token"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("linear")
    for heading in ("shape", "rank", "energy kept", "relative error", *["cost"] * calibrated):
        table.add_column(heading, justify="right")
    if len(linears) <= MOST_ROWS:
        for row in linears:
            shape, cost = f"{row['d_out']} x {row['d_in']}", [f"{row['cost']:.5f}"] if calibrated else []
            table.add_row(row["name"], shape, f"{row['rank']}", f"{row['energy']:.4f}", f"{row['error']:.4f}", *cost)
    else:
        shapes = {row["name"].split(".", 2)[2]: f"{row['d_out']} x {row['d_in']}" for row in linears}
        for row in slots:
            low, high = row["rank_min"], row["rank_max"]
            ranks = f"{low}" if low == high else f"{low}-{high}, mean {row['rank_mean']:.0f}"
            errors = f"{row['error_mean']:.4f}, at most {row['error_max']:.4f}"
            cost = [f"{row['cost']:.5f}"] if calibrated else []
            slot = f"{row['slot']} ({row['blocks']} blocks)"
            table.add_row(slot, shapes[row["slot"]], ranks, f"{row['energy']:.4f}", errors, *cost)
    console = Console()
    console.print(table)
    console.print("report.json lists every linear\n")
    if calibrated:
        of, losses = report["parameters"], report["heldout"]
        console.print(
            f"linears: {of['factors']:,} of {of['linears']:,} parameters ({of['factors'] / of['linears']:.1%})"
        )
        console.print(
            f"held-out loss: {losses['dense']:.4f} dense, {losses['factorized']:.4f} factorized, nats per token\n"
        )
