"""Files of conversations to messages. Accepts the usual forms of a record:

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
    {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}          ShareGPT
    {"instruction": "...", "input": "...", "output": "..."}                                          Alpaca; `input` is optional
    {"prompt": "...", "completion": "..."}                                                           also with lists of messages

one per line, in a JSON array, or per row of a Parquet file. Text may be compressed, or UTF-16.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from boost.data.byte_streams import CHUNK, is_compressed, open_utf8
from boost.data.documents import SURROGATE, Document, Unreadable
from boost.data.json_text import json_values
from boost.data.readers import require_unchanged
from boost.data.report import FileReport, PrepareReport
from boost.data.tables import PARQUET_SUFFIXES, damage, open_parquet
from boost.errors import DataError

LINES = (".jsonl", ".ndjson", ".json")
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
        return [_message(each, "role", "content") for each in record["messages"]]
    if isinstance(record.get("conversations"), list):
        messages = [
            _message(each, *(("from", "value") if isinstance(each, dict) and "from" in each else ("role", "content")))
            for each in record["conversations"]
        ]
        return _with_system(record, messages)
    if "instruction" in record and "output" in record:
        asked = _text(record["instruction"], "instruction")
        if more := _text(record.get("input") or "", "input"):
            asked = f"{asked}\n\n{more}"
        return _with_system(record, _exchange(asked, _text(record["output"], "output")))
    if "prompt" in record and "completion" in record:
        prompt, completion = record["prompt"], record["completion"]
        if isinstance(prompt, list) and isinstance(completion, list):
            return [_message(each, "role", "content") for each in (*prompt, *completion)]
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


def format_of(path: Path) -> str | None:
    """'parquet' or 'json', by the name of a file of conversations; None for another file."""
    if path.name.lower().endswith(PARQUET_SUFFIXES):
        return "parquet"
    name = path.stem if is_compressed(path) else path.name
    return "json" if name.lower().endswith(LINES) else None


class ConversationFile:
    """A file of conversations as a source of `boost prepare`. The text of a document is the JSON of its messages."""

    def __init__(self, path: str | Path) -> None:
        self.path, self.name = Path(path), str(path)
        if not self.path.is_file():
            raise DataError(f"{path}: no such file; --chat reads .jsonl, .json and .parquet files of conversations")
        if format_of(self.path) is None:
            raise DataError(
                f"{path}: not a file of conversations; --chat reads .jsonl, .json (also compressed) and .parquet"
            )
        found = self.path.stat()
        self.size: int | None = found.st_size
        self._size, self._mtime_ns = found.st_size, found.st_mtime_ns

    def fingerprint(self) -> list[Any]:
        """What changes if the content does: name, size and modification time."""
        return [self.path.name, self._size, self._mtime_ns]

    def documents(self, report: PrepareReport) -> Iterator[Document]:
        """The conversations, in order. Records in the report what was skipped. Raises `DataError` if the file cannot be read, or
        has changed since it was listed."""
        entry = report.source(self.name).file(self.path.name)
        try:
            for number, record in self._records(entry):
                document = document_of(record, f"{self.path.name}:{number}", f"record {number}", entry)
                if document is not None:
                    yield document
        except Unreadable as problem:
            raise problem.as_error(self.path) from problem
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read ({error.strerror or error}); copy it again") from error
        require_unchanged(self.path, self._size, self._mtime_ns)
        report.consumed += self._size

    def _records(self, entry: FileReport) -> Iterator[tuple[int, Any]]:
        if format_of(self.path) == "parquet":
            yield from enumerate(self._rows(), start=1)
            return
        with open_utf8(self.path, entry) as file:
            if _is_array(file):
                yield from enumerate(json_values(file), start=1)
                return
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    entry.skip("blank line", f"line {number}")
                    continue
                try:
                    record = json.loads(line.decode("utf-8").removeprefix("\ufeff"))
                except (ValueError, RecursionError):
                    entry.skip("not a line of JSON", f"line {number}")
                    continue
                yield number, record

    def _rows(self) -> Iterator[Any]:
        with open_parquet(self.path) as file, damage("damaged Parquet file"):
            for batch in file.iter_batches(256):
                yield from batch.to_pylist()


def _is_array(file: Any) -> bool:
    """Whether the file is one JSON array. Does not move the position in it."""
    return bool(file.peek(CHUNK).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["))


def open_conversations(paths: Sequence[str]) -> list[ConversationFile]:
    """Files of conversations; of a folder, all those below it, in sorted order, except hidden ones.

    Raises `DataError` if a named file is no file of conversations, or a folder has none.
    """
    found: dict[str, Path] = {}
    for path in paths:
        inside = _files_below(Path(path)) if Path(path).is_dir() else [Path(path)]
        if not inside:
            raise DataError(f"{path}: has no .jsonl, .json or .parquet file; --chat reads files of conversations")
        found.update({str(each): each for each in inside})
    return [ConversationFile(path) for path in found.values()]


def _files_below(folder: Path) -> list[Path]:
    return [
        each
        for each in sorted(folder.rglob("*"))
        if each.is_file() and format_of(each) and not any(p.startswith(".") for p in each.relative_to(folder).parts)
    ]
