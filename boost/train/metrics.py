"""Metrics for a run: metrics.jsonl, TensorBoard and, optionally, W&B.

Each line of metrics.jsonl is a JSON object, such as `{"kind": "step", "step": 120, "loss": 4.3, ...}`. `KINDS` maps kinds to the
classes that define their fields; other kinds come from `RunEvent`. JSON has no non-finite numbers, so they are written as the
strings "nan", "inf" and "-inf" (which pandas.to_numeric accepts); `read_metrics` converts them back to floats.
"""

import dataclasses
import importlib
import io
import itertools
import json
import logging
import math
import os
import socket
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model

from boost.config import Config, to_toml
from boost.errors import ConfigError, DataError
from boost.files import remove_leftovers, storage_errors, temporary_sibling
from boost.paths import require_regular, status
from boost.text import JsonObject
from boost.train.best_effort import best_effort
from boost.train.events import (
    EvalMetrics,
    EvaluationEnd,
    Rollback,
    RunEvent,
    SampleEnd,
    StepEnd,
    StepMetrics,
    TrainResult,
)
from boost.train.hooks import Hook
from boost.train.rundir import RunDirectory, flat_config

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from boost.train.loop import Trainer

log = logging.getLogger("boost")

REOPEN_S = 60.0
"""Seconds after which a failed write to TensorBoard is retried."""

_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_STRINGS = {"NaN": "nan", "Infinity": "inf", "-Infinity": "-inf"}
"""How numbers that are not finite are written, by what Python's json makes of them."""


@dataclass(frozen=True)
class RunEnd:
    """How a run ended. The line is absent if the run failed or was killed, and removed when the run is resumed."""

    step: int
    """Steps done."""
    state: str
    """done: the run is complete; stopped: a signal or a hook stopped it, and it can be resumed."""
    reason: str
    """Name of the signal, or the reason given by the hook; empty after the last step."""


KINDS = {"step": StepMetrics, "eval": EvalMetrics, "sample": SampleEnd, "end": RunEnd}
"""The class that defines the fields of a line in metrics.jsonl, by kind."""
TEXTS = ("kind", "prompt", "text", "state", "reason")
"""Text fields. In all other fields, "nan", "inf" and "-inf" are numbers."""


def _line_model(of: type) -> type[BaseModel]:
    """Checks the types in a line with the fields of a dataclass. Other fields are ignored."""
    hints, counted = get_type_hints(of), Annotated[int, Field(ge=0, lt=2**63)]
    fields: JsonObject = {"kind": (str, ...)}
    for field in dataclasses.fields(of):
        required = field.default is field.default_factory is dataclasses.MISSING
        hint = hints[field.name]
        fields[field.name] = (counted if hint is int else hint, ... if required else None)
    return create_model(of.__name__, __config__=ConfigDict(strict=True), **fields)


_LINES = {kind: _line_model(of) for kind, of in KINDS.items()}
_EVENT = _line_model(RunEvent)


_event_files = itertools.count()


class EventFile:
    """A TensorBoard event file in a folder, which it creates. TensorBoard hides earlier events from `purge_step` on.

    `torch.utils.tensorboard.SummaryWriter` writes in a thread of its own. That thread prints a traceback when a write fails (a full
    disk, a renamed folder), and it needs a thread that the system may not have. Here each event is one write, which raises OSError.
    """

    def __init__(self, folder: Path, purge_step: int | None = None) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog  # takes a second

        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}.{next(_event_files):06}"
        self._file = open(folder / name, "xb", buffering=0)  # noqa: SIM115 - closed by close()
        self.add(0, file_version="brain.Event:2")
        if purge_step is not None:
            self.add(purge_step, session_log=SessionLog(status=SessionLog.START))

    def add(
        self,
        step: int,
        scalars: Mapping[str, float] = {},
        texts: Mapping[str, str] = {},
        summary: Any = None,
        **fields: Any,
    ) -> None:
        """Adds an event: points of curves and Markdown texts by name, a `Summary`, or other fields of tensorboard's `Event`."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter
        from torch.utils.tensorboard.summary import scalar, text

        drawn = [*itertools.starmap(scalar, scalars.items()), *itertools.starmap(text, texts.items())]
        drawn += [] if summary is None else [summary]
        if drawn:
            fields["summary"] = Summary(value=[value for part in drawn for value in part.value])
        record = io.BytesIO()
        RecordWriter(record).write(Event(step=step, wall_time=time.time(), **fields).SerializeToString())
        left = record.getbuffer()
        while left:  # an almost full disk takes only part of a record before it reports the error
            left = left[self._file.write(left) :]

    def close(self) -> None:
        self._file.close()


class MetricsHook(Hook):
    """Writes metrics to every backend that the configuration enables. A write that fails only logs a warning (`best_effort`)."""

    main_only = True

    def __init__(self) -> None:
        self._run: RunDirectory | None = None
        """None if the metrics could not be opened; nothing is written then."""
        self._board: EventFile | None = None
        self._reopen_at = 0.0
        self._trackers: list[ModuleType] = []
        self._sampled = (0, 0)
        """Step of the last sample, and the sample's number within that step."""

    def setup(self, trainer: "Trainer") -> None:
        def warn(text: str) -> None:
            trainer.warn(text)
            trainer.warnings.append(text)  # the console starts later

        with best_effort("open the metrics", warn):
            if trainer.resumed_from is None and not trainer.position.step:
                trainer.run.set_aside_metrics()
            state = trainer.position.step, trainer.takes_over
            if damaged := self.open(trainer.run, trainer.config, *state, trainer.warn):
                name = trainer.run.metrics.name
                trainer.warn(f"unreadable lines in {name}: {damaged}; they were moved to {name}.damaged")
            if trainer.recent:  # the previous main process may not have written them
                known = {(line["kind"], line["step"]) for line in read_metrics(trainer.run.metrics)}
                for metrics in trainer.recent:
                    kind = "step" if isinstance(metrics, StepMetrics) else "eval"
                    if (kind, metrics.step) not in known:
                        self.write(metrics)

    def open(
        self,
        run: RunDirectory,
        config: Config,
        done: int = 0,
        takes_over: bool = False,
        warn: Callable[[str], None] = log.warning,
    ) -> int:
        """Opens the files of a run that has done `done` steps. `takes_over`: the previous main process was lost, and the next step
        is in progress.

        First drops lines for later steps (which an earlier run trained after its last checkpoint) and any line truncated by a
        crash, so that no step appears twice. Returns the number of unreadable lines, which were moved to another file. Raises
        ConfigError if a tracker's package is missing, and StorageError if the run directory is not writable.
        """
        # Check before changing any file, so that a missing package does not lose lines from an earlier run.
        modules, damaged = tracker_modules(config), 0
        with storage_errors(run.path):
            if status(run.metrics):
                damaged = truncate_metrics(run.metrics, done, done == config.train.steps, takes_over)
            self._file = open(run.metrics, "a", encoding="utf-8")  # noqa: SIM115 - closed by teardown
        self._run, self._warn = run, warn
        self._purge: int | None = done + 1
        self._draw(done, **_description(config))
        for module in modules:
            with best_effort(f"open {module.__name__}", warn):
                # Record the id, so that a resumed run continues the same W&B run. A sweep agent sets the environment variable.
                run_id = run.tracker_id(module.__name__, os.environ.get("WANDB_RUN_ID") or uuid.uuid4().hex[:8])
                # Arguments outrank W&B's environment variables, so a default is passed only without them.
                usual = {"project": type(config.run).model_fields["project"].default, "name": run.path.resolve().name}
                where = {key: value for key, value in usual.items() if not os.environ.get(f"WANDB_{key.upper()}")}
                where |= {"project": config.run.project} if config.run.project != usual["project"] else {}
                where["dir"] = str(run.path)
                module.init(config=config.model_dump(), resume="allow", id=run_id, **where)
                # W&B drops what is logged for an earlier step than its last one: the steps that a run repeats.
                module.define_metric("*", step_metric="step")
                self._trackers.append(module)
        return damaged

    def write(self, metrics: StepMetrics | EvalMetrics) -> None:
        kind, prefix = ("step", "train") if isinstance(metrics, StepMetrics) else ("eval", "eval")
        self._add_line(kind, metrics)
        values = dataclasses.asdict(metrics)
        values |= {f"heldout_losses/{name}": loss for name, loss in values.pop("heldout_losses", {}).items()}
        drawn = {name: value for name, value in values.items() if value is not None and name not in ("step", "final")}
        named = {f"{prefix}/{name}": value for name, value in drawn.items()}
        self._draw(metrics.step, scalars=named)
        for tracker in self._trackers:
            with best_effort(f"log to {tracker.__name__}", self._warn):
                tracker.log({**named, "step": metrics.step})

    def after_step(self, trainer: "Trainer", event: StepEnd) -> None:
        self.write(event.metrics)

    def on_evaluation(self, trainer: "Trainer", event: EvaluationEnd) -> None:
        self.write(event.metrics)

    def on_event(self, trainer: "Trainer", event: RunEvent) -> None:
        self._add_line(event.kind, event)
        named = {f"run/{name}": value for name, value in event.numbers().items()}
        self._draw(event.step, scalars=named, texts={f"run/{event.kind}": event.line()})

    def on_sample(self, trainer: "Trainer", event: SampleEnd) -> None:
        step, number = self._sampled
        self._sampled = event.step, (number + 1 if step == event.step else 1)
        self._add_line("sample", event)
        self._draw(event.step, texts={f"sample/{self._sampled[1]}": _preformatted(f"{event.prompt}[...]{event.text}")})

    def on_train_end(self, trainer: "Trainer", result: TrainResult) -> None:
        end = RunEnd(result.position.step, "stopped" if result.stopped_by else "done", result.stopped_by or "")
        self._add_line("end", end)
        if end.state == "done":
            from torch.utils.tensorboard.summary import hparams

            *_, success = hparams({}, {})
            self._draw(end.step, summary=success)

    def on_rollback(self, trainer: "Trainer", event: Rollback) -> None:
        """Drops the lines for steps that will be repeated; TensorBoard hides the events for them from a new file on."""
        if self._run is not None:
            board, self._board, self._purge = self._board, None, event.step + 1
            if board is not None:
                with best_effort("write TensorBoard events", self._warn):
                    board.close()
            with best_effort("write metrics.jsonl", self._warn):
                try:
                    self._file.close()
                    truncate_metrics(self._run.metrics, event.step)
                finally:
                    self._file = open(self._run.metrics, "a", encoding="utf-8")  # noqa: SIM115 - closed by teardown

    def teardown(self, trainer: "Trainer") -> None:
        if self._run is None:
            return
        with best_effort("write metrics.jsonl", self._warn):
            self._file.close()
        if self._board is not None:
            with best_effort("write TensorBoard events", self._warn):
                self._board.close()
        for tracker in self._trackers:
            with best_effort(f"log to {tracker.__name__}", self._warn):
                tracker.finish()
        self._run, self._board, self._trackers = None, None, []

    def _add_line(self, kind: str, event: "DataclassInstance") -> None:
        if self._run is not None:
            with best_effort("write metrics.jsonl", self._warn):
                values = {name: value for name, value in dataclasses.asdict(event).items() if value is not None}
                line = json.loads(json.dumps({"kind": kind, **values}), parse_constant=_STRINGS.__getitem__)
                self._file.write(json.dumps(line) + "\n")
                self._file.flush()

    def _draw(self, step: int, **event: Any) -> None:
        """Writes to TensorBoard (`EventFile.add`). A failed write may leave part of an event, so a new file follows after REOPEN_S
        seconds."""
        if self._run is None or (self._board is None and time.monotonic() < self._reopen_at):
            return
        with best_effort("write TensorBoard events", self._warn):
            try:
                if self._board is None:
                    self._board = EventFile(self._run.tensorboard, self._purge)
                    self._purge = None
                self._board.add(step, **event)
            except Exception:
                if self._board is not None:
                    self._board.close()
                self._board, self._reopen_at = None, time.monotonic() + REOPEN_S
                raise


def _description(config: Config) -> JsonObject:
    """The event with the configuration, as text and, except for [run], for the HPARAMS tab.

    Leaves out hparams' list of hyperparameters for all runs in a folder, because runs differ by model family.
    TensorBoard derives the list from the runs, and uses their scalars as metrics.
    """
    from torch.utils.tensorboard.summary import hparams

    values = {key: value for key, value in flat_config(config.model_dump()).items() if not key.startswith("run.")}
    for key, value in values.items():
        values[key] = value if isinstance(value, bool | int | float | str) else str(value)
    _, start, _ = hparams(values, {})  # the first value is the list for all runs
    return {"texts": {"config": _preformatted(to_toml(config))}, "summary": start}


def _preformatted(text: str) -> str:
    """Formats `text` as a code block in TensorBoard's Markdown."""
    return "".join(f"    {line}\n" for line in text.split("\n"))


def tracker_modules(config: Config) -> list[ModuleType]:
    """The package that run.wandb = true requires; empty otherwise. Raises ConfigError if the package is missing."""
    if not config.run.wandb:
        return []
    try:
        return [importlib.import_module("wandb")]
    except ModuleNotFoundError as error:
        if error.name != "wandb":
            raise
        raise ConfigError("run.wandb = true: the package 'wandb' is not installed; run 'pip install wandb'") from None


def read_metrics(path: Path | str, damaged: list[int] | None = None) -> list[JsonObject]:
    """Reads all lines in a metrics.jsonl, except an incomplete last line (after a crash or in a live run).

    Raises DataError if any other line is damaged: not JSON, or without the fields and types of its `kind`. If a list `damaged` is
    given, appends the line numbers of such lines to it instead. Raises FileNotFoundError if the file does not exist.
    """
    require_regular(path)
    lines = []
    for number, line in enumerate(Path(path).read_bytes().split(b"\n")[:-1], start=1):
        try:
            lines.append(_from_line(line, path, number))
        except DataError:
            if damaged is None:
                raise
            damaged.append(number)
    return lines


def truncate_metrics(path: Path, last_step: int, at_end: bool = False, in_progress: bool = False) -> int:
    """Atomically drops the lines for steps > `last_step`.

    With `in_progress`, step `last_step` + 1 has started, and its other events (`RunEvent`) are kept. Also drops the `RunEnd`
    line and, with `at_end`, the final evaluation and its samples, which a run resumed at its end repeats. Moves damaged lines to
    <name>.damaged, so that they do not stop the run. Returns their number.
    """
    require_regular(path)
    damaged = []
    remove_leftovers(path)
    temporary = temporary_sibling(path)
    with open(path, "rb") as old, open(temporary, "wb") as new:
        for number, line in enumerate(old, start=1):
            if not line.endswith(b"\n"):
                continue
            try:
                values = _from_line(line, path, number)
            except DataError:
                damaged.append(line)
                continue
            kind, step = values["kind"], values["step"]
            final = kind == "sample" or (kind == "eval" and values.get("final", True))
            repeated = kind == "end" or (at_end and final and step == last_step)
            if step <= last_step + (in_progress and kind not in KINDS) and not repeated:
                new.write(line)
        new.flush()
        os.fsync(new.fileno())
    if damaged:
        with open(path.with_name(f"{path.name}.damaged"), "ab") as aside:
            aside.writelines(damaged)
    os.replace(temporary, path)
    return len(damaged)


def _from_line(line: bytes, path: Path | str, number: int) -> JsonObject:
    try:
        values = _numbers(json.loads(line), TEXTS)
        _LINES.get(values["kind"], _EVENT).model_validate(values)
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError):
        raise DataError(f"line {number} of '{path}' is damaged; fix or remove that line") from None
    return values


def _numbers(values: JsonObject, texts: Sequence[str] = ()) -> JsonObject:
    """Converts the strings of numbers that are not finite back, in place."""
    for name, value in values.items():
        if isinstance(value, dict):
            _numbers(value)
        elif isinstance(value, str) and name not in texts:
            values[name] = _NOT_FINITE.get(value, value)
    return values
