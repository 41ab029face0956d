from pathlib import Path

import pytest

from boost.errors import DataError
from boost.measure.run_record import config_difference, find_runs, read_run
from boost.train.metrics import RunEnd
from boost.train.run_lock import RunLock
from tests.measure.made_runs import make_run


def test_the_numbers_of_a_run(tmp_path: Path) -> None:
    record = read_run(make_run(tmp_path / "run", "--optim.lr", "0.25"))
    done = record.summary()
    assert (record.state, record.config["optim.lr"], record.config["train.steps"]) == ("done", 0.25, 20)
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
    metrics.write_text('{"kind": "st\x00\n[3]\n' + text + '{"kind": "step", "st')
    record = read_run(path)
    assert (record.damaged, record.summary()) == (2, read_run(make_run(tmp_path / "whole")).summary())
    metrics.write_text(text.replace('"loss": 5.0', '"loss": "nan"'))
    assert read_run(path).series("loss")[0][0] == 2
    metrics.unlink()
    record = read_run(path)
    assert (record.state, record.updated, record.summary().loss, record.summary().step) == ("failed", None, None, 0)


def test_the_last_start_of_a_run_has_its_configuration_whatever_wrote_it(tmp_path: Path) -> None:
    path = tmp_path / "run"
    for _ in range(10):
        make_run(path)
    make_run(path, "--optim.lr", "0.125")
    assert (path / "config.11.toml").exists() and read_run(path).config["optim.lr"] == 0.125
    (path / "config.12.toml").write_text('[optim]\nname = "of a plugin"\nlr = 2.5\n')
    assert read_run(path).config == {"optim.name": "of a plugin", "optim.lr": 2.5}
    (path / "config.12.toml").write_text("[")
    with pytest.raises(DataError, match=r"config.12.toml' is not a TOML file"):
        read_run(path)


def test_only_keys_that_differ_are_a_difference(tmp_path: Path) -> None:
    flags = [["--model.family", "svd"], ["--model.family", "dense", "--optim.lr", "0.5"], ["--model.family", "svd"]]
    runs = [read_run(make_run(tmp_path / str(number), *words)) for number, words in enumerate(flags)]
    assert config_difference([runs[0], runs[2]]) == {}
    difference = config_difference(runs)
    assert difference["model.family"] == ["svd", "dense", "svd"] and difference["optim.lr"][1] == 0.5
    rank = runs[0].config["model.rank"]
    assert difference["model.rank"] == [rank, None, rank], "dense has none"
    assert "run.dir" not in difference and "train.steps" not in difference


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
