"""Runs `boost train` as a background command and reads its processes' heartbeats."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from boost.train.checkpoint import complete_checkpoints
from boost.train.heartbeat import read_beats
from tests import toy

LIMIT_S = 600
"""Only against hanging for ever."""

QUIET = ("--train.eval_every", "0", "--train.save_every", "0")
"""Flags of a run that neither evaluates nor saves before it ends."""


def toml(store: Path, *, tp: int = 2, micro_batch: int = 4, **train: int | str) -> str:
    """Writes the configuration of a command; keywords are fields of [train]."""
    fields = {"seq_len": 32, "global_batch": 4, "micro_batch": micro_batch, **train}
    lines = [f"{name} = {json.dumps(value)}" for name, value in fields.items()]
    sections = (f"[parallel]\ntp = {tp}", "[optim]\nlr = 3e-3", "\n".join(["[train]", *lines]))
    return "\n".join((toy.TOML, *sections, f'[data]\nstore = "{store}"', '[run]\ndevice = "cpu"\npeak_tflops = 1\n'))


ENDLESS = {
    "steps": 100000,
    "save_every": 20,
    "eval_every": 30,
    "eval_tokens": 6400,
    "log_every": 1000,
    "keep": 100000,
}
"""[train] of a run that others end."""


def training(folder: Path, store: Path, *words: str) -> list[str]:
    """The command of an endless run in `folder`/run, and its configuration."""
    config = folder / "run.toml"
    config.write_text(f'{toml(store, **ENDLESS)}dir = "{folder / "run"}"\n')
    return [sys.executable, "-m", "boost.cli.main", "train", str(config), *words]


def phases_in(shared: Path) -> set[str]:
    """Phases of the processes that send heartbeats, given the folder in which their launcher creates its own."""
    folders = list(shared.glob("boost-launch-*"))
    return {beat.phase for beat in read_beats(folders[0])} if folders else set()


class Command:
    """`boost train` on two processes, with access to its launcher's folder."""

    def __init__(self, folder: Path, store: Path, *words: str, **variables: str) -> None:
        self.run, self.shared = folder / "run", folder / "shared"
        self.shared.mkdir(exist_ok=True)
        command = training(folder, store, *words)
        environment = os.environ | {"TMPDIR": str(self.shared), "OMP_NUM_THREADS": "1"} | variables
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
        )

    def phases(self) -> set[str]:
        """Phases of the processes that send heartbeats."""
        return phases_in(self.shared)

    def processes(self) -> list[int]:
        """The launcher and the processes of the run. (With a CUDA build of torch, multiprocessing's tracker is another child.)"""
        command = ["pgrep", "--list-full", "--parent", str(self.process.pid)]
        found = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
        return [self.process.pid, *(int(line.split()[0]) for line in found if "resource_tracker" not in line)]

    def wait_for(self, condition: Callable[[], Any]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def finish(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=LIMIT_S)
        return self.process.returncode, out, err

    def __enter__(self) -> "Command":
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.communicate()


def saved_steps(run: Path) -> list[int]:
    """Steps of the complete checkpoints, read from state.json."""
    return [json.loads((path / "state.json").read_text())["step"] for path in complete_checkpoints(run / "checkpoints")]
