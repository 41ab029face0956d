"""Token files of other tools: the ids and the boundaries of documents, against files written by hand; damage is an error."""

import struct
from itertools import chain

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from boost.data import token_files
from boost.data.report import FileReport
from boost.data.token_files import open_token_files, split_at_eos
from boost.errors import DataError
from tests.data.token_formats import MEGATRON_CODES, write_llm_c, write_megatron

EOS = 9
DOCUMENTS = [[[1, 2, 3]], [[4], [5, EOS]], [[6, EOS, 7, 7, 7, 7, 7]], [[8, EOS]]]
"""Of sequences: one without eos, one of two sequences, one with eos inside."""


def documents_of(path, column=None, dtype="uint16", entry=None):
    """The ids of each document, over all files of a path."""
    found, current = [], []
    for file in open_token_files(path, column, dtype):
        for ids, end in file.chunks(EOS, entry or FileReport("x")):
            current += ids.tolist()
            if end:
                found.append(current)
                current = []
    assert not current
    return found


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch):
    monkeypatch.setattr(token_files, "_BLOCK", 4)


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
        open_token_files(index, None, "uint16")


def test_a_megatron_file_that_does_not_match_its_index(tmp_path):
    index = write_megatron(tmp_path / "x", DOCUMENTS)
    data = index.with_suffix(".bin").read_bytes()
    index.with_suffix(".bin").write_bytes(data[:-2])
    with pytest.raises(DataError, match=r"x\.bin: has 28 bytes, but x\.idx says 30; copy it again"):
        open_token_files(index, None, "uint16")
    index.with_suffix(".bin").unlink()
    with pytest.raises(DataError, match=r"x\.bin: no such file"):
        open_token_files(index, None, "uint16")


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_raw_ids_end_documents_at_eos(dtype, tmp_path):
    ids = [1, 2, 3, 4, EOS, 5, EOS, EOS, 6, 7]
    np.array(ids, dtype).tofile(tmp_path / "all.bin")
    assert documents_of(tmp_path / "all.bin", dtype=dtype) == [[1, 2, 3, 4, EOS], [5, EOS], [EOS], [6, 7]]


def test_a_folder_of_nanogpt_has_its_held_out_ids(tmp_path):
    for name in ("train", "val"):
        np.array([1, 2], "<u2").tofile(tmp_path / f"{name}.bin")
    files = open_token_files(tmp_path, None, "uint16")
    assert [(file.key, file.split) for file in files] == [("train.bin", "train"), ("val.bin", "heldout")]
    (tmp_path / "val.bin").unlink()
    assert [file.split for file in open_token_files(tmp_path, None, "uint16")] == [None]


@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
def test_the_header_of_llm_c_gives_the_type(dtype, tmp_path):
    ids = [EOS, 1, 2, 3, EOS, 4] * 200
    write_llm_c(tmp_path / "x.bin", ids, dtype)
    assert documents_of(tmp_path / "x.bin") == [[EOS]] + [[1, 2, 3, EOS], [4, EOS]] * 199 + [[1, 2, 3, EOS], [4]]
    (tmp_path / "x.bin").write_bytes((tmp_path / "x.bin").read_bytes()[:-4])
    with pytest.raises(DataError, match="but its header says 1200; copy it again"):
        documents_of(tmp_path / "x.bin")


def test_half_an_id_is_an_error(tmp_path):
    (tmp_path / "x.bin").write_bytes(bytes(7))
    with pytest.raises(DataError, match="7 bytes are not a whole number of uint16 ids; check --token-dtype"):
        documents_of(tmp_path / "x.bin")


def test_paths_without_tokens_are_one_line(tmp_path):
    (tmp_path / "x.txt").write_text("text")
    for path, message in {
        tmp_path: r"contains neither train\.bin nor \.arrow or \.parquet files",
        tmp_path / "x.txt": r"expected \.bin, \.idx, \.arrow or \.parquet",
        tmp_path / "none.bin": r"none\.bin: no such file",
        tmp_path / "prefix": "prefix: no such file",
    }.items():
        with pytest.raises(DataError, match=message):
            open_token_files(path, None, "uint16")


ROWS = [[1, 2, EOS], [3], None, [], [4, 5, 6, 7]]


@pytest.mark.parametrize("kind", [pa.list_(pa.int32()), pa.large_list(pa.uint16())])
@pytest.mark.parametrize("suffix", [".arrow", ".parquet"])
def test_rows_of_a_column_are_documents(kind, suffix, tmp_path):
    write_table(tmp_path / f"x{suffix}", pa.table({"n": range(5), "input_ids": pa.array(ROWS, kind)}))
    assert documents_of(tmp_path / f"x{suffix}") == [row or [] for row in ROWS]


def write_table(path, table):
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    else:
        with pa.OSFile(str(path), "wb") as out, pa.ipc.new_stream(out, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)


def test_padding_is_left_out_and_noted(tmp_path):
    rows = {
        "input_ids": [[1, 2, 0, 0], [3, 0, 0, 0], [4, 5, 6, 7]],
        "attention_mask": [[1, 1, 0, 0], [1, 0, 0, 0], [1] * 4],
    }
    write_table(tmp_path / "x.parquet", pa.table(rows))
    entry = FileReport("x")
    assert documents_of(tmp_path / "x.parquet", entry=entry) == [[1, 2], [3], [4, 5, 6, 7]]
    assert entry.notes["rows with padding (attention_mask 0), which was left out"].examples == ["row 0", "row 1"]


@pytest.mark.parametrize("kind", [pa.list_(pa.int64()), pa.list_(pa.int64(), 3)])
def test_packed_rows_are_one_stream(kind, tmp_path):
    rows = [[1, 2, 3], [4, EOS, 5], [6, 7, EOS], [8, 8, 8]]
    write_table(tmp_path / "x.arrow", pa.table({"input_ids": pa.array(rows, kind)}))
    entry = FileReport("x")
    assert documents_of(tmp_path / "x.arrow", entry=entry) == [[1, 2, 3, 4, EOS], [5, 6, 7, EOS], [8, 8, 8]]
    assert "rows of 3 ids each, read as one stream: documents end at the end-of-document token" in entry.notes


def test_a_column_that_does_not_hold_ids_is_asked_for(tmp_path):
    write_table(tmp_path / "x.parquet", pa.table({"tokens": [[1, 2]], "text": ["a"], "probs": [[0.5]]}))
    for column, message in {
        None: r"x\.parquet: no column 'input_ids' among tokens, text, probs; choose one with --text-field",
        "text": "column 'text' has type string, not lists of integers; choose another with --text-field",
        "probs": "column 'probs' has type list<.*double>, not lists of integers",
    }.items():
        with pytest.raises(DataError, match=message):
            documents_of(tmp_path / "x.parquet", column)
    assert documents_of(tmp_path / "x.parquet", "tokens") == [[1, 2]]


def test_a_saved_dataset_is_read_shard_by_shard(tmp_path):
    import datasets

    datasets.disable_progress_bars()
    rows = [[i] * (i + 1) for i in range(9)]
    train = datasets.Dataset.from_dict({"input_ids": rows})
    datasets.DatasetDict(train=train, test=train.select([0])).save_to_disk(
        str(tmp_path / "d"), num_shards={"train": 3, "test": 1}
    )
    assert documents_of(tmp_path / "d") == rows
    assert documents_of(tmp_path / "d" / "test") == rows[:1]


def test_damaged_tables_are_one_line(tmp_path):
    write_table(tmp_path / "x.parquet", pa.table({"input_ids": [[1, 2]] * 9}))
    (tmp_path / "x.parquet").write_bytes((tmp_path / "x.parquet").read_bytes()[:-20])
    with pytest.raises(DataError, match=r"x\.parquet: not a Parquet file.*; copy it again"):
        documents_of(tmp_path / "x.parquet")


def test_a_stream_that_ends_with_eos_has_no_empty_document():
    blocks = [np.array([1, EOS]), np.array([2]), np.array([EOS])]
    assert [(ids.tolist(), end) for ids, end in split_at_eos(iter(blocks), EOS)] == [
        ([1, EOS], True), ([2], False), ([EOS], True)
    ]  # fmt: skip
