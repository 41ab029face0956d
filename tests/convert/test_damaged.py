"""Untrusted folders: for any header, a one-line error names the file, and nothing is allocated."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from boost.convert.formats import read_folder
from boost.convert.tensors import TensorFolder
from boost.errors import BoostError, CheckpointError

DEEP = b"[" * 100_000


def file_of(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def tensor(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


SAFETENSORS = {
    "empty": b"",
    "header longer than the file": file_of(b"{}", length=1 << 20),
    "header of 2^63 bytes": file_of(b"{}", length=1 << 63),
    "header that is no JSON": file_of(b"\x80pickle"),
    "deep header": file_of(DEEP),
    "5000 digits": file_of(b'{"a":' + b"9" * 5000 + b"}"),
    "offsets beyond the end": file_of({"a": tensor([4], 0, 16)}, b"1234"),
    "negative offsets": file_of({"a": tensor([1], -4, 0)}, b"1234"),
    "offsets that overlap": file_of({"a": tensor([1], 0, 4), "b": tensor([1], 2, 6)}, b"123456"),
    "bytes after the last tensor": file_of({"a": tensor([1], 0, 4)}, b"12345678"),
    "shape that is not its bytes": file_of({"a": tensor([3], 0, 4)}, b"1234"),
    "2^124 elements": file_of({"a": tensor([1 << 62, 1 << 62], 0, 4)}, b"1234"),
    "unknown dtype": file_of({"a": tensor([1], 0, 4, "P32")}, b"1234"),
    "no shape": file_of({"a": {"dtype": "F32", "data_offsets": [0, 4]}}, b"1234"),
}


@pytest.mark.parametrize("name", SAFETENSORS)
def test_headers_of_safetensors(tmp_path: Path, name: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(SAFETENSORS[name])
    with pytest.raises(BoostError, match=r"model\.safetensors' is damaged or is not a ") as caught:
        TensorFolder(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("mapped", [False, True])
def test_a_file_that_changes_after_its_header_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mapped: bool
) -> None:
    """Before it is opened again, or between the two times that safetensors opens it."""
    file = tmp_path / "model.safetensors"
    file.write_bytes(file_of({"a": tensor([1], 0, 4)}, b"1234"))
    folder, map_file = TensorFolder(tmp_path), torch.UntypedStorage.from_file
    if mapped:
        monkeypatch.setattr(
            torch.UntypedStorage, "from_file", lambda *args, **words: (file.write_bytes(b""), map_file(*args, **words))
        )
    else:
        file.unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors' is damaged or is not a "):
        folder.read("a")


LLAMA = {
    "model_type": "llama", "hidden_size": 64, "vocab_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2,
}  # fmt: skip
CONFIGS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "cannot be read"),
    "deep": (DEEP, "cannot be read"),
    "not UTF-8": (b"\xff\xfe{}", "cannot be read"),
    "5000 digits": (json.dumps(LLAMA).encode().replace(b"64", b"9" * 5000), "cannot be read"),
    "a list": (b"[]", "not a JSON object"),
    "absurd width": (json.dumps(LLAMA | {"hidden_size": 10**12}).encode(), "model.dim = 1000000000000 is too large"),
    "absurd depth": (json.dumps(LLAMA | {"num_hidden_layers": 10**12}).encode(), "model.layers = 1000000000000 is too"),
    "negative width": (json.dumps(LLAMA | {"hidden_size": -64}).encode(), "model.dim = -64 is too small"),
    "a word": (json.dumps(LLAMA | {"hidden_size": "\x1b[2J"}).encode(), "model.dim"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_config_json(tmp_path: Path, name: str) -> None:
    content, message = CONFIGS[name]
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(BoostError, match="config.json.*" + message):
        read_folder(tmp_path)
