"""An imported model, for the tests of commands that read checkpoints."""

from pathlib import Path

import pytest

from boost.cli.main import main
from tests.cli.commands import llama_of


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, store: Path) -> Path:
    """A dense model that was imported with the tokenizer of the tests' token store."""
    out = tmp_path_factory.mktemp("imported") / "c"
    assert main(["import", str(llama_of(store, tmp_path_factory.mktemp("llama"))), "--out", str(out)]) == 0
    return out
