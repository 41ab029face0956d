"""Injects faults to rehearse cluster failures: `boost train --inject-fault KIND@STEP[:RANK]`.

A fault hits one process just before STEP (`nan`: during STEP), and hits again if the run resumes from an earlier step.
"""

import errno
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from boost.errors import ConfigError
from boost.train.events import StepStart
from boost.train.hooks import Hook

if TYPE_CHECKING:
    from torch import Tensor

    from boost.train.loop import Trainer


SLOW_S = 20.0
"""Duration of `slow`, in seconds."""

WAIT_S = 120.0
"""Longest duration of `wait`, in seconds."""

KINDS = {
    "kill": "the process kills itself with SIGKILL, as the out-of-memory killer would",
    "hang": "the process stops (SIGSTOP) and no longer responds",
    "nan": "one of the process's gradients becomes NaN",
    "flip": "one exponent bit of one weight flips, on this process only",
    "disk-full": "the process fails with ENOSPC when it creates the next file or folder of a checkpoint",
    "slow": f"the process sleeps for {SLOW_S:g} s",
    "wait": f"with run.recovery = 'in-step': the process waits up to {WAIT_S:g} s for a lost replica to return and ask to rejoin",
}
"""What each kind does."""

_PATTERN = re.compile(r"([a-z-]+)@(\d{1,9})(?::(\d{1,9}))?")


@dataclass(frozen=True)
class Fault:
    """A fault to inject: its kind, and the step and global rank that it hits."""

    kind: str
    step: int
    rank: int = 0


def parse_fault(text: str, steps: int, world_size: int) -> Fault:
    """Parses KIND@STEP or KIND@STEP:RANK (rank 0 by default). Raises ConfigError."""
    match = _PATTERN.fullmatch(text)
    field = f"--inject-fault {text}"
    if match is None:
        raise ConfigError(f"{field} must be KIND@STEP or KIND@STEP:RANK, such as kill@5:1; kinds: {', '.join(KINDS)}")
    fault = Fault(match[1], int(match[2]), int(match[3] or 0))
    if fault.kind not in KINDS:
        raise ConfigError(f"{field}: unknown fault '{fault.kind}'; kinds: {', '.join(KINDS)}")
    if not 1 <= fault.step <= steps:
        raise ConfigError(f"{field}: there is no step {fault.step}; nearest step: {min(max(fault.step, 1), steps)}")
    if fault.rank >= world_size:
        raise ConfigError(f"{field}: there is no rank {fault.rank}; largest valid rank: {world_size - 1}")
    return fault


class FaultInjection(Hook):
    def __init__(self, faults: list[Fault], wait: Callable[[], object] = lambda: None) -> None:
        """`wait`: the action of that name."""
        self._faults, self._wait = faults, wait
        self._nan_pending = False

    def setup(self, trainer: "Trainer") -> None:
        self._faults = [fault for fault in self._faults if fault.rank == trainer.mesh.rank]

    def before_step(self, trainer: "Trainer", event: StepStart) -> None:
        for fault in self._faults:
            if fault.step == event.step:
                trainer.warn(f"injected fault: {fault.kind} at step {fault.step} on rank {fault.rank}")
                self.actions(trainer)[fault.kind]()

    def after_backward(self, trainer: "Trainer") -> None:
        if self._nan_pending:
            self._nan_pending = False
            next(s.tensor.grad for s in trainer.fused_params if s.tensor.grad is not None).view(-1)[0] = float("nan")

    def actions(self, trainer: "Trainer") -> dict[str, Callable[[], object]]:
        return {
            "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
            "hang": lambda: os.kill(os.getpid(), signal.SIGSTOP),
            "nan": lambda: setattr(self, "_nan_pending", True),
            "flip": lambda: flip_exponent_bit(trainer.fused_params[0].tensor),
            "disk-full": lambda: fail_next_write(trainer.run.checkpoints),
            "slow": lambda: time.sleep(SLOW_S),
            "wait": self._wait,
        }


def flip_exponent_bit(weights: "Tensor") -> None:
    """Flips the third exponent bit of the first element, which multiplies it by 16 or 1/16: a finite, easily overlooked change."""
    import torch

    mantissa = {torch.float64: 52, torch.float32: 23, torch.bfloat16: 7, torch.float16: 10}[weights.dtype]
    as_integers = {8: torch.int64, 4: torch.int32, 2: torch.int16}[weights.element_size()]
    with torch.no_grad():
        weights.data.view(-1)[:1].view(as_integers).bitwise_xor_(1 << mantissa + 2)


def fail_next_write(folder: Path) -> None:
    """Makes this process fail with ENOSPC the next time it opens a file for writing or creates a folder below `folder`."""
    armed = [True]
    below = os.path.join(os.path.realpath(folder), "")

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if not armed or event not in ("open", "os.mkdir") or not isinstance(args[0], str | bytes | os.PathLike):
            return
        writes = event == "os.mkdir" or bool((args[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        path = os.path.realpath(os.fsdecode(args[0]))
        if writes and path.startswith(below):
            armed.clear()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    sys.addaudithook(audit)
