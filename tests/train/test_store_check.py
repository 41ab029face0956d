"""A token store that is damaged: no training on wrong data."""

import shutil
from pathlib import Path

import pytest

from boost.errors import DataError
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
