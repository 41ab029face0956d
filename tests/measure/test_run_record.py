from dataclasses import replace
from pathlib import Path

import pytest

from boost.errors import DataError
from boost.measure.run_record import find_runs, read_run
from boost.train.metrics import RunEnd
from boost.train.run_lock import RunLock
from tests.measure.made_runs import make_run


def test_the_numbers_of_a_run(tmp_path: Path) -> None:
    done = read_run(make_run(tmp_path / "run"))
    assert done.state == "done"
    assert (done.step, done.total_steps, done.tokens, done.seconds) == (20, 20, 1280, 10.0)
    assert done.loss == pytest.approx(3 + 2 * sum(1 / step for step in range(11, 21)) / 10)
    assert (done.best_step, done.best_heldout_loss) == (15, pytest.approx(3.1 + 2 / 15))
    assert done.heldout_loss == pytest.approx(3.6 + 2 / 20)
    assert (done.tokens_per_second, done.mfu, done.memory_bytes) == (10500.0, 0.4, 1 << 20)


@pytest.mark.parametrize(
    ("end", "state", "reason"),
    [
        (None, "failed", ""),
        (RunEnd(10, "stopped", "SIGTERM"), "stopped", "SIGTERM"),
        (RunEnd(10, "done", "no improvement"), "done", "no improvement"),
    ],
)
def test_how_a_run_ended(tmp_path: Path, end: RunEnd | None, state: str, reason: str) -> None:
    path = make_run(tmp_path / "run", steps=10, end=end)
    assert (read_run(path).state, read_run(path).reason) == (state, reason)
    with RunLock(path):
        assert read_run(path).state == "running"
    assert read_run(path).state == state


def test_a_run_without_metrics_and_one_with_damaged_lines(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    metrics = path / "metrics.jsonl"
    text = metrics.read_text()
    whole = read_run(path)
    metrics.write_text('{"kind": "st\x00\n[3]\n' + text + '{"kind": "step", "st')
    assert read_run(path) == replace(whole, damaged_lines=2, updated=read_run(path).updated)
    metrics.write_text(text.replace('"loss": 3.1,', '"loss": "nan",'))
    assert read_run(path).loss == pytest.approx(3 + 2 * sum(1 / step for step in range(10, 20)) / 10)
    metrics.unlink()
    record = read_run(path)
    assert (record.state, record.updated, record.loss, record.step) == ("failed", None, None, 0)


def test_the_configuration_of_the_last_start_counts(tmp_path: Path) -> None:
    path = tmp_path / "run"
    for _ in range(10):
        make_run(path)
    make_run(path, of=30)
    assert (path / "config.11.toml").exists() and read_run(path).total_steps == 30
    (path / "config.12.toml").write_text("[")
    with pytest.raises(DataError, match=r"config.12.toml is not valid TOML: .*; restore it"):
        read_run(path)


def test_runs_are_found_in_folders_of_folders(tmp_path: Path) -> None:
    for name in ("b", "a/2", "a/1", ".hidden/run"):
        make_run(tmp_path / name, steps=1)
    (tmp_path / "b/checkpoints/config.toml").touch()
    (tmp_path / "b/checkpoints/checkpoints").mkdir()
    assert [str(path.relative_to(tmp_path)) for path in find_runs(tmp_path)] == ["a/1", "a/2", "b"]
    assert find_runs(tmp_path / "b") == [tmp_path / "b"]
    for path in (tmp_path / "b/logs", tmp_path / "nowhere"):
        with pytest.raises(DataError, match="no runs in"):
            find_runs(path)
    with pytest.raises(DataError, match="is not a run directory"):
        read_run(tmp_path)
