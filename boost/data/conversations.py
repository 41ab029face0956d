"""Files of conversations to messages. Accepts the usual forms of a record:

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
    {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}          ShareGPT
    {"instruction": "...", "input": "...", "output": "..."}                                          Alpaca; `input` is optional
    {"prompt": "...", "completion": "..."}                                                           also with lists of messages

one per line, in a JSON array, or per row of a Parquet file.
"""

import gzip
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, cast

from boost.data.readers import Document, missing_package
from boost.data.report import FileReport, PrepareReport
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


class ConversationFile:
    """A file of conversations as a source of `boost prepare`. The text of a document is the JSON of its messages."""

    def __init__(self, path: str | Path) -> None:
        self.path, self.name = Path(path), str(path)
        if not self.path.is_file():
            raise DataError(f"{path}: no such file; --chat reads .jsonl, .json and .parquet files of conversations")
        if self._format() is None:
            raise DataError(
                f"{path}: not a file of conversations; --chat reads .jsonl, .json (also .gz, .zst) and .parquet"
            )
        found = self.path.stat()
        self.size: int | None = found.st_size
        self._identity = [self.path.name, found.st_size, found.st_mtime_ns]

    def fingerprint(self) -> list[Any]:
        """What changes if the content does: name, size and modification time."""
        return list(self._identity)

    def documents(self, report: PrepareReport) -> Iterator[Document]:
        """The conversations, in order. Records in the report what was skipped. Raises `DataError` if the file cannot be read, or
        has changed since it was listed."""
        entry = report.source(self.name).file(self.path.name)
        try:
            for number, record in self._records(entry):
                try:
                    text = json.dumps(messages_of(record), ensure_ascii=False)
                    entry.take(len(text.encode("utf-8")))
                    yield Document(f"{self.path.name}:{number}", text, entry)
                except Malformed as problem:
                    entry.skip(str(problem), f"record {number}")
                except UnicodeEncodeError:
                    entry.skip("not valid Unicode (half of a surrogate pair)", f"record {number}")
            found = self.path.stat()
        except (OSError, EOFError) as error:
            raise DataError(f"{self.path}: cannot be read ({error}); copy it again") from None
        report.consumed += found.st_size
        if [self.path.name, found.st_size, found.st_mtime_ns] != self._identity:
            raise DataError(f"{self.path}: changed during the preparation; run it again when nothing writes to it")

    def _format(self) -> str | None:
        name = self.path.name.lower().removesuffix(".gz").removesuffix(".zst")
        return "parquet" if name.endswith(".parquet") else "json" if name.endswith(LINES) else None

    def _records(self, entry: FileReport) -> Iterator[tuple[int, Any]]:
        if self._format() == "parquet":
            yield from enumerate(self._rows(), start=1)
            return
        with self._open() as file:
            first = file.read(1 << 12)
        with self._open() as file:
            if first.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
                yield from enumerate(self._array(file), start=1)
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

    def _array(self, file: IO[bytes]) -> list[Any]:
        try:
            return list(json.load(io.TextIOWrapper(file, encoding="utf-8-sig")))
        except (ValueError, RecursionError, TypeError) as error:
            raise DataError(
                f"{self.path}: not a JSON array ({error}); correct it, or write one record per line"
            ) from None

    def _rows(self) -> Iterator[Any]:
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError as error:
            raise missing_package("Parquet files", "pyarrow") from error
        try:
            with pyarrow.parquet.ParquetFile(self.path) as file:
                for batch in file.iter_batches(256):
                    yield from batch.to_pylist()
        except pyarrow.ArrowException as error:
            raise DataError(f"{self.path}: not a Parquet file ({str(error).splitlines()[0]}); copy it again") from None

    def _open(self) -> IO[bytes]:
        name = self.path.name.lower()
        if name.endswith(".gz"):
            return cast(IO[bytes], gzip.open(self.path, "rb"))
        if name.endswith(".zst"):
            try:
                import pyarrow
            except ImportError as error:
                raise missing_package("zstd files", "pyarrow") from error
            return io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.OSFile(str(self.path)), "zstd"))
        return self.path.open("rb")


def open_conversations(paths: Sequence[str]) -> list[ConversationFile]:
    """The sources of `boost prepare --chat`. Raises `DataError` if there is none, or one is no file of conversations."""
    if not paths:
        raise DataError("--chat: no input given; name .jsonl, .json or .parquet files of conversations")
    return [ConversationFile(path) for path in dict.fromkeys(paths)]
