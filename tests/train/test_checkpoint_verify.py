"""Checkpoints with valid digests and invalid contents: a one-line error before any weight changes."""

import errno
import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from boost.errors import CheckpointError, DamagedCheckpointError
from boost.parallel.mesh import Mesh
from boost.train import checkpoint as ckpt
from boost.train.checkpoint.commit import entry_of
from boost.train.rundir import RunDirectory
from tests import toy
from tests.distributed import run_distributed
from tests.train.saves import load, mesh_config, save

ALONE = Mesh(toy.CPU)
Edit = Callable[[dict[str, Any]], object]


def sign(path: Path) -> None:
    """Recomputes the digests, as someone who edits a checkpoint would."""
    files = [p for p in path.rglob("*") if p.is_file() and p.name != "manifest.json"]
    manifest = {f.relative_to(path).as_posix(): entry_of(f).model_dump() for f in files}
    (path / "manifest.json").write_text(json.dumps(manifest))


def edit_header(file: Path, edit: Edit) -> None:
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    edit(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


def edit_offsets(edit: Edit) -> Edit:
    def apply(header: dict[str, Any]) -> None:
        sharding = json.loads(header["__metadata__"]["DCP_SHARDING_INFO"])
        edit(sharding)
        header["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps(sharding)

    return apply


def save_two(folder: Path, config: Any) -> None:
    save(folder, config, 1)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two processes."""
    folder = tmp_path_factory.mktemp("sharded")
    run_distributed(2, save_two, folder, mesh_config(2))
    return folder / "step-00000001"


def refused(path: Path) -> str:
    """The error message when a checkpoint is loaded."""
    decoder, _ = toy.toy_decoder(mesh_config(1), seed=9)
    with pytest.raises(DamagedCheckpointError) as error:
        ckpt.load_weights(ckpt.open_checkpoint(path), decoder, ALONE)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.fixture
def path(tmp_path: Path, sharded: Path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(sharded, tmp_path / sharded.name))


EMBED = "model.embed"
LIBRARY = "deserializing header"  # what the safetensors library checks, it describes
HEADERS: dict[str, tuple[Edit, str]] = {
    "no sharding metadata": (
        lambda h: h["__metadata__"].pop("DCP_SHARDING_INFO"),
        "numbers instead of|overlap|exceeds",
    ),
    "no metadata": (lambda h: h.pop("__metadata__"), "written at step 0, sample 0, but state.json at step 1, sample"),
    "another step": (lambda h: h["__metadata__"].update(step="9"), "written at step 9, sample"),
    "metadata that is no text": (lambda h: h["__metadata__"].update(step=1), LIBRARY),
    "sharding of other tensors": (edit_offsets(lambda s: s.pop(EMBED)), f"{EMBED} has no valid saved_offsets"),
    "negative offset": (edit_offsets(lambda s: s[EMBED].update(saved_offsets=[-1, 0])), "greater than or equal to 0"),
    "offset outside": (edit_offsets(lambda s: s[EMBED].update(saved_offsets=[10**6, 0])), "exceeds"),
    "offset of the other": (edit_offsets(lambda s: s[EMBED].update(saved_offsets=[0, 0])), "overlap"),
    "dimensions missing": (edit_offsets(lambda s: s[EMBED].update(saved_offsets=[0])), "no valid saved_offsets"),
    "absurd dimension": (lambda h: h[EMBED].update(shape=[2**61, 2**61]), LIBRARY),
    "dimension of 100 digits": (lambda h: h[EMBED].update(shape=[10**100, 1]), LIBRARY),
    "negative dimension": (lambda h: h[EMBED].update(shape=[-1, -16]), LIBRARY),
    "bytes of another": (lambda h: h[EMBED].update(data_offsets=[8, 16]), LIBRARY),
    "unknown dtype": (lambda h: h[EMBED].update(dtype="U64"), "dtype 'U64'"),
    "dtype of an index": (lambda h: h[EMBED].update(dtype="I64"), "lack a common floating-point dtype"),
    "no entry": (lambda h: h.update({EMBED: 3}), LIBRARY),
    "foreign tensor": (lambda h: h.update({"model.evil": h.pop("rng.cpu.1")}), "saved_offsets"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_that_cannot_be_right_is_damage(path: Path, name: str) -> None:
    edit, message = HEADERS[name]
    edit_header(max((path / "tensors").iterdir()), edit)
    sign(path)
    said = refused(path)
    assert any(part in said for part in message.split("|")), said


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 8 + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (9).to_bytes(8, "little") + b'{"a": \xff}}',
        (10**5).to_bytes(8, "little") + b"[" * 10**5,
        (6000).to_bytes(8, "little") + b"1" * 6000,
    ],
    ids=["empty", "huge header", "list", "not UTF-8", "deeply nested", "6000 digits"],
)
def test_a_file_that_is_no_safetensors_file_is_damage(path: Path, content: bytes) -> None:
    victim = max((path / "tensors").iterdir())
    victim.write_bytes(content)
    sign(path)
    assert victim.name in refused(path)


def test_a_manifest_that_is_garbled_or_lacks_a_shard_or_the_state_is_damage(path: Path) -> None:
    max((path / "tensors").iterdir()).unlink()
    sign(path)
    assert "numbers instead of" in refused(path)
    (path / "manifest.json").write_text((path / "manifest.json").read_text().replace('"state.json"', '"other.json"'))
    assert "state.json is not listed" in refused(path)
    for content in ("[]", "{", '{"state.json": 3}', '{"state.json": {"bytes": 1}}'):
        (path / "manifest.json").write_text(content)
        assert "manifest.json" in refused(path)


STATES: dict[str, tuple[dict[str, Any], str]] = {
    "another step": ({"step": 2, "next_sample": 4}, "state.json has step = 2 instead of 1"),
    "negative step": ({"step": -1}, "step: Input should be greater than or equal to 0"),
    "negative tokens": ({"tokens": -5}, "tokens: "),
    "no tokens": ({"tokens": 0}, "tokens = 0 is inconsistent with step = 1"),
    "negative updates": ({"updates": -1}, "updates: "),
    "too many updates": ({"updates": 2}, "updates = 2 is more than step = 1"),
    "another sample": ({"next_sample": 3}, "state.json has next_sample = 3 instead of 2 (1 x global batch 2)"),
    "text": ({"step": "1"}, "step: Input should be a valid integer"),
    "statistics of unequal length": ({"recent": {"loss": [1.0], "gradient_norm": []}}, "recent must have lists of one"),
    "one statistic": ({"recent": {"loss": [1.0]}}, "recent must have lists of one length, gradient_norm and loss"),
    "no number": ({"recent": {"loss": [math.nan], "gradient_norm": [1.0]}}, "recent.loss.0: "),
    "no end token": ({"data": {"eos": -1}}, "data.eos: "),
    "settings that are a list": ({"data": {"hub": [1]}}, "data.hub: Input should be a valid dictionary"),
    "tokenizer settings": ({"data": {"hub": {"tokenizer": None}}}, "data.hub.tokenizer: "),
    "a template": ({"data": {"hub": {"chat_templates": {"default": 3}}}}, "data.hub.chat_templates.default: "),
    "end tokens": ({"data": {"hub": {"generation": {"eos_token_id": [[1]]}}}}, "data.hub.generation.eos_token_id"),
    "sources": ({"data": {"sources": [3]}}, "data.sources.0: "),
    "tied": ({"data": {"parameters": {"tied": [[]]}}}, "data.parameters.tied.0: "),
    "frozen": ({"data": {"parameters": {"frozen": ["x"]}}}, "names a parameter that is not in the model: 'x'"),
    "no configuration": ({"config": {"model": {"layers": "x"}}}, "configuration"),
}


@pytest.mark.parametrize("name", STATES)
def test_a_state_that_cannot_be_right_is_damage(path: Path, name: str) -> None:
    changes, message = STATES[name]
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps(state | changes))
    sign(path)
    with pytest.raises(CheckpointError) as error:
        ckpt.open_checkpoint(path)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_checkpoint_whose_state_has_more_than_is_read_opens(path: Path) -> None:
    expected = ckpt.open_checkpoint(path)
    state = json.loads((path / "state.json").read_text())
    state |= {"best_heldout_loss": 3.5, "stale_evaluations": 2}
    (path / "state.json").write_text(json.dumps(state))
    sign(path)
    assert ckpt.open_checkpoint(path) == expected


@pytest.mark.parametrize("content", ["[" * 10**5, "1" * 6000, '{"step": ' + "1" * 6000 + "}"])
def test_json_that_breaks_parsers_is_damage(path: Path, content: str) -> None:
    for name in ("state.json", "manifest.json"):
        (path / name).write_text(content)
        if name != "manifest.json":
            sign(path)
        with pytest.raises(DamagedCheckpointError, match=name) as error:
            ckpt.open_checkpoint(path)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["manifest.json", "state.json", "a shard", "best.json"])
def test_only_regular_files_are_read(path: Path, endless: Callable[[Path], None], name: str) -> None:
    if name == "best.json":
        endless(path.parent / name)
        assert ckpt.read_best(path.parent) is None
        return
    endless(next(path.glob("tensors/*")) if name == "a shard" else path / name)
    assert ckpt.complete_checkpoints(path.parent) == [path] * (name != "manifest.json")
    assert ckpt.marks_of(path) == ("", "")
    refused(path)  # a run that resumes takes the one before


@pytest.mark.parametrize("step", ["Infinity", "NaN", "1e300", "[]"])
def test_a_step_that_is_none_is_no_record(tmp_path: Path, step: str) -> None:
    for name in ("best.json", "last-saved.json"):
        (tmp_path / name).write_text(f'{{"step": {step}, "heldout_loss": 1.0}}')
    assert ckpt.read_best(tmp_path) is None
    (tmp_path / "step-00000001").mkdir()
    (tmp_path / "step-00000001/manifest.json").touch()
    for loss, is_record in (("1.5", True), ("NaN", False), ('"1.5"', False)):
        (tmp_path / "best.json").write_text(f'{{"step": 1, "heldout_loss": {loss}}}')
        assert (ckpt.read_best(tmp_path) is not None) == is_record
    assert (RunDirectory(tmp_path).recorded_save() or (None, None))[1] in (None, int(1e300))


def test_a_random_state_of_another_size_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Part of a state would be another state."""
    _, path = save(tmp_path, mesh_config(1), 1)
    load(path, mesh_config(1))
    monkeypatch.setattr(torch, "get_rng_state", lambda: torch.zeros(7, dtype=torch.uint8))
    with pytest.raises(DamagedCheckpointError, match=r"rng\.cpu\.0, of \d+ bytes, but torch .* needs 7"):
        load(path, mesh_config(1))


def test_a_random_state_that_torch_rejects_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def reject(state: torch.Tensor) -> None:
        raise RuntimeError("Invalid mt19937 state")

    _, path = save(tmp_path, mesh_config(1), 1)
    monkeypatch.setattr(torch, "set_rng_state", reject)
    with pytest.raises(DamagedCheckpointError, match=r"rng\.cpu\.0, that is none: Invalid mt19937 state"):
        load(path, mesh_config(1))


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "tensors/../../x", "a//b", "nul\0", "C:x"])
def test_a_manifest_lists_files_of_its_checkpoint_only(path: Path, name: str) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    manifest[name] = {"bytes": 1, "xxh3_128": "0" * 32}
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DamagedCheckpointError, match=r"manifest\.json': a file = .* is not a valid file name"):
        ckpt.open_checkpoint(path)


@pytest.mark.parametrize("call", ["boost.train.checkpoint.verify.entry_of", "boost.train.checkpoint.verify.read_text"])
def test_a_read_that_fails_is_no_damage(path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """Resuming still uses the previous checkpoint, but nobody is told that this one is damaged."""
    with monkeypatch.context() as patch:
        patch.setattr(call, fail_to_read)
        with pytest.raises(DamagedCheckpointError) as caught, ckpt.verifying(path, mesh_config(2).model, ALONE):
            pass
    said = str(caught.value)
    assert "cannot be read: Input/output error" in said and "try again" in said and "damaged" not in said
    with ckpt.verifying(path, mesh_config(2).model, ALONE):
        pass


def fail_to_read(file: Path, *_: object, **__: object) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO), str(file))
