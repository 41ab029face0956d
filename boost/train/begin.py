"""Start of a run: from an intact checkpoint, from the weights of another run, or from initial weights."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from boost.data.mixture import Corpus
from boost.errors import CheckpointError, DamagedCheckpointError
from boost.train import checkpoint as ckpt
from boost.train.model import initialize_model
from boost.train.resume import check_resumable, check_start, resume_warnings

if TYPE_CHECKING:
    from boost.train.loop import Trainer

log = logging.getLogger("boost")


def begin(trainer: "Trainer", resume_from: Sequence[Path], start_from: str | None) -> None:
    """Implementation of `Trainer.start`."""
    trainer.warnings += ckpt.incomplete_warnings(trainer.run.checkpoints)
    damaged: list[str] = []
    for path in resume_from:
        try:
            found = ckpt.open_checkpoint(path)
            check_resumable(found, trainer.config, trainer.corpus)
            trainer.load(found)
        except DamagedCheckpointError as error:
            damaged.append(str(error))
            if len(damaged) == len(resume_from):
                raise DamagedCheckpointError("; ".join(damaged)) from None
            trainer.warnings.append(f"{error}; trying the previous checkpoint")
        else:
            trainer.resumed_from = found.path
            if found.position.doubt:
                trainer.begin_trouble(found.position.doubt, ruined=False)
            trainer.warnings += resume_warnings(found, list(resume_from), trainer.config)
            log.info("resumed from %s at step %d", found.path, trainer.position.step)
            break
    else:
        _load_initial_weights(trainer, start_from)
    for warning in trainer.warnings:
        log.warning(warning)
    for folder in trainer.checkpoint_folders:
        ckpt.supersede(folder, trainer.position.step, trainer.mesh)


def inherited_data(corpus: Corpus, resume_from: Sequence[Path], start_from: str | None) -> dict[str, Any]:
    """Data that this run's checkpoints inherit from the checkpoint it resumes or starts from: what the original Hugging Face folder
    contained besides weights, such as a chat template. If that has no template, the one of a store of conversations. Replicas that
    rejoin later, without loading a checkpoint, need it too."""
    hub = _hub_data(resume_from, start_from)
    chat = next((store.chat for store in corpus.stores if store.chat), None)
    if chat and not hub.get("chat_templates"):
        tokenizer = {**chat["tokenizer"], **hub.get("tokenizer", {})}
        hub = {**hub, "tokenizer": tokenizer, "chat_templates": {"default": chat["template"]}}
    return {ckpt.HUB: hub} if hub else {}


def _hub_data(resume_from: Sequence[Path], start_from: str | None) -> dict[str, Any]:
    for path in (*resume_from, *([Path(start_from)] if start_from else [])):
        try:
            data = ckpt.open_checkpoint(path).data
        except CheckpointError:  # `begin` reports it, or falls back to the previous checkpoint
            continue
        return dict(data.get(ckpt.HUB) or {})
    return {}


def _load_initial_weights(trainer: "Trainer", start_from: str | None) -> None:
    if start_from is None:
        initialize_model(trainer.model, trainer.config.train.seed, show=trainer.mesh.is_main)
        return
    found = check_start(start_from, trainer.config, trainer.store)
    ckpt.load_weights(found, trainer.model, trainer.mesh)
    trainer.started_from = found.path
    log.info("initialized from the weights of %s", found.path)
