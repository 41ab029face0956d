"""Checks that token stores match a configuration, before processes start and again in each of them."""

from pathlib import Path

from boost.config import Config
from boost.config.recipes import prepare_command
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


def check_vocabulary(config: Config, store: TokenStore) -> None:
    """Raises ConfigError if the store contains token ids outside the model's vocabulary."""
    if store.largest_token >= config.model.vocab_size:
        tp = config.parallel.tp
        valid = -(-store.vocab_size // tp) * tp
        raise ConfigError(
            f"model.vocab_size = {config.model.vocab_size}, but the store '{store.path}' contains token ids up to "
            f"{store.largest_token}; set model.vocab_size = {valid}, the tokenizer's vocabulary size"
        )
