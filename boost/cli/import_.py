"""`boost import`: converts Hugging Face weights to a checkpoint."""

import argparse
import sys
from pathlib import Path

from boost.cli.export import FILE_BYTES
from boost.cli.terminal import add_options, print_rows
from boost.errors import ConfigError
from boost.text import JsonObject, printable

OPTIONS = {
    "--tokenizer PATH": "tokenizer.json or its folder (default: the one in DIR)",
    "--dtype {bfloat16,float32}": "dtype of weights (default: as stored; float32 for factors)",
    "--untie": "import embedding and head as two tensors if they are one in DIR",
    "--allow-nonfinite": "import weights that are NaN or infinite, and print how many",
}
RANKS = {
    "--rank R": "factorize: rank of every linear",
    "--energy FRACTION": "factorize: fraction of the squared singular values of each linear to keep, such as 0.95",
    "--budget FRACTION": "factorize, with --calibrate: parameters of all factors as a fraction of the parameters that they "
    "replace, such as 0.6; embedding, norms and head are not counted",
}
MORE = {
    "--calibrate STORE": "with --budget: token store whose training split is used for calibration; ranks depend on how much the "
    "loss would rise if each direction were dropped",
    "--calibrate-tokens N": "with --calibrate: number of calibration tokens, spread evenly over the split (default 262144)",
    "--multiple N": "with --energy: round ranks up to a multiple of N (default 1); with --budget: ranks are multiples of N "
    "(default 8)",
    "--device {auto,cpu,cuda}": "device for calibration and SVD (default: a GPU if available)",
    "--json": "print JSON, including the error of every linear",
}


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "import",
        description="Converts a Hugging Face folder with safetensors weights (Llama, Mistral, Qwen2, Qwen3, SmolLM3, the official\n"
        "CoLA class, or the output of 'boost export') to a checkpoint at step 0, for 'boost eval', 'generate' and\n"
        "'train --start-from'.\n"
        "--rank, --energy and --budget factorize the linears of a dense model, from a folder or a checkpoint, into an svd\n"
        "model, and report the error of each linear. --budget and --calibrate choose directions by their cost on\n"
        "calibration text; --rank and --energy truncate the SVD.",
        epilog="examples:\n"
        "  boost import models/llama-1b --out checkpoints/llama-1b\n"
        "  boost import models/cola-1b --out checkpoints/cola-1b --tokenizer data/c4\n"
        "  boost import models/llama-1b --out checkpoints/svd --rank 512\n"
        "  boost import runs/dense --out checkpoints/svd --energy 0.95 --multiple 8\n"
        "  boost import runs/dense --out checkpoints/svd --budget 0.6 --calibrate data/mine\n"
        "  boost train --start-from checkpoints/svd --distill-from runs/dense --data.store data/mine --run.dir runs/svd",
    )
    parser.add_argument(
        "source", metavar="DIR", help="Hugging Face folder; to factorize, also a boost run or checkpoint"
    )
    parser.add_argument("--out", required=True, metavar="CHECKPOINT", help="output folder; must be empty or not exist")
    add_options(parser, OPTIONS)
    add_options(parser.add_mutually_exclusive_group(), RANKS)
    add_options(parser, MORE, device="auto")
    return parser


def run(args: argparse.Namespace) -> int:
    if (args.budget is None) != (args.calibrate is None):
        raise ConfigError("--budget FRACTION and --calibrate STORE require each other; pass both, or use --energy")
    if args.calibrate_tokens is not None and args.calibrate is None:
        raise ConfigError("--calibrate-tokens requires --calibrate STORE; add it, or remove --calibrate-tokens")
    if args.multiple is not None and args.energy is None and args.budget is None:
        raise ConfigError(
            "--multiple has no effect without --energy or --budget; add one of them, or remove --multiple"
        )
    if not Path(args.source).is_dir():
        raise ConfigError(f"there is no folder at '{args.source}'; pass a Hugging Face folder with safetensors weights")

    from boost.cli.inference import dump
    from boost.config.architecture import parameter_count
    from boost.convert.compress import Compression
    from boost.convert.importing import import_weights
    from boost.convert.spectrum import Truncation
    from boost.train.rendezvous import choose_device

    how: Compression | Truncation | None = None
    options = {"multiple": args.multiple, "tokens": args.calibrate_tokens}
    options = {name: value for name, value in options.items() if value is not None}
    if args.budget is not None:
        how = Compression(args.budget, args.calibrate, device=choose_device(args.device).type, **options)
    elif args.rank is not None or args.energy is not None:
        how = Truncation(args.rank, args.energy, device=choose_device(args.device).type, **options)
    named = Path(args.tokenizer) if args.tokenizer else None
    done = import_weights(
        Path(args.source), Path(args.out), args.dtype, named, how, FILE_BYTES, args.untie, args.allow_nonfinite
    )
    facts: dict[str, object] = {
        "checkpoint": str(done.path),
        "family": done.model.family,
        "parameters": parameter_count(done.model),
        **({"untied_parameters": done.untied} if done.untied else {}),
        "bytes": done.bytes,
        "dtype": done.dtype,
        "tokenizer": done.tokenizer,
        **({"notes": done.notes} if args.json else {}),
    }
    if done.report and args.json:
        facts["report"] = done.report
    elif done.report:
        _print_report(done.report)
    dump(facts, args.json)
    for note in done.notes:
        print(f"note: {printable(note)}", file=sys.stderr)
    if not done.tokenizer:
        source = args.source  # may be missing because only the model was saved
        slow = [f"{name} but " for name in ("tokenizer.model", "vocab.json") if Path(source, name).is_file()]
        way_out = "import again with --tokenizer PATH, for example the folder that the model was originally loaded from"
        if slow:
            saves = f"AutoTokenizer.from_pretrained('{source}').save_pretrained('{source}')"
            way_out = f"convert it with {saves} and import again"
        problem = f"'{source}' has {''.join(slow[:1])}no tokenizer.json, so the checkpoint has no tokenizer"
        print(f"warning: {problem}; {way_out}", file=sys.stderr)
    return 0


def _print_report(report: JsonObject) -> None:
    """Prints one row per slot, summarized over the blocks."""
    calibrated = "calibration" in report
    title = f"truncated SVD{' weighted by calibration text (cost in nats per token)' * calibrated}, all blocks together"
    rows = []
    shapes = {row["name"].split(".", 2)[2]: f"{row['d_out']} x {row['d_in']}" for row in report["linears"]}
    for row in report["slots"]:
        low, high = row["rank_min"], row["rank_max"]
        ranks = f"{low}" if low == high else f"{low}-{high}, mean {row['rank_mean']:.0f}"
        errors = f"{row['error_mean']:.4f}, at most {row['error_max']:.4f}"
        cost = [f"{row['cost']:.5f}"] if calibrated else []
        rows.append((row["slot"], shapes[row["slot"]], ranks, f"{row['energy']:.4f}", errors, *cost))
    numbers = ("shape", "rank", "energy kept", "relative error", *["cost"] * calibrated)
    print_rows(("linear", *numbers), rows, right=numbers, title=title)
    print("report.json lists every linear\n")
    of = report["parameters"]
    if calibrated:
        asked = f"--budget allows {report['asked']['budget']:.1%} and counts only linears"
        print(
            f"linears: {of['factors']:,} parameters instead of {of['linears']:,} ({of['factors'] / of['linears']:.1%}; {asked})"
        )
    head = f"; untying the head from the embedding added {of['untied']:,}" if of["untied"] else ""
    print(
        f"whole model: {of['after']:,} parameters instead of {of['before']:,} ({of['after'] / of['before']:.1%}){head}"
    )
    if calibrated:
        losses = report["heldout"]
        print(f"held-out loss: dense {losses['dense']:.4f}, factorized {losses['factorized']:.4f} nats per token")
    print()
