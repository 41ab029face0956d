"""Sources: what is read; the report lists everything else with its location and reason."""

import gzip
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from boost.data import hub, readers
from boost.data.report import PrepareReport
from boost.data.sources import FilesSource, open_sources
from boost.data.stdlib import StdlibSource, documented_modules, render_documentation
from boost.errors import DataError


def read(*sources):
    report = PrepareReport()
    documents = [(doc.key, doc.text) for source in sources for doc in source.documents(report)]
    return documents, report


def skips(report):
    return {
        (entry.name, reason): skip.examples
        for source in report.sources
        for entry in source.files
        for reason, skip in entry.skipped.items()
    }


class Bomb:
    """Creates a file when unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (Path(self.path),))


@pytest.fixture
def hostile(tmp_path):
    folder = tmp_path / "corpus"
    (folder / "sub").mkdir(parents=True)
    (folder / ".git").mkdir()
    (folder / "a.txt").write_text("plain é", "utf-8")
    (folder / "bom.txt").write_bytes(b"\xef\xbb\xbfmarked")
    (folder / "sub" / "b.md").write_text("# deeper")
    (folder / "empty.txt").write_bytes(b"")
    (folder / "blank.txt").write_text(" \n\t\n")
    (folder / "latin.txt").write_bytes(b"caf\xe9 au lait")
    (folder / "image.png").write_bytes(b"\x89PNG\0\0")
    (folder / "packed.txt.gz").write_bytes(gzip.compress(b"was packed"))
    (folder / "cut.txt.gz").write_bytes(gzip.compress(b"was packed" * 50)[:-9])
    (folder / "nogzip.txt.gz").write_bytes(b"not packed")
    (folder / "huge.txt").write_text("x" * 300_000)
    (folder / "broken.txt").symlink_to(folder / "nowhere")
    (folder / "twice.txt").symlink_to(folder / "a.txt")
    (folder / "text.pkl").write_bytes(pickle.dumps(Bomb(tmp_path / "executed"), protocol=0))
    (folder / "model.pt").write_bytes(pickle.dumps(Bomb(tmp_path / "executed")))
    (folder / ".hidden").write_text("no")
    os.mkfifo(folder / "pipe")
    return folder


def test_hostile_folder(hostile, tmp_path):
    documents, report = read(FilesSource(hostile))
    assert documents == [
        ("a.txt", "plain é"),
        ("bom.txt", "marked"),
        ("huge.txt", "x" * 300_000),
        ("packed.txt.gz", "was packed"),
        ("sub/b.md", "# deeper"),
    ]
    refused = "refused: pickles and binary arrays are never loaded"
    found = skips(report)
    assert found.pop(("nogzip.txt.gz", "damaged gzip file"))
    assert found == {
        (".git", "hidden"): [],
        (".hidden", "hidden"): [],
        ("blank.txt", "empty"): [],
        ("broken.txt", "cannot be opened: No such file or directory"): [],
        ("cut.txt.gz", "damaged gzip file"): ["truncated"],
        ("empty.txt", "empty"): [],
        ("image.png", "binary (holds a NUL byte)"): ["byte 4"],
        ("latin.txt", "not UTF-8 text"): ["byte 3 (0xe9)"],
        ("model.pt", refused): [],
        ("pipe", "not a regular file"): [],
        ("text.pkl", refused): [],
        ("twice.txt", "already read under another name"): [],
    }
    assert not (tmp_path / "executed").exists()
    (summary,) = report.summary()["sources"]
    assert summary["files"] == summary["documents"] == 5
    assert summary["bytes"] == sum(len(text.encode()) for _, text in documents)
    assert sum(skip["count"] for skip in summary["skipped"].values()) == 13


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("latin.txt", r"not UTF-8 text at byte 3 \(0xe9\); convert it"),
        ("image.png", r"binary \(holds a NUL byte\) at byte 4"),
        ("text.pkl", "refused: pickles"),
        ("cut.txt.gz", "damaged gzip file"),
        ("pipe", "not a regular file"),
    ],
)
def test_a_file_that_was_named_must_be_readable(hostile, name, message):
    with pytest.raises(DataError, match=f"{name}: {message}"):
        read(FilesSource(hostile / name))


def test_missing_input_and_no_input():
    with pytest.raises(DataError, match="nowhere: no such file or folder"):
        open_sources(["nowhere"])
    with pytest.raises(DataError, match=r"no input given; .* --stdlib"):
        open_sources([])


def test_keys_of_several_inputs_are_unique_and_nothing_is_read_twice(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.txt").write_text(name)
    documents, report = read(*open_sources([tmp_path / "a", tmp_path / "b", tmp_path / "a/x.txt"]))
    assert documents == [("x.txt", "a"), ("x.txt#2", "b")]
    assert skips(report) == {("x.txt", "already read under another name"): []}


def test_a_store_inside_its_own_input_is_not_input(tmp_path):
    (tmp_path / "x.txt").write_text("text")
    before = FilesSource(tmp_path).fingerprint()
    (tmp_path / "store").mkdir()
    (tmp_path / "store.boost-tmp").mkdir()
    for name in ("store/store.json", "store/train.tokens", "store.boost-tmp/train.tokens"):
        (tmp_path / name).write_text("{}")
    source = FilesSource(tmp_path)
    assert source.fingerprint() == before
    documents, report = read(source)
    assert documents == [("x.txt", "text")] and skips(report) == {("store", "a token store"): []}


@pytest.mark.parametrize("suffix", [".jsonl", ".json.gz"])
def test_json_lines(tmp_path, suffix):
    lines = [
        b'{"text": "one", "n": 1}',
        b"",
        b'{"text": "cut',
        b'{"body": "other"}',
        b'["text"]',
        b'{"text": 5}',
        b'{"text": null}',
        b'{"text": ""}',
        b'{"text": "caf\xe9"}',
        b'{"text": "\\ud800 half"}',
        b'{"text": "' + b"long " * 100_000 + b'"}',
        b'{"text": "last, no newline"}',
    ]
    path = tmp_path / f"x{suffix}"
    data = b"\n".join(lines)
    path.write_bytes(gzip.compress(data) if suffix.endswith(".gz") else data)
    documents, report = read(FilesSource(path))
    assert [(key, len(text)) for key, text in documents] == [
        (f"{path.name}:1", 3), (f"{path.name}:11", 500_000), (f"{path.name}:12", 16)
    ]  # fmt: skip
    found = {reason: examples for (_, reason), examples in skips(report).items()}
    (broken,) = found.pop("not a line of JSON")
    assert broken == "line 3: Unterminated string starting at, column 10"
    assert found == {
        "blank line": ["line 2"],
        "no field 'text'": ["line 4 has body", "line 5 has list"],
        "text field is not a string": ["line 6: int", "line 7: NoneType"],
        "empty": ["line 8"],
        "not UTF-8 text": ["line 9, byte 13"],
        "not valid Unicode (half of a surrogate pair)": ["line 10: character 0"],
    }
    assert report.consumed == path.stat().st_size


def test_an_endless_line_is_not_read_into_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "MAX_LINE_BYTES", 100)
    (tmp_path / "x.jsonl").write_bytes(b'{"text": "first"}\n' + b"x" * 1000)
    documents, report = read(FilesSource(tmp_path))
    assert documents == [("x.jsonl:1", "first")]
    ((_, reason),) = skips(report)
    assert reason.startswith("a line longer than")


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
    write_parquet(tmp_path / "x.parquet", body=["a"], n=[1])
    with pytest.raises(DataError, match="no column 'text'; choose one with --text-field: body, n"):
        read(FilesSource(tmp_path))
    with pytest.raises(DataError, match="column 'n' has type int64, not string"):
        read(FilesSource(tmp_path, text_field="n"))
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


def test_a_missing_package_names_its_install(monkeypatch, tmp_path):
    write_parquet(tmp_path / "x.parquet", text=["a"])
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(DataError, match=r"needs the package 'pyarrow': pip install pyarrow"):
        read(FilesSource(tmp_path))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"needs the package 'datasets': pip install datasets"):
        read(hub.HubSource("someone/something"))


def test_names_that_are_not_text_can_be_reported(tmp_path):
    name = os.fsdecode(b"caf\xe9\x1b[31m.txt")
    (tmp_path / name).write_bytes(b"")
    _, report = read(FilesSource(tmp_path))
    (entry,) = report.sources[0].files
    assert entry.name.isprintable() and entry.name.encode("utf-8") == b"caf\\udce9\\x1b[31m.txt"


def test_stdlib_is_sources_and_documentation_only():
    source = StdlibSource()
    keys = [key for key, _ in source.files]
    assert "argparse.py" in keys and "json/decoder.py" in keys and keys == sorted(keys)
    forbidden = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
    assert not any(forbidden & set(Path(key).parts) for key in keys)
    assert {"math", "itertools"} <= set(documented_modules())
    assert not {"readline", "_tkinter", "_testcapi", "argparse"} & set(documented_modules())


def test_stdlib_reports_bad_files_and_reads_the_rest(tmp_path):
    (tmp_path / "good.py").write_text("x = 1\n")
    (tmp_path / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\n# \xe9\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "no.py").write_text("y = 1\n")
    source = StdlibSource(tmp_path)
    source.modules = ["math", "no_such_module"]
    documents, report = read(source)
    assert [key for key, _ in documents] == ["good.py", "doc/math"]
    assert {name for name, _ in skips(report)} == {"latin.py", "documentation of no_such_module"}
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no standard library sources"):
        StdlibSource(tmp_path / "empty")


@pytest.mark.slow
def test_documentation_has_signatures_and_no_addresses():
    import itertools
    import math

    text = render_documentation(math)
    assert "hypot" in text and "Return the sine of x (measured in radians)." in text
    assert "class chain" in render_documentation(itertools)
    code = (
        "import hashlib, importlib; from boost.data.stdlib import *\n"
        "texts = [render_documentation(importlib.import_module(n)) for n in ('builtins', '_io', 'time', '_socket')]\n"
        "print(hashlib.sha256('\\0'.join(texts).encode()).hexdigest())"
    )
    path = ":".join(p for p in sys.path if p)
    runs = {
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                       env={"PYTHONHASHSEED": seed, "PYTHONPATH": path}).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(runs) == 1


@pytest.fixture
def local_hub(tmp_path, monkeypatch):
    """Streams local JSON lines with the real `datasets`, in place of a dataset on the Hub."""
    import datasets

    calls = []
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"body": f"text {i}" if i != 3 else None}) + "\n" for i in range(9)))
    real = datasets.load_dataset

    def load(name, config, **options):
        calls.append((name, config, options))
        return real("json", data_files=str(path), split="train", streaming=True, cache_dir=str(tmp_path / "cache"))

    monkeypatch.setattr(datasets, "load_dataset", load)
    return calls


def test_hub_data_set_is_streamed_without_remote_code(local_hub):
    documents, report = read(hub.HubSource("someone/rows:english", "validation", "body"))
    assert documents == [(f"someone/rows:{i}", f"text {i}") for i in range(9) if i != 3]
    assert skips(report) == {("someone/rows", "text field is not a string"): ["row 3: NoneType"]}
    assert local_hub == [("someone/rows", "english", {"split": "validation", "streaming": True})]
    with pytest.raises(DataError, match="no column 'text'; choose one with --text-field: body"):
        read(hub.HubSource("someone/rows"))


def test_hub_failures_are_one_line(monkeypatch, tmp_path):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        DataError, match=r"--hf someone/never-cached: .*check the name, --hf-split and the network"
    ) as caught:
        read(hub.HubSource("someone/never-cached"))
    assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match="this is a local path"):
        hub.HubSource(str(tmp_path))
    with pytest.raises(DataError, match="not a dataset name"):
        hub.HubSource("https://example.com/data")


def zstd(path, data):
    import pyarrow

    with pyarrow.CompressedOutputStream(str(path), "zstd") as out:
        out.write(data)


def test_zstd_files(tmp_path):
    zstd(tmp_path / "a.jsonl.zst", b'{"text": "first"}\n{"text": "second"}\n')
    zstd(tmp_path / "b.txt.zst", "plain \N{SNOWMAN}".encode())
    documents, _ = read(FilesSource(tmp_path))
    assert documents == [
        ("a.jsonl.zst:1", "first"),
        ("a.jsonl.zst:2", "second"),
        ("b.txt.zst", "plain \N{SNOWMAN}"),
    ]


@pytest.mark.parametrize("keep", [slice(0, 20), slice(5, None)], ids=["truncated", "no header"])
def test_damaged_zstd_files(keep, tmp_path):
    zstd(tmp_path / "a.jsonl.zst", b'{"text": "first"}\n' * 50)
    (tmp_path / "a.jsonl.zst").write_bytes((tmp_path / "a.jsonl.zst").read_bytes()[keep])
    (tmp_path / "b.txt").write_text("b")
    documents, report = read(FilesSource(tmp_path))
    assert documents == [("b.txt", "b")]
    assert ("a.jsonl.zst", "damaged zstd file") in skips(report)


@pytest.mark.parametrize(("suffix", "delimiter"), [(".csv", ","), (".tsv", "\t"), (".csv.gz", ","), (".csv.zst", ",")])
def test_csv_files(suffix, delimiter, tmp_path):
    rows = ["id,text", '1,"two\nlines, and ""quotes"""', "2,", "3,b,c", "4,plain"]
    data = "\n".join(row if ',"' in row else row.replace(",", delimiter) for row in rows).encode() + b"\n"
    data = data.replace(b'1,"', f'1{delimiter}"'.encode()).replace(b"plain", b"\xff") + f"5{delimiter}last\n".encode()
    path = tmp_path / f"x{suffix}"
    if suffix.endswith(".zst"):
        zstd(path, data)
    else:
        path.write_bytes(gzip.compress(data) if suffix.endswith(".gz") else data)
    documents, report = read(FilesSource(tmp_path))
    assert documents == [(f"{path.name}:1", 'two\nlines, and "quotes"'), (f"{path.name}:4", "last")]
    found = skips(report)
    assert {reason for _, reason in found} == {"empty", "not a row of CSV", "not UTF-8 text"}


def test_csv_without_the_column_is_skipped_in_a_folder_and_an_error_by_name(tmp_path):
    (tmp_path / "x.csv").write_text("a,b\n1,2\n")
    (tmp_path / "y.txt").write_text("y")
    documents, report = read(FilesSource(tmp_path))
    assert documents == [("y.txt", "y")]
    assert ("x.csv", "no column 'text'") in skips(report)
    with pytest.raises(DataError, match="no column 'text'"):
        read(FilesSource(tmp_path / "x.csv"))
