"""`boost recipe`: a published run from its data to its perplexity, in one command that can be interrupted and repeated."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from boost.config import Config
from boost.config.recipes import Recipe, find_recipe, recipes, tokens_of
from boost.errors import ConfigError, DataError
from boost.format import format_count

if TYPE_CHECKING:
    from boost.data.prepare import PrepareOptions
    from boost.data.store import TokenStore

SHORT_HELDOUT_TOKENS = 200_000
"""Held-out tokens of a shortened run, at least."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    """Adds the command and returns its parser."""
    parser = subparsers.add_parser(
        "recipe",
        help="prepare, train, evaluate and compare a published run",
        usage="boost recipe [RECIPE] [--data PATH] [--steps N | --max-tokens N] [--yes] [--dry-run]\n"
        "                    [--section.key value ...]",
        description="Runs a published recipe to the end: prepares its data, trains its preset, evaluates, and compares with the\n"
        "published perplexity. Prints the budget first. Interrupt it at any time; the same command continues.\n"
        "Without RECIPE, lists them.",
        epilog="examples:\n"
        "  boost recipe                                     the list: preset, data, tokens, published perplexity\n"
        "  boost recipe c4-60m --dry-run                    the budget: tokens, disk, time on this machine, GPU-hours\n"
        "  boost recipe c4-60m --data /data/c4/en --yes     from local copies of C4's files, without asking\n"
        "  boost recipe c4-60m --steps 200 --train.global_batch 16      a rehearsal\n"
        "  boost recipe c4-130m --parallel.dp 8 --train.micro_batch 64  on eight GPUs",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", nargs="?", metavar="RECIPE", help="name of a recipe, or of its preset")
    parser.add_argument(
        "--data",
        metavar="PATH",
        help="folder with the dataset's files, instead of the Hugging Face Hub; their names contain the name of the split, such "
        "as c4-train.00000-of-01024.json.gz and c4-validation.00000-of-00008.json.gz",
    )
    parser.add_argument(
        "--tokenizer",
        metavar="TOKENIZER",
        help="instead of the recipe's: a local copy of it, or another one, as for 'boost prepare'",
    )
    shorter = parser.add_mutually_exclusive_group()
    shorter.add_argument("--steps", type=int, metavar="N", help="train for N steps")
    shorter.add_argument("--max-tokens", type=int, metavar="N", help="train on about N tokens")
    parser.add_argument("--gpu", default="h100-80g", metavar="PROFILE", help="GPU to plan for (default: %(default)s)")
    parser.add_argument("--gpus", type=int, default=8, metavar="N", help="number of them (default: %(default)s)")
    parser.add_argument(
        "--price", type=float, default=2.0, metavar="P", help="assumed USD per GPU-hour (default: %(default)s)"
    )
    parser.add_argument("--yes", action="store_true", help="do not ask before starting")
    parser.add_argument("--dry-run", action="store_true", help="print the budget and stop")
    parser.set_defaults(takes_overrides=True)
    return parser


def run(args: argparse.Namespace) -> int:
    """Lists the recipes, or runs one."""
    if args.recipe is None:
        if args.overrides:
            raise ConfigError(f"RECIPE is missing before {args.overrides[0]}; 'boost recipe' lists them")
        _print_list()
        return 0
    _check(args)
    if "RANK" in os.environ:
        raise ConfigError(
            "boost recipe runs on one machine and starts its processes itself; for torchrun, write its configuration with "
            f"'boost config {args.recipe}', and use 'boost prepare' and 'boost train'"
        )
    recipe = find_recipe(args.recipe)
    config = recipe.config(args.overrides, args.steps, args.max_tokens)
    options = _prepare_options(args, recipe, config)

    from boost.cli.recipe_budget import print_budget

    print_budget(args, recipe, config, options)
    if args.dry_run:
        return 0
    begun = Path(config.run.dir, "config.toml").exists()
    if not args.yes and not begun and not _confirmed():
        return 1
    return _run_stages(args, recipe, config, options)


def _check(args: argparse.Namespace) -> None:
    for flag, value in (("--steps", args.steps), ("--max-tokens", args.max_tokens), ("--gpus", args.gpus)):
        if value is not None and value < 1:
            raise ConfigError(f"{flag} = {value} is too small; smallest valid value: 1")
    if not args.price > 0:
        raise ConfigError(f"--price = {args.price:g} must be greater than 0 (USD per GPU-hour)")


def _confirmed() -> bool:
    """Asks on the terminal. Raises ConfigError without one."""
    if not sys.stdin.isatty():
        raise ConfigError("stdin is not a terminal, so nobody can confirm the budget; add --yes to start, or --dry-run")
    try:
        return input("Start? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False


def _prepare_options(args: argparse.Namespace, recipe: Recipe, config: Config) -> "PrepareOptions":
    """What to prepare: the training tokens of the run, and the held-out tokens of the publication. Raises ConfigError."""
    from boost.data.prepare import PrepareOptions

    corpus = recipe.corpus
    share = tokens_of(config) / tokens_of(recipe.config())
    heldout = min(max(int(corpus.heldout_tokens * share), SHORT_HELDOUT_TOKENS), corpus.heldout_tokens)
    options: dict[str, Any] = {
        "out": Path(config.data.store),
        "tokenizer": args.tokenizer or corpus.tokenizer,
        "max_tokens": tokens_of(config) + 1,  # the last target needs one more
        "max_heldout_tokens": heldout,
    }
    if args.data is None:
        return PrepareOptions(hf=corpus.dataset, heldout_split=corpus.heldout_split, **options)
    train, held_out = (_files(Path(args.data), split) for split in ("train", corpus.heldout_split))
    return PrepareOptions(inputs=train, heldout_from=held_out, **options)


def _files(folder: Path, split: str) -> tuple[str, ...]:
    """Files of a split by their names, in order; its folder if there is one. Raises ConfigError if there are none."""
    if not folder.is_dir():
        raise ConfigError(f"--data {folder}: no such folder; pass the folder that holds the dataset's files")
    if (folder / split).is_dir():
        return (str(folder / split),)
    found = sorted(str(path) for path in folder.iterdir() if split in path.name and path.is_file())
    if not found:
        raise ConfigError(f"--data {folder}: no file with '{split}' in its name, and no folder '{split}'")
    return tuple(found)


def _run_stages(args: argparse.Namespace, recipe: Recipe, config: Config, options: "PrepareOptions") -> int:
    """Prepares, trains and compares. Each stage does nothing if it is done, and continues if it was interrupted."""
    from boost.cli.prepare import print_report, progress_display
    from boost.cli.recipe_result import compare, final_evaluation
    from boost.cli.train import train_config
    from boost.data.prepare import prepare

    print("\n1/3 prepare", flush=True)
    result = prepare(options, progress_display())
    print_report(result)
    if args.tokenizer:
        config = _fitted(args, recipe, config, result.store)
    _require_text(config, result.store)
    print("\n2/3 train", flush=True)
    if final_evaluation(config) is None:
        code = train_config(config)
        if code:
            return code
    else:
        print(f"{config.run.dir} is finished, nothing to do")
    if final_evaluation(config) is None:
        print("\nnot finished; the same command continues")
        return 0
    print("\n3/3 compare", flush=True)
    compare(recipe, config)
    return 0


def _fitted(args: argparse.Namespace, recipe: Recipe, config: Config, store: "TokenStore") -> Config:
    """The configuration for another tokenizer: with a vocabulary of its size, unless the recipe's holds it."""
    if store.largest_token < config.model.vocab_size and store.vocab_size > config.model.vocab_size // 2:
        return config
    tp = config.parallel.tp
    size = ["--model.vocab_size", str(-(-store.vocab_size // tp) * tp)]
    return recipe.config([*size, *args.overrides], args.steps, args.max_tokens)


def _require_text(config: Config, store: "TokenStore") -> None:
    """Raises DataError if the data is much less than the run reads: it would train on the same text again and again."""
    found, needed = store.split("train").n_tokens, tokens_of(config)
    if found < needed / 4:
        raise DataError(
            f"{store.path}: has {format_count(found)} training tokens, and the recipe reads {format_count(needed)}; add more of "
            f"the dataset's files, or pass --max-tokens {found}"
        )


def _print_list() -> None:
    from rich.table import Table

    from boost.cli.terminal import print_table, result_console

    table = Table(box=None, pad_edge=False, header_style="bold")
    headings: Sequence[str] = ("recipe", "preset", "data", "tokens", "perplexity", "source")
    for heading in headings:
        table.add_column(heading, justify="right" if heading in ("tokens", "perplexity") else "left")
    for each in recipes().values():
        published = "-" if each.perplexity is None else f"{each.perplexity:.2f}"
        tokens = format_count(tokens_of(each.config()))
        table.add_row(each.name, each.preset, each.corpus.dataset, tokens, published, each.source)
    print_table(result_console(140), table)
    print("\n'boost recipe RECIPE --dry-run' prints the budget of one.")
