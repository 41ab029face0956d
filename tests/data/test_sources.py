"""Sources: what is read; the report lists everything else with its location and reason."""

import gzip
import json
import os
import pickle
import sys
from dataclasses import asdict
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from boost.data import hub
from boost.data.prepare import PrepareOptions, prepare
from boost.data.report import FileReport, PrepareReport
from boost.data.sources import FilesSource, StdlibSource
from boost.errors import DataError
from tests.data.inputs import read, skips


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


def test_missing_input_and_no_input(tmp_path):
    with pytest.raises(DataError, match="nowhere: no such file or folder"):
        FilesSource("nowhere")
    with pytest.raises(DataError, match=r"no input given; .* --stdlib"):
        prepare(PrepareOptions(out=tmp_path / "store"))


def test_keys_of_several_inputs_are_unique_and_nothing_is_read_twice(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.txt").write_text(name)
    seen = set[str]()
    documents, report = read(*(FilesSource(tmp_path / path, None, seen) for path in ("a", "b", "a/x.txt")))
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


def write_rows(folder, *names):
    """A file of one row, its own name, under each name."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".parquet"):
            pq.write_table(pa.table({"text": [name]}), path)
        else:
            path.write_text(f'{{"text": "{name}"}}\n' if path.suffix == ".jsonl" else name)


@pytest.mark.parametrize(
    ("names", "read_names"),
    [
        (["data/train-00000-of-00001.parquet", "data/extra-00000-of-00001.parquet"], ["data/train-00000-of-00001.parquet"]),
        (["train.jsonl", "dev.jsonl", "other.jsonl"], ["train.jsonl"]),
        (["en/my_train_0.jsonl", "en/my_val_0.jsonl"], ["en/my_train_0.jsonl"]),
        (["training/a.jsonl", "evaluation/a.jsonl"], ["training/a.jsonl"]),
        (["train.txt", "valid.txt", "notes.md", "code.py"], ["code.py", "notes.md", "train.txt"]),
        (["train.jsonl", "more.jsonl"], ["train.jsonl"]),
        (["train.txt", "more.txt"], ["more.txt", "train.txt"]),
        (["testament.jsonl", "latest.jsonl", "trains.jsonl"], ["latest.jsonl", "testament.jsonl", "trains.jsonl"]),
        (["test.jsonl", "more.jsonl"], ["more.jsonl"]),
        (["test.jsonl", "tests/a.py"], ["test.jsonl", "tests/a.py"]),
        (["test/a.py", "train/b.py", "c.py"], ["c.py", "test/a.py", "train/b.py"]),
    ],
)  # fmt: skip
def test_a_folder_of_several_splits_is_its_train_split(names, read_names, tmp_path, monkeypatch):
    write_rows(tmp_path, *names)
    monkeypatch.chdir(tmp_path.parent)
    found, report = read(FilesSource(tmp_path.name))
    assert [text for _, text in found] == read_names
    assert sorted(name for name, _ in skips(report)) == sorted({*names} - {*read_names})


def test_a_snapshot_of_the_hub_is_what_its_card_says(tmp_path):
    card = "---\nlicense: mit\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: '{}'\n---\n# A card\n"
    write_rows(tmp_path, *(f"blobs/{i}.parquet" for i in range(3)))
    folder = tmp_path / "snapshot"
    folder.mkdir()
    for i, name in enumerate(("a.parquet", "b.parquet", "train.parquet")):
        (folder / name).symlink_to(tmp_path / "blobs" / f"{i}.parquet")
    (folder / "README.md").write_text(card.format("[ab].parquet"))
    found, report = read(FilesSource(folder))
    assert [text for _, text in found] == ["blobs/0.parquet", "blobs/1.parquet"]
    assert skips(report) == {("README.md", "in no split"): [], ("train.parquet", "in no split"): []}
    (folder / "README.md").write_text(card.format("c.parquet"))
    with pytest.raises(DataError, match=r"snapshot: not a dataset .*: .*c\.parquet"):
        FilesSource(folder)
    (folder / "README.md").write_text(card.format("https://localhost:1/x.parquet"))
    with pytest.raises(DataError, match="snapshot: .* name data on the network; download"):
        FilesSource(folder)
    (folder / "README.md").write_text("configs:\n")
    assert [text for _, text in read(FilesSource(folder))[0]] == ["blobs/2.parquet"]


def test_a_card_that_says_how_to_read_files_is_refused(tmp_path):
    """What a reader finds out itself may be there."""
    (tmp_path / "a.jsonl").write_text('{"text": "b"}\n')
    item = "- config_name: {}\n  data_files: a.jsonl\n"
    card = f"---\nconfigs:\n{item}  encoding: utf-8\n  {{}}: 1\n{item}---\n"
    (tmp_path / "README.md").write_text(card.format("other", "skiprows", "default"))
    assert [text for _, text in read(FilesSource(tmp_path))[0]] == ["b"]
    (tmp_path / "README.md").write_text(card.format("default", "skiprows", "other"))
    with pytest.raises(
        DataError, match="dataset card sets skiprows for the files, which is not supported; save the dataset"
    ):
        FilesSource(tmp_path)


def test_a_folder_of_several_splits_without_train_asks(tmp_path):
    write_rows(tmp_path, "test.jsonl", "validation.jsonl")
    with pytest.raises(DataError, match="no train split among validation, test"):
        FilesSource(tmp_path)


def test_a_missing_package_names_its_install(monkeypatch, tmp_path):
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    for source, package in ((FilesSource(tmp_path), "pyarrow"), (hub.HubSource("someone/something"), "datasets")):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(DataError, match=rf"needs the package '{package}': pip install {package}"):
            read(source)


def test_stdlib_is_its_python_files(tmp_path):
    keys = [file.key for file in StdlibSource().files]
    assert "argparse.py" in keys and "json/decoder.py" in keys and keys == sorted(keys)
    forbidden = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
    assert not any(forbidden & set(Path(key).parts) for key in keys)
    (tmp_path / "good.py").write_text("x = 1\n")
    (tmp_path / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\n# \xe9\n")
    documents, report = read(StdlibSource(tmp_path))
    assert documents == [("good.py", "x = 1\n")] and {name for name, _ in skips(report)} == {"latin.py"}


@pytest.fixture
def local_hub(tmp_path, monkeypatch, datasets):
    """Streams local JSON lines with the real `datasets`, in place of a dataset on the Hub."""
    calls = []
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"body": f"text {i}" if i != 3 else None}) + "\n" for i in range(9)))
    real = datasets.load_dataset

    def load(name, config, **options):
        calls.append((name, config, options))
        return real("json", data_files=str(path), split="train", streaming=True, cache_dir=str(tmp_path / "cache"))

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(hub, "commit_of", lambda dataset, revision: f"{dataset}@{revision}")
    return calls


def test_hub_data_set_is_streamed_without_remote_code(local_hub):
    documents, report = read(hub.HubSource("someone/rows:english", "validation", "body"))
    assert documents == [(f"someone/rows:{i}", f"text {i}") for i in range(9) if i != 3]
    assert skips(report) == {("someone/rows", "with a text field that is not a string"): ["row 3: NoneType"]}
    options = {"split": "validation", "streaming": True, "revision": "someone/rows@None"}
    assert local_hub == [("someone/rows", "english", options)]
    assert report.notes == ["someone/rows at commit someone/rows@None"]
    with pytest.raises(DataError, match="no column 'text'; choose one with --text-field: body"):
        read(hub.HubSource("someone/rows"))


def test_a_revision_is_resolved_once_and_a_stream_continues_with_it(local_hub, monkeypatch):
    source = hub.HubSource("someone/rows", "train", "body", revision="v1")
    rows = source.documents(PrepareReport())
    for _ in range(2):
        next(rows)
    position = source.position()
    monkeypatch.setattr(hub, "commit_of", lambda dataset, revision: "a newer commit")
    again = hub.HubSource("someone/rows", "train", "body", revision="v1")
    report = PrepareReport()
    rest = [document.text for document in again.documents(report, position, [asdict(FileReport("someone/rows"))])]
    assert rest == [f"text {i}" for i in (2, *range(4, 9))]
    assert [options["revision"] for _, _, options in local_hub] == ["someone/rows@v1"] * 2
    assert source.fingerprint() == ["someone/rows", None, "train", "v1"]
    assert hub.HubSource("someone/rows").fingerprint() == ["someone/rows", None, "train"]


@pytest.mark.parametrize("mark_rows", [1, 3, 256])
def test_a_stream_continues_any_number_of_times(mark_rows, local_hub, monkeypatch):
    monkeypatch.setattr(hub, "MARK_ROWS", mark_rows)
    position, entries, texts = None, (), []
    for _ in range(8):
        source, report = hub.HubSource("someone/rows", "train", "body"), PrepareReport()
        texts.append(next(source.documents(report, position, entries)).text)
        position, entries = json.loads(json.dumps(source.position())), [asdict(report.sources[0].files[0])]
    assert texts == [f"text {i}" for i in range(9) if i != 3]
    assert entries[0]["documents"] == 8


def test_a_stream_that_continues_elsewhere_is_an_error(local_hub, monkeypatch, datasets):
    """As with datasets 5.0.0, which forgets the position at the second resume."""
    monkeypatch.setattr(hub, "MARK_ROWS", 2)
    source = hub.HubSource("someone/rows", "train", "body")
    documents = source.documents(PrepareReport())
    for _ in range(5):
        next(documents)
    monkeypatch.setattr(datasets.IterableDataset, "load_state_dict", lambda stream, state: None)
    again = hub.HubSource("someone/rows", "train", "body")
    with pytest.raises(DataError, match=r"datasets .* lost the stream's position at row 4"):
        next(again.documents(PrepareReport(), source.position(), [asdict(FileReport("someone/rows"))]))


def test_hub_failures_are_one_line(monkeypatch, tmp_path):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=r"--hf someone/never-cached: .*--hf-revision and the network") as caught:
        read(hub.HubSource("someone/never-cached"))
    assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match="this is a local path"):
        hub.HubSource(str(tmp_path))
    with pytest.raises(DataError, match="not a dataset name"):
        hub.HubSource("https://example.com/data")
