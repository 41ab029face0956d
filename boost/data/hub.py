"""Datasets from the Hugging Face Hub, streamed without a copy on disk. Never executes dataset code.

`datasets` retries a read that fails for about two minutes. Beyond that, the stream is opened again at the row after the last one,
for up to an hour without a new row.
"""

import logging
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from boost.data.conversations import document_of
from boost.data.readers import Document, accept, missing_package
from boost.data.report import FileReport, PrepareReport
from boost.errors import DataError

log = logging.getLogger("boost")

RECONNECT_S = 3600.0
"""Seconds without a new row after which a broken stream is given up."""
LONGEST_WAIT_S = 60.0
"""Maximum seconds between two attempts; the first wait is about a second, and each is twice the one before."""
_TRANSPORTS = ("aiohttp", "httpx", "httpcore", "requests", "urllib3")


class StreamError(DataError):
    """A stream broke and could not be opened again. What was prepared until then is kept."""

    is_temporary = True


class HubSource:
    """One split of `NAME` or `NAME:CONFIG`, streamed by `datasets`. Keys are row numbers.

    `revision`: a branch, tag or commit of the dataset's repository (None: its main branch). It is resolved to a commit before the
    first row; that commit is in the report, and a stream that continues reads the same one.
    """

    size: int | None = None

    def __init__(
        self,
        spec: str,
        split: str = "train",
        text_field: str = "text",
        revision: str | None = None,
        chat: bool = False,
    ) -> None:
        """`chat`: the rows are conversations."""
        self.dataset, _, config = spec.partition(":")
        self.config = config or None
        self.split, self.text_field, self.revision, self.chat = split, text_field, revision, chat
        self._commit: str | None = None
        self.name = f"Hugging Face {spec} ({split})"
        self._stream: Any = None
        self._row = self._consumed = 0
        if Path(self.dataset).exists():
            raise DataError(f"--hf {self.dataset}: this is a local path; pass it as INPUT, without --hf")
        if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", self.dataset) or config.startswith("/"):
            raise DataError(f"--hf {spec}: not a dataset name; expected OWNER/NAME or OWNER/NAME:CONFIG")

    def documents(
        self, report: PrepareReport, position: dict[str, Any] | None = None, entries: Sequence[dict[str, Any]] = ()
    ) -> Iterator[Document]:
        """Yields the rows with text. `position`: continues after it, with the numbers of the one of `entries` in the report."""
        entry = report.source(self.name).file(self.dataset)
        self._row, self._consumed = 0, report.consumed
        if position is not None:
            entry.restore(entries[0])
            self._row, report.consumed = position["row"], position["consumed"]
            self._commit = position.get("commit")
        for row in self._rows(position["stream"] if position else None):
            if self._commit and (note := f"{self.dataset} at commit {self._commit}") not in report.notes:
                report.notes.append(note)
            number, self._row = self._row, self._row + 1
            document = self._document(number, row, entry)
            if document is not None:
                report.consumed += len(document.text)
                self._consumed = report.consumed
                yield document

    def _document(self, number: int, row: dict[str, Any], entry: FileReport) -> Document | None:
        key, where = f"{self.dataset}:{number}", f"row {number}"
        if self.chat:
            return document_of(row, key, where, entry)
        if self.text_field not in row:
            columns = ", ".join(map(str, list(row)[:20]))
            raise DataError(f"{self.dataset}: no column {self.text_field!r}; choose one with --text-field: {columns}")
        return accept(row[self.text_field], key, where, entry)

    def position(self) -> dict[str, Any]:
        """The position after the last row."""
        state = {"stream": self._stream.state_dict(), "row": self._row, "consumed": self._consumed}
        return state | ({"commit": self._commit} if self._commit else {})

    def _rows(self, state: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
        with quiet_hub():
            began = False
            try:
                rows = self._open(state)
                while True:
                    try:
                        row = next(rows, None)
                    except Exception as error:
                        if not began or not is_transient(error):
                            raise
                        rows, row = self._reconnect(error)
                    if row is None:
                        return
                    began = True
                    yield row
            except (GeneratorExit, DataError):
                raise
            except Exception as error:
                # The library and its transports raise dozens of exception types.
                line = str(error).strip().splitlines()[0] if str(error).strip() else "no message"
                what = f"--hf {self.dataset}: {type(error).__name__}: {line}"
                if began or state is not None:
                    raise StreamError(
                        f"{what} (after row {self._row}); run it again when the network is back"
                    ) from error
                kind = StreamError if is_transient(error) else DataError
                raise kind(f"{what}; check the name, --hf-split, --hf-revision and the network") from error

    def _open(self, state: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
        try:
            import datasets
        except ImportError as error:
            raise missing_package("a Hugging Face dataset", "datasets") from error
        self._commit = self._commit or commit_of(self.dataset, self.revision)
        # Never trust_remote_code: a dataset is data, not a program.
        self._stream = datasets.load_dataset(
            self.dataset, self.config, split=self.split, streaming=True, revision=self._commit or self.revision
        )
        if state is not None:
            self._stream.load_state_dict(state)
        return iter(self._stream)

    def _reconnect(self, error: Exception) -> tuple[Iterator[dict[str, Any]], dict[str, Any] | None]:
        """Opens the stream again where it broke, and reads one row (None: the end)."""
        try:
            import tenacity
        except ImportError as missing:
            raise missing_package("a stream that breaks", "tenacity") from missing
        state = self._stream.state_dict()
        log.warning(
            "%s: the stream broke after row %d (%s); reconnecting", self.dataset, self._row, type(error).__name__
        )

        def attempt() -> tuple[Iterator[dict[str, Any]], dict[str, Any] | None]:
            rows = self._open(state)
            return rows, next(rows, None)

        retrying = tenacity.Retrying(
            stop=tenacity.stop_after_delay(RECONNECT_S),
            wait=tenacity.wait_exponential_jitter(initial=1, max=LONGEST_WAIT_S),
            retry=tenacity.retry_if_exception(is_transient),
            reraise=True,
        )
        return retrying(attempt)

    def fingerprint(self) -> list[Any]:
        return [self.dataset, self.config, self.split, *([self.revision] if self.revision else [])]


def commit_of(dataset: str, revision: str | None) -> str | None:
    """The commit of a dataset's branch, tag or commit (None: its main branch); None if the Hub may not be asked
    (HF_HUB_OFFLINE). Raises errors of the Hub's client."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import OfflineModeIsEnabled

    try:
        return HfApi().dataset_info(dataset, revision=revision).sha
    except OfflineModeIsEnabled:
        return None


def is_transient(error: BaseException) -> bool:
    """Whether the same request may succeed later: the connection failed, or the server is busy."""
    status = getattr(error, "status", None) or getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        return int(status) in (408, 425, 429) or int(status) >= 500
    if isinstance(error, FileNotFoundError):  # also of fsspec, if asking for the size of a file failed
        return error.__cause__ is not None and is_transient(error.__cause__)
    if isinstance(error, PermissionError):
        return False
    # A compressed file ends too early if the connection is closed in the middle of it.
    return isinstance(error, OSError | EOFError | zlib.error) or type(error).__module__.partition(".")[0] in _TRANSPORTS


@contextmanager
def quiet_hub() -> Iterator[None]:
    """Silences the five log lines per retry of the hub client. The error after the last retry is still raised."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
