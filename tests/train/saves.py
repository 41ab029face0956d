"""Checkpoints of toy models: saved, loaded, and their tensors by name."""

from pathlib import Path
from typing import Any

import torch

from boost.config import Config
from boost.train import checkpoint as ckpt
from boost.train.checkpoint import CheckpointSaver, Position
from boost.train.checkpoint.reshard import local_slices
from tests import toy
from tests.trained import Trained

DATA = {"store": "s", "tokenizer": "t", "eos": 0}
TOKENIZER = b'{"a": "tokenizer"}'


def save(folder: Path, config: Config, steps: int = 3) -> tuple[Trained, Path]:
    trained = Trained(config, steps)
    return trained, save_at(folder, trained, steps)


def save_at(folder: Path, trained: Trained, step: int, tokenizer: bytes = TOKENIZER) -> Path:
    saver = CheckpointSaver(trained.model, trained.optimizer, trained.config, tokenizer, DATA, trained.mesh)
    return saver.save(folder, Position(step, step * 64)).path


def load(folder: Path, config: Config) -> tuple[Trained, Position]:
    """Loads a checkpoint into a model with other initial weights."""
    trained = Trained(config, 0, seed=9)
    checkpoint = ckpt.open_checkpoint(folder)
    return trained, ckpt.load_training_state(checkpoint, trained.model, trained.optimizer, trained.mesh)


def mesh_config(tp: int, **parallel: Any) -> Config:
    return config_on("float64", {"tp": tp, **parallel})


def config_on(dtype: str, parallel: dict[str, Any], **model: Any) -> Config:
    """Two micro-batches per stage and replica: enough for every schedule, and few enough for two shared cores."""
    batch = 2 * parallel.get("pp", 1) * parallel.get("dp", 1)
    return toy.toy_config(dtype, model=model, parallel=parallel, train={"micro_batch": 1, "global_batch": batch})


def state_of(trained: Trained) -> dict[str, torch.Tensor]:
    """Weights and moments of a model on one process, by checkpoint name."""
    found = local_slices(trained.model, trained.mesh, trained.optimizer.parts())
    return {each.name: each.local.clone() for each in found}
