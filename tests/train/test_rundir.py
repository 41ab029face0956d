import json
import logging
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import boost
from boost.config import Config, load
from boost.errors import ConfigError, StorageError
from boost.train import rundir
from boost.train.rundir import RunDirectory, configure_logging, without_links
from tests.train import runs


def make_config(path: Path) -> Config:
    return load(None, ["--run.dir", str(path)])


def test_a_run_stays_in_the_folder_that_a_link_led_to(store: Path, tmp_path: Path, boost_logger: object) -> None:
    """Turned elsewhere during the run, it must not split the run's files over two folders."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "first")

    def turn(trainer: object) -> None:
        (tmp_path / "other").symlink_to(tmp_path / "second")
        (tmp_path / "other").rename(tmp_path / "link")

    config = runs.make_config(store, tmp_path / "link" / "run", train={"save_every": 2})
    result = boost.Trainer(config, hooks=[runs.Do("after_step", 3, turn)]).fit()
    run = RunDirectory(tmp_path / "first" / "run")
    assert result.checkpoint == run.checkpoints / "step-00000006"
    assert (
        run.recorded_save() == (run.checkpoints, 6)
        and len(runs.losses(run.path)) == 6
        and (run.logs / "rank0.log").stat().st_size
    )
    assert not any((tmp_path / "second").iterdir()) and not (run.path / "run.lock").exists()


def test_links_are_followed_unless_they_dangle_or_nodes_may_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = make_config(Path("runs/one"))
    assert without_links(config).run.dir == "runs/one"
    (tmp_path / "runs").symlink_to("disk")
    assert without_links(config).run.dir == "runs/one", "refused later, with the link's name"
    (tmp_path / "disk").mkdir()
    assert without_links(config).run.dir == str(tmp_path.resolve() / "disk/one")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    assert without_links(config).run.dir == "runs/one"


@pytest.fixture
def boost_logger() -> Iterator[logging.Logger]:
    logger = logging.getLogger("boost")
    before = (list(logger.handlers), logger.level, logger.propagate)
    yield logger
    for handler in [handler for handler in logger.handlers if handler not in before[0]]:
        handler.close()
    logger.handlers[:], logger.propagate = before[0], before[2]
    logger.setLevel(before[1])


def files(path: Path) -> dict[str, bytes]:
    return {str(item.relative_to(path)): item.read_bytes() for item in path.rglob("*") if item.is_file()}


def test_a_run_records_a_configuration_that_loads_to_itself_and_its_environment_but_no_host(tmp_path: Path) -> None:
    config = make_config(tmp_path / "deep" / "run")
    run = RunDirectory.create(config, resume=False)
    assert load(str(run.path / "config.toml")) == config
    assert run.logs.is_dir() and run.checkpoints.is_dir()
    text = (run.path / "environment.json").read_text()
    environment = json.loads(text)
    expected = {"torch": torch.__version__, "python": platform.python_version(), "world_size": 1}
    assert environment | expected == environment
    assert environment["cores"] >= 1 and environment["cpu"] and isinstance(environment["command"], list)
    assert "hostname" not in environment
    assert len(platform.node()) < 6 or platform.node() not in text


@pytest.mark.parametrize(
    ("script", "program"),
    [
        ("bin/boost", ["boost"]),
        ("package/cli/main.py", ["python", "-m", "package.cli.main"]),
        ("package/__main__.py", ["python", "-m", "package"]),
        ("script.py", ["script.py"]),
    ],
)
def test_the_command_can_be_typed_again(
    script: str, program: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "package" / "cli").mkdir(parents=True)
    for init in ("package/__init__.py", "package/cli/__init__.py"):
        (tmp_path / init).touch()
    monkeypatch.setattr(sys, "argv", [str(tmp_path / script), "steps", "--tp", "2"])
    assert rundir.environment(make_config(tmp_path))["command"] == [*program, "steps", "--tp", "2"]


@pytest.mark.parametrize("leftover", ["metrics.jsonl", "checkpoints/step-10"])
def test_a_fresh_run_does_not_touch_an_earlier_one(tmp_path: Path, leftover: str) -> None:
    (tmp_path / leftover).parent.mkdir(exist_ok=True)
    (tmp_path / leftover).write_text("something\n")
    before = files(tmp_path)
    with pytest.raises(ConfigError) as caught:
        RunDirectory.create(make_config(tmp_path), resume=False)
    message = str(caught.value)
    assert "\n" not in message and f"run.dir = '{tmp_path}'" in message
    assert "--resume auto" in message and "another --run.dir" in message
    assert files(tmp_path) == before


def test_later_starts_keep_every_file_that_lies_there(tmp_path: Path) -> None:
    """A start that trained nothing does not stand in the way of a new run."""
    (tmp_path / "config.toml").write_text("# mine\n")
    for line, resume in (("", False), ("", False), ('{"step": 1}\n', True), ('{"step": 2}\n', True)):
        (tmp_path / "metrics.jsonl").write_text(line)
        before = files(tmp_path)
        RunDirectory.create(make_config(tmp_path), resume)
        assert before.items() <= files(tmp_path).items()
    made = [f"config.{number}.toml" for number in range(2, 6)]
    made += ["environment.json", *(f"environment.{number}.json" for number in range(2, 5))]
    assert set(files(tmp_path)) == {"config.toml", "metrics.jsonl", *made}
    assert "[model]" in (tmp_path / "config.2.toml").read_text()


def test_a_path_that_cannot_be_made_is_one_line_which_names_a_link_to_nowhere(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=f"run.dir = '{tmp_path}/file/run'.*Not a directory.*--run.dir") as caught:
        RunDirectory.create(make_config(tmp_path / "file" / "run"), resume=False)
    assert "\n" not in str(caught.value)
    (tmp_path / "runs").symlink_to(tmp_path / "unmounted")
    for name in ("runs", "runs/mine"):
        with pytest.raises(StorageError, match="runs' is a link to '.*unmounted', which does not exist"):
            RunDirectory.create(make_config(tmp_path / name), resume=False)


def test_a_token_store_is_no_run_directory(store: Path) -> None:
    before = files(store)
    with pytest.raises(ConfigError, match="is a token store; choose another --run.dir"):
        RunDirectory.create(make_config(store), resume=False)
    assert files(store) == before


def test_logs_go_to_the_file_of_the_rank_with_times_and_are_appended(
    tmp_path: Path, boost_logger: logging.Logger
) -> None:
    configure_logging(tmp_path / "logs", 3)
    logging.getLogger("boost.some.module").info("first %d", 1)
    boost_logger.debug("not shown")
    configure_logging(tmp_path / "logs", 3)
    boost_logger.warning("second")
    lines = (tmp_path / "logs" / "rank3.log").read_text().splitlines()
    assert [line.split(" ", 2)[2] for line in lines] == ["INFO first 1", "WARNING second"]
    assert all(line[:2] == "20" and line[4] == "-" for line in lines)


def test_logs_that_cannot_be_written_are_one_line(tmp_path: Path, boost_logger: logging.Logger) -> None:
    (tmp_path / "logs").touch()
    with pytest.raises(StorageError, match=r"^run\.dir = .* cannot be written: File exists"):
        configure_logging(tmp_path / "logs", 0)


def git(folder: Path, *words: str) -> None:
    subprocess.run(["git", "-C", str(folder), "-c", "user.name=t", "-c", "user.email=t@t", *words], check=True)


def test_git_state_is_that_of_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "boost" / "train"
    package.mkdir(parents=True)
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.setattr(rundir, "__file__", str(package / "rundir.py"))
    assert rundir.git_state() is None
    git(tmp_path, "init", "-q")
    assert rundir.git_state() == {"commit": None, "dirty": True}
    git(tmp_path, "add", "pyproject.toml")
    git(tmp_path, "commit", "-q", "-m", "first")
    state = rundir.git_state()
    assert state is not None and len(state["commit"]) == 40 and state["dirty"] is False
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    for result in ("results/steps.json", "report.html", "soak.json"):
        (tmp_path / "benchmarks" / result).touch()
    assert rundir.git_state() == state
    (tmp_path / "benchmarks" / "steps.py").touch()
    assert rundir.git_state() == state | {"dirty": True}
    monkeypatch.setattr(rundir, "__file__", str(tmp_path / "venv/boost/train/rundir.py"))
    assert rundir.git_state() is None, "of an installed copy within another repository"


def test_only_auto_and_paths_inside_continue_a_run(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    assert run.continued_by("auto")
    assert run.continued_by(str(tmp_path / "run"))
    assert run.continued_by(str(tmp_path / "run" / "checkpoints" / "step-00000001"))
    assert not run.continued_by(str(tmp_path / "other"))
    assert not run.continued_by(None)
