"""Reads the sources of a store any number of times, and continues where an interrupted run stopped.

A position is a list of marks, one per source that has been begun. A stream continues at its own position. Files are read again from
the start of their source up to the mark, which is fast next to tokenizing, and must contain the documents that they contained.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from boost.data.hub import HubSource
from boost.data.readers import Document
from boost.data.report import PrepareReport
from boost.data.sources import AGAIN, Source
from boost.errors import DataError


class Progress:
    """Progress callbacks of `prepare`; this base class does nothing."""

    def phase(self, name: str, total: int | None) -> None:
        """A phase begins. `total`: input bytes that it will read; None if unknown."""

    def update(self, consumed: int, documents: int) -> None:
        """Input bytes and documents processed so far in this phase."""

    def close(self) -> None:
        """The last phase is done, or an error occurred."""


MAX_DIGESTS = 100_000
"""Maximum number of files after which a digest is recorded, about 100 bytes each; later files are covered by the last one."""


class ConsistentPasses:
    """Checks that every pass yields the same documents: a file can change and keep its size and time.

    Compares a digest of the documents of each source so far with that of earlier passes, where files and passes end.

    `count` documents of the current source have the digest `digest`. The digest of each document includes that of the one before,
    so that a pass can continue from a saved position.
    """

    def __init__(self) -> None:
        self.count, self.digest = 0, b""
        self._source = 0
        self._digests: dict[tuple[int, int], bytes] = {}
        """Digest of the first n documents of a source, by (source, n): at the ends of files, and where earlier passes ended."""
        self._expected: dict[tuple[int, int], bytes] = {}

    def begin(self) -> None:
        """Begins a pass. The previous one may have ended anywhere."""
        self._leave()
        self._source, self.count = -1, 0
        self._expected = self._digests.copy()

    def begin_source(self) -> None:
        """Begins the next source of this pass."""
        self._leave()
        self._source, self.count, self.digest = self._source + 1, 0, b""

    def _leave(self) -> None:
        if self.count:
            self._digests[self._source, self.count] = self.digest

    def expect(self, count: int, digest: str) -> None:
        """Requires this digest (hex) after `count` documents of this source, as an interrupted run found it."""
        self._expected[self._source, count] = bytes.fromhex(digest)

    def jump(self, count: int, digest: str) -> None:
        """Continues this source after `count` documents with this digest (hex), without reading them."""
        self.count, self.digest = count, bytes.fromhex(digest)

    def check(self, documents: Iterable[Document]) -> Iterator[Document]:
        """Yields documents of this source. Raises `DataError` where they differ from an earlier pass."""
        entry = None
        for document in documents:
            if entry is not document.entry and self.count and len(self._digests) < MAX_DIGESTS:
                self._digests.setdefault((self._source, self.count), self.digest)
            entry = document.entry
            digest = hashlib.sha256(self.digest)
            for text in (document.key, document.text):
                data = text.encode("utf-8", "surrogatepass")
                digest.update(len(data).to_bytes(8, "little") + data)
            self.count, self.digest = self.count + 1, digest.digest()
            if self._expected.get((self._source, self.count), self.digest) != self.digest:
                raise DataError(
                    f"the input changed between two passes over it, in {document.entry.name} or before; {AGAIN}"
                )
            yield document
        if self.count < max((count for source, count in self._expected if source == self._source), default=0):
            raise DataError(f"the input became shorter between two passes over it; {AGAIN}")


@dataclass
class _Begun:
    """A source that this pass has begun to read."""

    source: Source
    section: int
    """Its place in the report."""
    documents: int = 0
    digest: str = ""
    """The digest (hex) after its documents so far."""


class Reading:
    """The documents of all sources: those for the held-out split first, then the others, of which at most `limit`."""

    def __init__(
        self, sources: Sequence[Source], heldout: Sequence[Source], limit: int | None, progress: Progress
    ) -> None:
        sizes = [source.size for source in (*heldout, *sources)]
        self._total = None if None in sizes else sum(size for size in sizes if size is not None)
        self._sources, self._heldout, self._limit, self._progress = sources, heldout, limit, progress
        self.separate = bool(heldout)
        """Whether held-out documents come from sources of their own."""
        self.report = PrepareReport()
        self.taken = 0
        """Documents of this pass, without those of sources for the held-out split."""
        self._passes = ConsistentPasses()
        self._begun: list[_Begun] = []

    def documents(
        self, phase: str, is_full: Callable[[str], bool] = lambda split: False, saved: Sequence[dict[str, Any]] = ()
    ) -> Iterator[Document]:
        """One pass, with a fresh report. `is_full(split)`: the split needs no more documents. `saved`: continues at this
        `position`."""
        self.report = PrepareReport()
        self._progress.phase(phase, self._total)
        self._passes.begin()
        self.taken, self._begun = 0, []
        left = list(saved)
        for split, sources in (("heldout", self._heldout), ("train", self._sources)):
            for source in sources:
                mark = left.pop(0) if left else None
                if mark is None and (is_full(split) or self._is_over(split)):
                    break
                for document in self._read(source, split, mark, bool(left), is_full):
                    yield document
                    self._progress.update(self.report.consumed, self.taken)
                    if is_full(split) or self._is_over(split):
                        break

    def _is_over(self, split: str) -> bool:
        return split == "train" and self.taken == self._limit

    def _read(
        self, source: Source, split: str, mark: dict[str, Any] | None, finished: bool, is_full: Callable[[str], bool]
    ) -> Iterator[Document]:
        """The documents of one source after its mark; none if the mark is its end (`finished`)."""
        self._close_last()
        self._begun.append(begun := _Begun(source, len(self.report.sources)))
        self._passes.begin_source()
        again = 0 if mark is None else int(mark["documents"])
        documents: Iterator[Document]
        if mark is None or not isinstance(source, HubSource):
            documents = source.documents(self.report)
        else:
            self._passes.jump(again, mark["digest"])
            self.taken += again if split == "train" else 0
            if finished or is_full(split) or self._is_over(split):
                self.report.source(source.name).restore(mark["entries"])
                return
            documents, again = source.documents(self.report, mark["stream"], mark["entries"]), 0
        if mark is not None and again:
            self._passes.expect(again, mark["digest"])
        for number, document in enumerate(self._passes.check(documents), start=1):
            self.taken += split == "train"
            if number > again:
                yield replace(document, split=split) if self.separate else document
                continue
            self._progress.update(self.report.consumed, self.taken)
            if mark is not None and number == again:
                self.report.sources[begun.section].restore(mark["entries"])
                if finished or is_full(split) or self._is_over(split):
                    return

    def _close_last(self) -> None:
        if self._begun:
            last = self._begun[-1]
            last.documents, last.digest = self._passes.count, self._passes.digest.hex()

    def position(self) -> list[dict[str, Any]]:
        """Where this pass is, as JSON values. All documents so far must have been written: their tokens are part of it."""
        self._close_last()
        return [
            {
                "documents": begun.documents,
                "digest": begun.digest,
                "entries": [
                    entry.as_dict() for section in self.report.sources[begun.section :][:1] for entry in section.files
                ],
                "stream": begun.source.position()
                if begun is self._begun[-1] and isinstance(begun.source, HubSource)
                else None,
            }
            for begun in self._begun
        ]

    def update_progress(self, left: int) -> None:
        """Shows progress within a long document with about `left` bytes remaining."""
        self._progress.update(max(self.report.consumed - left, 0), self.taken)
