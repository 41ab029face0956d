"""Training: the same few lines for one process on a laptop and for a mesh of GPUs.

A step is a pure function of (weights, moments, step number): the data, the learning rate and everything else follow from the
step, so a resumed run repeats to the bit what it would have done.
"""

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from boost.config import Config
from boost.config.architecture import IGNORED, flops_per_token
from boost.data.batches import Batches
from boost.data.fit import open_fitting_store
from boost.data.store import TOKENIZER_FILE, TokenStore
from boost.errors import CheckpointError, ConfigError, DamagedCheckpointError, StorageError, TrainingError
from boost.models.stored import storages
from boost.optim.build import build_optimizer
from boost.optim.schedule import learning_rate
from boost.parallel.gradients import Agreement, GradientReducer, agree, clip
from boost.parallel.mesh import Mesh
from boost.train import checkpoint as ckpt
from boost.train.checkpoint import Checkpoint, Position
from boost.train.console import Console
from boost.train.evaluate import Evaluation, evaluate
from boost.train.hardware import memory_bytes, mfu
from boost.train.metrics import EvalMetrics, MetricsWriter, StepMetrics
from boost.train.model import Model, backward, build_model, initialize_model
from boost.train.rundir import RunDirectory
from boost.train.signals import StopRequest

log = logging.getLogger("boost")

MAX_BAD_STEPS = 3
"""Steps in a row whose loss or gradient is not finite before the run gives up; none of them changes a weight."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    position: Position
    evaluation: Evaluation | None
    """On all held-out text; None if the run was stopped before its last step."""
    checkpoint: Path | None
    """The newest complete checkpoint."""
    stopped_by: str | None
    """The signal that stopped it, if one did."""
    signalled_here: bool = False
    """Whether that signal came to this process."""


class Trainer:
    """A run on this process: weights, optimizer, data and where they stand."""

    def __init__(self, config: Config, mesh: Mesh, run: RunDirectory) -> None:
        """Builds everything at step 0. Raises DataError if the token store does not serve the configuration."""
        self.config, self.mesh, self.run = config, mesh, run
        train = config.train
        self.store = open_fitting_store(config)
        self.heldout = self.store.split("heldout")
        self.batches = Batches(self.store.split("train"), train.seq_len, train.global_batch, train.seed)
        torch.manual_seed(train.seed + mesh.rank)
        self.model: Model = build_model(config, mesh)
        self.storages = list(storages(self.model))
        self.reducer = GradientReducer(self.storages, mesh)
        self.optimizer = build_optimizer(self.storages, config, mesh)
        self.flops_per_token = flops_per_token(config.model, train.seq_len)
        self.position = Position(0, 0)
        self.bad_steps = 0
        self.resumed_from: Path | None = None
        self.started_from: Path | None = None
        self.warnings: list[str] = []
        """What a person should be told before the first step."""
        self._metrics_lost = False

    def start(self, resume_from: list[Path], start_from: str | None = None) -> None:
        """Takes the first sound checkpoint of `resume_from`; if there is none to take, begins at step 0 with the weights of
        `start_from`, or initial ones.

        Raises CheckpointError if the checkpoint is of another model, of other data, or if all are damaged.
        """
        for path in resume_from:
            try:
                found = ckpt.open_checkpoint(path)
                self._check_resumable(found)
                self.position = ckpt.load_training_state(found, self.model, self.optimizer, self.mesh)
            except DamagedCheckpointError as error:
                if path == resume_from[-1]:
                    raise
                self.warnings.append(f"{error}; the checkpoint before it is taken")
                log.warning(self.warnings[-1])
            else:
                self.resumed_from = found.path
                log.info("resumed from %s at step %d", found.path, self.position.step)
                break
        else:
            self._begin(start_from)
        ckpt.supersede(self.run.checkpoints, self.position.step, self.mesh)

    def _begin(self, start_from: str | None) -> None:
        """Weights of step 0."""
        if start_from is None:
            initialize_model(self.model, self.config.train.seed, show=self.mesh.is_main)
            return
        found = check_start(start_from, self.config, self.store)
        ckpt.load_weights(found, self.model, self.mesh)
        self.started_from = found.path
        log.info("started from the weights of %s", found.path)

    def fit(self, console: Console, writer: MetricsWriter | None, peak: float) -> Outcome:
        """Trains from the current position to the last step, or until a signal; saves; evaluates at the end.

        `peak`: FLOP/s of one device, for MFU.
        """
        train = self.config.train
        saved: Path | None = None
        with StopRequest() as request:
            while self.position.step < train.steps:
                agreement = self._reported_step(console, writer, peak, request.requested)
                last = self.position.step == train.steps
                if agreement.stop and not last:
                    saved = self.save()
                    stopped_by = request.name or "a signal to another process"
                    return Outcome(self.position, None, saved, stopped_by, request.requested)
                if _due(self.position.step, train.eval_every) and not last:
                    self.evaluate(console, writer, train.eval_tokens or None)
                if last or _due(self.position.step, train.save_every):
                    saved = self._save_or_warn(console, must=last)
            # Still under the request: a signal now must not cost the last words of a run that is saved already.
            evaluation = self.evaluate(console, writer, None)
        newest = ckpt.complete_checkpoints(self.run.checkpoints)
        return Outcome(self.position, evaluation, saved or (newest[-1] if newest else None), None)

    def step(self, rate: float, stop: bool) -> Agreement:
        """One optimizer step on one global batch. Updates nothing if any process saw a number that is not finite.

        Raises TrainingError after MAX_BAD_STEPS such steps in a row.
        """
        train, mesh = self.config.train, self.mesh
        tokens = train.global_batch * train.seq_len
        batches = list(self.batches.micro_batches(self.position.step, mesh.dp.rank, mesh.dp.size, train.micro_batch))
        self.reducer.begin(len(batches))
        loss = backward(self.model, batches, self.config, divisor=tokens)
        self.reducer.finish()
        targets = sum(int((batch.targets != IGNORED).sum()) for batch in batches)
        agreement = agree(self.storages, loss, targets, tokens, stop, mesh)
        if math.isfinite(agreement.loss) and math.isfinite(agreement.gradient_norm):
            clip((s.tensor for s in self.storages), agreement, self.config.optim.clip)
            self.optimizer.step(self.position.step, rate)
            self.bad_steps = 0
        else:
            self._bad_step(agreement)
        self.position = Position(self.position.step + 1, self.position.tokens + tokens)
        return agreement

    def _reported_step(self, console: Console, writer: MetricsWriter | None, peak: float, stop: bool) -> Agreement:
        config = self.config
        rate = learning_rate(config.optim, self.position.step, config.train.steps)
        begun = time.perf_counter()
        agreement = self.step(rate, stop)
        seconds = time.perf_counter() - begun
        speed = config.train.global_batch * config.train.seq_len / seconds
        metrics = StepMetrics(
            step=self.position.step,
            loss=agreement.loss,
            lr=rate,
            gradient_norm=agreement.gradient_norm,
            tokens_per_second=speed,
            mfu=mfu(speed, self.flops_per_token, self.mesh.size, peak),
            memory_bytes=memory_bytes(self.mesh.device),
            tokens=self.position.tokens,
            seconds=seconds,
        )
        console.step(metrics)
        if writer:
            self._record(console, lambda: writer.step(metrics))
        return agreement

    def evaluate(self, console: Console, writer: MetricsWriter | None, max_tokens: int | None) -> Evaluation:
        """Held-out loss at the current position, reported."""
        train = self.config.train
        result = evaluate(
            self.model,
            self.heldout,
            train.seq_len,
            train.micro_batch,
            self.config.data.isolate_documents,
            self.mesh,
            max_tokens,
        )
        metrics = EvalMetrics(
            step=self.position.step,
            heldout_loss=result.loss,
            perplexity=result.perplexity,
            bits_per_byte=result.bits_per_byte,
            tokens=result.tokens,
        )
        console.evaluation(metrics)
        if writer:
            self._record(console, lambda: writer.evaluation(metrics))
        return result

    def _record(self, console: Console, write: Callable[[], None]) -> None:
        """Metrics that cannot be written cost a warning when that begins, not the run."""
        try:
            write()
            self._metrics_lost = False
        except StorageError as error:
            if not self._metrics_lost:
                console.note(f"warning: metrics are not written: {error}; training goes on")
            self._metrics_lost = True

    def save(self) -> Path:
        """A complete checkpoint of the current position. Raises StorageError on every process if it could not be written."""
        path = ckpt.save_checkpoint(
            self.run.checkpoints,
            self.model,
            self.optimizer,
            self.position,
            self.config,
            self.store.path / TOKENIZER_FILE,
            self._data_identity(),
            self.mesh,
        )
        ckpt.remove_old(self.run.checkpoints, self.config.train.keep, self.mesh)
        log.info("saved %s", path)
        return path

    def _save_or_warn(self, console: Console, must: bool) -> Path | None:
        """A periodic save that fails costs a warning, not the run; the last one must succeed."""
        try:
            return self.save()
        except StorageError as error:
            if must:
                raise
            log.warning("%s; training goes on", error)
            console.note(f"warning: {error}; training goes on, earlier checkpoints are intact")
            return None

    def _bad_step(self, agreement: Agreement) -> None:
        self.bad_steps += 1
        what = f"loss {agreement.loss}, gradient norm {agreement.gradient_norm} at step {self.position.step + 1}"
        log.warning("%s: no weight was changed", what)
        if self.bad_steps >= MAX_BAD_STEPS:
            raise TrainingError(
                f"{what}: not finite for {self.bad_steps} steps in a row, no weight was changed; resume from a checkpoint "
                f"with a lower optim.lr (now {self.config.optim.lr}) or more optim.warmup_steps"
            )

    def _data_identity(self) -> dict[str, Any]:
        """What a resumed run must find again, and what generation needs to know of the tokenizer."""
        return {
            "tokenizer": self.store.fingerprint,
            "content": self.store.content(self.batches.split.name),
            "eos": self.store.eos,
        }

    def _check_resumable(self, found: Checkpoint) -> None:
        """The order of the data is a function of these fields: another value would repeat or skip samples."""
        if found.updates == 0 and found.data.get("content") is None:
            raise CheckpointError(
                f"'{found.path}' holds imported weights and no run; begin one by --start-from {found.path}"
            )
        for field in ("seed", "seq_len", "global_batch"):
            before, now = getattr(found.config.train, field), getattr(self.config.train, field)
            if before != now:
                raise ConfigError(
                    f"train.{field} = {now}, but '{found.path}' was trained with {before}, and the order of the data "
                    f"depends on it; resume with train.{field} = {before}, or start another run.dir"
                )
        if found.position.step > self.config.train.steps:
            raise ConfigError(
                f"train.steps = {self.config.train.steps}, but '{found.path}' has done {found.position.step} steps; "
                f"the smallest legal value is {found.position.step}"
            )
        self.store.require_tokenizer(str(found.data.get("tokenizer")), f"'{found.path}'")
        if found.data.get("content") != self._data_identity()["content"]:
            raise CheckpointError(
                f"'{found.path}' was trained on other text than data.store = '{self.config.data.store}' holds; "
                "resume with the store it was trained on"
            )


def check_start(start_from: str, config: Config, store: TokenStore) -> Checkpoint:
    """The checkpoint whose weights a run begins with.

    Raises CheckpointError or DataError if it is of another model or another tokenizer.
    """
    found = ckpt.open_checkpoint(Path(start_from))
    ckpt.require_fits(found, config.model)
    store.require_tokenizer(found.require_tokenizer(), f"'{found.path}'")
    return found


def resume_candidates(resume: str | None, run: RunDirectory) -> list[Path]:
    """Checkpoints that `--resume` means, the newest first: all of this run's for 'auto', else the one at a path.

    Raises CheckpointError if the path has none.
    """
    if resume is None:
        return []
    if resume == "auto":
        return ckpt.complete_checkpoints(run.checkpoints)[::-1]
    return [ckpt.find_checkpoint(Path(resume))]


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
