"""Checks that a token store matches a configuration, before processes start and again in each of them."""

from pathlib import Path

from boost.config import Config
from boost.config.recipes import prepare_command
from boost.data.batches import Batches, EvaluationBatches
from boost.data.store import TokenStore, is_missing
from boost.data.verify import Progress, verify_once
from boost.errors import ConfigError, DataError


def open_fitting_store(config: Config, progress: Progress = iter) -> TokenStore:
    """Opens the token store of a configuration and verifies it unless data.verify is false. `progress` wraps the iteration over the
    blocks to verify; a store that this machine has verified before is not read again.

    Raises DataError or ConfigError if the store is missing, damaged, too small for one sequence, or contains token ids outside the
    model's vocabulary.
    """
    path = Path(config.data.store)
    if is_missing(path):
        raise DataError(f"{path}: no token store here; create it with: {prepare_command(config)}")
    store = TokenStore.open(path)
    check_vocabulary(config, store)
    if config.data.verify:
        verify_once(store, progress)
    Batches(store.split("train"), config.train.seq_len, config.train.global_batch, config.train.seed)
    EvaluationBatches(store.split("heldout"), config.train.seq_len, config.train.micro_batch)
    return store


def check_vocabulary(config: Config, store: TokenStore) -> None:
    """Raises ConfigError if the store contains token ids outside the model's vocabulary."""
    if store.largest_token >= config.model.vocab_size:
        tp = config.parallel.tp
        valid = -(-store.vocab_size // tp) * tp
        raise ConfigError(
            f"model.vocab_size = {config.model.vocab_size}, but data.store = '{store.path}' contains token ids up to "
            f"{store.largest_token}; set it to the tokenizer's vocabulary size, {valid}"
        )
