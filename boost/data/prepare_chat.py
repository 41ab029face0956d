"""Conversations to a token store with a loss mask: `boost prepare --chat`."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from boost.data.chat import ChatTemplate, Encoded, Rejected
from boost.data.documents import Document
from boost.data.report import PrepareReport
from boost.data.sources import Source
from boost.data.spans import boundaries_of
from boost.data.split import choose_split
from boost.data.store import MASKED_FORMAT, OFFSET_DTYPE, SPLITS, token_dtype
from boost.data.tokenizer import find_eos, load_tokenizer, vocabulary_size
from boost.data.writer import TokenWriter, store_meta
from boost.errors import DataError

if TYPE_CHECKING:
    from boost.data.prepare import PrepareOptions, Progress


class MaskedWriter(TokenWriter):
    """A `TokenWriter` that also writes which tokens count in the loss."""

    def __init__(self, folder: Path, dtype: "np.dtype[Any]", eos: int) -> None:
        super().__init__(folder, dtype, eos)
        for sizes in self.sizes.values():
            sizes.update(targets=0, target_spans=0, target_bytes=0)
        for name in SPLITS:
            self._open[f"{name}.targets"] = self._create(f"{name}.targets")

    def append_conversation(self, split: str, document: Encoded, text_of: Callable[[Any], str]) -> None:
        """Appends one document. The end-of-document token counts if it belongs to the conversation and counts there, or if the
        token before it counts. `text_of`: text of tokens, to count its bytes."""
        ids, mask = _without_eos(document, self.eos, text_of)
        sizes = self.sizes[split]
        boundaries = boundaries_of(mask) + sizes["tokens"]
        self._write(f"{split}.targets", boundaries.astype(OFFSET_DTYPE).tobytes())
        sizes["targets"] += int(mask.sum())
        sizes["target_spans"] += len(boundaries) // 2
        sizes["target_bytes"] += len(text_of(ids[mask[:-1]]).encode("utf-8"))
        self.append(split, ids, len(document.text.encode("utf-8")), end=True)


def _without_eos(document: Encoded, eos: int, text_of: Callable[[Any], str]) -> tuple[Any, Any]:
    """(ids [n], mask [n + 1]): without an end-of-document token at the end, which the store adds, and without white space after
    one. The last entry of the mask is for that token."""
    ids, mask = document.ids, document.mask
    ends = np.flatnonzero(ids == eos)
    if len(ends) and (end := int(ends[-1])) and not text_of(ids[end + 1 :]).strip():
        return ids[:end], mask[: end + 1].copy()
    return ids, np.append(mask, mask[-1:])


def build_chat(
    options: "PrepareOptions",
    sources: Sequence[Source],
    fingerprint: str,
    folder: Path,
    progress: "Progress",
) -> None:
    """Reads the sources and fills the folder of a new store. Raises `DataError`."""
    template, tokenizer = ChatTemplate(Path(options.tokenizer)), load_tokenizer(options.tokenizer)
    eos = find_eos(tokenizer, options.eos, options.tokenizer)
    size = vocabulary_size(tokenizer)
    pass_over = _Conversations(sources, template, options.max_documents, progress)
    rule = choose_split(pass_over.documents("scanning the input"), options.heldout)
    if rule is None or rule.single:
        found = "the only conversation" if rule else "no conversation"
        raise DataError(
            f"{found} can be used, and a store needs one to train on and one to hold out "
            f"({pass_over.report.skipped_in_words()}); add conversations"
        )
    with MaskedWriter(folder, token_dtype(size), eos[1]) as writer:
        template.straddling = 0
        for document, encoded in pass_over.encoded("encoding"):
            ((split, _),) = rule.parts(document)
            for each in encoded:
                writer.append_conversation(split, each, template.text_of)
                document.entry.tokens += len(each.ids)
        report = pass_over.report
        report.notes += _notes(template, writer)
        meta = store_meta(MASKED_FORMAT, tokenizer, eos, fingerprint, options, report) | {
            "chat": {"template": template.template, "tokenizer": template.special_tokens},
        }
        writer.finish(tokenizer.to_str(), meta, report.details())


def _notes(template: ChatTemplate, writer: MaskedWriter) -> list[str]:
    counted = sum(sizes["targets"] for sizes in writer.sizes.values())
    total = sum(sizes["tokens"] for sizes in writer.sizes.values())
    how = "{% generation %} markers of the chat template" if template.has_markers else "prompts of the chat template"
    notes = [f"{counted:,} of {total:,} tokens count in the loss, by the {how}"]
    if template.straddling:
        notes.append(
            f"{template.straddling:,} answers begin within a token: the template should end its prompt with a token of its own"
        )
    return notes


class _Conversations:
    """Reads and formats the conversations any number of times, each time with a fresh report and a phase of the display."""

    def __init__(
        self, sources: Sequence[Source], template: ChatTemplate, limit: int | None, progress: "Progress"
    ) -> None:
        self._sources, self._template, self._limit, self._progress = sources, template, limit, progress
        self.report = PrepareReport()

    def encoded(self, phase: str) -> Iterator[tuple[Document, list[Encoded]]]:
        """Yields (document, its encoded conversations), without those that the template rejects."""
        self.report = report = PrepareReport()
        sizes = [source.size or 0 for source in self._sources]
        self._progress.phase(phase, sum(sizes))
        taken, before = 0, 0
        for source, size in zip(self._sources, sizes, strict=True):
            for document in source.documents(report):
                try:
                    encoded = self._template.encode(json.loads(document.text))
                except Rejected as problem:
                    document.entry.documents -= 1
                    document.entry.skip(str(problem), document.key.rpartition(":")[2])
                    continue
                taken += 1
                yield document, encoded
                self._progress.update(min(before + document.entry.bytes, before + size), taken)
                if taken == self._limit:
                    report.notes.append(f"only the first {taken} conversations were read (--max-documents)")
                    return
            before += size

    def documents(self, phase: str) -> Iterator[Document]:
        """Yields the documents of `encoded`."""
        for document, _ in self.encoded(phase):
            yield document
