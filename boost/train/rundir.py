"""The run directory, whose files docs/run-directory.md lists. A resumed run continues in it, and writes its configuration and
environment under new names."""

import contextlib
import datetime
import itertools
import json
import logging
import os
import platform
import subprocess
import sys
from pathlib import Path

from boost.config import Config, to_toml
from boost.errors import CheckpointError, ConfigError, StorageError
from boost.files import replace_text, storage_errors
from boost.machine import available_cores, cpu_model, launcher_number
from boost.paths import file_name, is_file, is_folder, read_record, status
from boost.text import JsonObject
from boost.train.run_lock import RunLock
from boost.version import __version__

BEST = "@best"
"""Suffix of a path that selects the run's checkpoint with the lowest held-out loss (train.keep_best)."""

_LOG_FORMAT = "%(asctime)s %(levelname)s %(message)s"


class RunDirectory:
    """The paths in a run directory. The constructor does not access the disk; `create` creates the folder."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.metrics = self.path / "metrics.jsonl"
        self.tensorboard = self.path / "tensorboard"
        self.logs = self.path / "logs"
        self.checkpoints = self.path / "checkpoints"
        self.last_saved = self.path / "last-saved.json"
        self.trackers = self.path / "trackers.json"
        self.lock: RunLock | None = None
        """The lock that this process holds on the folder; None on all processes but the main one, and outside a run."""
        self.token = ""
        """The token of the main process's lock, with which another process of this run can take it over."""

    @classmethod
    def create(cls, config: Config, resume: bool) -> "RunDirectory":
        """Creates the folder `config.run.dir` and writes the configuration and environment to it. Used only on the main process.

        Raises ConfigError (and changes nothing) if the folder already holds a run, and StorageError if it cannot be written.
        """
        run = cls(config.run.dir)
        with storage_errors(config.run.dir):
            if not resume:
                run.require_empty()
            for folder in (run.logs, run.checkpoints, run.tensorboard):
                folder.mkdir(parents=True, exist_ok=True)
            _write_numbered(run.path, "config", ".toml", to_toml(config))
            _write_numbered(run.path, "environment", ".json", json.dumps(environment(config), indent=2) + "\n")
        return run

    def continued_by(self, resume: str | None) -> bool:
        """Whether `--resume` refers to this run: 'auto', or a path inside this folder. A path in another run starts a new run."""
        if resume is None or resume == "auto":
            return resume == "auto"
        return Path(resume.removesuffix(BEST)).resolve().is_relative_to(self.path.resolve())

    def require_owned(self, folder: Path | None = None) -> None:
        """Raises LostRunError if this run has lost its directory (`boost.train.run_lock`), and StorageError if the system cannot
        tell. `folder`: the folder to write to; outside run.dir, only another owner in the lock matters, because that folder is
        run.dir's, and --resume auto of the other run would continue from what is saved there. Does nothing without a lock."""
        if self.lock is None:
            return
        if folder is None or folder.is_relative_to(self.path):
            self.lock.require_held()
        else:
            with contextlib.suppress(StorageError):
                self.lock.require_held(may_be_missing=True)

    def record_saved(self, saved: Path, step: int) -> None:
        """Atomically records that the checkpoint `saved`, at `step`, is the newest one. Raises StorageError."""
        elsewhere = {} if saved.parent == self.checkpoints else {"folder": str(saved.parent.absolute())}
        with storage_errors(self.path):
            replace_json(self.last_saved, {"step": step, **elsewhere})

    def recorded_save(self) -> tuple[Path, int] | None:
        """(folder, step) of the newest checkpoint, as recorded; None if no checkpoint was saved here. Raises OSError."""
        values = read_record(self.last_saved)
        try:
            folder, step = Path(values.get("folder", self.checkpoints)), int(values["step"])
        except (ValueError, KeyError, TypeError, OverflowError):
            return None
        return (folder, step) if folder == self.checkpoints or folder.is_absolute() else None

    def tracker_id(self, tracker: str, proposed: str) -> str:
        """Returns this run's id at an experiment tracker: the recorded one or, if none, `proposed`, which it records.

        Raises StorageError, or DataError if the id is not a valid file name."""
        ids = read_record(self.trackers)
        if not isinstance(ids.get(tracker), str):
            ids[tracker] = proposed
            with storage_errors(self.path):
                replace_json(self.trackers, ids)
        return file_name(ids[tracker], self.trackers, tracker)  # W&B names a folder after it

    def set_aside_metrics(self) -> None:
        """Renames the metrics of an earlier run to metrics.1.jsonl, metrics.2.jsonl, ..., so a run that starts over does not
        overwrite them. Trackers treat it as a new run, too. Raises StorageError."""
        with storage_errors(self.path):
            if not (is_file(self.metrics) and self.metrics.stat().st_size):
                return
            number = next(n for n in itertools.count(1) if not status(self.path / f"metrics.{n}.jsonl"))
            self.metrics.rename(self.path / f"metrics.{number}.jsonl")
            if status(self.trackers):
                self.trackers.rename(self.path / f"trackers.{number}.json")

    def require_empty(self) -> None:
        """Raises ConfigError if a new run would mix its files with those of an earlier run or a token store."""
        if status(self.path / "store.json"):
            raise ConfigError(f"run.dir = '{self.path}' is a token store; choose another --run.dir")
        holds_metrics = is_file(self.metrics) and self.metrics.stat().st_size > 0
        if holds_metrics or (is_folder(self.checkpoints) and any(self.checkpoints.iterdir())):
            raise ConfigError(
                f"run.dir = '{self.path}' already holds a run; resume it with --resume auto, or choose another --run.dir"
            )


def without_links(config: Config) -> Config:
    """The configuration with the real path of run.dir, resolved once: a link that is turned elsewhere meanwhile must not
    split its files over two folders.

    Changes nothing if run.dir has no links, if one of them dangles, or with several nodes, whose links may differ.
    """
    path = Path(config.run.dir)
    links = [place for place in (path.absolute(), *path.absolute().parents) if place.is_symlink()]
    several = launcher_number("GROUP_WORLD_SIZE", "1") > 1
    if several or not links or not all(map(status, links)):
        return config
    return config.changed(run={"dir": str(path.resolve())})


def configure_logging(logs: Path | str, rank: int) -> None:
    """Appends the 'boost' logger's messages (INFO and up) to `logs`/rank{rank}.log, timestamped. Raises StorageError.

    A second call replaces the first.
    """
    with storage_errors(Path(logs).parent):
        Path(logs).mkdir(parents=True, exist_ok=True)
        handler = _RankLog(Path(logs) / f"rank{rank}.log", encoding="utf-8")
    handler.setFormatter(logging.Formatter(_LOG_FORMAT))
    logger = logging.getLogger("boost")
    for earlier in [earlier for earlier in logger.handlers if isinstance(earlier, _RankLog)]:
        logger.removeHandler(earlier)
        earlier.close()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    # The root logger's handlers belong to libraries and would print over the progress bar.
    logger.propagate = False


class _RankLog(logging.FileHandler):
    """A separate type, so that a later call can find it among the logger's handlers."""

    _failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        """Warns once that lines cannot be written (for example, on a full disk), instead of printing a traceback for each."""
        if not self._failed:
            print(
                f"warning: cannot write {self.baseFilename}: {sys.exc_info()[1]}; training continues", file=sys.stderr
            )
        self._failed = True


def flat_config(tree: JsonObject, prefix: str = "") -> JsonObject:
    """Flattens a tree to dotted keys: {"train": {"steps": 3}} becomes {"train.steps": 3}."""
    flat: JsonObject = {}
    for key, value in tree.items():
        inner = isinstance(value, dict)
        flat |= flat_config(value, f"{prefix}{key}.") if inner else {f"{prefix}{key}": value}
    return flat


def environment(config: Config) -> JsonObject:
    """The environment that a run depends on. It contains no host name or install path, because run directories are shared."""
    import numpy
    import torch

    module, folder = Path(sys.argv[0]).stem, Path(sys.argv[0]).parent
    while is_file(folder / "__init__.py"):
        module, folder = f"{folder.name}.{module}", folder.parent
    # The program as it was typed: a script's name, or the module that was run with -m.
    program = ["python", "-m", module.removesuffix(".__main__")] if "." in module else [Path(sys.argv[0]).name]
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "boost": __version__,
        "git": git_state(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if gpus else None,
        "numpy": numpy.__version__,
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": cpu_model(),
        "cores": available_cores(),
        "gpus": gpus,
        "threads": torch.get_num_threads(),
        "world_size": config.parallel.world_size,
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": [*program, *sys.argv[1:]],
    }


def git_state() -> JsonObject | None:
    """{'commit': hash or None before the first commit, 'dirty': bool} of boost's own git checkout; None if there is none.

    An installed copy of boost may be inside another repository (in a virtual environment), whose commit is not boost's.
    """
    package = Path(__file__).resolve().parent.parent
    top = _git(package, "rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != package.parent or not is_file(package.parent / "pyproject.toml"):
        return None
    # Ignore experiment results, which are not code.
    results = (":!benchmarks/results", ":!benchmarks/*.json", ":!benchmarks/*.html")
    status = _git(package.parent, "status", "--porcelain", "--", ".", *results)
    return {"commit": _git(package, "rev-parse", "--verify", "--quiet", "HEAD"), "dirty": status != ""}


def _git(folder: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def require_checkpoint_folder(path: str | Path) -> None:
    """Raises CheckpointError if the path to a run or checkpoint does not exist. Commands call this before they import torch,
    which takes several seconds."""
    if not (status(path) or status(str(path).removesuffix(BEST))):
        raise CheckpointError(f"no checkpoint at '{path}': no such folder")


def replace_json(path: Path, values: JsonObject) -> None:
    """Writes a JSON file atomically."""
    replace_text(path, json.dumps(values) + "\n")


def _write_numbered(folder: Path, stem: str, suffix: str, text: str) -> None:
    """Writes to the first unused name among stem.suffix, stem.2.suffix, ..."""
    for number in itertools.count(1):
        name = f"{stem}{suffix}" if number == 1 else f"{stem}.{number}{suffix}"
        with contextlib.suppress(FileExistsError), open(folder / name, "x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            return
