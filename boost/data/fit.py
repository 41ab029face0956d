"""Checks that token stores match a configuration, before processes start and again in each of them."""

import math
import shlex
from pathlib import Path

from boost.config import Config
from boost.data.batches import Batches, EvaluationBatches
from boost.data.mixture import Corpus
from boost.data.store import TokenStore, is_missing
from boost.data.verify import Progress, verify_once
from boost.errors import ConfigError, DataError


def open_corpus(config: Config, progress: Progress = iter, until_stopped: Progress = iter) -> Corpus:
    """Opens the token stores in a configuration and verifies them unless data.verify is false. `progress` wraps the iteration over
    the blocks to verify; a store that this machine has verified before is not read again. `until_stopped`: see `verify_once`.

    Raises DataError or ConfigError if a store is missing, damaged, too small for one sequence, contains token ids outside the
    model's vocabulary, or has a different tokenizer from the others.
    """
    for path in config.data.sources:
        if is_missing(Path(path)):
            raise DataError(f"{path}: no token store here; create it with: {prepare_command(config, path)}")
    corpus, train = Corpus.open(config.data.sources), config.train
    for store in corpus.stores:
        check_vocabulary(config, store)
        if config.data.verify:
            verify_once(store, progress, until_stopped)
    Batches(corpus.split("train"), train.seq_len, train.global_batch, train.seed)
    for store in corpus.stores:
        EvaluationBatches(store.split("heldout"), train.seq_len, train.micro_batch)
    return corpus


def prepare_command(config: Config, store: str) -> str:
    """The command that creates a token store of the configuration, for an error message."""
    weights, train = config.data.sources, config.train
    first, name, out = next(iter(weights)), Path(store).name, shlex.quote(store)
    if name == "c4":  # of the published presets
        tokens = train.steps * train.global_batch * train.seq_len * weights[store] / sum(weights.values())
        return (
            f"boost prepare --hf allenai/c4:en --max-tokens {math.ceil(tokens)} --heldout-split validation "
            f"--max-heldout-tokens 10000000 --tokenizer t5-base --out {out}"
        )
    if store != first:  # a mixture has one tokenizer
        return f"boost prepare INPUT --tokenizer {shlex.quote(first)} --out {out}"
    if name == "stdlib":
        return f"boost prepare --stdlib --out {out}"
    return f"boost prepare INPUT --tokenizer train:{config.model.vocab_size} --out {out}"


def check_vocabulary(config: Config, store: TokenStore) -> None:
    """Raises ConfigError if the store contains token ids outside the model's vocabulary."""
    if store.largest_token >= config.model.vocab_size:
        tp = config.parallel.tp
        valid = -(-store.vocab_size // tp) * tp
        raise ConfigError(
            f"model.vocab_size = {config.model.vocab_size}, but the store '{store.path}' contains token ids up to "
            f"{store.largest_token}; set model.vocab_size = {valid}, the tokenizer's vocabulary size"
        )
