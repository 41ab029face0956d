"""Which checkpoint a run resumes or starts from, and whether it may."""

from pathlib import Path
from typing import Any

from boost.config import Config
from boost.data.store import TokenStore
from boost.errors import CheckpointError, ConfigError
from boost.train import checkpoint as ckpt
from boost.train.checkpoint import Checkpoint
from boost.train.rundir import RunDirectory


def resume_candidates(resume: str | None, run: RunDirectory) -> list[Path]:
    """Checkpoints that `--resume` names, newest first: all of this run's for 'auto', else the one at a path.

    Raises CheckpointError if there is none at the path.
    """
    if resume is None:
        return []
    if resume == "auto":
        return ckpt.complete_checkpoints(run.checkpoints)[::-1]
    return [ckpt.find_checkpoint(Path(resume))]


def check_start(start_from: str, config: Config, store: TokenStore) -> Checkpoint:
    """The checkpoint whose weights a run starts from.

    Raises CheckpointError or DataError if it has another model or another tokenizer.
    """
    found = ckpt.open_checkpoint(Path(start_from))
    ckpt.require_fits(found, config.model)
    store.require_tokenizer(found.require_tokenizer(), f"'{found.path}'")
    return found


def data_identity(store: TokenStore) -> dict[str, Any]:
    """What a checkpoint records of its data: a resumed run needs the same, and generation needs the tokenizer."""
    return {"tokenizer": store.fingerprint, "content": store.content("train"), "eos": store.eos}


def check_resumable(found: Checkpoint, config: Config, store: TokenStore) -> None:
    """Raises ConfigError or CheckpointError if resuming would repeat or skip samples, or train on other data.

    The order of the data is a function of the seed, the sequence length and the global batch.
    """
    if found.updates == 0 and found.data.get("content") is None:
        raise CheckpointError(
            f"'{found.path}' holds imported weights, not a run; start a run from it with --start-from {found.path}"
        )
    for field in ("seed", "seq_len", "global_batch"):
        before, now = getattr(found.config.train, field), getattr(config.train, field)
        if before != now:
            raise ConfigError(
                f"train.{field} = {now}, but '{found.path}' was trained with {before}, and the order of the data "
                f"depends on it; resume with train.{field} = {before}, or choose another run.dir"
            )
    if found.position.step > config.train.steps:
        raise ConfigError(
            f"train.steps = {config.train.steps}, but '{found.path}' has done {found.position.step} steps; "
            f"smallest valid value: {found.position.step}"
        )
    store.require_tokenizer(str(found.data.get("tokenizer")), f"'{found.path}'")
    if found.data.get("content") != store.content("train"):
        raise CheckpointError(
            f"'{found.path}' was trained on other text than data.store = '{config.data.store}' holds; "
            "resume with the store it was trained on"
        )
