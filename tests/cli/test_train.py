"""`boost train`, `eval` and `generate` as whole commands: killed, resumed, stopped, evaluated."""

import contextlib
import json
import os
import resource
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from boost.errors import ConfigError
from boost.train.checkpoint import complete_checkpoints
from boost.train.metrics import read_metrics
from boost.train.run_lock import require_unlocked
from tests.cli.commands import Capture, done, refused, say
from tests.train.commands import LIMIT_S, QUIET, ForkedPython, boost_command, toml

pytestmark = pytest.mark.slow

STEPS = 12


def write_config(folder: Path, store: Path) -> Path:
    path = folder / "run.toml"
    path.write_text(toml(store, seq_len=128, steps=STEPS, save_every=4, eval_every=8, eval_tokens=1280, log_every=1))
    return path


@pytest.fixture(autouse=True)
def threads_as_a_user_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher sets the number of threads, as in commands that run in separate processes."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


@pytest.fixture
def config(tmp_path: Path, store: Path) -> Path:
    return write_config(tmp_path, store)


def wait_for_step(process: ForkedPython, run: Path, step: int) -> None:
    """Waits until metrics.jsonl has `step`."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline and process.poll() is None:
        if (run / "metrics.jsonl").exists() and any(m["step"] >= step for m in read_metrics(run / "metrics.jsonl")):
            return
        time.sleep(0.02)
    process.kill()
    raise AssertionError(f"step {step} was not reached: {process.communicate()}")


def until_unlocked(run: Path) -> None:
    """Waits until the processes of a killed run are gone, which its launcher does not wait for."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        try:
            return require_unlocked(run)
        except ConfigError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def numbers(run: Path) -> list[tuple[object, ...]]:
    """Numbers that must be bitwise reproducible: loss and gradient norm of every step, loss of every evaluation."""
    names = ("kind", "step", "loss", "gradient_norm", "heldout_loss", "lr", "tokens")
    lines = [line for line in read_metrics(run / "metrics.jsonl") if line["kind"] in ("step", "eval")]
    return [tuple(line.get(name) for name in names) for line in lines]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, store: Path) -> Path:
    """The run directory of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    run = folder / "whole"
    words = ["train", str(write_config(folder, store)), "--run.dir", str(run)]
    with contextlib.closing(ForkedPython(boost_command, [words], os.environ)) as process:
        out, err = process.communicate()
    assert process.returncode == 0, err
    for words in ("held-out loss", "unigram entropy", "held-out perplexity", "bits per byte", "sample", str(run)):
        assert words in out
    assert out.splitlines()[-1].split(maxsplit=1) == [
        "next", f"boost eval {run}; boost generate {run}; boost export {run} --out exported/whole",
    ]  # fmt: skip
    return run


def test_a_killed_run_resumes_to_the_last_bit(config: Path, whole: Path, tmp_path: Path, capfd: Capture) -> None:
    killed = tmp_path / "killed"
    assert len(numbers(whole)) == STEPS + 2

    # It hangs before step 10, however late this process looks: the save at step 4 is complete, the one at 8 is not yet, perhaps.
    words = ["train", str(config), "--run.dir", str(killed), "--inject-fault", "hang@10"]
    with contextlib.closing(ForkedPython(boost_command, [words], os.environ)) as process:
        wait_for_step(process, killed, 9)
    until_unlocked(killed)
    steps_before = len(read_metrics(killed / "metrics.jsonl"))
    assert steps_before < STEPS
    assert complete_checkpoints(killed / "checkpoints")

    err = refused(capfd, "train", config, "--run.dir", killed)
    assert "already holds a run" in err and "--resume auto" in err
    assert len(read_metrics(killed / "metrics.jsonl")) == steps_before, "nothing is lost by the mistake"

    assert "resumed at step" in done(capfd, "train", config, "--run.dir", killed, "--resume", "auto")
    assert numbers(killed) == numbers(whole)
    shards = [complete_checkpoints(run / "checkpoints")[-1] / "tensors" for run in (whole, killed)]
    for name in sorted(file.name for file in shards[0].iterdir()):
        expected, actual = (load_file(folder / name) for folder in shards)
        assert expected.keys() == actual.keys()
        assert all(torch.equal(expected[key], actual[key]) for key in expected), name


def test_a_second_run_is_refused_and_sigterm_saves_and_loses_nothing(
    config: Path, tmp_path: Path, capfd: Capture
) -> None:
    run = tmp_path / "run"
    words = ["train", str(config), "--run.dir", str(run), "--train.steps", "5000", *QUIET]
    with contextlib.closing(ForkedPython(boost_command, [words], os.environ)) as process:
        wait_for_step(process, run, 2)
        code, _, err = say(capfd, "train", config, "--run.dir", run, "--resume", "auto")
        assert code == 2 and f"run.dir = '{run}' is in use by process" in err
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate()
        assert process.returncode == 0, err
    assert "stopped by SIGTERM" in out
    (saved,) = complete_checkpoints(run / "checkpoints")
    last = read_metrics(run / "metrics.jsonl")[-1]["step"]
    assert json.loads((saved / "state.json").read_text())["step"] == last


def test_evaluation_and_generation_do_not_depend_on_the_mesh(whole: Path, capfd: Capture) -> None:
    run = whole
    evaluations, texts = [], []
    for tp in (1, 2):
        evaluations.append(json.loads(done(capfd, "eval", run, "--tp", tp, "--json")))
        words = ["--prompt", "def ", "--max-tokens", 20, "--seed", 3, "--tp", tp, "--json"]
        out = done(capfd, "generate", run, *words)
        texts.append(json.loads(out))
    trained = [m for m in read_metrics(run / "metrics.jsonl") if m["kind"] == "eval"][-1]
    for evaluation in evaluations:
        assert evaluation["loss"] == pytest.approx(trained["heldout_loss"], rel=1e-5)
        assert evaluation["tokens"] == trained["tokens"]
        assert evaluation["perplexity"] == pytest.approx(2.718281828 ** evaluation["loss"], rel=1e-4)
    assert texts[0]["tokens"] == texts[1]["tokens"]
    assert 0 < len(texts[0]["tokens"]) <= 20
    out = done(capfd, "generate", run, "--prompt", "def ", "--max-tokens", 20, "--seed", 3)
    assert out == f"def {texts[0]['text']}\n"
    assert "parallel.tp = 3 must divide" in refused(capfd, "eval", run, "--tp", 3)


def command_with_small_files(words: list[str]) -> int:
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
    return boost_command(words)


def test_a_file_size_limit_is_one_line_and_keeps_what_was_saved(config: Path, tmp_path: Path, capfd: Capture) -> None:
    """Emulates a full disk: the last save fails, and the earlier one stays."""
    run = tmp_path / "run"
    words = f"train {config} --run.dir {run} --parallel.tp 1 --train.eval_every 0 --train.steps".split()
    assert say(capfd, *words, "5")[0] == 0
    before = complete_checkpoints(run / "checkpoints")
    words += ["10", "--resume", "auto", "--run.save_retry_minutes", "0"]
    with contextlib.closing(ForkedPython(command_with_small_files, [words], os.environ)) as process:
        _, err = process.communicate()
    assert process.returncode == 2, err
    assert err.strip().splitlines()[-1].startswith("boost: error: the checkpoint for step 10 was not saved")
    assert complete_checkpoints(run / "checkpoints") == before


def command_with_few_files(words: list[str], free: int) -> int:
    used = set(map(int, os.listdir("/proc/self/fd")))
    limit = [number for number in range(max(used) + free + 2) if number not in used][free]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    return boost_command(words)


@pytest.mark.parametrize(
    ("command", "free"),
    [("train", 28), ("train --run.recovery in-step", 28), ("launch --nproc-per-node 2 -- train", 12)],
)
def test_a_limit_of_open_files_is_one_line(config: Path, tmp_path: Path, command: str, free: int) -> None:
    """Before torch waits for a store or a peer whose sockets it could not open."""
    words = (
        f"{command} {config} --run.dir {tmp_path / 'run'} --parallel.tp 1 --parallel.dp 2 --train.micro_batch 1".split()
    )
    with contextlib.closing(ForkedPython(command_with_few_files, [words, free], os.environ)) as process:
        _, err = process.communicate()
    assert process.returncode in (2, 3) and "Traceback" not in err, err
    assert err.splitlines()[-1].endswith("the system allows no more open files; raise its limit (ulimit -n)"), err
