"""The checkpoints of a run: writes them to the run's directory or, if that fails or is lost, to run.fallback_dir; finds the ones
that are there."""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from boost.config import Config
from boost.errors import LostRunError, NonFiniteError, StorageError
from boost.parallel.mesh import Mesh
from boost.train import checkpoint as ckpt
from boost.train.agreement import run_on_main
from boost.train.best_effort import best_effort
from boost.train.checkpoint import CheckpointSaver, Position, SavedCheckpoint
from boost.train.heartbeat import Phase, in_phase
from boost.train.rundir import RunDirectory

FIRST_WAIT_S, LONGEST_WAIT_S = 5.0, 60.0
"""First and longest wait between attempts at the last save, in seconds."""


class Saves:
    """Writes and finds a run's checkpoints. It asks no hook and checks no replica: `Trainer.save` does.

    Methods that write are collective and raise StorageError on every process if any cannot write, NonFiniteError if weights or
    optimizer state are not finite, and LostRunError if the run has lost its directory. If it was deleted or renamed, they save in
    run.fallback_dir first, if set; not if another run has taken it over, because that folder is the other run's, too.
    """

    def __init__(
        self, config: Config, mesh: Mesh, run: RunDirectory, saver: CheckpointSaver, warn: Callable[[str], None]
    ) -> None:
        self.config, self.mesh, self.run, self.saver, self._warn = config, mesh, run, saver, warn
        self.elsewhere = ckpt.fallback_folder(config)
        """The folder in run.fallback_dir, if configured."""

    @property
    def folders(self) -> list[Path]:
        """Folders of this run's checkpoints: the one in run.dir, and the one in run.fallback_dir if configured."""
        return [folder for folder in (self.run.checkpoints, self.elsewhere) if folder]

    def prepare(self) -> None:
        """Allocates host memory for background saves in advance. Collective. Does nothing if replicas change, because they rejoin
        at different times."""
        if self.mesh.background is None:
            self.saver.prepare()

    def start(self, position: Position) -> None:
        """Starts a save in the background; only one is in flight at a time. Returns after the copy to host memory."""
        with in_phase(Phase.SAVE):
            self.mesh.together(lambda: self.saver.start(self.run.checkpoints, position))

    def save(self, position: Position, folder: Path | None = None) -> SavedCheckpoint:
        """Saves in `folder`; None: in run.dir."""
        folder = folder or self.run.checkpoints
        with in_phase(Phase.SAVE), self.rescuing(position, folder):
            return self.mesh.together(lambda: self.saver.save(folder, position))

    def save_last(self, position: Position, urgent: bool) -> SavedCheckpoint:
        """Saves like `save`, but retries (run.save_retry_minutes) and then uses run.fallback_dir, or the weights are lost.
        `urgent`: the process may be killed soon, so it tries run.fallback_dir before the retries."""
        own, elsewhere, minutes = self.run.checkpoints, self.elsewhere, self.config.run.save_retry_minutes
        waits = list(retry_waits(minutes))  # waits, not times, so that all processes follow them without communication
        attempts = [(own, 0.0, "")]
        for number, wait in enumerate(waits, start=1):
            again = f"retry {number} of {len(waits)} follows in {wait:.0f} s (run.save_retry_minutes = {minutes:g})"
            attempts.append((own, wait, f"free disk space; {again}"))
        if elsewhere:
            there = elsewhere, 0.0, f"saving in '{elsewhere}' (run.fallback_dir)"
            attempts.insert(1 if urgent else len(attempts), there)
        failure: StorageError | None = None
        for folder, wait, notice in attempts:
            if failure:
                self._warn(f"{failure}; {notice}")
                time.sleep(wait)
            try:
                return self.save(position, folder)
            except StorageError as error:
                if folder == elsewhere:
                    self._warn(str(error))
                else:
                    failure = error
        assert failure
        raise failure

    def finish(self, position: Position) -> SavedCheckpoint | None:
        """Waits for the save in flight and returns it; None if there is none. `position`: the current one."""
        if self.saver.in_flight is None:
            return None
        with in_phase(Phase.SAVE), self.rescuing(position, self.run.checkpoints):
            return self.mesh.together(lambda: self.saver.finish() if self.saver.in_flight is not None else None)

    @contextlib.contextmanager
    def rescuing(self, position: Position, folder: Path) -> Iterator[None]:
        """Saves in run.fallback_dir, if set, if the run has lost its directory, before the error ends the run. Collective."""
        try:
            yield
        except LostRunError:
            if self.elsewhere and self.elsewhere != folder:
                with contextlib.suppress(LostRunError):  # `RunDirectory.require_owned`, after a take-over
                    try:
                        saved = self.save(position, self.elsewhere)
                        self._warn(f"saved '{saved.path}', because the run directory is lost")
                    except (StorageError, NonFiniteError) as error:
                        self._warn(str(error))
            raise

    def supersede_later(self, newest: Path | None, step: int) -> None:
        """Marks checkpoints at later steps as superseded, so that --resume auto does not find an abandoned branch. Collective.

        `newest`: the checkpoint at `step`, the current one, perhaps of another run; None at step 0.
        """

        def supersede() -> None:
            self.run.require_owned()
            recorded = self.run.recorded_save()
            own = [*self.folders, *(recorded[:1] if recorded else ())]
            # Record it first: if this process is killed in between, --resume auto misses no checkpoint.
            with best_effort("write last-saved.json", self._warn):
                if newest is not None and newest.parent in own:
                    self.run.record_saved(newest, step)
                else:
                    self.run.last_saved.unlink(missing_ok=True)
            for folder in self.folders:
                ckpt.supersede(folder, step)

        run_on_main(self.mesh, supersede, StorageError)

    def complete(self) -> list[Path]:
        """The complete checkpoints of this run. Raises OSError."""
        return [path for folder in self.folders for path in ckpt.complete_checkpoints(folder)]

    def proven(self, step: int) -> Path | None:
        """The newest checkpoint up to `step`, the last one that is proven healthy; None if there is none. Raises OSError."""
        steps = sorted(((ckpt.step_of(path) or 0, path) for path in self.complete()), reverse=True)
        return next((path for at, path in steps if at <= step and not any(ckpt.marks_of(path))), None)

    def latest(self) -> Path | None:
        """The newest complete checkpoint, for a message; None if there is none, or if the folder cannot be read now."""
        with contextlib.suppress(OSError):
            return next(reversed(ckpt.complete_checkpoints(self.run.checkpoints)), None)
        return None


def retry_waits(minutes: float) -> Iterator[float]:
    """Yields the wait before each retry, in seconds. Waits double up to one minute and take `minutes` in total."""
    left, wait = 60 * minutes, FIRST_WAIT_S
    while left > 0:
        yield min(wait, left)
        left -= wait
        wait = min(2 * wait, LONGEST_WAIT_S)
