"""One process's part in a run: how it joins, which trainer it has, and how it leaves."""

from collections.abc import Callable, Sequence
from pathlib import Path

from boost.config import Config
from boost.parallel.mesh import close_mesh, open_mesh
from boost.parallel.rendezvous import Stopped
from boost.train.faults import Fault, FaultInjection
from boost.train.heartbeat import Heartbeat
from boost.train.hooks import Hook
from boost.train.loop import Trainer
from boost.train.rundir import RunDirectory


class Session:
    """A run that ends if one of its processes does."""

    def __init__(self, config: Config, stopped: Stopped) -> None:
        """Joins the mesh. Raises the same errors as `open_mesh`."""
        self.config = config
        self.mesh = open_mesh(config.parallel, config.run.device, config.run.startup_timeout_s, stopped)

    @property
    def rank(self) -> int:
        """The number of this process in names of log files."""
        return self.mesh.rank

    @property
    def is_over(self) -> bool:
        """Whether the run has ended while this process waited to join it."""
        return False

    def heartbeat(self, on_hang: Callable[[str], None]) -> Heartbeat:
        """The heartbeat of this process."""
        return Heartbeat(self.mesh, self.config.run, on_hang)

    def faults(self, faults: Sequence[Fault]) -> Hook:
        """The hook that injects these faults."""
        return FaultInjection(list(faults))

    def trainer(self, run: RunDirectory, hooks: Sequence[Hook]) -> Trainer:
        """Builds the trainer."""
        return Trainer(self.config, self.mesh, run, hooks)

    def start(self, trainer: Trainer, candidates: list[Path], start_from: str | None) -> None:
        """Loads the state to start with (`Trainer.start`)."""
        trainer.start(candidates, start_from)

    def failed(self, error: Exception) -> None:
        """Called when the run fails with `error` on this process."""

    def close(self) -> None:
        """Leaves the mesh, when the run is complete."""
        close_mesh()
