"""Reads the sources of a store any number of times, and continues where an interrupted run stopped.

A position is a list of marks, one per source that has been started. A stream continues at its own position. Files must have
unchanged sizes and times; they are reread from the start of their source up to the mark, which is fast compared with tokenizing.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from boost.data.hub import HubSource
from boost.data.options import Progress
from boost.data.readers import Document
from boost.data.report import PrepareReport
from boost.data.sources import AGAIN, Source
from boost.errors import DataError
from boost.text import JsonObject


@dataclass
class _Begun:
    """A source that this pass has begun to read."""

    source: Source
    section: int
    """Its entry in the report."""
    documents: int = 0
    """Number of its documents so far."""


class Reading:
    """The documents from all sources: those for the held-out split first, then at most `limit` documents from the other sources."""

    def __init__(
        self, sources: Sequence[Source], heldout: Sequence[Source], limit: int | None, progress: Progress
    ) -> None:
        sizes = [source.size for source in (*heldout, *sources)]
        self._total = None if None in sizes else sum(size for size in sizes if size is not None)
        self._sources, self._heldout, self._limit, self._progress = sources, heldout, limit, progress
        self.separate = bool(heldout)
        """Whether held-out documents come from separate sources."""
        self.report = PrepareReport()
        self.taken = 0
        """Number of documents in this pass, excluding those from sources for the held-out split."""
        self._begun: list[_Begun] = []

    def documents(
        self, phase: str, is_full: Callable[[str], bool] = lambda split: False, saved: Sequence[JsonObject] = ()
    ) -> Iterator[Document]:
        """Makes one pass, with a new report. `is_full(split)`: whether the split needs no more documents. `saved`: the `position`
        to continue from."""
        self.report = PrepareReport()
        self._progress.phase(phase, self._total)
        self.taken, self._begun = 0, []
        left = list(saved)

        def is_over(split: str) -> bool:
            return is_full(split) or (split == "train" and self.taken == self._limit)

        for split, sources in (("heldout", self._heldout), ("train", self._sources)):
            for source in sources:
                mark = left.pop(0) if left else None
                if mark is None and is_over(split):
                    break
                for document in self._read(source, split, mark, bool(left), is_over):
                    yield document
                    self._progress.update(self.report.consumed, self.taken)
                    if is_over(split):
                        break

    def _read(
        self, source: Source, split: str, mark: JsonObject | None, finished: bool, is_over: Callable[[str], bool]
    ) -> Iterator[Document]:
        """The documents from one source after its mark; none if the mark is at its end (`finished`)."""
        self._begun.append(begun := _Begun(source, len(self.report.sources)))
        again = 0 if mark is None else int(mark["documents"])
        documents: Iterator[Document]
        if mark is None or not isinstance(source, HubSource):
            documents = source.documents(self.report)
        else:
            begun.documents = again
            self.taken += again if split == "train" else 0
            if finished or is_over(split):
                self.report.source(source.name).restore(mark["entries"])
                return
            documents, again = source.documents(self.report, mark["stream"], mark["entries"]), 0
        for document in documents:
            begun.documents += 1
            self.taken += split == "train"
            if begun.documents > again:
                yield replace(document, split=split) if self.separate else document
                continue
            self._progress.update(self.report.consumed, self.taken)
            if mark is not None and begun.documents == again:
                self.report.sources[begun.section].restore(mark["entries"])
                if finished or is_over(split):
                    return
        if begun.documents < again:
            raise DataError(f"{source.name} has fewer documents than before the interruption; {AGAIN}")

    def position(self) -> list[JsonObject]:
        """The position of this pass, as JSON values. Includes token counts, so all documents so far must have been written."""
        return [
            {
                "documents": begun.documents,
                "entries": [
                    asdict(entry) for section in self.report.sources[begun.section :][:1] for entry in section.files
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
