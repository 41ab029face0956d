"""A token store that is damaged: no training on wrong data."""

import fcntl
import shutil
import signal
from pathlib import Path

import pytest

from boost.errors import DataError
from tests.train.commands import Command, saved_steps
from tests.train.runs import make_config, make_trainer


def test_damage_is_found_before_the_first_step(store: Path, tmp_path: Path) -> None:
    own = shutil.copytree(store, tmp_path / "store")
    tokens = (own / "train.tokens").read_bytes()
    (own / "train.tokens").write_bytes(bytes(len(tokens)))
    config = make_config(own, tmp_path / "run")
    with pytest.raises(DataError, match=r"train\.tokens is damaged"):
        make_trainer(config)
    unverified = config.model_copy(update={"data": config.data.model_copy(update={"verify": False})})
    make_trainer(unverified)


@pytest.mark.slow
def test_a_start_that_waits_for_a_verification_says_so_and_hears_a_signal(store: Path, tmp_path: Path) -> None:
    cache = tmp_path / "boost/verified"
    with Command(tmp_path, store, XDG_CACHE_HOME=str(tmp_path)) as command:
        command.wait_for(lambda: list(cache.glob("*.lock")) or saved_steps(command.run))
        command.process.send_signal(signal.SIGTERM)
        command.finish()
    (name,) = cache.glob("*.lock")
    for record in cache.glob("*.json"):
        record.unlink()
    with (
        name.open("a") as lock,
        Command(tmp_path, store, "--run.dir", str(tmp_path / "other"), XDG_CACHE_HOME=str(tmp_path)) as command,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        command.wait_for(lambda: "waiting up to" in command.process.said()[1])
        command.process.send_signal(signal.SIGTERM)
        code, out, err = command.finish()
    assert (code, err.count("\n")) == (0, 1) and "which is verifying" in err and name.name in err
    assert out == "stopped by SIGTERM during startup, before the first step; nothing was lost\n"
