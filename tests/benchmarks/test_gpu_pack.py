"""benchmarks/gpu/pack.py: a token store as one file."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.gpu.pack import LIMIT, from_text, main, to_text


def test_tokens_survive_as_text() -> None:
    tokens = np.array([300, 5, 300, 300, 0, 5, LIMIT - 1], dtype=np.uint16)
    assert (from_text(to_text(tokens)) == tokens).all()
    assert to_text(np.full(1000, 31_999, dtype=np.uint16)).endswith(bytes(1000)), "one byte for the most frequent id"
    with pytest.raises(ValueError, match=f"token id {LIMIT}: only ids below {LIMIT}"):
        to_text(np.array([LIMIT], dtype=np.uint16))


def test_a_store_is_the_same_after_its_journey(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyppmd")
    for source, target in ((store, tmp_path / "store.zip"), (tmp_path / "store.zip", tmp_path / "far" / "store")):
        monkeypatch.setattr("sys.argv", ["pack", str(source), str(target)])
        assert main() == 0
    files = {path.name: path.read_bytes() for path in store.iterdir()}
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "far" / "store").iterdir()}
    assert (tmp_path / "store.zip").stat().st_size < sum(map(len, files.values())) / 2
