"""The usual forms of conversations, the files that hold them, and what is said of records that are none."""

import datetime
import decimal
import gzip
import json
from pathlib import Path
from typing import Any

import pandas
import pyarrow
import pyarrow.parquet
import pytest

from boost.data import hub
from boost.data.conversations import Malformed, conversation_of, records_of
from boost.data.report import PrepareReport
from boost.data.sources import FilesSource
from boost.errors import DataError


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


USER, ANSWER = said("user", "a"), said("assistant", "b")
SHARED = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
FORMS: list[tuple[dict[str, Any], list[dict[str, Any]]]] = [
    ({"messages": [USER, ANSWER]}, [USER, ANSWER]),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}, ANSWER]},
        [{**USER, "content": [{"type": "text", "text": "a"}]}, ANSWER],
    ),
    ({"messages": json.dumps([USER, ANSWER])}, [USER, ANSWER]),
    (
        {"messages": [USER, {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}]},
        [
            USER,
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{}"}}],
            },
        ],
    ),
    ({"messages": [USER, ANSWER, said("user", "c")]}, [USER, ANSWER]),
    ({"conversations": SHARED}, [USER, ANSWER]),
    ({"conversations": [USER, ANSWER]}, [USER, ANSWER]),
    ({"system": "s", "conversations": SHARED}, [said("system", "s"), USER, ANSWER]),
    ({"instruction": "a", "input": "", "output": "b"}, [USER, ANSWER]),
    ({"instruction": "a", "input": "x", "output": "b"}, [said("user", "a\n\nx"), ANSWER]),
    ({"instruction": "", "input": "a", "output": "b"}, [USER, ANSWER]),
    ({"prompt": "a", "completion": "b"}, [USER, ANSWER]),
    ({"prompt": [USER], "completion": [ANSWER]}, [USER, ANSWER]),
    ({"prompt": [USER, ANSWER, USER], "completion": [ANSWER]}, [USER, {**ANSWER, "weight": 0}, USER, ANSWER]),
    (
        {"instruction": "c", "output": "d", "history": [["a", "b"]]},
        [USER, ANSWER, said("user", "c"), said("assistant", "d")],
    ),
    ({"system": "s", "messages": [USER, ANSWER]}, [said("system", "s"), USER, ANSWER]),
    ({"messages": [USER, {**ANSWER, "weight": 0}, ANSWER]}, [USER, {**ANSWER, "weight": 0}, ANSWER]),
    (
        {"messages": [USER, {**ANSWER, "train": False}, {**ANSWER, "train": True}]},
        [USER, {**ANSWER, "weight": 0}, ANSWER],
    ),
    ({"conversations": [*SHARED, {**SHARED[1], "loss": 0}]}, [USER, ANSWER, {**ANSWER, "weight": 0}]),
    ({"prompt": "a", "completion": "b", "label": True}, [USER, ANSWER]),
]


@pytest.mark.parametrize(("record", "messages"), FORMS)
def test_forms(record: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    assert conversation_of(record).messages == messages


def test_what_a_template_may_need_is_kept() -> None:
    calls = [{"function": {"name": "f", "arguments": {}}}]
    record = {"messages": [said("user", "a"), {"role": "assistant", "content": None, "tool_calls": calls}]}
    assert conversation_of(record).messages[1] == record["messages"][1]


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ([1], "not an object, but a list"),
        ({"text": "a"}, "without 'messages', 'conversations'"),
        ({"messages": []}, "without an assistant message"),
        ({"messages": [said("user", "a")]}, "without an assistant message"),
        ({"messages": [said("narrator", "a")]}, "unknown role 'narrator'"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "with 'chosen': preference data"),
        ({"messages": "x"}, "with text as 'messages' that is not JSON"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}, ANSWER]}, "a part of type 'image_url'"),
        (
            {"messages": [{"role": "user", "content": [{"text": "a", "image": "x"}]}, ANSWER]},
            "with 'image', which is not",
        ),
        ({"messages": ["a"]}, "a message without 'role'"),
        ({"conversations": [{**SHARED[0], "role": "x"}, SHARED[1]]}, "both 'from' and 'role' in a message"),
        ({"messages": [{"role": "user"}, said("assistant", "b")]}, "with null as 'content', not text"),
        ({"conversations": [{"from": "human", "value": 3}]}, "with a number as 'value', not text"),
        ({"instruction": "a", "output": " "}, "an empty answer"),
        ({"messages": [USER, {**ANSWER, "weight": 0}]}, "without an assistant message that counts toward the loss"),
        ({"messages": [USER, {**ANSWER, "weight": 0.5}]}, "with 'weight' = 0.5 in a message, but only 0 and 1"),
        ({"conversations": [SHARED[0], {**SHARED[1], "train_detail": [{}]}]}, "with 'train_detail', which is not"),
        ({"messages": [USER, ANSWER], "images": ["a.png"]}, "with 'images', which is not supported"),
        ({"prompt": "a", "completion": "b", "label": False}, "with label = false, which marks a bad answer"),
        ({"messages": [USER, ANSWER], "tools": "x"}, "with text as 'tools' that is not JSON"),
        ({"messages": [USER, ANSWER], "tools": {"a": 1}}, "with an object as 'tools', not a list"),
        ({"instruction": "a", "output": "b", "history": ["c"]}, "'history' that is not a list of question-answer"),
    ],
)
def test_what_is_no_conversation(record: Any, words: str) -> None:
    with pytest.raises(Malformed, match=words):
        conversation_of(record)


def test_every_field_of_a_record_is_used_or_named() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    for given in ({"tools": tools}, {"tools": json.dumps(tools)}, {"functions": tools}):
        assert conversation_of({"messages": [USER, ANSWER], **given}).template == {"tools": tools}
    record = {"messages": [USER, ANSWER], "documents": [{"text": "x"}], "chat_template_kwargs": {"thinking": True}}
    found = conversation_of(record | {"id": 3, "source": "s", "images": [], "tools": None})
    assert found.template == {"documents": [{"text": "x"}], "thinking": True}
    assert found.unused == ["id", "source", "images"]
    for other in ({"system": ["s"]}, {"label": 0}, {"label": "false"}):  # in no form that is read
        assert conversation_of({"messages": [USER, ANSWER], **other}).unused == [*other]
    twice = {
        "messages": [said("system", "s"), USER, ANSWER],
        "system": "t",
        "tools": tools,
        "functions": [{"name": "g"}],
    }
    assert conversation_of(twice).unused == ["system", "functions"]
    calls = {"tool_calls": [{"function": {"name": "f"}}], "function_call": {"name": "g"}}
    assert conversation_of({"messages": [USER, {**ANSWER, **calls}]}).messages[1] == {**ANSWER, **calls}
    older = {"tool_calls": [], "function_call": {"name": "g"}}  # tables fill columns
    (call,) = conversation_of({"messages": [USER, {**ANSWER, **older}]}).messages[1]["tool_calls"]
    assert call["function"]["name"] == "g"


RECORDS = [{"messages": [said("user", f"question {i}"), said("assistant", f"answer {i}")]} for i in range(5)]


def test_the_same_from_every_kind_of_file(tmp_path: Path, datasets: Any) -> None:
    lines = "".join(json.dumps(record) + "\n" for record in RECORDS)
    names = ("a.jsonl", "a.jsonl.gz", "a.json", "a.parquet", "wrapped.json", "a.csv", "a.arrow", "saved")
    files = [tmp_path / name for name in names]
    files[0].write_text("\ufeff" + lines, encoding="utf-8")
    files[1].write_bytes(gzip.compress(lines.encode()))
    files[2].write_text(json.dumps(RECORDS, indent=1))
    table = pyarrow.Table.from_pylist(RECORDS)
    pyarrow.parquet.write_table(table, files[3])
    files[4].write_text(json.dumps({"version": 1, "data": RECORDS}))
    pandas.DataFrame({"messages": [json.dumps(record["messages"]) for record in RECORDS]}).to_csv(files[5], index=False)
    with pyarrow.OSFile(str(files[6]), "wb") as sink, pyarrow.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    datasets.Dataset(table).save_to_disk(str(files[7]))
    for source in (FilesSource(file, chat=True) for file in files):
        found = [json.loads(document.text) for document in source.documents(PrepareReport())]
        assert found == [{**record, "template": {}} for record in RECORDS], source.name


def test_values_in_an_array_are_those_of_json_lines(tmp_path: Path) -> None:
    """`datasets` would read a date, nine digits, an error and JSON as text."""
    parts = [{"type": "text", "text": "parts"}]
    drawn: list[list[Any]] = [["2024-01-01"], [0.12345678901234567], [10**25], ["text", parts]]
    for number, values in enumerate(drawn):
        records = [{"messages": [{**USER, "more": value}, ANSWER]} for value in values]
        (tmp_path / f"{number}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        (tmp_path / f"{number}.json").write_text(json.dumps(records))
        lines, array = (
            [d.text for d in FilesSource(tmp_path / f"{number}.{suffix}", chat=True).documents(PrepareReport())]
            for suffix in ("jsonl", "json")
        )
        assert lines == array
        assert [json.loads(text)["messages"][0]["more"] for text in array] == values


def test_bad_records_are_counted_and_the_rest_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        f'{json.dumps(RECORDS[0])}\n\nno json\n{{"text": "x"}}\n{json.dumps(RECORDS[1])}\n'
    )
    report = PrepareReport()
    documents = list(FilesSource(tmp_path / "a.jsonl", chat=True).documents(report))
    assert [document.key for document in documents] == ["a.jsonl:1", "a.jsonl:5"]
    skipped = report.sources[0].files[0].skipped
    assert {reason: skip.count for reason, skip in skipped.items()} == {
        "blank line": 1,
        "not valid JSON": 1,
        "without 'messages', 'conversations', 'instruction' and 'output', or 'prompt' and 'completion'": 1,
    }


@pytest.mark.parametrize(
    ("name", "words"), [("a.txt", "not a conversation file"), ("a.json", "not JSON at line 1, col")]
)
def test_files_that_hold_no_conversations(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / name).write_bytes(b"[1, ")
    with pytest.raises(DataError, match=words):
        list(FilesSource(tmp_path / name, chat=True).documents(PrepareReport()))


def test_nulls_of_a_merged_schema_are_no_content(tmp_path: Path) -> None:
    """Arrow gives every record the fields of all records; the conversation is that of the JSON lines."""
    records = [
        {
            "messages": [
                USER,
                {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": a}}]},
            ]
        }
        for a in ({"city": "Rome"}, {"x": 1, "y": [{"z": 2}]})
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "a.parquet")
    lines, rows = (
        [json.loads(document.text) for document in FilesSource(tmp_path / name, chat=True).documents(PrepareReport())]
        for name in ("a.jsonl", "a.parquet")
    )
    assert lines == rows


def test_nulls_in_views_and_maps_are_no_content_either() -> None:
    struct = pyarrow.struct([("a", pyarrow.int64()), ("b", pyarrow.int64())])
    view = pyarrow.array([[{"a": 1}]], pyarrow.list_view(struct))
    entries = pyarrow.array([[("k", {"a": 1})]], pyarrow.map_(pyarrow.string(), struct))
    (record,) = records_of(pyarrow.table({"view": view, "map": entries}))
    assert record == {"view": [{"a": 1}], "map": {"k": {"a": 1}}}


def test_arrays_of_datasets_are_lists() -> None:
    import datasets

    kind = datasets.Features({"a": datasets.Array2D((2, 2), "int32")})
    data = datasets.Dataset.from_dict({"a": [[[1, 2], [3, 4]]]}, features=kind)
    assert [*records_of(data.with_format("arrow")[:])] == [{"a": [[1, 2], [3, 4]]}]


def test_values_that_json_has_not_are_as_a_template_writes_them(tmp_path: Path) -> None:
    at = datetime.datetime(2024, 1, 2, 3, 4)
    messages = [{**USER, "timestamp": at, "hash": b"x"}, {**ANSWER, "cost": decimal.Decimal("0.1")}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"messages": messages}]), tmp_path / "a.parquet")
    (document,) = FilesSource(tmp_path / "a.parquet", chat=True).documents(PrepareReport())
    assert json.loads(document.text)["messages"] == [
        {**USER, "timestamp": "2024-01-02 03:04:00", "hash": "b'x'"},
        {**ANSWER, "cost": "0.1"},
    ]


def test_a_streamed_table_keeps_null_within_json(
    tmp_path: Path, datasets: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a column of JSON, null is a value; elsewhere, Arrow adds it to rows that do not have the field."""
    call = {"function": {"name": "f", "arguments": {"x": None}}}
    text, calls = datasets.Value("string"), datasets.List(datasets.Json())
    features = {"messages": datasets.List({"role": text, "content": text, "tool_calls": calls})}
    records: list[Any] = [{"messages": [USER, {**ANSWER, "tool_calls": [call]}]}, {"messages": [USER, ANSWER]}]
    rows = datasets.Dataset.from_list(records, features=datasets.Features(features))
    rows.to_parquet(str(tmp_path / "a.parquet"))
    stream = datasets.load_dataset("parquet", data_files=str(tmp_path / "a.parquet"), split="train", streaming=True)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: stream)
    monkeypatch.setattr(hub, "commit_of", lambda dataset, revision: "commit")
    documents = hub.HubSource("someone/chats", chat=True).documents(PrepareReport())
    assert [json.loads(document.text)["messages"] for document in documents] == [r["messages"] for r in records]
