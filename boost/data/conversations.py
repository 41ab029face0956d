"""Files of conversations to messages. Accepts the usual forms of a record:

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
    {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}          ShareGPT
    {"instruction": "...", "input": "...", "output": "..."}                                          Alpaca; `input` is optional
    {"prompt": "...", "completion": "..."}                                                           also with lists of messages

one per line, in a JSON array, or per row of a Parquet file. Text may be compressed.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from boost.data.readers import (
    JSON_SUFFIXES,
    PARQUET_SUFFIXES,
    SURROGATE,
    Document,
    Unreadable,
    damage,
    json_records,
    open_parquet,
)  # fmt: skip
from boost.data.report import FileReport, PrepareReport

_ROLES = {
    "human": "user", "user": "user", "prompter": "user",
    "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
    "model": "assistant",
    "system": "system", "developer": "developer",
    "tool": "tool", "function": "tool", "observation": "tool", "function_response": "tool",
}  # fmt: skip
"""Role of each sender in ShareGPT files and in messages."""


class Malformed(Exception):
    """A record that is no conversation: why."""


def messages_of(record: Any) -> list[dict[str, Any]]:
    """The messages of a record, up to the last one of the assistant. Raises Malformed."""
    if not isinstance(record, dict):
        raise Malformed(f"a record is {_kind(record)}, not an object")
    messages = _by_form(record)
    while messages and messages[-1]["role"] != "assistant":
        messages.pop()  # nothing is learned from what nobody answered
    if not messages:
        raise Malformed("no message of the assistant")
    return messages


def _by_form(record: dict[str, Any]) -> list[dict[str, Any]]:
    if isinstance(record.get("messages"), list):
        return [_message(message, "role", "content") for message in record["messages"]]
    if isinstance(record.get("conversations"), list):
        shared = [isinstance(message, dict) and "from" in message for message in record["conversations"]]
        keys = [("from", "value") if is_shared else ("role", "content") for is_shared in shared]
        turns = zip(record["conversations"], keys, strict=True)
        return _with_system(record, [_message(message, role, content) for message, (role, content) in turns])
    if "instruction" in record and "output" in record:
        asked = _text(record["instruction"], "instruction")
        if more := _text(record.get("input") or "", "input"):
            asked = f"{asked}\n\n{more}"
        return _with_system(record, _exchange(asked, _text(record["output"], "output")))
    if "prompt" in record and "completion" in record:
        prompt, completion = record["prompt"], record["completion"]
        if isinstance(prompt, list) and isinstance(completion, list):
            return [_message(message, "role", "content") for message in (*prompt, *completion)]
        return _exchange(_text(prompt, "prompt"), _text(completion, "completion"))
    raise Malformed("neither messages, conversations, instruction and output, nor prompt and completion")


def _exchange(asked: str, answered: str) -> list[dict[str, Any]]:
    if not answered.strip():
        raise Malformed("an empty answer")
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]


def _with_system(record: dict[str, Any], messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    system = record.get("system")
    if not isinstance(system, str) or not system or (messages and messages[0]["role"] == "system"):
        return messages
    return [{"role": "system", "content": system}, *messages]


def _message(message: Any, role: str, content: str) -> dict[str, Any]:
    """A message with the keys `role` and `content`; others, such as tool_calls, are kept for the template."""
    if not isinstance(message, dict) or not isinstance(message.get(role), str):
        raise Malformed(f"a message without {role!r}")
    if message[role] not in _ROLES:
        raise Malformed(f"unknown role {message[role][:40]!r}")
    others = {
        key: value for key, value in message.items() if key not in (role, content, "weight") and value is not None
    }
    text = message.get(content)
    if text is None and others.get("tool_calls"):
        text = ""
    return {"role": _ROLES[message[role]], "content": _text(text, content), **others}


def _text(value: Any, field: str) -> str:
    """A text, or the texts of a list of parts as of the OpenAI API."""
    if isinstance(value, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in value):
        return "".join(part["text"] for part in value)
    if not isinstance(value, str):
        raise Malformed(f"{field!r} is {_kind(value)}, not text")
    return value


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def document_of(record: Any, key: str, where: str, entry: FileReport) -> Document | None:
    """A conversation as a document: its text is the JSON of its messages. None if it cannot be used, which the report says."""
    try:
        text = json.dumps(messages_of(record), ensure_ascii=False)
        entry.take(len(text.encode("utf-8")))
    except (Malformed, UnicodeEncodeError) as problem:
        entry.skip(str(problem) if isinstance(problem, Malformed) else SURROGATE, where)
        return None
    return Document(key, text, entry)


def read_conversations(path: Path, key: str, entry: FileReport, report: PrepareReport) -> Iterator[Document]:
    """The conversations of one file, in order. Records in the report what was skipped. Raises `Unreadable`."""
    name = path.name.lower()
    if name.endswith(JSON_SUFFIXES):
        for number, where, record in json_records(path, entry, report):
            if document := document_of(record, f"{key}:{number}", where, entry):
                yield document
    elif name.endswith(PARQUET_SUFFIXES):
        with open_parquet(path) as file, damage("damaged Parquet file"):
            rows = (row for batch in file.iter_batches(256) for row in batch.to_pylist())
            for number, row in enumerate(rows, start=1):
                if document := document_of(row, f"{key}:{number}", f"record {number}", entry):
                    yield document
        report.consumed += path.stat().st_size
    else:
        raise Unreadable("not a file of conversations", fix="--chat reads .jsonl, .json (also compressed) and .parquet")
