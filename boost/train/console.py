"""Console output for a run: a progress bar on a terminal, plain lines elsewhere.

`ConsoleHook` prints training progress on the main process. `progress` is the progress bar for all other slow work.
"""

import math
import sys
import time
from typing import Self, TextIO

from rich.console import Console as RichConsole

from boost.config.architecture import parameter_count
from boost.format import format_bytes, format_count, format_duration, format_percent, format_rate
from boost.text import printable
from boost.train.events import EvalMetrics, EvaluationEnd, RunEvent, StepEnd, StepMetrics, TrainStart
from boost.train.hooks import Hook
from boost.train.loop import Trainer
from boost.train.progress import BAR_MIN_WIDTH, live_bars, make_bar

MFU_MIN_WIDTH = 100
"""Minimum terminal width, in columns, at which the bar includes MFU."""


class PlainConsole:
    """Plain lines for a file or a pipe: the first step, every `log_every`-th step, and the last step. A context manager."""

    def __init__(self, total_steps: int, start_step: int, log_every: int, out: TextIO | None = None) -> None:
        self._total, self._every, self._out = total_steps, log_every, out
        self._first = start_step + 1
        self._timed: tuple[int, float] | None = None
        """The first step and its end time. That step starts threads, allocates and compiles, so time is measured from its end."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def step(self, metrics: StepMetrics) -> None:
        eta = self.eta(metrics)
        if metrics.step in (self._first, self._total) or metrics.step % self._every == 0:
            self.note(step_line(metrics, self._total, eta))

    def eta(self, metrics: StepMetrics) -> float:
        """Estimated seconds until the last step. Includes evaluations and checkpoints, but not the slow first step."""
        now = time.monotonic()
        if self._timed is None:
            self._timed = metrics.step, now
        step, then = self._timed
        pace = (now - then) / (metrics.step - step) if metrics.step > step else metrics.seconds
        return pace * (self._total - metrics.step)

    def evaluation(self, metrics: EvalMetrics) -> None:
        self.note(evaluation_line(metrics, self._total))

    def note(self, text: str) -> None:
        print(printable(text), file=self._out or sys.stdout, flush=True)

    def close(self) -> None:
        """Restores the terminal."""


class BarConsole(PlainConsole):
    """A live bar at the bottom of a terminal, with evaluations and notes scrolling above it."""

    def __init__(self, total_steps: int, start_step: int, rich_console: RichConsole | None = None) -> None:
        super().__init__(total_steps, start_step, log_every=1)
        self._bar = make_bar(rich_console)
        self._task = self._bar.add_task("train", total=total_steps, completed=start_step, stats="")

    def __enter__(self) -> Self:
        self._bar.start()
        live_bars.append(self._bar)
        return self

    def step(self, metrics: StepMetrics) -> None:
        # Shorter than `step_line`: shows memory and MFU only if the terminal is wide enough.
        width = self._bar.console.width
        name = "loss" if metrics.cross_entropy is None else "distillation loss"
        words = [f"{name} {metrics.loss:.4f}", format_rate(metrics.tokens_per_second, 2)]
        words += [f"mfu {format_percent(metrics.mfu)}"] * (width >= MFU_MIN_WIDTH and not math.isnan(metrics.mfu))
        words += [format_bytes(metrics.memory_bytes, 2)] * (width >= BAR_MIN_WIDTH)
        words += [f"eta {format_duration(self.eta(metrics))}"]
        self._bar.update(self._task, completed=metrics.step, stats=" ".join(words))

    def note(self, text: str) -> None:
        self._bar.console.print(printable(text), markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self._bar.stop()
        if self._bar in live_bars:
            live_bars.remove(self._bar)


class ConsoleHook(Hook):
    """Prints a summary of the run at the start, and then steps, evaluations and warnings."""

    main_only = True

    def __init__(self) -> None:
        self._console: PlainConsole | None = None

    def on_train_start(self, trainer: Trainer, event: TrainStart) -> None:
        self._console = make_console(event.total_steps, event.step, trainer.config.train.log_every)
        self._console.__enter__()
        for line in _introduction(trainer):
            self._note(line)

    def after_step(self, trainer: Trainer, event: StepEnd) -> None:
        if self._console:
            self._console.step(event.metrics)

    def on_evaluation(self, trainer: Trainer, event: EvaluationEnd) -> None:
        if self._console:
            self._console.evaluation(event.metrics)

    def on_event(self, trainer: Trainer, event: RunEvent) -> None:
        self._note(event.line())

    def on_warning(self, trainer: Trainer, text: str) -> None:
        self._note(f"warning: {text}")

    def teardown(self, trainer: Trainer) -> None:
        if self._console:
            self._console.close()

    def _note(self, text: str) -> None:
        if self._console:  # the introduction includes warnings from before the first step
            self._console.note(text)


def _introduction(trainer: Trainer) -> list[str]:
    model, parallel, train = trainer.config.model, trainer.config.parallel, trainer.config.train
    lines = [
        f"{model.title} {format_count(parameter_count(model))} parameters, layout {trainer.model.layout.spec.name}, "
        f"tp {parallel.tp} x pp {parallel.pp} x dp {parallel.dp}{f' x cp {parallel.cp}' * (parallel.cp > 1)} on "
        f"{trainer.mesh.device.type}, {trainer.batches.n_samples} training sequences of {train.seq_len} tokens"
    ]
    corpus = trainer.corpus
    if len(corpus.stores) > 1:
        for name, weight, samples in zip(corpus.names, corpus.weights, trainer.batches.samples_of, strict=True):
            epochs = float(weight) * train.steps * train.global_batch / samples
            share = format_percent(float(weight))
            lines.append(
                f"  {share} {name}: {samples:,} training sequences, {epochs:.1f} epochs in {train.steps} steps"
            )
    lines += [f"warning: {warning}" for warning in trainer.warnings]
    if trainer.started_from:
        lines.append(
            f"initialized from the weights of {trainer.started_from}; peak learning rate {trainer.config.optim.lr:g}"
        )
    if trainer.resumed_from:
        lines.append(f"resumed at step {trainer.position.step} of {train.steps} from {trainer.resumed_from}")
    return lines


def make_console(total_steps: int, start_step: int, log_every: int) -> PlainConsole:
    """Returns the console for stdout: a progress bar on a terminal, plain lines elsewhere.

    `start_step`: number of steps that a resumed run has already done.
    """
    if RichConsole().is_terminal:
        return BarConsole(total_steps, start_step)
    return PlainConsole(total_steps, start_step, log_every)


def step_line(metrics: StepMetrics, total_steps: int, eta: float) -> str:
    """`step   120/1000  loss 4.3210  lr 2.9e-03  norm 0.41  8.1k tok/s  mfu 41.2%  1.3 GB  eta 3:21`; no MFU if it is unknown.
    While distilling, `distillation loss 5.4321  cross-entropy 4.3210`."""
    loss = f"loss {metrics.loss:.4f}  "
    if metrics.cross_entropy is not None:
        loss = f"distillation {loss}cross-entropy {metrics.cross_entropy:.4f}  "
    mfu = "" if math.isnan(metrics.mfu) else f"mfu {format_percent(metrics.mfu)}  "
    return (
        f"step {_step_of_total(metrics.step, total_steps)}  {loss}"
        f"lr {metrics.lr:.1e}  norm {metrics.gradient_norm:.2f}  {format_rate(metrics.tokens_per_second, 2)}  "
        f"{mfu}{format_bytes(metrics.memory_bytes, 2)}  eta {format_duration(eta)}"
    )


def evaluation_line(metrics: EvalMetrics, total_steps: int) -> str:
    """`eval   120/1000  held-out loss 4.3210  perplexity 75.26  bits/byte 1.512  8.2k tokens`; for a mixture, followed by
    `  (c4 4.5012  code 3.9007)`."""
    sources = "  ".join(f"{name} {loss:.4f}" for name, loss in metrics.heldout_losses.items())
    mixture = f"  ({sources})" if sources else ""
    return (
        f"eval {_step_of_total(metrics.step, total_steps)}  held-out loss {metrics.heldout_loss:.4f}  "
        f"perplexity {metrics.perplexity:.2f}  bits/byte {metrics.bits_per_byte:.4f}  {format_count(metrics.tokens, 2)} tokens"
        f"{mixture}"
    )


def _step_of_total(step: int, total_steps: int) -> str:
    return f"{step:>{max(len(str(total_steps)), 5)}}/{total_steps}"
