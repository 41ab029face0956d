"""Schema of state.json, and `open_checkpoint`, which reads and checks everything except the tensors."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from boost import __version__
from boost.config import Config
from boost.config.load import from_tree
from boost.errors import BoostError, CheckpointError, DamagedCheckpointError
from boost.train.checkpoint.folders import STATE_FILE, TOKENIZER_FILE, find_checkpoint, step_of
from boost.train.checkpoint.manifest import first_problem, read_json, read_manifest, verify_file

FORMAT: Literal[1] = 1
HUB = "hub"
"""Key in a checkpoint's data: extra content of the Hugging Face folder the weights came from, such as a chat template."""

Counted = Annotated[int, Field(ge=0, lt=2**63)]


@dataclass(frozen=True)
class Position:
    """Position of a run. Together with the configuration, it is enough to resume exactly."""

    step: int
    """Optimizer steps done. Determines the learning rate and, with `skipped`, the data position."""
    tokens: int
    """Tokens trained on."""
    skipped: int = 0
    """Steps of data that rollbacks have skipped: step n trains on the data of step n + skipped."""
    trouble: str = ""
    """Why the weights are unusable; '' if they are usable. Such a checkpoint is resumed by its path, or if there is no other."""
    doubt: str = ""
    """Why it is unknown whether the weights are usable: training was in trouble. A run that resumes from them still is."""
    recent: dict[str, list[float]] = field(default_factory=dict, compare=False, repr=False)
    """Loss and gradient norm of recent healthy steps, with which the steps after a resume are compared (`boost.train.health`)."""
    # State of early stopping. Excluded from comparison, because it does not affect the weights.
    best_heldout_loss: float | None = field(default=None, compare=False)
    """Lowest held-out loss of periodic evaluations so far, nats per token; None before the first, and without early stopping."""
    stale_evaluations: int = field(default=0, compare=False)
    """Periodic evaluations since the lowest loss."""


class CheckpointState(BaseModel):
    """Content of state.json. Ignores unknown keys, which later releases may add."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    format: Literal[1] = FORMAT
    boost: str = __version__
    torch: str = str(torch.__version__)
    step: Counted
    tokens: Counted
    updates: Counted
    """Optimizer updates: steps minus skipped ones."""
    next_sample: Counted
    """Index of the next training sequence."""
    processes: Annotated[int, Field(ge=1, le=2**31)]
    skipped_steps: Counted = 0
    trouble: str = ""
    doubt: str = ""
    recent: dict[str, list[float]] = {}
    best_heldout_loss: float | None = None
    stale_evaluations: Counted = 0
    data: dict[str, Any]
    config: dict[str, Any]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.updates > self.step:
            raise ValueError(f"updates = {self.updates} is more than step = {self.step}")
        if (self.tokens > 0) != (self.step > 0):
            raise ValueError(f"tokens = {self.tokens} is inconsistent with step = {self.step}")
        return self


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk, with its state read and checked."""

    path: Path
    position: Position
    config: Config
    updates: int
    data: dict[str, Any]
    """Fingerprints of the run's token store and tokenizer; for imported weights, of their tokenizer."""

    @property
    def tokenizer(self) -> Path:
        """Path of the tokenizer file. Imported weights may have none."""
        return self.path / TOKENIZER_FILE

    def require_tokenizer(self) -> str:
        """The fingerprint of the tokenizer. Raises CheckpointError if there is none."""
        if not self.tokenizer.is_file() or not self.data.get("tokenizer"):
            raise CheckpointError(
                f"'{self.path}' has no tokenizer, so the meaning of its tokens is unknown; import the weights again "
                "with --tokenizer PATH (such as a token store)"
            )
        return str(self.data["tokenizer"])


def _position(state: CheckpointState) -> Position:
    health = state.trouble, state.doubt, state.recent
    return Position(
        state.step, state.tokens, state.skipped_steps, *health, state.best_heldout_loss, state.stale_evaluations
    )


def open_checkpoint(path: Path) -> Checkpoint:
    """Reads and checks everything except the tensors. Raises CheckpointError."""
    path = find_checkpoint(path)
    verify_file(path, STATE_FILE, read_manifest(path))
    return read_state(path)


def read_state(path: Path) -> Checkpoint:
    """Reads and checks state.json, but not its digest. Raises CheckpointError."""
    raw = read_json(path / STATE_FILE)
    if raw.get("format") != FORMAT:
        raise CheckpointError(f"'{path}' has checkpoint format {raw.get('format')!r:.40}; this version reads {FORMAT}")
    try:
        state = CheckpointState.model_validate(raw)
        config = from_tree(state.config)
    except ValidationError as error:
        raise DamagedCheckpointError(f"'{path}/{STATE_FILE}' is damaged: {first_problem(error)}") from None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DamagedCheckpointError(f"'{path}/{STATE_FILE}' has a malformed configuration: {error}") from None
    except BoostError as error:
        raise CheckpointError(f"'{path}/{STATE_FILE}' has an invalid configuration: {error}") from None
    if (named := step_of(path)) not in (None, state.step):
        raise DamagedCheckpointError(f"'{path}' is damaged: {STATE_FILE} says step {state.step}, its folder {named}")
    if state.next_sample != (state.step + state.skipped_steps) * config.train.global_batch:
        raise DamagedCheckpointError(
            f"'{path}' is damaged: next_sample = {state.next_sample} is not step {state.step + state.skipped_steps} x global batch "
            f"{config.train.global_batch}"
        )
    return Checkpoint(path, _position(state), config, state.updates, dict(state.data))
