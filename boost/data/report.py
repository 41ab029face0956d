"""Report of `boost prepare`: what it read, changed or skipped, and why, for each file, for each source and in total."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

from boost.text import JsonObject, printable

# Enough examples to find the problem, without keeping a string for each of ten million bad lines.
MAX_EXAMPLES = 5


@dataclass
class Skip:
    """Number of skips for one reason, and the first occurrences."""

    count: int = 0
    examples: list[str] = field(default_factory=list)

    def add(self, where: str, count: int = 1) -> None:
        self.count += count
        if where and len(self.examples) < MAX_EXAMPLES:
            self.examples.append(where)


@dataclass
class FileReport:
    """One input file (or one streamed dataset). `bytes` counts UTF-8 bytes of the text read; `tokens` includes eos."""

    name: str
    documents: int = 0
    bytes: int = 0
    tokens: int = 0
    skipped: dict[str, Skip] = field(default_factory=dict)
    notes: dict[str, Skip] = field(default_factory=dict)
    """Notes on text that was not read exactly as stored, such as normalized line breaks."""

    def __post_init__(self) -> None:
        self.name = printable(self.name)

    def take(self, n_bytes: int) -> None:
        """Counts one document as read."""
        self.documents += 1
        self.bytes += n_bytes

    def skip(self, reason: str, where: str = "", documents: int = 1) -> None:
        """Counts a document, a line or all documents in a file as skipped; `where` is the position in this file."""
        self.skipped.setdefault(printable(reason), Skip()).add(printable(where), documents)

    def note(self, what: str, where: str = "") -> None:
        """Counts one document or file to which the note `what` applies, such as normalized line breaks."""
        self.notes.setdefault(printable(what), Skip()).add(printable(where))

    def restore(self, saved: JsonObject) -> None:
        """Inverse of `asdict`: restores the counts, skips and notes."""
        self.documents, self.bytes, self.tokens = (int(saved[key]) for key in ("documents", "bytes", "tokens"))
        for what in ("skipped", "notes"):
            reasons = {reason: Skip(skip["count"], list(skip["examples"])) for reason, skip in saved[what].items()}
            setattr(self, what, reasons)


@dataclass
class SourceReport:
    """One argument on the command line: a folder, a file, the standard library or a Hugging Face dataset."""

    name: str
    files: list[FileReport] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.name = printable(self.name)

    def file(self, name: str) -> FileReport:
        """Adds an entry for one file."""
        self.files.append(FileReport(name))
        return self.files[-1]

    def restore(self, saved: list[JsonObject]) -> None:
        """Restores the entries of all files (`FileReport.restore`), adding entries for files that have none yet."""
        for missing in saved[len(self.files) :]:
            self.file(missing["name"])
        for entry, numbers in zip(self.files, saved, strict=True):
            entry.restore(numbers)

    def as_dict(self) -> dict[str, object]:
        """Totals over this source's files; `files` counts those with at least one document."""
        return {
            "name": self.name,
            "files": sum(entry.documents > 0 for entry in self.files),
            **{key: sum(getattr(entry, key) for entry in self.files) for key in ("documents", "bytes", "tokens")},
            "skipped": _as_dicts(merge_skips((entry.name, entry.skipped) for entry in self.files)),
            "notes": _as_dicts(merge_skips((entry.name, entry.notes) for entry in self.files)),
        }


@dataclass
class PrepareReport:
    """Report on one pass over the sources. `consumed` counts input bytes read so far, for a progress bar."""

    sources: list[SourceReport] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    consumed: int = 0

    def source(self, name: str) -> SourceReport:
        """Adds an entry for one source."""
        self.sources.append(SourceReport(name))
        return self.sources[-1]

    def summary(self) -> dict[str, object]:
        """Totals per source, small enough for `store.json`."""
        return {"sources": [source.as_dict() for source in self.sources], "notes": self.notes}

    def details(self) -> dict[str, object]:
        """Every file by name, for `report.json`."""
        return {source.name: [asdict(entry) for entry in source.files] for source in self.sources}

    def skipped_in_words(self) -> str:
        """Text for an error message: `3 skipped: 2 empty (a.txt), 1 binary (holds a NUL byte) (b.dat: byte 9)`."""
        skips = merge_skips((entry.name, entry.skipped) for source in self.sources for entry in source.files)
        if not skips:
            return "no input was found"
        reasons = ", ".join(
            f"{skip.count} {reason}" + (f" ({skip.examples[0]})" if skip.examples else "")
            for reason, skip in skips.items()
        )
        return f"{sum(skip.count for skip in skips.values())} skipped: {reasons}"


def merge_skips(files: Iterable[tuple[str, dict[str, Skip]]]) -> dict[str, Skip]:
    """The skips (or notes) for many files by reason, with examples prefixed by their file names."""
    merged: dict[str, Skip] = {}
    for name, skips in files:
        for reason, skip in skips.items():
            total = merged.setdefault(reason, Skip())
            examples = [f"{name}: {where}" for where in skip.examples] or [name]
            total.add(examples[0], skip.count)
            for example in examples[1:]:
                total.add(example, 0)
    return merged


def _as_dicts(skips: dict[str, Skip]) -> dict[str, object]:
    return {reason: asdict(skip) for reason, skip in skips.items()}
