"""Random conversations under several templates: tokens and mask are those of `apply_chat_template`, or the difference is named."""

import copy
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from boost.data.chat import ChatTemplate, Rejected
from boost.data.report import PrepareReport
from boost.data.sources import FilesSource
from tests.border.draws import nightly_seeds
from tests.data.chats import MARKED, TEXT, chat_tokenizer

CALLS = (
    '{% for c in m.tool_calls or [] %}<call>{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}}</call>{% endfor %}"
)
PARTS = (
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content if p.type == 'text' %}"
    "[{{ p.text | trim }}]{% endfor %}{% endif %}"
)
FULL = (
    "{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools>{% endif %}{% for m in messages %}"
    "<|im_start|>{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}\n{% if m.role == 'assistant' %}{% generation %}"
    f"{{% if m.reasoning_content %}}<think>{{{{ m.reasoning_content }}}}</think>{{% endif %}}{PARTS}{CALLS}<|im_end|>"
    f"{{% endgeneration %}}{{% else %}}{PARTS}<|im_end|>{{% endif %}}\n{{% endfor %}}"
)
OBJECT = FULL.replace(CALLS, CALLS.replace("c.function.arguments if c.function.arguments is string else ", ""))
STRING = FULL.replace(CALLS, CALLS.replace(" if c.function.arguments is string else c.function.arguments | tojson", ""))
TEMPLATES = {"full": FULL, "object": OBJECT, "string": STRING, "text only": MARKED}


def draw_record(rng: random.Random, uniform: bool) -> dict[str, Any]:
    """`uniform`: every field has one type, as in a table."""
    words = TEXT.split()

    def text() -> str:
        return " ".join(rng.choices(words, k=rng.randint(1, 5)))

    def content() -> Any:
        kinds = ["text", "text", "reasoning"]
        return (
            text()
            if uniform
            else rng.choice(
                [text(), [{"type": rng.choice(kinds), "text": f" {text()} "} for _ in range(rng.randint(1, 3))]]
            )
        )

    messages: list[dict[str, Any]] = [{"role": "system", "content": text()}] if rng.random() < 0.3 else []
    for _ in range(rng.randint(1, 3)):
        messages.append({"role": "user", "content": content()} | ({"name": "Ada"} if rng.random() < 0.2 else {}))
        if rng.random() < 0.5:
            values: list[Any] = [1, "x", [1, "é"], {"d": True}]
            pairs = dict(
                zip("abcd", ["é", 1, [1.5], {"d": True}] if uniform else rng.choices(values, k=4), strict=True)
            )
            arguments: Any = {name: pairs[name] for name in rng.sample("abcd", rng.randint(uniform, 3))}
            arguments = json.dumps(arguments) if rng.random() < 0.5 and not uniform else arguments
            call = {"type": "function", "id": "1", "function": {"name": rng.choice("fg"), "arguments": arguments}}
            messages.append({"role": "assistant", "content": rng.choice(["", text(), None]), "tool_calls": [call]})
            messages.append({"role": "tool", "content": text(), "tool_call_id": "1"})
        answer = {"role": "assistant", "content": content()}
        messages.append(answer | ({"reasoning_content": text()} if rng.random() < 0.2 else {}))
    record: dict[str, Any] = {"messages": messages}
    if rng.random() < 0.5:
        record["tools"] = [
            {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in "fg"
        ]
    return {"tools": None, **record} if uniform else record


def dropped(value: Any) -> Any:
    """Without null fields, at every depth."""
    if isinstance(value, dict):
        return {name: dropped(item) for name, item in value.items() if item is not None}
    return [dropped(item) for item in value] if isinstance(value, list) else value


def write_json(records: list[dict[str, Any]], path: Path) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def write_text(records: list[dict[str, Any]], path: Path) -> None:
    """Parquet with columns of text that is JSON."""
    columns = {
        name: [json.dumps(record[name]) if name in record else None for record in records]
        for name in ("messages", "tools")
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), path)


def write_json_type(records: list[dict[str, Any]], path: Path) -> None:
    """Parquet with lists of Arrow's type for JSON."""
    columns = {}
    for name in ("messages", "tools"):
        rows = [[json.dumps(item) for item in record[name]] if name in record else None for record in records]
        columns[name] = pyarrow.array(rows, pyarrow.list_(pyarrow.string())).cast(pyarrow.list_(pyarrow.json_()))
    pyarrow.parquet.write_table(pyarrow.table(columns), path)


def write_merged(records: list[dict[str, Any]], path: Path) -> None:
    """Parquet whose schema has the fields of all records."""
    names = dict.fromkeys(name for record in records for name in record)
    table = pyarrow.table({name: [record.get(name) for record in records] for name in names})
    pyarrow.parquet.write_table(table, path)


def write_datasets(records: list[dict[str, Any]], path: Path) -> None:
    datasets.Dataset.from_list(records).to_parquet(path)


WRITERS = [write_json, write_text, write_json_type, write_merged, write_datasets]


def as_owner_needs(record: dict[str, Any], notes: list[str], reads_parts: bool) -> dict[str, Any]:
    """The record with the changes that the notes name."""
    messages = copy.deepcopy(record["messages"])
    for message in messages:
        if message.get("content") is None:
            message["content"] = "" if any(note.startswith("with null as content") for note in notes) else None
        elif isinstance(message["content"], list) and not reads_parts:
            message["content"] = "".join(part["text"] for part in message["content"] if part["type"] == "text")
        for call in message.get("tool_calls") or []:
            arguments = call["function"]["arguments"]
            if any(note.endswith("as an object, because it needs that") for note in notes):
                arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
            elif any(note.endswith("as text, because it needs that") for note in notes):
                arguments = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            call["function"]["arguments"] = arguments
    return {**record, "messages": messages}


def check_all(folder: Path, seeds: range) -> None:
    templates = {name: ChatTemplate(chat_tokenizer(folder / name, source)) for name, source in TEMPLATES.items()}
    outcomes = Counter[str]()
    for seed in seeds:
        rng = random.Random(seed)
        name, write = rng.choice(list(TEMPLATES)), rng.choice(WRITERS)
        records = [draw_record(rng, write in (write_merged, write_datasets)) for _ in range(3)]
        template, owner = templates[name], templates[name]._tokenizer
        path = folder / ("a.jsonl" if write is write_json else "a.parquet")
        try:
            write(records, path)
        except (pyarrow.ArrowException, TypeError, ValueError):
            outcomes["not written"] += 1  # arguments that are text in one record and an object in another
            continue
        read = [json.loads(document.text) for document in FilesSource(path, chat=True).documents(PrepareReport())]
        assert len(read) == len(records), seed
        if write in (write_merged, write_datasets):  # a table has another order of fields
            rows = [*datasets.load_dataset("parquet", data_files=str(path), split="train", streaming=True)]
            assert [dropped(row) for row in rows] == [dropped(record) for record in records], seed
            records = rows
        for record, ours in zip(records, read, strict=True):
            try:
                notes = list(template.unused(ours["messages"], ours["template"]))
                (document,) = template.encode(ours["messages"], ours["template"])
            except Rejected as problem:
                if not str(problem).startswith(("with a tool call as the answer", "with an empty answer")):
                    raise
                outcomes["refused"] += 1
                continue
            given = as_owner_needs(dropped(record), notes, name != "text only")
            theirs = owner.apply_chat_template(
                given["messages"],
                tools=given.get("tools"),
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=True,
            )
            np.testing.assert_array_equal(document.ids, theirs["input_ids"], err_msg=f"seed {seed}, {name}, {write}")
            np.testing.assert_array_equal(document.mask, np.array(theirs["assistant_masks"], bool), err_msg=f"{seed}")
            outcomes["equal"] += 1
    assert outcomes["equal"] > len(seeds), outcomes


@pytest.mark.slow
def test_conversations_are_those_of_transformers(tmp_path: Path) -> None:
    check_all(tmp_path, range(60))


@pytest.mark.nightly
def test_conversations_are_those_of_transformers_in_many_draws(tmp_path: Path) -> None:
    check_all(tmp_path, nightly_seeds(2000))
