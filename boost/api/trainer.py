"""`Trainer`: a run from Python, with hooks."""

import threading
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from boost.config import Config, for_weights
from boost.config.load import as_config
from boost.errors import ConfigError, Stopped
from boost.machine import launcher_number
from boost.train.events import TrainResult
from boost.train.hooks import Hook

if TYPE_CHECKING:
    from boost.api.model import Model


class Trainer:
    """Trains a configuration in this process, or as one process under torchrun, as `boost train` does.

        class StopAtLoss(boost.Hook):
            def after_step(self, trainer, event):
                if event.metrics.loss < 2.0:
                    trainer.request_stop("loss below 2.0")

        result = boost.Trainer("run.toml", hooks=[StopAtLoss()]).fit()

    Metrics, checkpoints and logs go to `config.run.dir`. `model()` loads the trained model.
    """

    def __init__(
        self,
        config: Config | Mapping[str, object] | str | Path,
        *,
        hooks: Sequence[Hook] = (),
        resume: str | None = None,
        start_from: str | Path | None = None,
    ) -> None:
        """
        Args:
            config: a configuration, a nested dict, a TOML file, or the name of a preset.
            hooks: called around each step on every process, before the built-in ones (`boost.Hook`).
            resume: "auto" resumes from the latest checkpoint in run.dir, or starts a new run; or pass a checkpoint.
            start_from: a checkpoint whose weights the run starts from, at step 0. Unless `config` sets them, the learning
                rate and train.seq_len are chosen for these weights, as in `boost train --start-from`.

        Checks everything that can be checked before the first step. Raises ConfigError, DataError or CheckpointError.
        """
        config = as_config(config)  # mistakes are found before torch is imported

        from boost.train.checkpoint import open_checkpoint
        from boost.train.launch import under_torchrun
        from boost.train.run import check_before_start

        if start_from is not None:
            config = for_weights(config, open_checkpoint(Path(start_from)).config)
        self.config = config
        self.hooks = tuple(hooks)
        self._resume, self._start_from = resume, None if start_from is None else str(start_from)
        size = config.parallel.world_size
        started = launcher_number("WORLD_SIZE") if under_torchrun() else 1
        if size != started:
            raise ConfigError(
                f"parallel: the mesh size ({size}) differs from the number of processes ({started}); run this script with "
                f"torchrun --nproc-per-node {size}"
            )
        check_before_start(config, resume, self._start_from)

    def fit(self, *, return_if_stopped: bool = False) -> TrainResult:
        """Trains to the last step, or until a hook or a signal stops the run. Collective: all processes call it.

        A signal (SIGTERM, SIGUSR1, SIGHUP or Ctrl-C) saves and raises `boost.Stopped`, so that a script does not go on as if the
        run were complete; with `return_if_stopped`, it returns the result, whose `stopped` is true. A signal before the first step
        always raises. On a thread other than the main one, no signal is caught. Raises BoostError if training fails.
        """
        from boost.train.run import train

        if threading.current_thread() is not threading.main_thread():
            warnings.warn("fit() is not on the main thread, so a signal ends the run without a save", stacklevel=2)
        result, _ = train(self.config, self._resume, self._start_from, hooks=self.hooks)
        if result is None:
            raise Stopped("a signal stopped the run before its first step; nothing was lost")
        if result.by_signal and not return_if_stopped:
            raise Stopped(
                f"{result.stopped_by} stopped the run at step {result.position.step} of {self.config.train.steps}; checkpoint: "
                f"{result.checkpoint}; resume with boost.Trainer(..., resume='auto')",
                result,
            )
        return result

    def model(self, **options: Any) -> "Model":
        """Loads the model of the run's latest checkpoint on one process; `options` as in `Model.from_pretrained`."""
        from boost.api.model import Model

        return Model.from_pretrained(self.config.run.dir, **options)
