"""Token files of other tools: the ids and the boundaries of documents, against files written by hand; damage is an error."""

import struct
from itertools import chain

import numpy as np
import pytest

from boost.data import from_tokens
from boost.data.from_tokens import open_token_files
from boost.errors import DataError
from tests.data.token_formats import MEGATRON_CODES, write_llm_c, write_megatron

EOS = 9
DOCUMENTS = [[[1, 2, 3]], [[4], [5, EOS]], [[6, EOS, 7, 7, 7, 7, 7]], [[8, EOS]]]
"""Of sequences: one without eos, one of two sequences, one with eos inside."""


def documents_of(path, dtype="uint16"):
    """The ids of each document, over all files of a path."""
    found, current = [], []
    for file in open_token_files(path, dtype):
        for ids, end in file.pieces(EOS):
            current += ids.tolist()
            if end:
                found.append(current)
                current = []
    assert not current
    return found


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch):
    monkeypatch.setattr(from_tokens, "_BLOCK", 4)


@pytest.mark.parametrize("dtype", MEGATRON_CODES)
def test_megatron_documents_are_those_of_the_index(dtype, tmp_path):
    index = write_megatron(tmp_path / "my_text_document", DOCUMENTS, dtype)
    expected = [list(chain(*document)) for document in DOCUMENTS]
    for path in (index, index.with_suffix(".bin"), index.with_suffix("")):
        assert documents_of(path) == expected


def test_megatron_empty_documents_and_modes(tmp_path):
    index = write_megatron(tmp_path / "x", [[[1]], [], [[]], [[2, 3]]])
    index.write_bytes(index.read_bytes() + bytes(3))  # one byte per sequence, of a multimodal dataset
    assert documents_of(index) == [[1], [], [], [2, 3]]


def change(at, data):
    return lambda content: content[:at] + data + content[at + len(data) :]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (change(0, b"TNTIDX"), r"x\.idx: not an index of Megatron-LM"),
        (lambda content: content[:20], r"x\.idx: not an index of Megatron-LM"),
        (change(9, b"\2"), "version 2 of Megatron-LM's index; only version 1"),
        (change(17, b"\7"), "code 7 for the type of the ids; expected an integer type"),
        (lambda content: content[:-1], "99 bytes after the header, but 100 for 5 sequences; copy it again"),
        (change(26, b"\6"), "100 bytes after the header, but 108 for 5 sequences"),
        (change(34, struct.pack("<i", 4)), "sequences that do not follow one another"),
        (change(34, struct.pack("<i", -1)), "sequences that do not follow one another"),
        (change(34 + 60 + 8, struct.pack("<q", 5)), "document indices that do not divide the 5 sequences"),
        (change(34 + 60 + 32, struct.pack("<q", 4)), "document indices that do not divide the 5 sequences"),
    ],
)
def test_a_damaged_index_is_an_error_that_names_it(damage, message, tmp_path):
    index = write_megatron(tmp_path / "x", DOCUMENTS)
    index.write_bytes(damage(index.read_bytes()))
    with pytest.raises(DataError, match=message):
        open_token_files(index, "uint16")


def test_a_megatron_file_that_does_not_match_its_index(tmp_path):
    index = write_megatron(tmp_path / "x", DOCUMENTS)
    data = index.with_suffix(".bin").read_bytes()
    index.with_suffix(".bin").write_bytes(data[:-2])
    with pytest.raises(DataError, match=r"x\.bin: has 28 bytes, but x\.idx says 30; copy it again"):
        open_token_files(index, "uint16")
    index.with_suffix(".bin").unlink()
    with pytest.raises(DataError, match=r"x\.bin: no such file"):
        open_token_files(index, "uint16")


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_raw_ids_end_documents_at_eos(dtype, tmp_path):
    ids = [1, 2, 3, 4, EOS, 5, EOS, EOS, 6, 7]
    np.array(ids, dtype).tofile(tmp_path / "all.bin")
    assert documents_of(tmp_path / "all.bin", dtype=dtype) == [[1, 2, 3, 4, EOS], [5, EOS], [EOS], [6, 7]]


def test_a_folder_of_nanogpt_has_its_held_out_ids(tmp_path):
    for name in ("train", "val"):
        np.array([1, 2], "<u2").tofile(tmp_path / f"{name}.bin")
    files = open_token_files(tmp_path, "uint16")
    assert [(file.path.name, file.split) for file in files] == [("train.bin", "train"), ("val.bin", "heldout")]
    (tmp_path / "val.bin").unlink()
    assert [file.split for file in open_token_files(tmp_path, "uint16")] == [None]


@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
def test_the_header_of_llm_c_is_not_taken_for_ids(dtype, tmp_path):
    write_llm_c(tmp_path / "x.bin", [1, 2, EOS], dtype)
    with pytest.raises(DataError, match=r"x\.bin: has the header of llm\.c; remove it: tail -c \+1025 x\.bin"):
        documents_of(tmp_path / "x.bin")


def test_half_an_id_is_an_error(tmp_path):
    (tmp_path / "x.bin").write_bytes(bytes(7))
    with pytest.raises(DataError, match="7 bytes are not a whole number of uint16 ids; check --token-dtype"):
        documents_of(tmp_path / "x.bin")


def test_paths_without_tokens_are_one_line(tmp_path):
    (tmp_path / "x.txt").write_text("text")
    for path, message in {
        tmp_path: r"contains no train\.bin",
        tmp_path / "x.txt": r"expected \.bin or \.idx of Megatron-LM",
        tmp_path / "none.bin": r"none\.bin: no such file",
        tmp_path / "prefix": "prefix: no such file",
    }.items():
        with pytest.raises(DataError, match=message):
            open_token_files(path, "uint16")
