"""Checks that every pass over the input yields the same documents: a file can change and keep its size and time."""

import hashlib
from collections.abc import Iterable, Iterator

from boost.data.documents import Document
from boost.data.readers import AGAIN
from boost.errors import DataError

MAX_DIGESTS = 100_000
"""Maximum number of files after which a digest is recorded, about 100 bytes each; later files are covered by the last one."""


class ConsistentPasses:
    """Compares a digest of the documents of each source so far with that of earlier passes, where files and passes end.

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
