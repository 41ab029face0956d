"""Names from files become paths only if they stay in their folder."""

from pathlib import Path

import pytest

from boost.errors import CheckpointError, DataError
from boost.paths import file_name
from boost.train.rundir import RunDirectory

UNSAFE = ["", ".", "..", "../x", "/x", "a/b", "a\\b", "C:", "c:x", "x\0", "\ud800", "n" * 201, 3, None, ["x"]]


@pytest.mark.parametrize(
    "name", ["a", "rag", "model-00001-of-00002.safetensors", "..a", "a..b", "c", "übung", "rag:v2"]
)
def test_a_plain_name_is_returned(name: str) -> None:
    assert file_name(name, "f.json", "field") == file_name(name, "f.json", "field", nested=True) == name
    assert file_name(f"tensors/{name}", "f.json", "field", nested=True) == f"tensors/{name}"


@pytest.mark.parametrize("name", UNSAFE)
def test_others_are_refused_with_file_field_and_value(name: object) -> None:
    with pytest.raises(CheckpointError, match=r"^'f\.json': field = .* is not a file name \(") as caught:
        file_name(name, "f.json", "field", CheckpointError)
    assert "\n" not in str(caught.value)
    if name != "a/b":
        for nested in (name, f"tensors/{name}" if isinstance(name, str) else name):
            with pytest.raises(DataError, match="is not a file name"):
                file_name(nested, "f.json", "field", nested=True)


def test_the_recorded_id_of_a_tracker_is_a_name(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.trackers.write_text('{"wandb": "../../PWNED", "other": "a1"}')
    assert run.tracker_id("other", "b2") == "a1"
    with pytest.raises(DataError, match=r"trackers\.json': wandb = '../../PWNED' is not a file name"):
        run.tracker_id("wandb", "b2")
