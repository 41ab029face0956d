"""The teacher in a distillation: a frozen model, sharded over the same mesh as the student."""

import shlex
from pathlib import Path

import torch
from torch import Tensor

from boost.config import Config
from boost.config.layouts import layout_spec, layouts_of, spec_of
from boost.config.rules import check
from boost.config.schema import ModelConfig, ParallelConfig
from boost.data.store import TokenStore
from boost.errors import ConfigError
from boost.models.decoder import Decoder
from boost.models.interface import Teaching
from boost.parallel.mesh import Mesh
from boost.paths import is_file
from boost.train import checkpoint as ckpt
from boost.train.checkpoint import Checkpoint
from boost.train.model import build_decoder


class Teacher:
    """Computes the student's targets for each micro-batch. Each replica has its own copy in train.compute_dtype, with weights
    sharded over TP and sequences over CP. Training does not change it, and checkpoints do not contain it."""

    def __init__(self, config: Config, mesh: Mesh) -> None:
        """Builds and loads the teacher for the student's `config`. Collective. Raises BoostError."""

        def load(checkpoint: Checkpoint) -> tuple[Config, Decoder]:
            fitting = teacher_config(config, checkpoint.config.model)
            decoder = build_decoder(fitting, mesh)
            ckpt.load_weights(checkpoint, decoder, mesh)
            return fitting, decoder

        self._distill = config.distill
        self.config, self.decoder = ckpt.read_checkpoint(Path(config.distill.teacher), load, mesh)
        self.decoder.requires_grad_(False)
        self.cross_entropy = torch.zeros((), dtype=torch.double, device=mesh.device)
        """The student's cross-entropy over the micro-batches since the last reset, summed over this process's targets."""

    def __call__(self, tokens_BS: Tensor, document_ids_BS: Tensor | None) -> Teaching:
        """Runs the teacher's forward pass. Takes the same arguments as `Decoder.forward`."""
        hidden_TE = self.decoder.head_inputs(tokens_BS, document_ids_BS)
        distill = self._distill
        weights = distill.weight, distill.temperature, distill.hidden
        return Teaching(hidden_TE, self.decoder.head_weight, *weights, self.cross_entropy)


def check_teacher(config: Config, store: TokenStore) -> Checkpoint | None:
    """Opens the teacher's checkpoint and checks that it fits the student, the mesh and the data. Returns None without a teacher.

    Raises BoostError.
    """
    if not config.distill.teacher:
        return None
    path = Path(config.distill.teacher)
    if is_file(path / "config.json"):
        raise ConfigError(
            f"distill.teacher = '{path}' is a Hugging Face folder; convert it first: boost import "
            f"{shlex.quote(str(path))} --out CHECKPOINT"
        )
    checkpoint = ckpt.open_checkpoint(path)
    teacher_config(config, checkpoint.config.model)
    store.require_tokenizer(checkpoint.require_tokenizer(), f"distill.teacher = '{checkpoint.path}'")
    return checkpoint


def teacher_config(config: Config, teacher: ModelConfig) -> Config:
    """The teacher's configuration on the mesh of the student's `config`, without activation checkpointing. Selects a layout that
    supports the teacher's family, preferably with the student's kind of residual stream. Raises ConfigError if no layout fits."""
    student = config.model
    if teacher.vocab_size != student.vocab_size:
        raise ConfigError(
            f"distill.teacher = '{config.distill.teacher}' has model.vocab_size = {teacher.vocab_size}, but the model has "
            f"{student.vocab_size}; set model.vocab_size to {teacher.vocab_size}, or use another teacher"
        )
    if config.distill.hidden and teacher.dim != student.dim:
        raise ConfigError(
            f"distill.hidden = {config.distill.hidden} compares hidden states, but distill.teacher has model.dim = {teacher.dim} "
            f"and the model has {student.dim}; set distill.hidden = 0, or use a teacher of the same width"
        )
    dtype = config.train.compute_dtype
    train = config.train.model_copy(update={"recompute": "none", "recompute_every": 1, "param_dtype": dtype})
    problem: ConfigError | None = None
    own, names = config.parallel, layouts_of(teacher)
    residual = spec_of(own).residual
    # Try the most similar layout for the teacher's family first.
    for name in sorted(names, key=lambda name: (name != own.layout, layout_spec(name).residual != residual)):
        fields = ("tp", "dp", "cp", "grouping", "overlap", *layout_spec(name).options)
        parallel = ParallelConfig(layout=name, **{field: getattr(own, field) for field in fields})
        distill = type(config.distill)()
        sections = {"model": teacher, "parallel": parallel, "train": train, "distill": distill}
        fitting = config.model_copy(update=sections)
        try:
            check(fitting)
        except ConfigError as error:
            problem = problem or error
        else:
            return fitting
    raise ConfigError(f"distill.teacher = '{config.distill.teacher}' does not fit this mesh: {problem}")
