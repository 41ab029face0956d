"""Console output for a run: a progress bar on a terminal, plain lines elsewhere.

`ConsoleHook` prints training progress on the main process. `progress` is the progress bar for all other slow work.
"""

import math
import time

from rich.console import Console as RichConsole
from rich.progress import Progress

from boost.config.architecture import parameter_count
from boost.format import format_bytes, format_count, format_duration, format_percent, format_rate
from boost.text import printable
from boost.train.events import EvalMetrics, EvaluationEnd, RunEvent, StepEnd, StepMetrics
from boost.train.hooks import Hook
from boost.train.loop import Trainer
from boost.train.progress import BAR_MIN_WIDTH, live_bars, make_bar

MFU_MIN_WIDTH = 100
"""Minimum terminal width, in columns, at which the bar includes MFU."""


class ConsoleHook(Hook):
    """Prints a summary of the run at the start, and then steps, evaluations and warnings.

    On a terminal, steps move a bar at the bottom, and everything else scrolls above it. Elsewhere, it prints plain lines for the
    first step, every train.log_every-th step, and the last step.
    """

    main_only = True

    def __init__(self, terminal: RichConsole | None = None) -> None:
        """`terminal`: by default, stdout."""
        self._terminal = terminal
        self._first: int | None = None
        """The first step of this run; None before it starts."""
        self._bar: Progress | None = None
        self._timed: tuple[int, float] | None = None
        """The first step and its end time. That step starts threads, allocates and compiles, so time is measured from its end."""

    def on_train_start(self, trainer: Trainer) -> None:
        done, total = trainer.position.step, trainer.config.train.steps
        self._first, self._timed = done + 1, None
        # Not earlier: a process that takes over the run gets its stdout only then.
        terminal = self._terminal or RichConsole()
        if terminal.is_terminal:
            self._bar = make_bar(terminal)
            self._task = self._bar.add_task("train", total=total, completed=done, stats="")
            self._bar.start()
            live_bars.append(self._bar)
        for line in _introduction(trainer):
            self._note(line)

    def after_step(self, trainer: Trainer, event: StepEnd) -> None:
        metrics, total = event.metrics, trainer.config.train.steps
        eta = self._eta(metrics, total)
        if self._bar is None:
            if metrics.step in (self._first, total) or metrics.step % trainer.config.train.log_every == 0:
                self._note(step_line(metrics, total, eta))
            return
        # Shorter than `step_line`: shows memory and MFU only if the terminal is wide enough.
        width = self._bar.console.width
        name = "loss" if metrics.cross_entropy is None else "distillation loss"
        words = [f"{name} {metrics.loss:.4f}", format_rate(metrics.tokens_per_second, 2)]
        words += [f"mfu {format_percent(metrics.mfu)}"] * (width >= MFU_MIN_WIDTH and not math.isnan(metrics.mfu))
        words += [format_bytes(metrics.memory_bytes, 2)] * (width >= BAR_MIN_WIDTH)
        words += [f"eta {format_duration(eta)}"]
        self._bar.update(self._task, completed=metrics.step, stats=" ".join(words))

    def _eta(self, metrics: StepMetrics, total: int) -> float:
        """Estimated seconds until the last step. Includes evaluations and checkpoints, but not the slow first step."""
        now = time.monotonic()
        if self._timed is None:
            self._timed = metrics.step, now
        step, then = self._timed
        pace = (now - then) / (metrics.step - step) if metrics.step > step else metrics.seconds
        return pace * (total - metrics.step)

    def on_evaluation(self, trainer: Trainer, event: EvaluationEnd) -> None:
        self._note(evaluation_line(event.metrics, trainer.config.train.steps))

    def on_event(self, trainer: Trainer, event: RunEvent) -> None:
        self._note(event.line())

    def on_warning(self, trainer: Trainer, text: str) -> None:
        self._note(f"warning: {text}")

    def teardown(self, trainer: Trainer) -> None:
        if self._bar in live_bars:
            self._bar.stop()
            live_bars.remove(self._bar)

    def _note(self, text: str) -> None:
        if self._bar is not None:
            self._bar.console.print(printable(text), markup=False, highlight=False, emoji=False, soft_wrap=True)
        elif self._first is not None:  # the introduction includes warnings from before the first step
            print(printable(text), flush=True)


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
