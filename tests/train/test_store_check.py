"""A token store that changes during a run: a one-line error, no training on wrong data, no SIGBUS."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from boost.errors import DataError
from boost.train.loop import Trainer
from tests.train.runs import Do, fitted, make_config, make_trainer


def run_with(change: Callable[[Path], None], store: Path, folder: Path) -> Trainer:
    own = shutil.copytree(store, folder / "store")
    return fitted(make_config(own, folder / "run"), Do("after_step", 2, lambda _: change(own / "train.tokens")))


def test_truncation_is_one_line(store: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"train\.tokens is shorter than when it was opened"):
        run_with(lambda file: os.truncate(file, 0), store, tmp_path)


def test_a_store_that_is_deleted_under_a_run_is_still_read(store: Path, tmp_path: Path) -> None:
    assert run_with(lambda file: file.unlink(), store, tmp_path).position.step == 6


def test_damage_is_found_before_the_first_step(store: Path, tmp_path: Path) -> None:
    own = shutil.copytree(store, tmp_path / "store")
    tokens = (own / "train.tokens").read_bytes()
    (own / "train.tokens").write_bytes(bytes(len(tokens)))
    config = make_config(own, tmp_path / "run")
    with pytest.raises(DataError, match=r"train\.tokens is damaged"):
        make_trainer(config)
    unverified = config.model_copy(update={"data": config.data.model_copy(update={"verify": False})})
    make_trainer(unverified)
