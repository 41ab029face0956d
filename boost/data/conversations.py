"""Converts conversation files to messages. Accepts the usual record formats:

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
    {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}          ShareGPT
    {"instruction": "...", "input": "...", "output": "..."}                                          Alpaca; `input` is optional
    {"prompt": "...", "completion": "..."}                                                           also with lists of messages

A file contains one record per line, a JSON array of records, or a table with a record per row, whose fields may hold JSON. The
template also receives a record's `system`, `tools` (or `functions`), `documents` and `chat_template_kwargs`, and all other fields
of its messages. A message whose `weight`, `train` or `loss` is 0 does not count toward the loss. The report names unused fields.
"""

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from boost.data.readers import SURROGATE, Document, json_records
from boost.data.report import FileReport, PrepareReport
from boost.text import JsonObject

if TYPE_CHECKING:
    from pyarrow import DataType, Table

_ROLES = {
    "human": "user", "user": "user", "prompter": "user",
    "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
    "model": "assistant",
    "system": "system", "developer": "developer",
    "tool": "tool", "function": "tool", "observation": "tool", "function_response": "tool",
}  # fmt: skip
"""Role of each sender in ShareGPT files and in messages."""


_FORMS = ("messages", "conversations", "instruction", "prompt")
"""Fields of which a record has one."""
_COUNTS = ("weight", "train", "loss")
"""Fields in a message that determine whether it counts toward the loss, as in files for OpenAI, axolotl and ms-swift."""
_REFUSED = ("train_detail", "images", "image", "videos", "video", "audios", "audio")
"""Fields in a record or a message that would change what is learned, but are not supported."""


class Malformed(Exception):
    """Why a record is not a conversation."""


class Conversation(NamedTuple):
    """The content of a record."""

    messages: list[JsonObject]
    """The messages up to the last assistant message. A message that does not count toward the loss has `weight` 0."""
    template: JsonObject
    """Additional variables for the chat template, such as `tools`."""
    unused: list[str]
    """Fields in the record that have no effect."""


def conversation_of(record: object) -> Conversation:
    """The conversation in a record. Raises Malformed."""
    if not isinstance(record, dict):
        raise Malformed(f"not an object, but {_kind(record)}")
    record = {key: value for key, value in record.items() if value is not None}
    _refuse(record)
    if record.get("label") is False:
        raise Malformed("with label = false, which marks a bad answer")
    if named := [name for name in ("chosen", "rejected") if name in record]:
        raise Malformed(f"with {named[0]!r}: preference data, which is not supported")
    for name in ("messages", "conversations"):
        if isinstance(record.get(name), str):
            record[name] = _decoded(record[name], name)
    form, messages = _by_form(record)
    used = {*form, "chat_template_kwargs", "documents", "tools"}
    used |= set() if record.get("tools") else {"functions"}
    used |= {"label"} if record.get("label") is True else set()
    system = record.get("system")
    if isinstance(system, str) and not (messages and messages[0]["role"] == "system"):
        messages[:0] = [{"role": "system", "content": system}] if system else []
        used.add("system")
    while messages and messages[-1]["role"] != "assistant":
        messages.pop()  # nothing is learned from unanswered messages
    if not messages:
        raise Malformed("without an assistant message")
    if all(message.get("weight") == 0 for message in messages if message["role"] == "assistant"):
        raise Malformed("without an assistant message that counts toward the loss")
    return Conversation(messages, template_fields(record), [key for key in record if key not in used])


def _by_form(record: JsonObject) -> tuple[tuple[str, ...], list[JsonObject]]:
    """(fields that hold the messages, messages)."""
    if isinstance(record.get("messages"), list):
        return ("messages",), [_message(message, "role", "content") for message in record["messages"]]
    if isinstance(record.get("conversations"), list):
        shared = [isinstance(message, dict) and "from" in message for message in record["conversations"]]
        keys = [("from", "value") if is_shared else ("role", "content") for is_shared in shared]
        turns = zip(record["conversations"], keys, strict=True)
        messages = [_message(message, role, content) for message, (role, content) in turns]
        return ("conversations",), messages
    if "instruction" in record and "output" in record:
        parts = _text(record["instruction"], "instruction"), _text(record.get("input") or "", "input")
        asked = "\n\n".join(filter(None, parts))
        history = record.get("history") or []  # earlier exchanges, as LLaMA-Factory reads them
        if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
            raise Malformed("with a 'history' that is not a list of question-answer pairs")
        earlier = [_exchange(_text(question, "history"), _text(answer, "history")) for question, answer in history]
        messages = [*chain(*earlier), *_exchange(asked, _text(record["output"], "output"))]
        return ("instruction", "input", "output", "history"), messages
    if "prompt" in record and "completion" in record:
        prompt, completion = record["prompt"], record["completion"]
        if isinstance(prompt, list) and isinstance(completion, list):
            messages = [_message(message, "role", "content") for message in (*prompt, *completion)]
            for message in messages[: len(prompt)]:  # only the completion counts
                message |= {"weight": 0} if message["role"] == "assistant" else {}
        else:
            messages = _exchange(_text(prompt, "prompt"), _text(completion, "completion"))
        return ("prompt", "completion"), messages
    raise Malformed("without 'messages', 'conversations', 'instruction' and 'output', or 'prompt' and 'completion'")


def template_fields(record: JsonObject) -> JsonObject:
    """Variables for the chat template in a record. Raises Malformed."""
    fields: JsonObject = {}
    more = record.get("chat_template_kwargs") or {}
    if not isinstance(more, dict):
        raise Malformed(f"with {_kind(more)} as 'chat_template_kwargs', not an object")
    for name, value in (
        ("tools", record.get("tools") or record.get("functions")),
        ("documents", record.get("documents")),
    ):
        if isinstance(value, str) and value:  # as stored in ShareGPT and Parquet files
            value = _decoded(value, name)
        if value and not isinstance(value, list):
            raise Malformed(f"with {_kind(value)} as {name!r}, not a list")
        fields |= {name: value} if value else {}
    return {**more, **fields}


def _decoded(text: str, name: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise Malformed(f"with text as {name!r} that is not JSON") from None


def _refuse(fields: JsonObject) -> None:
    for name in _REFUSED:
        if fields.get(name):
            raise Malformed(f"with {name!r}, which is not supported")


def _exchange(asked: str, answered: str) -> list[JsonObject]:
    if not answered.strip():
        raise Malformed("with an empty answer")
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]


def _message(message: object, role: str, content: str) -> JsonObject:
    """Returns a message with the keys `role` and `content`. Other keys, such as tool_calls, are kept for the template."""
    if not isinstance(message, dict) or not isinstance(message.get(role), str):
        raise Malformed(f"with a message without {role!r}")
    if message[role] not in _ROLES:
        raise Malformed(f"with unknown role {message[role][:40]!r}")
    _refuse(message)
    others = {
        key: value for key, value in message.items() if key not in (role, content, *_COUNTS) and value is not None
    }
    for key in _COUNTS:
        if (counts := message.get(key)) not in (None, 0, 1):
            raise Malformed(f"with {key!r} = {counts!r:.20} in a message, but only 0 and 1 are supported")
    if any(message.get(key) == 0 for key in _COUNTS):
        others["weight"] = 0
    if other := {"role", "content"} & others.keys():
        raise Malformed(f"with both {role!r} and {min(other)!r} in a message")
    if not others.get("tool_calls") and (call := others.pop("function_call", None)):  # the older form of one tool call
        others["tool_calls"] = [{"type": "function", "function": call}]
    calls = others.get("tool_calls")
    if isinstance(calls, str) and calls:
        calls = others["tool_calls"] = _decoded(calls, "tool_calls")
    if calls and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise Malformed(f"with {_kind(calls)} as 'tool_calls', not a list of objects")
    text = message.get(content)
    if isinstance(text, list):  # the template may read the parts
        for part in text:
            _refuse(part if isinstance(part, dict) else {})
            if not isinstance(part, dict) or not isinstance(part.get("text"), str):
                kind = repr(part.get("type"))[:40] if isinstance(part, dict) else _kind(part)
                raise Malformed(f"with a part of type {kind} in {content!r}, which is not supported")
    elif text is not None or not calls:  # the template decides what a tool call without content says
        text = _text(text, content)
    return {"role": _ROLES[message[role]], "content": text, **others}


def _text(value: object, field: str) -> str:
    """Returns text unchanged; joins the texts in a list of parts, as in the OpenAI API."""
    if isinstance(value, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in value):
        return "".join(part["text"] for part in value)
    if not isinstance(value, str):
        raise Malformed(f"with {_kind(value)} as {field!r}, not text")
    return value


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def document_of(record: object, key: str, where: str, entry: FileReport) -> Document | None:
    """A conversation as a document, whose text is JSON with messages and template variables. None if it is skipped."""
    try:
        messages, template, unused = conversation_of(record)
        # Tables may hold dates and the like, which a template would write as str does.
        text = json.dumps({"messages": messages, "template": template}, ensure_ascii=False, default=str)
        entry.take(len(text.encode("utf-8")))
    except (Malformed, UnicodeEncodeError) as problem:
        entry.skip(str(problem) if isinstance(problem, Malformed) else SURROGATE, where)
        return None
    for name in unused:
        entry.note(f"with the field {name[:40]!r}, which has no effect", where)
    return Document(key, text, entry)


def read_conversations(path: Path, key: str, entry: FileReport, report: PrepareReport) -> Iterator[Document]:
    """Yields the conversations in a JSON file, in order, and reports skipped records. Raises `Unreadable`."""
    for number, where, record in json_records(path, entry, report, lambda record: any(map(record.get, _FORMS))):
        if document := document_of(record, f"{key}:{number}", where, entry):
            yield document


def records_of(table: "Table") -> Iterator[JsonObject]:
    """The rows of a pyarrow table as in JSON lines."""
    types = {field.name: field.type for field in table.schema}
    for row in table.to_pylist():
        yield {name: _from_arrow(value, types[name]) for name, value in row.items()}


def _from_arrow(value: Any, kind: "DataType") -> object:
    """A value as in JSON lines: without the nulls that Arrow adds for fields of other records, and with columns of JSON decoded."""
    from pyarrow import types

    if value is None:
        return None
    if getattr(kind, "extension_name", "") == "arrow.json":
        return json.loads(value)
    if types.is_struct(kind):
        fields = ((field.name, field.type) for field in kind if value[field.name] is not None)
        return {name: _from_arrow(value[name], inner) for name, inner in fields}
    if types.is_map(kind):
        return {name: _from_arrow(item, kind.item_type) for name, item in value}
    kind = getattr(kind, "storage_type", kind)  # the arrays of `datasets` are lists
    return [_from_arrow(item, kind.value_type) for item in value] if isinstance(value, list) else value
