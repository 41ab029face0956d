"""Files and folders that pyarrow and datasets write: our texts are those of `load_dataset` or `load_from_disk` for the same
path, or the file is refused in one line, or the report names what is different."""

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from boost.data.report import PrepareReport
from boost.data.sources import FilesSource
from boost.errors import DataError
from tests.border.draws import Seeds, drawn

WORDS = [
    "a", "word", "é", "漢", "🎉", ",", ";", "|", "\t", "\n", "\r\n", '"', '""', "'", "\\", '\\"', "{", "}", "007", "1.5", "NA",
    "null", "None", "nan", "true", "#", ":", "$", "a,b", 'say "hi"', " ", "  ", "=", "/",
]  # fmt: skip
Texts = list[Any]


def draw_texts(rng: random.Random) -> list[str | None]:
    plain = rng.random() < 0.3
    words = ["a", "word", "é", "it's", "5", "x;y", "p|q"] if plain else WORDS
    rare = rng.choice((0.0, 0.2))
    return [
        rng.choice((None, "", " ")) if rng.random() < rare else "".join(rng.choices([*words, " "], k=rng.randint(1, 8)))
        for _ in range(rng.randint(1, 12))
    ]


def draw_table(rng: random.Random) -> pd.DataFrame:
    """A text column, in any place, beside others of other types."""
    texts = draw_texts(rng)
    others = {
        "id": range(len(texts)),
        "label": [rng.choice(("pos", "neg, or not", 'a "b"', "x\ny")) for _ in texts],
        "score": [rng.choice((None, 0.5, 2.0)) for _ in texts],
    }
    names = ["text", *rng.sample([*others], rng.randint(0, 3))]
    rng.shuffle(names)
    return pd.DataFrame({name: texts if name == "text" else others[name] for name in names})


def ours_or_refused(path: Path) -> tuple[list[str], PrepareReport] | None:
    """None if the error is one line."""
    report = PrepareReport()
    try:
        return [document.text for document in FilesSource(path).documents(report)], report
    except DataError as problem:
        if "\n" in str(problem):
            raise
        return None


def oracle(cache: Path, kind: str, **options: Any) -> Texts:
    stream = datasets.load_dataset(kind, split="train", streaming=True, cache_dir=str(cache), **options)
    return [row["text"] for row in stream]


def as_documents(values: Texts) -> list[str]:
    return [value.replace("\r\n", "\n") for value in values if isinstance(value, str) and value.strip()]


def compare(path: Path, expected: Texts, seed: int) -> str:
    """Our texts are the expected ones, and what is left out is counted; or the file is refused in one line."""
    if (read := ours_or_refused(path)) is None:
        return "refused"
    found, report = read
    if found != as_documents(expected):
        # A text column of nulls alone.
        said = {reason for source in report.sources for entry in source.files for reason in entry.notes}
        assert any(line.startswith("read from column 'label'") for line in said), (seed, path.name, found, expected)
        return "named"
    skipped = sum(skip.count for source in report.sources for entry in source.files for skip in entry.skipped.values())
    assert len(found) + skipped >= len(expected), seed
    return "equal"


def check_json(rng: random.Random, folder: Path, seed: int) -> str:
    table = draw_table(rng)
    orient: Any = rng.choice(("lines", "records", "records", "table", "columns", "index", "split", "values"))
    path = folder / ("x.jsonl" if orient == "lines" and rng.random() < 0.7 else "x.json")
    if orient == "lines":
        table.to_json(path, orient="records", lines=True, force_ascii=rng.random() < 0.5)
    else:
        table.to_json(path, orient=orient, indent=rng.choice((None, 2)), force_ascii=rng.random() < 0.5)
    options = {"field": "data"} if orient == "table" else {}
    if orient == "records" and rng.random() < 0.3:
        wrapped = {"version": "v2.0", "rows": json.loads(path.read_text("utf-8")), "tags": ["a", "b"]}
        path.write_text(json.dumps(wrapped, indent=rng.choice((None, 1))))
        options = {"field": "rows"}
    if orient in ("columns", "index", "split", "values"):
        expected: Texts = []  # one row of objects and lists, or rows of lists: no text
    else:
        expected = oracle(folder / "cache", "json", data_files=str(path), **options)
        if not all(isinstance(value, str | None) for value in expected):
            expected = table["text"].tolist()  # text that looks like numbers, which `load_dataset(field=...)` converts
        expected = [None if value != value else value for value in expected]
    return compare(path, expected, seed)


def check_parquet(rng: random.Random, folder: Path, seed: int) -> str:
    table = pa.Table.from_pandas(draw_table(rng), preserve_index=False)
    kinds = [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string()), pa.string_view()]
    kind = rng.choice(kinds)
    at = table.column_names.index("text")
    values = pa.array(table["text"].to_pylist(), pa.string())
    table = table.set_column(
        at, "text", values.dictionary_encode() if pa.types.is_dictionary(kind) else values.cast(kind)
    )
    if rng.random() < 0.3:
        table = table.append_column("more", pa.array([{"text": "inner", "n": [1]}] * len(table)))
    path = folder / "x.parquet"
    if rng.random() < 0.3 and kind == pa.string():
        datasets.Dataset(table).to_parquet(path)
    else:
        pq.write_table(
            table, path, row_group_size=rng.choice((1, 3, 100)), compression=rng.choice(("snappy", "zstd", "none"))
        )
    try:
        expected = oracle(folder / "cache", "parquet", data_files=str(path))
    except Exception:
        expected = values.to_pylist()  # types that this version of datasets does not know
    return compare(path, expected, seed)


def check_arrow(rng: random.Random, folder: Path, seed: int) -> str:
    table = pa.Table.from_pandas(draw_table(rng), preserve_index=False)
    path = folder / "x.arrow"
    new = rng.choice((pa.ipc.new_stream, pa.ipc.new_file))
    options = pa.ipc.IpcWriteOptions(compression=rng.choice((None, "lz4", "zstd")))
    with pa.OSFile(str(path), "wb") as sink, new(sink, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=rng.choice((1, 4, 100)))
    return compare(path, oracle(folder / "cache", "arrow", data_files=str(path)), seed)


def check_saved(rng: random.Random, folder: Path, seed: int) -> str:
    path = folder / "saved"
    for _ in range(rng.randint(1, 3)):
        rows = datasets.Dataset.from_pandas(draw_table(rng), preserve_index=False)
        rows = rows.shuffle(seed=seed) if rng.random() < 0.3 else rows
        rows = rows.filter(lambda row: row["text"] != "") if rng.random() < 0.3 else rows
        if not len(rows):
            rows = datasets.Dataset.from_dict({"text": ["left"]})
        shards = rng.randint(1, min(4, len(rows)))
        if rng.random() < 0.4:
            splits = datasets.DatasetDict(train=rows, test=rows.select([0]))
            splits.save_to_disk(str(path), num_shards={"train": shards, "test": 1})
        else:
            rows.save_to_disk(str(path), num_shards=shards)
    loaded = datasets.load_from_disk(str(path))
    rows = loaded["train"] if isinstance(loaded, datasets.DatasetDict) else loaded
    expected = rows["text"][:]
    if rng.random() < 0.5:
        rows.map(lambda row: {"upper": str(row["text"]).upper()})
    return compare(path, expected, seed)


FOLDERS = ["", "", "data/", "en/", "train/", "test/", "val/", "my-eval_1/", "Testing/", "a.dev/"]
STEMS = [
    "train", "train-00000-of-00002", "train-00001-of-00002", "training_1", "test", "test-00000-of-00001", "validation", "dev", "a",
    "b", "extra-00000-of-00001", "testament", "latest", "Train", "x.train.y", "val-2", "eval", "my_evaluation", "contest test",
]  # fmt: skip


def check_splits(rng: random.Random, folder: Path, seed: int) -> str:
    path, suffix = folder / "corpus", rng.choice((".jsonl", ".parquet", ".txt"))
    names = {rng.choice(FOLDERS) + rng.choice(STEMS) + suffix for _ in range(rng.randint(1, 5))}
    for name in names:
        (file := path / name).parent.mkdir(parents=True, exist_ok=True)
        if suffix == ".parquet":
            pq.write_table(pa.table({"text": [name]}), file)
        else:
            file.write_text(json.dumps({"text": name}) if suffix == ".jsonl" else name)
    if rng.random() < 0.3:
        configs: dict[str, Any] = {"train": rng.choice(("*", "**/*", "**/train*", "data/*"))}
        configs |= {"test": rng.choice(("**/test*", "**/*test*"))} if rng.random() < 0.5 else {}
        files = "".join(f"  - split: {split}\n    path: '{pattern}{suffix}'\n" for split, pattern in configs.items())
        (path / "README.md").write_text(f"---\nconfigs:\n- config_name: default\n  data_files:\n{files}---\n# Corpus\n")
    try:
        splits = datasets.load_dataset(str(path), streaming=True, cache_dir=str(folder / "cache"))
        texts = {str(split): sorted(row["text"] for row in rows) for split, rows in splits.items()}
    except (OSError, ValueError):
        texts = {}
    has_card = (path / "README.md").exists()
    expected = texts.get("train")
    if expected is None and not has_card:  # files of no split are not held out
        expected = sorted(names - {name for split in texts.values() for name in split})
    if not expected and len(texts) == 1:
        (expected,) = texts.values()
    if suffix == ".txt" and {*texts} == {"train"} and not has_card:
        expected = sorted(names)
    if (read := ours_or_refused(path)) is None:
        assert not expected, (seed, names)
        return "refused"
    found, report = read
    assert sorted(found) == expected, (seed, names, found, expected)
    named = {entry.name for source in report.sources for entry in source.files}
    assert named >= names, (seed, names)
    return "equal"


CHECKS = {
    "json": check_json, "parquet": check_parquet, "arrow": check_arrow, "saved": check_saved,
    "splits": check_splits,
}  # fmt: skip


def check(folder: Path, kind: str, seed: int) -> str:
    folder.mkdir()
    return CHECKS[kind](random.Random(f"{kind} {seed}"), folder, seed)


@pytest.mark.slow
@pytest.mark.parametrize("kind", CHECKS)
@drawn(25, 400)
def test_texts_are_those_of_datasets(seeds: Seeds, kind: str, tmp_path: Path) -> None:
    results = Counter(check(tmp_path / str(seed), kind, seed) for seed in seeds())
    assert results["equal"] > 0.4 * results.total(), results
