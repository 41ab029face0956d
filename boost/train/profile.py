"""Traces selected training steps: computation and communication of each process, for ui.perfetto.dev."""

import logging
from typing import TYPE_CHECKING

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from boost.train.best_effort import best_effort
from boost.train.hooks import Hook, StepEnd, StepStart

if TYPE_CHECKING:
    from boost.train.loop import Trainer

log = logging.getLogger("boost")


class ProfileHook(Hook):
    """Profiles steps `first` to `last` of every process into run.dir/profile/rank<R>.json (train.profile).

    The files are in Chrome's trace format, with CPU operators and collectives, GPU kernels, and a range per step; they open in
    ui.perfetto.dev. Profiled steps are slower.
    """

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last
        self._profiler: profile | None = None
        self._step: tuple[int, record_function] | None = None
        """Number and open range of the current step. On GPUs the next step begins before `after_step`."""

    def before_step(self, trainer: "Trainer", event: StepStart) -> None:
        if event.step == self.first:
            on_gpu = trainer.mesh.device.type == "cuda"
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
            self._profiler = profile(activities=activities)
            self._profiler.start()
        if self._profiler is not None:
            self._end_step()
            self._step = event.step, record_function(f"step {event.step}")
            self._step[1].__enter__()

    def after_step(self, trainer: "Trainer", event: StepEnd) -> None:
        if self._step is not None and self._step[0] == event.metrics.step:
            self._end_step()
        if event.metrics.step == self.last or event.last or event.stopping:
            self._write(trainer)

    def teardown(self, trainer: "Trainer") -> None:
        self._write(trainer)

    def _end_step(self) -> None:
        if self._step is not None:
            self._step[1].__exit__(None, None, None)
            self._step = None

    def _write(self, trainer: "Trainer") -> None:
        self._end_step()
        if self._profiler is None:
            return
        profiler, self._profiler = self._profiler, None
        if trainer.mesh.device.type == "cuda":
            torch.cuda.synchronize(trainer.mesh.device)
        profiler.stop()
        folder = trainer.run.path / "profile"
        file = folder / f"rank{trainer.mesh.rank}.json"
        with best_effort(f"write the timeline of steps {self.first} to {self.last}", trainer.warn):
            folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(file))
            log.info("timeline of steps %d to %d: %s (ui.perfetto.dev)", self.first, self.last, file)
