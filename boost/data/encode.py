"""Tokenizes text in bounded memory: splits long texts into pieces and encodes them in batches."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from boost.data.report import FileReport
from boost.data.store import SPLITS
from boost.data.tokenizer import PlainText
from boost.data.writer import TokenWriter
from boost.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

Piece = tuple[FileReport, str, str, bool]
"""A piece of a document: its file, its split, the text, and whether the document ends with it."""
# Maximum number of characters in a piece of text that is encoded: an encoding takes about 100 bytes per character.
PIECE_CHARS = 1 << 16
# Approximate number of characters in a batch of pieces, which the tokenizer distributes over the CPU cores.
BATCH_CHARS = 1 << 20
# The newline stands before what is looked at behind it, because `re` skips to a literal.
_LAST_CLEAN_LINE_END = re.compile(r".*\n(?<=\S\n)(?=\S)", re.DOTALL)


def split_text(text: str, limit: int = PIECE_CHARS) -> Iterator[str]:
    """Splits a long text into pieces of at most `limit` characters whose concatenation is the text.

    Splits after a newline between two visible characters, where a byte-level BPE with the GPT-2 pattern never merges, so the tokens
    are the same as for the whole text. Without such a newline, splits at any whitespace or even inside a word. In that
    case, and with tokenizers that mark the start of a text (such as SentencePiece's "▁"), a token may differ at each split.
    """
    start = 0
    while len(text) - start > limit:
        window = text[start : start + limit + 1]
        end = _last_split(window, limit)
        yield window[:end]
        start += end
    yield text[start:] if start else text


def _last_split(window: str, limit: int) -> int:
    if match := _LAST_CLEAN_LINE_END.match(window):
        return match.end()
    for position in range(limit, max(limit - 4096, 0), -1):
        if window[position].isspace() and not window[position - 1].isspace():
            return position
    return limit


class Encoder:
    """Encodes texts in batches and passes the tokens to the writer in order, until a split has `limits[split]` tokens."""

    def __init__(
        self,
        tokenizer: "Tokenizer",
        eos: int,
        writer: TokenWriter,
        on_batch: Callable[[int], None],
        limits: Mapping[str, int],
    ) -> None:
        """`on_batch` is called after every batch with the number of characters left in the current text."""
        self._tokenizer, self._eos, self._writer = tokenizer, eos, writer
        self._on_batch, self._limits = on_batch, limits
        self._batch = list[Piece]()
        self._chars = 0
        self._thread = ThreadPoolExecutor(1, "encode")
        self._sent: tuple[list[Piece], Future[Sequence[Encoding]]] | None = None
        """The batch that is being encoded."""
        self._starts, self._drops = True, False
        """Whether the next piece starts a document; whether the current document is left out."""
        self._plain = PlainText(tokenizer, eos)
        self.counts = self._plain.counts

    def add(self, entry: FileReport, split: str, text: str) -> None:
        """Queues one document; its tokens are counted in `entry`."""
        left = len(text)
        for piece in split_text(text, PIECE_CHARS):
            left -= len(piece)
            self._batch.append((entry, split, piece, left == 0))
            self._chars += len(piece)
            if self._chars >= BATCH_CHARS:
                self._send()
                self._on_batch(left)

    def is_full(self, split: str, more: int = 0) -> bool:
        """Whether the split has reached its maximum number of tokens, with `more` tokens."""
        return split in self._limits and self._writer.sizes[split]["tokens"] + more >= self._limits[split]

    def flush(self) -> None:
        """Encodes and writes everything that was added."""
        self._send()
        self._send()

    def _send(self) -> None:
        """Begins to encode the queue, and meanwhile writes the batch before it: one core converts and writes tokens, and reads the
        next documents, while the tokenizer uses the others."""
        before, self._sent = self._sent, None
        if self._batch:
            self._sent = self._batch, self._thread.submit(self._encoded, self._batch)
            self._batch, self._chars = [], 0
        if before:
            self._write(*before)

    def _encoded(self, batch: "list[Piece]") -> "Sequence[Encoding]":
        texts = [piece for _, _, piece, _ in batch]
        try:
            return self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except BaseException as error:  # the Rust side raises a plain Exception, or panics with one of its own
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            files = ", ".join(dict.fromkeys(entry.name for entry, *_ in batch[:3]))
            raise DataError(
                f"the tokenizer cannot encode the text of {files}: {error}; choose another tokenizer"
            ) from None

    def _write(self, batch: "list[Piece]", encodings: "Future[Sequence[Encoding]]") -> None:
        """Leaves out documents that begin after their split is full."""
        tokens: dict[str, list[int]] = {name: [] for name in SPLITS}
        ends: dict[str, list[int]] = {name: [] for name in SPLITS}
        sizes = dict.fromkeys(SPLITS, 0)
        for (entry, split, piece, end), encoding in zip(batch, encodings.result(), strict=True):
            if self._starts:
                self._drops = self.is_full(split, len(tokens[split]))
            n_bytes = len(piece.encode("utf-8"))
            if self._drops:
                entry.documents -= self._starts
                entry.bytes -= n_bytes
            else:
                ids = self._plain.ids(encoding.ids, piece)
                tokens[split] += ids
                if end:
                    tokens[split].append(self._eos)
                    ends[split].append(len(tokens[split]))
                sizes[split] += n_bytes
                entry.tokens += len(ids) + end
            self._starts = end
        for name in SPLITS:
            self._writer.append(name, tokens[name], sizes[name], ends[name])
