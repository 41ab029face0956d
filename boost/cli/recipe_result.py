"""The last stage of `boost recipe`: the perplexity of the run next to the published one."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from boost.config import Config
from boost.config.recipes import Recipe, tokens_of
from boost.format import format_count

if TYPE_CHECKING:
    from boost.train.evaluate import Evaluation

RESULT_FILE = "recipe.json"


def final_evaluation(config: Config) -> dict[str, Any] | None:
    """The metrics of the evaluation at the end of the run, on all of the held-out split; None if it is not done."""
    from boost.train.metrics import read_metrics
    from boost.train.rundir import RunDirectory

    metrics = RunDirectory(config.run.dir).metrics
    found = None
    for line in read_metrics(metrics) if metrics.is_file() else ():
        if line.get("kind") == "eval" and line.get("final") and line.get("step") == config.train.steps:
            found = line
    return found


def compare(recipe: Recipe, config: Config) -> None:
    """Evaluates as the publication does, prints both perplexities, and writes recipe.json to the run directory."""
    from boost.cli.terminal import print_fact, result_console
    from boost.train.best_effort import best_effort

    path = Path(config.run.dir) / RESULT_FILE
    whole = final_evaluation(config)
    assert whole is not None
    complete = tokens_of(config) == tokens_of(recipe.config()) and config.model == recipe.config().model
    facts = _done(path, config)
    if facts is None:
        result = _by_document(config)
        facts = {
            "recipe": recipe.name,
            "perplexity": result.perplexity,
            "heldout_tokens": result.tokens,
            "perplexity_of_all_tokens": whole["perplexity"],
            "step": config.train.steps,
            "training_tokens": tokens_of(config),
            "published": recipe.perplexity,
            "source": recipe.source,
            "complete": complete,
        }
        with best_effort(f"write {path}"):
            path.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    out = result_console(140)
    rows = {
        "perplexity": f"{facts['perplexity']:.2f} on the first {config.train.seq_len} tokens of each held-out document, as "
        f"published ({format_count(facts['heldout_tokens'])} tokens)",
        "all tokens": f"{whole['perplexity']:.2f} on whole documents",
        "published": _published(recipe, config, facts["perplexity"], complete),
    }
    for key, value in rows.items():
        print_fact(out, key, value, 14)


def _done(path: Path, config: Config) -> dict[str, Any] | None:
    """The content of recipe.json of this run at its last step; None if there is none."""
    try:
        facts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return facts if facts.get("step") == config.train.steps else None


def _by_document(config: Config) -> "Evaluation":
    from boost.cli.inference import open_model
    from boost.data.store import TokenStore
    from boost.parallel.mesh import close_mesh
    from boost.train.evaluate import evaluate

    args = argparse.Namespace(checkpoint=config.run.dir, tp=1, device=config.run.device)
    _, opened, mesh, decoder = open_model(args)
    split = TokenStore.open(Path(config.data.store)).split("heldout")
    train = config.train
    found = evaluate(
        decoder, split, train.seq_len, train.micro_batch, opened.data.isolate_documents, mesh, by_document=True
    )
    close_mesh()
    return found


def _published(recipe: Recipe, config: Config, perplexity: float, complete: bool) -> str:
    if recipe.perplexity is None:
        return f"- ({recipe.source})"
    words = f"{recipe.perplexity:.2f} ({recipe.source})"
    if not complete:
        share = tokens_of(config) / tokens_of(recipe.config())
        same = config.model == recipe.config().model
        reason = f"{share:.2%} of its tokens" if same else f"another model, {share:.2%} of its tokens"
        return f"{words}; not comparable: this run had {reason}"
    return f"{words}; this run: {perplexity / recipe.perplexity - 1:+.1%}"
