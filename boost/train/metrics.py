"""Metrics of a run: metrics.jsonl and TensorBoard, optionally W&B and trackio.

Each line of metrics.jsonl is a JSON object, such as `{"kind": "step", "step": 120, "loss": 4.3, ...}`. `KINDS` maps each kind to
the class that defines its fields. JSON has no non-finite numbers, so they are written as the strings "nan", "inf" and "-inf"
(which pandas.to_numeric accepts); `read_metrics` converts them back to floats.
"""

import contextlib
import dataclasses
import importlib
import json
import math
import os
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar, cast

from boost.config import Config, to_toml
from boost.errors import ConfigError, DataError, StorageError
from boost.parallel.gradients import StepStats
from boost.train.hardware import memory_bytes, mfu
from boost.train.hooks import EvaluationEnd, Hook, MembershipChange, Rollback, SampleEnd, StepEnd, TrainEnd
from boost.train.rundir import RunDirectory, storage_errors

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from boost.train.loop import Trainer

Metrics = TypeVar("Metrics")

_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@dataclass(frozen=True)
class StepMetrics:
    """One optimizer step, over all processes."""

    step: int
    """Steps done, including this one."""
    loss: float
    """Mean loss over the targets of the step, in nats per token: cross-entropy, or the loss of a distillation."""
    lr: float
    """Learning rate of this step."""
    gradient_norm: float
    """Global gradient norm before clipping."""
    tokens_per_second: float
    """Throughput of all processes: tokens of the step / seconds."""
    mfu: float
    """Model FLOPs utilization as a fraction (formula: boost.train.hardware.mfu); nan if the peak is unknown."""
    memory_bytes: int
    """Memory of the main process in bytes: peak allocated on a GPU, resident set size on a CPU."""
    tokens: int
    """Tokens trained on since the start of the run."""
    seconds: float
    """Wall-clock time of the step."""


@dataclass(frozen=True)
class EvalMetrics:
    """One evaluation on held-out text."""

    step: int
    """Steps done so far."""
    heldout_loss: float
    """Mean cross-entropy in nats per token."""
    perplexity: float
    """exp(heldout_loss)."""
    bits_per_byte: float
    """Cross-entropy in bits per byte of text; comparable across tokenizers."""
    tokens: int
    """Held-out tokens evaluated."""
    final: bool = False
    """Whether it is the final evaluation of the run, on the whole held-out split."""
    heldout_losses: Mapping[str, float] = field(default_factory=dict)
    """Mean cross-entropy of each store of data.mixture by its name, in nats per token; `heldout_loss` is their weighted mean. Empty
    without a mixture."""


@dataclass(frozen=True)
class RunEnd:
    """How a run ended. Missing if the run failed or was killed; removed when the run is resumed."""

    step: int
    """Steps done."""
    state: str
    """done: the run is complete; stopped: a signal or a hook stopped it, and it can be resumed."""
    reason: str
    """Name of the signal, or the reason given by the hook or early stopping; empty after the last step."""


KINDS = {"step": StepMetrics, "eval": EvalMetrics, "sample": SampleEnd, "membership": MembershipChange, "end": RunEnd}
"""The class that defines the fields of a line of metrics.jsonl, by kind."""
TEXTS = ("kind", "prompt", "text", "state", "reason")
"""Text fields. In all other fields, a string is a non-finite number."""


def step_metrics(trainer: "Trainer", stats: StepStats, lr: float, seconds: float, peak: float) -> StepMetrics:
    """Metrics of the step that led to the trainer's current position."""
    train, mesh = trainer.config.train, trainer.mesh
    speed = train.global_batch * train.seq_len / seconds
    return StepMetrics(
        step=trainer.position.step,
        loss=stats.loss,
        lr=lr,
        gradient_norm=stats.gradient_norm,
        tokens_per_second=speed,
        mfu=mfu(speed, trainer.flops_per_token, mesh.size, peak),
        memory_bytes=memory_bytes(mesh.device),
        tokens=trainer.position.tokens,
        seconds=seconds,
    )


class MetricsWriter:
    """Writes metrics to every backend that the configuration enables. For the main process only.

    With `resumed_step` = N, first drops lines of steps after N (which the earlier run trained after its last checkpoint) and a
    line truncated by a crash, so that no step appears twice. Raises ConfigError if a tracker's package is missing, StorageError
    if the run directory is not writable.
    """

    def __init__(
        self,
        run: RunDirectory,
        config: Config,
        resumed_step: int | None = None,
        takes_over: bool = False,
        at_end: bool = False,
    ) -> None:
        """`takes_over`: the previous main process is lost, and the step after `resumed_step` is in progress. `at_end`: no step is
        left after `resumed_step`, so the final evaluation is repeated."""
        self._run = run
        self.damaged = 0
        """Number of unreadable lines of an earlier run, which were moved to another file."""
        # Before any file is changed: a missing package must not cost lines of an earlier run.
        modules = tracker_modules(config)
        with storage_errors(run.path):
            if resumed_step is not None and run.metrics.exists():
                at_end = at_end or resumed_step == config.train.steps
                self.damaged = truncate_metrics(run.metrics, resumed_step, at_end, takes_over)
            self._file = open(run.metrics, "a", encoding="utf-8")  # noqa: SIM115 - closed by close()
            from torch.utils.tensorboard import SummaryWriter

            purge = None if resumed_step is None else resumed_step + 1
            self._board = SummaryWriter(str(run.tensorboard), purge_step=purge)
            _describe_run(self._board, run, config, resumed_step or 0)
        self._trackers = [_Tracker(module, run, config) for module in modules]

    def step(self, metrics: StepMetrics) -> None:
        """Writes one step. Raises StorageError."""
        self._write("step", "train", metrics)

    def evaluation(self, metrics: EvalMetrics) -> None:
        """Writes one evaluation. Raises StorageError."""
        self._write("eval", "eval", metrics)

    def write(self, metrics: StepMetrics | EvalMetrics) -> None:
        """Writes one step or evaluation. Raises StorageError."""
        if isinstance(metrics, StepMetrics):
            self.step(metrics)
        else:
            self.evaluation(metrics)

    def membership(self, event: MembershipChange) -> None:
        """Writes a membership change. Raises StorageError."""
        with storage_errors(self._run.path):
            self._file.write(_to_line({"kind": "membership", **dataclasses.asdict(event)}))
            self._file.flush()
            self._board.add_scalar("run/replicas", event.replicas, event.step)
            self._board.add_text("run/membership", event.line(), event.step)

    def sample(self, event: SampleEnd, number: int = 1) -> None:
        """Writes the text generated for the `number`-th prompt. Raises StorageError."""
        with storage_errors(self._run.path):
            self._file.write(_to_line({"kind": "sample", **dataclasses.asdict(event)}))
            self._file.flush()
            self._board.add_text(f"sample/{number}", _preformatted(f"{event.prompt}[...]{event.text}"), event.step)

    def end(self, event: RunEnd) -> None:
        """Writes how the run ended. Raises StorageError."""
        with storage_errors(self._run.path):
            self._file.write(_to_line({"kind": "end", **dataclasses.asdict(event)}))
            self._file.flush()
            if event.state == "done":
                from torch.utils.tensorboard.summary import hparams

                *_, success = hparams({}, {})
                cast(Any, self._board._get_file_writer()).add_summary(success, event.step)

    def rewind(self, step: int) -> None:
        """Drops the lines of steps after `step`, which will be repeated. Raises StorageError."""
        with storage_errors(self._run.path):
            self._file.close()
            truncate_metrics(self._run.metrics, step)
            self._file = open(self._run.metrics, "a", encoding="utf-8")  # noqa: SIM115 - closed by close()

    def close(self) -> None:
        """Flushes and closes everything. A second call does nothing."""
        with storage_errors(self._run.path):
            if self._file.closed:
                return
            self._file.close()
            self._board.close()
        for tracker in self._trackers:
            tracker.finish()

    def _write(self, kind: str, prefix: str, metrics: StepMetrics | EvalMetrics) -> None:
        values = dataclasses.asdict(metrics)
        with storage_errors(self._run.path):
            self._file.write(_to_line({"kind": kind, **values}))
            self._file.flush()
            named = {
                f"{prefix}/{name}": value
                for name, value in flat_config(values, separator="/").items()
                if name not in ("step", "final")
            }
            for name, value in named.items():
                self._board.add_scalar(name, value, metrics.step)
        for tracker in self._trackers:
            tracker.log(named, metrics.step)


class MetricsHook(Hook):
    """Writes the metrics of a run. If writing fails, warns once, and training continues."""

    main_only = True

    def __init__(self) -> None:
        self._writer: MetricsWriter | None = None
        self._failing = False
        self._sampled = (0, 0)
        """Step of the last sample, and its number within that step."""

    def setup(self, trainer: "Trainer") -> None:
        if trainer.resumed_from is None and not trainer.position.step:
            trainer.run.set_aside_metrics()
        takes_over = trainer.recovery is not None and trainer.recovery.decision.number > 0
        self._writer = MetricsWriter(trainer.run, trainer.config, trainer.position.step, takes_over, trainer.at_end)
        if self._writer.damaged:
            name = trainer.run.metrics.name
            trainer.warn(f"{self._writer.damaged} lines of {name} could not be read; moved to {name}.damaged")

        if trainer.recovery is not None and trainer.recent:
            known = {(line["kind"], line["step"]) for line in read_metrics(trainer.run.metrics)}
            for metrics in trainer.recent:
                kind = "step" if isinstance(metrics, StepMetrics) else "eval"
                if (kind, metrics.step) not in known:
                    self._write(trainer, self._writer.write, metrics)

    def after_step(self, trainer: "Trainer", event: StepEnd) -> None:
        if self._writer:
            self._write(trainer, self._writer.step, event.metrics)

    def on_evaluation(self, trainer: "Trainer", event: EvaluationEnd) -> None:
        if self._writer:
            self._write(trainer, self._writer.evaluation, event.metrics)

    def on_sample(self, trainer: "Trainer", event: SampleEnd) -> None:
        step, number = self._sampled
        self._sampled = event.step, (number + 1 if step == event.step else 1)
        if self._writer:
            writer, number = self._writer, self._sampled[1]
            self._write(trainer, lambda sample: writer.sample(sample, number), event)

    def on_train_end(self, trainer: "Trainer", event: TrainEnd) -> None:
        result = event.result
        end = RunEnd(
            result.position.step, "stopped" if result.stopped_by else "done", result.stopped_by or result.early or ""
        )
        if self._writer:
            self._write(trainer, self._writer.end, end)

    def on_membership(self, trainer: "Trainer", event: MembershipChange) -> None:
        if self._writer:
            self._write(trainer, self._writer.membership, event)

    def on_rollback(self, trainer: "Trainer", event: Rollback) -> None:
        if self._writer:
            self._write(trainer, self._writer.rewind, event.step)

    def teardown(self, trainer: "Trainer") -> None:
        if self._writer:
            with contextlib.suppress(StorageError):  # already warned about
                self._writer.close()

    def _write(self, trainer: "Trainer", write: Callable[[Metrics], None], metrics: Metrics) -> None:
        try:
            write(metrics)
            self._failing = False
        except StorageError as error:
            if not self._failing:
                trainer.warn(f"cannot write metrics: {error}; training continues")
            self._failing = True


def _describe_run(board: "SummaryWriter", run: RunDirectory, config: Config, step: int) -> None:
    """Writes the configuration as text and, except for [run], to the HPARAMS tab.

    Writes no list of hyperparameters for all runs of a folder: TensorBoard derives the list from the runs, which differ by model
    family, and uses their scalars as metrics.
    """
    from torch.utils.tensorboard.summary import hparams

    board.add_text("config", _preformatted(to_toml(config)), step)
    values = {key: value for key, value in flat_config(config.model_dump()).items() if not key.startswith("run.")}
    for key, value in values.items():
        values[key] = value if isinstance(value, bool | int | float | str) else str(value)
    # `SummaryWriter.add_hparams` would write to a separate folder, and write a list for all runs (the first part).
    _, start, _ = hparams(values, {})
    cast(Any, board._get_file_writer()).add_summary(start, step)


def _preformatted(text: str) -> str:
    """Formats `text` as a code block in TensorBoard's Markdown."""
    return "".join(f"    {line}\n" for line in text.split("\n"))


def flat_config(tree: dict[str, Any], prefix: str = "", separator: str = ".") -> dict[str, Any]:
    """Flattens a tree to dotted keys: {"train": {"steps": 3}} becomes {"train.steps": 3}."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        inner = isinstance(value, dict)
        flat |= flat_config(value, f"{prefix}{key}{separator}", separator) if inner else {f"{prefix}{key}": value}
    return flat


class _Tracker:
    """wandb or trackio, which share the API used here. The run id is stored, so that a resumed run continues the same run."""

    def __init__(self, module: ModuleType, run: RunDirectory, config: Config) -> None:
        self._module = module
        name, package = run.path.resolve().name, module.__name__
        given = os.environ.get("WANDB_RUN_ID") if package == "wandb" else None  # set by a sweep agent
        run_id = run.tracker_id(package, given or uuid.uuid4().hex[:8])
        by_name = {"name": f"{name}-{run_id}"}  # trackio resumes runs by name
        own = {"name": name, "id": run_id, "dir": str(run.path)} if package == "wandb" else by_name
        module.init(project=config.run.project, config=config.model_dump(), resume="allow", **own)

    def log(self, values: dict[str, Any], step: int) -> None:
        self._module.log(values, step=step)

    def finish(self) -> None:
        self._module.finish()


def tracker_modules(config: Config) -> list[ModuleType]:
    """The packages that run.wandb and run.trackio require. Raises ConfigError if one is missing."""
    modules = []
    for name, wanted in (("wandb", config.run.wandb), ("trackio", config.run.trackio)):
        if not wanted:
            continue
        try:
            modules.append(importlib.import_module(name))
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
            raise ConfigError(f"run.{name} = true needs the package '{name}': pip install {name}") from None
    return modules


def read_metrics(path: Path | str, damaged: list[int] | None = None) -> list[dict[str, Any]]:
    """Reads all lines of a metrics.jsonl, except an incomplete last line (after a crash or in a live run).

    Raises DataError if any other line is not a JSON object. If a list `damaged` is given, appends the numbers of such lines to it
    instead. Raises FileNotFoundError if the file does not exist.
    """
    found = []
    for number, line in enumerate(Path(path).read_bytes().split(b"\n")[:-1], start=1):
        try:
            found.append(_from_line(line, path, number))
        except DataError:
            if damaged is None:
                raise
            damaged.append(number)
    return found


def truncate_metrics(path: Path, last_step: int, at_end: bool = False, in_progress: bool = False) -> int:
    """Drops the lines of steps > `last_step`. Atomic: the file is replaced at once.

    With `in_progress`, step `last_step` + 1 has started, and its membership changes are kept. Also drops the end of the run and,
    with `at_end`, the final evaluation, which a run resumed at its end repeats. Lines that are not JSON objects are moved to
    <name>.damaged, so that they do not stop the run. Returns the number of such lines.
    """
    damaged = []
    temporary = path.with_name(f"{path.name}.tmp")
    with open(path, "rb") as old, open(temporary, "wb") as new:
        for number, line in enumerate(old, start=1):
            if not line.endswith(b"\n"):
                continue
            try:
                values = _from_line(line, path, number)
            except DataError:
                damaged.append(line)
                continue
            kind = values.get("kind")
            final = kind == "sample" or (kind == "eval" and values.get("final", True))
            repeated = kind == "end" or (at_end and final and values.get("step") == last_step)
            last = last_step + (in_progress and kind == "membership")
            if values.get("step", 0) <= last and not repeated:
                new.write(line)
        new.flush()
        os.fsync(new.fileno())
    if damaged:
        with open(path.with_name(f"{path.name}.damaged"), "ab") as aside:
            aside.writelines(damaged)
    os.replace(temporary, path)
    return len(damaged)


def _to_line(values: dict[str, Any]) -> str:
    return json.dumps(_finite(values), allow_nan=False) + "\n"


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """Non-finite numbers as strings, in nested tables too."""
    return {
        name: _finite(value)
        if isinstance(value, dict)
        else str(value)
        if isinstance(value, float) and not math.isfinite(value)
        else value
        for name, value in values.items()
    }


def _from_line(line: bytes, path: Path | str, number: int) -> dict[str, Any]:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise DataError(f"line {number} of '{path}' is not a JSON object; fix or remove that line")
    return _numbers(values)


def _numbers(values: dict[str, Any]) -> dict[str, Any]:
    """Inverse of `_finite`."""
    return {
        name: _numbers(value)
        if isinstance(value, dict)
        else _NOT_FINITE.get(value, value)
        if isinstance(value, str) and name not in TEXTS
        else value
        for name, value in values.items()
    }
