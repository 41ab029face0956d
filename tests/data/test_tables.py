"""Tables: rows of CSV, Parquet and Arrow files, of the column with the text."""

import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from boost.data import documents, tables
from boost.data.sources import FilesSource
from boost.errors import DataError
from tests.data.inputs import compressed, notes, read, skips


def write_parquet(path, **columns):
    pq.write_table(pa.table(columns), path, row_group_size=100)


def test_parquet_in_row_groups(tmp_path):
    texts = [f"row {i}" for i in range(250)]
    texts[7], texts[130] = None, ""
    write_parquet(tmp_path / "x.parquet", body=texts, n=list(range(250)))
    documents, report = read(FilesSource(tmp_path / "x.parquet", text_field="body"))
    assert documents == [(f"x.parquet:{i}", text) for i, text in enumerate(texts) if text]
    assert skips(report) == {
        ("x.parquet", "text field is not a string"): ["row 7: NoneType"],
        ("x.parquet", "empty"): ["row 130"],
    }


def test_parquet_of_the_wrong_shape(tmp_path):
    write_parquet(tmp_path / "x.parquet", body=["a"], title=["b"], n=[1])
    with pytest.raises(DataError, match="no text column found among body, title, n; choose one with --text-field"):
        read(FilesSource(tmp_path / "x.parquet"))
    with pytest.raises(DataError, match="column 'n' does not hold strings; choose another with --text-field"):
        read(FilesSource(tmp_path / "x.parquet", text_field="n"))
    _, report = read(FilesSource(tmp_path))
    assert ("x.parquet", "no text column found among body, title, n") in skips(report)
    (tmp_path / "x.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match="not a Parquet file"):
        read(FilesSource(tmp_path / "x.parquet"))
    _, report = read(FilesSource(tmp_path))
    assert ("x.parquet", "not a Parquet file") in skips(report)


def test_damaged_parquet_keeps_what_came_before(tmp_path):
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"text": [os.urandom(99).hex() for _ in range(400)]}), path, row_group_size=100,
                   compression="zstd", write_page_checksum=True)  # fmt: skip
    start = pq.ParquetFile(path).metadata.row_group(2).column(0).data_page_offset
    data = bytearray(path.read_bytes())
    data[start : start + 400] = os.urandom(400)
    path.write_bytes(data)
    documents, report = read(FilesSource(tmp_path))
    assert len(documents) >= 200
    assert ("x.parquet", "damaged Parquet file") in skips(report)


@pytest.mark.parametrize(("suffix", "delimiter"), [(".csv", ","), (".tsv", "\t"), (".csv.gz", ","), (".csv.zst", ",")])
def test_csv_files(suffix, delimiter, tmp_path):
    rows = ["id,text", '1,"two\nlines, and ""quotes"""', "2,", "3,b,c", "4,plain"]
    data = "\n".join(row if ',"' in row else row.replace(",", delimiter) for row in rows).encode() + b"\n"
    data = data.replace(b'1,"', f'1{delimiter}"'.encode()).replace(b"plain", b"\xff") + f"5{delimiter}last\n".encode()
    path = compressed(tmp_path / f"x{suffix}", data)
    documents, report = read(FilesSource(tmp_path))
    assert documents == [(f"{path.name}:1", 'two\nlines, and "quotes"'), (f"{path.name}:4", "last")]
    found = skips(report)
    assert {reason for _, reason in found} == {"empty", "not a row of CSV", "not UTF-8 text"}


def test_csv_without_the_column_is_skipped_in_a_folder_and_an_error_by_name(tmp_path):
    (tmp_path / "x.csv").write_text("a,b\n1,2\n")
    (tmp_path / "y.txt").write_text("y")
    documents, report = read(FilesSource(tmp_path))
    assert documents == [("y.txt", "y")]
    assert ("x.csv", "no text column found among a, b") in skips(report)
    with pytest.raises(DataError, match=r"x\.csv: no text column found among a, b; choose one with --text-field"):
        read(FilesSource(tmp_path / "x.csv"))
    assert read(FilesSource(tmp_path / "x.csv", "a"))[0] == [("x.csv:1", "1")]


def test_a_csv_row_that_is_too_long_keeps_the_rows_before(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "MAX_ROW_BYTES", 1000)
    (tmp_path / "x.csv").write_text("text,n\n" + "short,1\n" * 300 + "y" * 3000 + ",2\n")
    documents, report = read(FilesSource(tmp_path))
    assert 100 < len(documents) <= 300
    ((_, reason), (where,)) = next(iter(skips(report).items()))
    assert reason == "not a CSV file" and "a row longer than 1 kB" in where


def test_parquet_of_long_rows_is_decoded_few_at_a_time(tmp_path, monkeypatch):
    seen = []
    real = pq.ParquetFile.iter_batches
    monkeypatch.setattr(
        pq.ParquetFile, "iter_batches", lambda file, rows, **k: seen.append(rows) or real(file, rows, **k)
    )
    monkeypatch.setattr(tables, "_BATCH_BYTES", 3500)
    write_parquet(tmp_path / "x.parquet", text=[os.urandom(500).hex() for _ in range(20)])
    assert len(read(FilesSource(tmp_path))[0]) == 20 and seen == [3]


def arrow_files(folder, table):
    with pa.OSFile(str(folder / "a.arrow"), "wb") as out, pa.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    with pa.OSFile(str(folder / "b.arrow"), "wb") as out, pa.ipc.new_file(out, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)


def test_arrow_streams_and_files(tmp_path):
    texts = [f"row {i}" for i in range(20)]
    texts[3], texts[4] = None, "two\r\nlines"
    arrow_files(tmp_path, pa.table({"n": range(20), "body": pa.array(texts, pa.large_string())}))
    found, report = read(FilesSource(tmp_path))
    expected = [(i, "two\nlines" if i == 4 else f"row {i}") for i in range(20) if i != 3]
    assert found == [(f"{name}.arrow:{i}", text) for name in "ab" for i, text in expected]
    assert skips(report) == {(f"{n}.arrow", "text field is not a string"): ["row 3: NoneType"] for n in "ab"}
    assert ("a.arrow", "without column 'text', text read from 'body'") in notes(report)
    assert report.consumed == sum(path.stat().st_size for path in tmp_path.iterdir())


@pytest.mark.parametrize("name", ["a.arrow", "b.arrow"])
def test_damaged_arrow_files(name, tmp_path):
    arrow_files(tmp_path, pa.table({"text": [f"row {i}" * 50 for i in range(20)]}))
    data = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(data[: len(data) // 2])
    with pytest.raises(DataError, match=rf"{name}: (damaged|not an) Arrow file.*; copy it again"):
        read(FilesSource(tmp_path / name))
    (tmp_path / name).write_bytes(b"something else entirely")
    with pytest.raises(DataError, match="not an Arrow file"):
        read(FilesSource(tmp_path / name))


def test_long_cells_are_split(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "MAX_DOCUMENT_CHARS", 100)
    monkeypatch.setattr(documents, "PART_CHARS", 50)
    write_parquet(tmp_path / "x.parquet", text=["word " * 40, "short"])
    found, report = read(FilesSource(tmp_path))
    assert "".join(text for _, text in found) == "word " * 40 + "short" and len(found) == 5
    assert notes(report) == {
        ("x.parquet", "longer than 100 characters, split into several documents"): ["row 0"]
    }  # fmt: skip


@pytest.fixture
def saved(tmp_path):
    """A dataset saved by `datasets` with its splits: train in three shards, and test."""
    import datasets

    datasets.disable_progress_bars()
    train = datasets.Dataset.from_dict({"story": [f"story {i}" for i in range(30)], "n": range(30)})
    test = datasets.Dataset.from_dict({"story": ["of the test"], "n": [0]})
    folder = tmp_path / "saved"
    datasets.DatasetDict(train=train, test=test).save_to_disk(str(folder), num_shards={"train": 3, "test": 1})
    return folder


def test_a_saved_dataset_is_its_train_split(saved):
    found, report = read(FilesSource(saved))
    assert [text for _, text in found] == [f"story {i}" for i in range(30)]
    assert skips(report) == {
        ("test", "another split than train; to read it, name its folder"): [],
        ("dataset_dict.json", "metadata of a saved dataset"): [],
        ("train/dataset_info.json", "metadata of a saved dataset"): [],
        ("train/state.json", "metadata of a saved dataset"): [],
    }
    assert [text for _, text in read(FilesSource(saved / "test"))[0]] == ["of the test"]


def test_a_saved_dataset_without_a_train_split_asks(saved):
    (saved / "train").rename(saved / "validation")
    with pytest.raises(DataError, match="without a train split; name the folder of a split: test, validation"):
        FilesSource(saved)
