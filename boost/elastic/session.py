"""How one process takes part in a run with in-step recovery."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from boost.config import Config
from boost.elastic.recovery import Recovery
from boost.elastic.trainer import ElasticTrainer
from boost.train.faults import WAIT_S, Fault, FaultInjection
from boost.train.heartbeat import Heartbeat
from boost.train.hooks import Hook, Training
from boost.train.rendezvous import Stopped
from boost.train.run import Session
from boost.train.rundir import RunDirectory


class ElasticSession(Session):
    """A run that survives the loss of a replica."""

    def __init__(self, config: Config, stopped: Stopped) -> None:
        """Joins the replica and, unless it is a restart, the first membership. Raises the same errors as `Recovery`."""
        self.config, self.recovery = config, Recovery(config, stopped)
        self.mesh = self.recovery.mesh
        self.rank = self.recovery.slot
        """Rank in the full run; membership changes do not affect it."""

    @property
    def rejoins(self) -> bool:  # type: ignore[override]
        return self.recovery.is_restart

    @property
    def is_over(self) -> bool:
        return self.recovery.is_over

    def heartbeat(self, on_hang: Callable[[str], None]) -> Heartbeat:
        slot = replace(self.mesh, rank=self.recovery.slot, size=self.recovery.slots)
        return Heartbeat(slot, self.config.run, on_hang, self.recovery.board, self.recovery.member.incarnation)

    def faults(self, faults: Sequence[Fault]) -> Hook:
        return _Faults(list(faults))

    def trainer(self, run: RunDirectory, hooks: Sequence[Hook]) -> ElasticTrainer:
        return ElasticTrainer(self.config, self.recovery, run, hooks)

    def start(self, trainer: Training, candidates: list[Path], start_from: str | None) -> None:
        """Loads the initial state; a restarted replica receives the current state from the others."""
        elastic = cast(ElasticTrainer, trainer)
        if self.recovery.is_restart:
            self.recovery.enter(elastic)
        else:
            elastic.start(candidates, start_from)
            self.recovery.trainer = elastic  # after this, a lost replica does not end the run

    def failed(self, error: Exception) -> None:
        """Tells the other replicas that this one failed."""
        self.recovery.failed(error)

    def close(self) -> None:
        self.recovery.close()
        super().close()


class _Faults(FaultInjection):
    def actions(self, trainer: Training) -> dict[str, Callable[[], Any]]:
        elastic = cast(ElasticTrainer, trainer)
        return super().actions(trainer) | {"wait": lambda: elastic.wait_for_newcomer(WAIT_S)}
