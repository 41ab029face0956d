"""Checks that every pass over the input yields the same documents: a file can change and keep its size and time."""

import hashlib
from collections.abc import Iterable, Iterator

from boost.data.readers import AGAIN, Document
from boost.errors import DataError

MAX_DIGESTS = 100_000
"""Maximum number of files after which a digest is recorded, about 100 bytes each; later files are covered by the last one."""


class ConsistentPasses:
    """Compares a digest of all documents so far with that of earlier passes, where files and passes end.

    `count` documents of this pass have the digest `digest`: each document's digest includes that of the one before, so that a
    pass can continue from a saved position.
    """

    def __init__(self) -> None:
        self.count, self.digest = 0, b""
        self._digests: dict[int, bytes] = {}
        """Digest of the first n documents, by n: at the ends of files, and where earlier passes ended."""
        self._expected: dict[int, bytes] = {}

    def begin(self) -> None:
        """Begins a pass. The previous one may have ended anywhere."""
        if self.count:
            self._digests[self.count] = self.digest
        self.count, self.digest = 0, b""
        self._expected = self._digests.copy()

    def expect(self, count: int, digest: str) -> None:
        """Requires this digest (hex) after `count` documents, as an interrupted run found it."""
        self._expected[count] = bytes.fromhex(digest)

    def jump(self, count: int, digest: str) -> None:
        """Continues after `count` documents with this digest (hex), without reading them."""
        self.count, self.digest = count, bytes.fromhex(digest)

    def check(self, documents: Iterable[Document]) -> Iterator[Document]:
        """Yields the documents. Raises `DataError` where they differ from an earlier pass."""
        entry = None
        for document in documents:
            if entry is not document.entry and self.count and len(self._digests) < MAX_DIGESTS:
                self._digests.setdefault(self.count, self.digest)
            entry = document.entry
            digest = hashlib.sha256(self.digest)
            for text in (document.key, document.text):
                data = text.encode("utf-8", "surrogatepass")
                digest.update(len(data).to_bytes(8, "little") + data)
            self.count, self.digest = self.count + 1, digest.digest()
            if self._expected.get(self.count, self.digest) != self.digest:
                raise DataError(
                    f"the input changed between two passes over it, in {document.entry.name} or before; {AGAIN}"
                )
            yield document

    def end(self) -> None:
        """The input has no more documents. Raises `DataError` if an earlier pass found more."""
        if self.count < max(self._expected, default=0):
            raise DataError(f"the input became shorter between two passes over it; {AGAIN}")
