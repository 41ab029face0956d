"""Names from files become paths only if they stay in their folder."""

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from boost.errors import CheckpointError, DataError
from boost.paths import file_name, is_file, is_folder, read_record, read_text, status
from boost.train.metrics import read_metrics
from boost.train.run_lock import require_unlocked
from boost.train.rundir import RunDirectory
from tests.train.reads import watched

UNSAFE = ["", ".", "..", "../x", "/x", "a/b", "a\\b", "C:", "c:x", "x\0", "\ud800", "n" * 201, 3, None, ["x"]]


@pytest.mark.parametrize(
    "name", ["a", "rag", "model-00001-of-00002.safetensors", "..a", "a..b", "c", "übung", "rag:v2"]
)
def test_a_plain_name_is_returned(name: str) -> None:
    assert file_name(name, "f.json", "field") == file_name(name, "f.json", "field", nested=True) == name
    assert file_name(f"tensors/{name}", "f.json", "field", nested=True) == f"tensors/{name}"


@pytest.mark.parametrize("name", UNSAFE)
def test_others_are_refused_with_file_field_and_value(name: object) -> None:
    with pytest.raises(CheckpointError, match=r"^'f\.json': field = .* is not a valid file name \(") as caught:
        file_name(name, "f.json", "field", CheckpointError)
    assert "\n" not in str(caught.value)
    if name != "a/b":
        for nested in (name, f"tensors/{name}" if isinstance(name, str) else name):
            with pytest.raises(DataError, match="is not a valid file name"):
                file_name(nested, "f.json", "field", nested=True)


def test_the_recorded_id_of_a_tracker_is_a_name(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.trackers.write_text('{"wandb": "../../PWNED", "other": "a1"}')
    assert run.tracker_id("other", "b2") == "a1"
    with pytest.raises(DataError, match=r"trackers\.json': wandb = '../../PWNED' is not"):
        run.tracker_id("wandb", "b2")


def test_only_regular_files_of_a_sane_size_are_read(endless: Callable[[Path], None], tmp_path: Path) -> None:
    endless(tmp_path / "file")
    with pytest.raises(OSError, match="not a regular file"):
        read_text(tmp_path / "file")
    large = tmp_path / "large"
    with open(large, "wb") as file:
        file.truncate((1 << 28) + 1)
    with pytest.raises(OSError, match="larger than 268 MB"):
        read_text(large)
    (tmp_path / "text").write_text("text")
    (tmp_path / "link").symlink_to("text")
    assert read_text(tmp_path / "link") == "text"


@pytest.mark.parametrize("error", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EACCES])
def test_what_cannot_be_told_is_neither_there_nor_missing(tmp_path: Path, error: int) -> None:
    (tmp_path / "file").write_text("{}")
    (tmp_path / "loop").symlink_to("loop")
    none = ((name, (False, False)) for name in ("none", "file/x", "loop", "n" * 300, "\0"))
    for name, there in (("file", (True, False)), ("", (False, True)), *none):
        assert (is_file(tmp_path / name), is_folder(tmp_path / name)) == there
        assert (status(tmp_path / name) is not None) == any(there) and read_record(tmp_path / name) == {}

    def see(call: str, path: str) -> None:
        raise OSError(error, os.strerror(error), path)

    with watched(see):
        for ask in (status, is_file, is_folder, read_record):
            for name in ("file", "none"):
                with pytest.raises(OSError, match=re.escape(os.strerror(error))):
                    ask(tmp_path / name)


def test_a_run_directory_with_such_files_is_read(endless: Callable[[Path], None], tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    endless(run.last_saved)
    assert run.recorded_save() is None
    endless(tmp_path / "run.lock")
    require_unlocked(tmp_path)
    (tmp_path / "run.lock").rename(run.metrics)
    with pytest.raises(OSError, match="not a regular file"):
        read_metrics(run.metrics)
