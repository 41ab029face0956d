"""Conversations to a token store with a loss mask: `boost prepare --chat`."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from boost.data.chat import ChatTemplate, Encoded, Rejected
from boost.data.readers import Document
from boost.data.reading import Reading
from boost.data.split import choose_split
from boost.data.store import OFFSET_DTYPE, SPLITS, boundaries_of, token_dtype
from boost.data.tokenizer import find_eos, load_tokenizer, vocabulary_size
from boost.data.writer import TokenWriter, store_meta
from boost.errors import DataError

if TYPE_CHECKING:
    from boost.data.prepare import PrepareOptions


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
        ids, mask = document.ids, np.append(document.mask, document.mask[-1:])
        ends = np.flatnonzero(ids == self.eos)
        # The store adds the end-of-document token, so the template's own goes, with white space that it adds after it.
        if len(ends) and (end := int(ends[-1])) and not text_of(ids[end + 1 :]).strip():
            ids, mask = ids[:end], mask[: end + 1]
        sizes = self.sizes[split]
        boundaries = boundaries_of(mask) + sizes["tokens"]
        self._write(f"{split}.targets", boundaries.astype(OFFSET_DTYPE).tobytes())
        sizes["targets"] += int(mask.sum())
        sizes["target_spans"] += len(boundaries) // 2
        sizes["target_bytes"] += len(text_of(ids[mask[:-1]]).encode("utf-8"))
        self.append(split, ids, len(document.text.encode("utf-8")), end=True)


def build_chat(options: "PrepareOptions", reading: Reading, fingerprint: str, folder: Path) -> None:
    """Reads the sources and fills the folder of a new store. Raises `DataError`."""
    template, tokenizer = ChatTemplate(Path(options.tokenizer)), load_tokenizer(options.tokenizer)
    eos = find_eos(tokenizer, options.eos, options.tokenizer)
    size = vocabulary_size(tokenizer)

    def encoded(phase: str) -> Iterator[tuple[Document, list[Encoded]]]:
        """The conversations that the template accepts."""
        for document in reading.documents(phase):
            try:
                yield document, template.encode(json.loads(document.text))
            except Rejected as problem:
                document.entry.documents -= 1
                document.entry.skip(str(problem), document.key.rpartition(":")[2])

    rule = choose_split((document.key for document, _ in encoded("scanning the input")), options.heldout)
    if rule is None or rule.single:
        usable = "the only conversation" if rule else "no conversation"
        raise DataError(
            f"{usable} can be used, and a store needs one to train on and one to hold out "
            f"({reading.report.skipped_in_words()}); add conversations"
        )
    with MaskedWriter(folder, token_dtype(size), eos[1]) as writer:
        template.straddling = 0
        for document, conversations in encoded("encoding"):
            ((split, _),) = rule.parts(document)
            for conversation in conversations:
                writer.append_conversation(split, conversation, template.text_of)
                document.entry.tokens += len(conversation.ids)
        report = reading.report
        counted = sum(sizes["targets"] for sizes in writer.sizes.values())
        total = sum(sizes["tokens"] for sizes in writer.sizes.values())
        how = "{% generation %} markers" if template.has_markers else "prompts"
        report.notes.append(f"{counted:,} of {total:,} tokens count in the loss, by the {how} of the chat template")
        if template.straddling:
            report.notes.append(
                f"{template.straddling:,} answers begin within a token: the template should end its prompt with a token of its own"
            )
        if reading.taken == options.max_documents:
            report.notes.append(f"only the first {reading.taken} conversations were read (--max-documents)")
        meta = store_meta(tokenizer, eos, fingerprint, options, report) | {
            "chat": {"template": template.template, "tokenizer": template.special_tokens},
        }
        writer.finish(tokenizer.to_str(), meta, report.details())
