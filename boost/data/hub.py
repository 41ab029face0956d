"""Datasets from the Hugging Face Hub, streamed without a copy on disk. Never executes dataset code.

`datasets` retries failed reads. If it gives up, running the command again continues after the last committed row.
"""

import hashlib
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from boost.data.readers import Document, accept, note_unread, require
from boost.data.report import PrepareReport
from boost.errors import DataError
from boost.text import JsonObject

READ_RETRIES = 720
"""How many times `datasets` retries a failed read, 5 s apart: for an hour instead of two minutes."""


MARK_ROWS = 256
"""How often to ask for the stream's state, in rows: each time, `datasets` copies it."""


class StreamError(DataError):
    """A stream could not be opened, or it broke. The data prepared so far is kept."""

    is_temporary = True


class HubSource:
    """One split of `NAME` or `NAME:CONFIG`, streamed by `datasets`. Keys are row numbers.

    `revision`: a branch, tag or commit of the dataset's repository (None: its main branch). It is resolved to a commit before the
    first row is read; that commit is in the report, and a stream that continues later reads the same commit.
    """

    size: int | None = None

    def __init__(self, spec: str, split: str = "train", text_field: str = "text", revision: str | None = None) -> None:
        self.dataset, _, config = spec.partition(":")
        self.config = config or None
        self.split, self.text_field, self.revision = split, text_field, revision
        self._commit: str | None = None
        self.name = f"Hugging Face {spec} ({split})"
        self._mark: JsonObject = {"stream": None, "row": 0, "next": None}
        """A recent state of the stream, the number of the row that follows it, and that row's digest."""
        self._row = self._consumed = 0
        if Path(self.dataset).exists():
            raise DataError(f"--hf {self.dataset}: this is a local path; pass it as INPUT, without --hf")
        if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", self.dataset) or config.startswith("/"):
            raise DataError(f"--hf {spec}: not a dataset name; expected OWNER/NAME or OWNER/NAME:CONFIG")

    def documents(
        self, report: PrepareReport, position: JsonObject | None = None, entries: Sequence[JsonObject] = ()
    ) -> Iterator[Document]:
        """Yields the rows with text. `position`: where to continue, with the report's numbers taken from `entries`."""
        entry = report.source(self.name).file(self.dataset)
        self._row, self._consumed, continues_at = 0, report.consumed, 0
        self._mark = {"stream": None, "row": 0, "next": None}
        if position is not None:
            entry.restore(entries[0])
            continues_at, report.consumed = position["row"], position["consumed"]
            self._commit, self._mark = position.get("commit"), position["mark"]
            self._row = self._mark["row"]
        for row in self._rows():
            if self._commit and (note := f"{self.dataset} at commit {self._commit}") not in report.notes:
                report.notes.append(note)
            key, where = f"{self.dataset}:{self._row}", f"row {self._row}"
            self._row += 1
            if self._row <= continues_at:
                continue
            if self.text_field not in row:
                columns = ", ".join(map(str, list(row)[:20]))
                raise DataError(
                    f"{self.dataset}: no column {self.text_field!r}; choose one with --text-field: {columns}"
                )
            if self._row == 1:
                note_unread(entry, row.keys() - {self.text_field})
            document = accept(row[self.text_field], key, where, entry)
            if document is not None:
                report.consumed += len(document.text)
                self._consumed = report.consumed
                yield document

    def position(self) -> JsonObject:
        """The position after the last row."""
        state = {"mark": self._mark, "row": self._row, "consumed": self._consumed}
        return state | ({"commit": self._commit} if self._commit else {})

    def _rows(self) -> Iterator[JsonObject]:
        """The rows from the mark on, which advances with them. Raises `StreamError`, also if the first row is not the mark's: a
        version of `datasets` may continue elsewhere than at the state that it is given."""
        datasets = require("datasets", "a Hugging Face dataset")
        datasets.config.STREAMING_READ_MAX_RETRIES = max(datasets.config.STREAMING_READ_MAX_RETRIES, READ_RETRIES)
        with quiet_hub():
            try:
                self._commit = self._commit or commit_of(self.dataset, self.revision)
                # Never trust_remote_code: a dataset is data, not a program.
                stream = datasets.load_dataset(
                    self.dataset, self.config, split=self.split, streaming=True, revision=self._commit or self.revision
                )
                if self._mark["stream"] is not None:
                    stream.load_state_dict(self._mark["stream"])
                rows, state, number = iter(stream), self._mark["stream"], self._mark["row"]
                while (row := next(rows, None)) is not None:
                    if number == self._mark["row"] and self._mark["next"] not in (None, _digest(row)):
                        raise DataError(
                            f"--hf {self.dataset}: datasets {datasets.__version__} lost the stream's position at row {number}; "
                            "install another version and run the command again, which starts from the beginning"
                        )
                    if state is not None or number == 0:
                        self._mark = {"stream": state, "row": number, "next": _digest(row)}
                    yield row
                    number += 1
                    state = stream.state_dict() if number % MARK_ROWS == 0 else None
            except DataError:
                raise
            except Exception as error:
                # The library and its transports raise dozens of exception types.
                line = str(error).strip().splitlines()[0] if str(error).strip() else "no message"
                fix = "check the name, --hf-split, --hf-revision and the network"
                if self._row:
                    line, fix = f"{line} (after row {self._row})", "run the command again when the network is back"
                raise StreamError(f"--hf {self.dataset}: {type(error).__name__}: {line}; {fix}") from error

    def fingerprint(self) -> list[object]:
        return [self.dataset, self.config, self.split, *([self.revision] if self.revision else [])]


def _digest(row: object) -> str:
    return hashlib.sha256(repr(row).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def commit_of(dataset: str, revision: str | None) -> str | None:
    """The commit that `revision` of a dataset names (None: its main branch); None if the Hub must not be contacted
    (HF_HUB_OFFLINE). Raises the Hub client's errors."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import OfflineModeIsEnabled

    try:
        return HfApi().dataset_info(dataset, revision=revision).sha
    except OfflineModeIsEnabled:
        return None


@contextmanager
def quiet_hub() -> Iterator[None]:
    """Silences the Hub client's five log lines per retry. The error after the last retry is still raised."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
