"""JSON: lines, arrays and pretty-printed files; what is bad is skipped where it stands, and long lines lose nothing."""

import gzip
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from boost.data import documents, json_text
from boost.data.sources import FilesSource
from boost.errors import DataError
from tests.data.inputs import compressed, notes, read, skips


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


@pytest.fixture
def short_lines(monkeypatch):
    """Every line is long."""
    monkeypatch.setattr(json_text, "MAX_LINE_BYTES", 10)
    monkeypatch.setattr(json_text, "CHUNK", 7)
    monkeypatch.setattr(documents, "MAX_DOCUMENT_CHARS", 40)
    monkeypatch.setattr(documents, "PART_CHARS", 20)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=30),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.dictionaries(st.text(max_size=5), JSON_VALUES, max_size=3), min_size=1, max_size=3),
    st.text(min_size=1, max_size=120).filter(str.strip),
    st.booleans(),
    st.integers(7, 40),
)
def test_long_lines_give_what_json_gives(tmp_path_factory, records, text, ascii_only, chunk):
    """Against the parser of the standard library, for every position of a chunk's end."""
    path = tmp_path_factory.mktemp("long") / "x.jsonl"
    records = [{**record, "text": f"{text}{i}", "after": text} for i, record in enumerate(records)]
    lines = [json.dumps(record, ensure_ascii=ascii_only) for record in records]
    try:
        path.write_text("\n".join(lines), "utf-8", newline="")
    except UnicodeEncodeError:
        return  # half of a surrogate pair has no UTF-8
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_text, "MAX_LINE_BYTES", 10)
        patch.setattr(json_text, "CHUNK", chunk)
        found, report = read(FilesSource(path, "text"))
    if any("\ud800" <= c <= "\udfff" for c in text):
        assert not found and len(skips(report)) == 1
    else:
        assert [text for _, text in found] == [r["text"].replace("\r\n", "\n") for r in records]
        assert skips(report) == {} and report.consumed == path.stat().st_size


def test_bad_long_lines_are_skipped_where_they_stand(short_lines, tmp_path):
    good = {"meta": {"a": [1, "}"]}, "text": "word " * 30}
    lines = [
        json.dumps(good),
        '{"other": "' + "x" * 50 + '"}',
        '{"text": ["' + "x" * 50 + '"]}',
        '["' + "x" * 50 + '"]',
        '{"text" "' + "x" * 50 + '"}',
        '{"text": "' + "x" * 50 + "\\q" + '"}',
        '{"text": "' + "\\ud800" * 2 + '"}',
        '{"text": "short"}',
        '{"text": "never ends ' + "y" * 30,
    ]
    (tmp_path / "x.jsonl").write_bytes("\n".join(lines).encode() + b"\n" + b'{"text": "caf\xe9 au lait"}\n')
    found, report = read(FilesSource(tmp_path, "text"))
    texts: dict = {}
    for key, text in found:
        texts[key.partition("[")[0]] = texts.get(key.partition("[")[0], "") + text
    assert texts.pop("x.jsonl:1") == good["text"] and texts.pop("x.jsonl:8") == "short"
    assert set(texts) <= {"x.jsonl:6", "x.jsonl:9"}  # what came before the damage
    assert skips(report) == {
        ("x.jsonl", "no field 'text'"): ["line 2 has other"],
        ("x.jsonl", "no string in field 'text'"): ["line 3"],
        ("x.jsonl", "not a line of JSON"): [
            "line 4: no { at byte 0", "line 5: no : at byte 8", "line 6: Invalid \\escape",
            "line 9: unterminated string of 52 B",
        ],
        ("x.jsonl", "not valid Unicode (half of a surrogate pair)"): ["line 7: character 0"],
        ("x.jsonl", "not UTF-8 text"): ["line 10: invalid continuation byte"],
    }  # fmt: skip
    split = "longer than 40 characters, split into several documents"
    assert notes(report)["x.jsonl", split][0] == "line 1"


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("suffix", [".json", ".json.zst"])
def test_a_json_array_is_one_record_per_element(suffix, indent, tmp_path, monkeypatch):
    monkeypatch.setattr(json_text, "CHUNK", 64)
    records = [{"text": f"number {i} \N{GRINNING FACE}", "n": i} for i in range(40)] + [{"n": 3}, "text"]
    compressed(tmp_path / f"x{suffix}", json.dumps(records, indent=indent, ensure_ascii=False).encode())
    found, report = read(FilesSource(tmp_path))
    assert found == [(f"x{suffix}:{i + 1}", f"number {i} \N{GRINNING FACE}") for i in range(40)]
    assert skips(report) == {(f"x{suffix}", "no field 'text'"): ["record 41 has n", "record 42 has str"]}


def test_pretty_printed_records(tmp_path):
    (tmp_path / "x.json").write_text("\n".join(json.dumps({"text": f"t{i}"}, indent=1) for i in range(3)) + "\n")
    assert [text for _, text in read(FilesSource(tmp_path))[0]] == ["t0", "t1", "t2"]


@pytest.mark.parametrize(
    ("tail", "reason", "where"),
    [
        ('{"text": oops}]', "not JSON", "record 2: Expecting value"),
        ('{"text": "two"', "not JSON", "record 2: Expecting ',' delimiter"),
        ('{"text": "two"}', "not JSON", "record 3: Expecting value"),
        ('{"text": "' + "x" * 900 + '"}]', "a record longer than 500 B", "after record 1"),
        ("[" * 100_000, "not JSON", "record 2: nested too deeply"),
    ],
)
def test_a_damaged_array_keeps_what_came_before(tail, reason, where, tmp_path, monkeypatch):
    monkeypatch.setattr(json_text, "CHUNK", 64)
    monkeypatch.setattr(json_text, "MAX_VALUE_CHARS", 500 if "x" in tail else 1 << 20)
    (tmp_path / "x.json").write_text('[{"text": "one"},' + tail)
    found, report = read(FilesSource(tmp_path))
    assert found[0] == ("x.json:1", "one")
    assert skips(report) == {("x.json", reason): [where]}


def test_the_text_field_is_found_or_asked_for(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"n": 1}\nbroken\n{"body": "found", "n": 2}\n')
    found, report = read(FilesSource(tmp_path / "a.jsonl"))
    assert found == [("a.jsonl:3", "found")]
    assert notes(report) == {("a.jsonl", "without column 'text', text read from 'body'"): []}
    (tmp_path / "b.jsonl").write_text('{"prompt": "p", "answer": "a"}\n')
    with pytest.raises(
        DataError, match=r"b\.jsonl: no text column found among prompt, answer; choose one with --text-f"
    ):
        read(FilesSource(tmp_path / "b.jsonl"))
    found, report = read(FilesSource(tmp_path))
    assert len(found) == 1 and ("b.jsonl", "no text column found among prompt, answer") in skips(report)


def test_the_field_of_a_file_with_long_lines_is_found(short_lines, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"n": [1, 2, {"x": "y"}], "body": "a long line", "z": -1.5e3}\n')
    assert read(FilesSource(tmp_path))[0] == [("a.jsonl:1", "a long line")]
