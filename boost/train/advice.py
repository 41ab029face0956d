"""What a person wants to know before a run spends hours: too little data, no saves. One line each."""

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

from boost.format import format_count

if TYPE_CHECKING:
    from boost.train.loop import Trainer

log = logging.getLogger("boost")

MANY_EPOCHS = 4.0
"""Repeating data up to 4 times is about as good as new data (arXiv 2305.16264)."""
FEW_HELDOUT_TOKENS = 50_000
"""With fewer tokens, the standard error of the held-out perplexity is above about 1% (losses vary by 2 to 3 nats per token)."""


def advise(trainer: "Trainer") -> None:
    """Adds advice to the warnings that the console prints before the first step. On the main process."""
    for text in (*trainer.config.model.advice(), *start_advice(trainer)):
        log.warning(text)
        trainer.warnings.append(text)


def start_advice(trainer: "Trainer") -> Iterator[str]:
    """Advice before the first step, from the configuration, the token stores and this machine."""
    train, corpus = trainer.config.train, trainer.corpus
    for store, weight, samples in zip(corpus.stores, corpus.weights, trainer.batches.samples_of, strict=True):
        epochs = float(weight) * train.steps * train.global_batch / samples
        if epochs > MANY_EPOCHS:
            yield (
                f"the run reads the {format_count(samples * train.seq_len)} training tokens of {store.path} {epochs:.0f} times "
                f"(epochs); beyond {MANY_EPOCHS:.0f}, more text helps more than more steps"
            )
    for store in corpus.stores:
        split = store.split("heldout")
        heldout = split.n_tokens if split.n_targets is None else split.n_targets
        if heldout < FEW_HELDOUT_TOKENS:
            counted = "" if split.n_targets is None else " that count in the loss"
            yield (
                f"the held-out split of {store.path} has {format_count(heldout)} tokens{counted}, fewer than "
                f"{format_count(FEW_HELDOUT_TOKENS)}: its loss is noisy; prepare it with a larger --heldout"
            )
    masked = [store.path for store in corpus.stores if store.is_masked]
    if masked and not trainer.config.data.isolate_documents:
        yield (
            f"{masked[0]} holds conversations, and tokens attend to those before them in the same sequence; "
            "set data.isolate_documents = true"
        )
    if not train.save_every and not train.save_minutes:
        yield (
            "no checkpoints until the end of the run (train.save_every and train.save_minutes are 0): a crash loses all of it"
        )
