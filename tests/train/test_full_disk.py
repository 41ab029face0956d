"""What cannot be written outside of a checkpoint does not end a run, and does not keep it from saving."""

import contextlib
import errno
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import boost
from boost.config.load import load
from boost.errors import StorageError
from boost.train import best_effort as module
from boost.train import checkpoint as ckpt
from boost.train import worker
from boost.train.best_effort import best_effort
from boost.train.failures import failure_report
from boost.train.heartbeat import FolderBoard, read_beats
from boost.train.loop import Trainer
from boost.train.metrics import MetricsHook
from boost.train.overdue import end_process
from boost.train.rundir import configure_logging
from tests.train.commands import Command, ForkedPython, boost_command, phases_in, renew_output, saved_steps, training
from tests.train.runs import Do, Warnings, fitted, make_config, small_disk, started

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
IN_STEP = ("--parallel.tp", "1", "--parallel.dp", "2", "--train.micro_batch", "2", "--run.recovery", "in-step")


@pytest.fixture(autouse=True)
def works_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_failing", set())


@pytest.fixture
def dev_full() -> Path:
    path = Path("/dev/full")
    if not path.exists():
        pytest.skip("this system has no /dev/full")
    return path


def test_the_first_failure_of_each_kind_is_said_until_it_works_again() -> None:
    said: list[str] = []
    for works in (False, False, True, False):
        for what in ("metrics", "heartbeats"):
            with best_effort(f"write {what}", said.append):
                if not works:
                    raise FULL
    first = [f"cannot write {what}: {FULL.strerror}; training continues" for what in ("metrics", "heartbeats")]
    assert said == first * 2
    with pytest.raises(ValueError, match="another"), best_effort("metrics", said.append, StorageError):
        raise ValueError("another")


def test_a_run_whose_metrics_log_and_notes_cannot_be_written_trains_and_saves(
    store: Path, tmp_path: Path, dev_full: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each of them is said once. What follows a complete checkpoint does not make it fail, not even the last one."""
    run = tmp_path / "run"
    (run / "logs").mkdir(parents=True)
    (run / "logs/rank0.log").symlink_to(dev_full)
    (run / "last-saved.json").mkdir()
    for name in ("tensorboard", "profile"):
        (run / name).touch()  # instead of a folder
    train = {"steps": 6, "save_every": 2, "keep": 1, "keep_best": True, "eval_every": 2, "profile": [2, 3]}
    configure_logging(run / "logs", 0)

    def full(*_: Any) -> None:
        raise StorageError("full")

    def fill_metrics(_: Trainer) -> None:
        with dev_full.open("wb") as device:
            os.dup2(device.fileno(), metrics._file.fileno())

    monkeypatch.setattr(ckpt, "rotate", full)
    monkeypatch.setattr("boost.train.builtin_hooks.write_best", full)
    metrics, hook = MetricsHook(), Warnings()
    try:
        trainer = started(make_config(store, run, train=train), hook, Do("on_train_start", 0, fill_metrics), metrics)
        result = trainer.fit()
    finally:
        logging.getLogger("boost").handlers.clear()
    assert result.position.step == 6 and saved_steps(run) == [2, 4, 6]
    kinds = [text.partition(":")[0].removeprefix("cannot ").removeprefix("write ") for text in hook.seen]
    files = ["TensorBoard events", "metrics.jsonl", "last-saved.json", "best.json"]
    assert sorted(kinds) == sorted([*files, "remove old checkpoints", "the timeline of steps 2 to 3"])
    assert capfd.readouterr().err.count("rank0.log: [Errno 28] No space left on device; training continues") == 1


def test_a_tracker_that_fails_is_left_out(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        __name__ = "wandb"

        def init(self, *_: Any, **__: Any) -> None:
            pass

        define_metric = init

        def log(self, *_: Any, **__: Any) -> None:
            raise ConnectionError("no network")

        finish = log

    monkeypatch.setitem(sys.modules, "wandb", Broken())  # type: ignore[arg-type]
    config, hook = make_config(store, tmp_path, run={"wandb": True}), Warnings()
    assert fitted(config, hook, MetricsHook()).position.step == 6
    assert hook.seen == ["cannot log to wandb: no network; training continues"]


def test_heartbeats_are_overwritten_in_place(tmp_path: Path) -> None:
    """Long, then short: nothing of the long one is left, and the file does not change its size."""
    board = FolderBoard(tmp_path)
    for count, where in ((1, "x" * 6000), (2, "y"), (3, "z" * 5000)):
        board.post(1, json.dumps({"rank": 1, "count": count, "where": where, "issued": {}}))
        (beat,) = read_beats(tmp_path)
        assert (beat.count, beat.where) == (count, where)
    assert [file.name for file in tmp_path.iterdir()] == ["beat1"]
    (tmp_path / "beat2").write_text('{"rank": 2, "cou')
    assert [beat.rank for beat in read_beats(tmp_path)] == [1]


def test_a_report_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    report = failure_report(StorageError("x"), 0)
    assert report.write(tmp_path)
    assert not report.write(tmp_path / "gone")


@pytest.mark.slow
def test_output_that_cannot_be_written_does_not_end_a_run(store: Path, tmp_path: Path, dev_full: Path) -> None:
    """stdout and stderr on a full disk, then a pipe that nobody reads any more, then closed, also those of a script."""
    words = ("--parallel.tp", "1", "--train.steps", "3", "--train.log_every", "1", "--train.eval_every", "0")
    closed = (into_a_closed_pipe, without_streams, script_without_streams)
    for function, output in ((boost_command, str(dev_full)), *((function, "") for function in closed)):
        folder = tmp_path / function.__name__
        folder.mkdir()
        process = ForkedPython(function, [training(folder, store, *words)[3:]], os.environ, output)
        assert (process.wait(), saved_steps(folder / "run"), process.said()) == (0, [3], ("", ""))
        process.close()


@pytest.mark.slow
def test_an_error_that_cannot_be_printed_keeps_its_exit_code(tmp_path: Path, dev_full: Path) -> None:
    """Of a command, of a process whose report cannot be written either, and of one that ends because nothing answers."""
    buffered, full = os.environ | {"PYTHONUNBUFFERED": ""}, str(dev_full)
    with open(full, "w") as file:
        assert subprocess.run([sys.executable, "-m", "boost.cli.main", "x"], stderr=file, env=buffered).returncode == 2
    spec = SimpleNamespace(folder=tmp_path / "gone", log_dir=None)
    ends: list[Any] = [(worker._report_and_leave, [spec, 0, StorageError("x")], full, 2)]
    ends += [(end_without_output, [how], output, 7) for how, output in (("", full), ("closed", ""), ("missing", ""))]
    for function, arguments, output, code in ends:
        process = ForkedPython(function, arguments, os.environ, output)
        assert process.wait() == code, (arguments, process.said())
        process.close()


def end_without_output(how: str) -> None:
    print("text", end="")  # stays in the buffer
    if how == "closed":
        sys.stdout.close()
        sys.stderr.close()
    elif how == "missing":
        close_streams()
    end_process("nothing answers", 7)


def into_a_closed_pipe(words: list[str]) -> int:
    reading, writing = os.pipe()
    os.close(reading)
    for descriptor in (1, 2):
        os.dup2(writing, descriptor)
    renew_output()
    return boost_command(words)


def close_streams() -> None:
    sys.stdin = sys.stdout = sys.stderr = None  # type: ignore[assignment]
    os.closerange(0, 3)


def without_streams(words: list[str]) -> int:
    """Descriptors 0 to 2 become the null device; otherwise, C code would print into files that the run opens."""
    close_streams()
    code = boost_command(words)
    null = os.stat(os.devnull)
    return code or sum(not os.path.samestat(os.fstat(descriptor), null) for descriptor in range(3))


def script_without_streams(words: list[str]) -> int:
    close_streams()
    boost.Trainer(load(words[1], words[2:])).fit()
    return 0


def fill(folder: Path) -> None:
    for size in (1 << 16, 1 << 12, 1):
        with contextlib.suppress(OSError), open(folder / f"fill{size}", "wb", buffering=0) as file:
            while True:
                file.write(bytes(size))


def steps(run: Path) -> int:
    metrics = run / "metrics.jsonl"
    return metrics.read_text().count('"kind": "step"') if metrics.exists() else 0


def stopped(command: Command, number: signal.Signals, process: int) -> None:
    """Sends a signal to the launcher (0) or a process, and checks that all that was trained is saved."""
    os.kill(command.processes()[process], number)
    code, out, err = command.finish()
    assert code == 0 and "Traceback" not in out + err and "error" not in err, out + err
    assert f"at step {saved_steps(command.run)[-1]} of 100000, checkpoint saved" in out


SIGNALS = [
    ((), signal.SIGTERM, 0),
    *(pytest.param((), *rest, marks=pytest.mark.nightly) for rest in ((signal.SIGINT, 0), (signal.SIGTERM, 2))),
    *(
        pytest.param(IN_STEP, *rest, marks=pytest.mark.nightly)  # on each commit, after the loss of a replica
        for rest in ((signal.SIGINT, 0), (signal.SIGTERM, 0), (signal.SIGTERM, 1))
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("words", "number", "process"), SIGNALS)
def test_a_signal_saves_although_the_temporary_folder_is_full(
    store: Path, tmp_path: Path, words: tuple[str, ...], number: signal.Signals, process: int
) -> None:
    with small_disk(tmp_path / "shared", 4 << 20), Command(tmp_path, store, *words) as command:
        command.wait_for(lambda: steps(command.run) > 3)
        fill(command.shared)
        begun = steps(command.run)
        command.wait_for(lambda: steps(command.run) > begun)
        stopped(command, number, process)


@pytest.mark.slow
def test_a_lost_replica_is_left_out_although_the_temporary_folder_is_full(store: Path, tmp_path: Path) -> None:
    """The others agree on the next membership in space that was reserved for it."""
    with small_disk(tmp_path / "shared", 4 << 20), Command(tmp_path, store, *IN_STEP) as command:
        command.wait_for(lambda: steps(command.run) > 3)
        fill(command.shared)
        os.kill(command.processes()[2], signal.SIGKILL)
        begun = steps(command.run)
        command.wait_for(lambda: steps(command.run) > begun + 10)
        stopped(command, signal.SIGTERM, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "process"), [pytest.param(signal.SIGINT, 0, marks=pytest.mark.nightly), (signal.SIGTERM, 1)]
)
def test_a_signal_saves_although_the_folder_of_the_launcher_is_gone(
    store: Path, tmp_path: Path, number: signal.Signals, process: int
) -> None:
    """As after a cleaner of temporary files: nothing can be written there either, and it needs no rights to test."""
    with Command(tmp_path, store) as command:
        command.wait_for(lambda: steps(command.run) > 3 and phases_in(command.shared))
        for folder in command.shared.glob("boost-launch-*"):
            shutil.rmtree(folder)
        stopped(command, number, process)
