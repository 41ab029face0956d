"""Train/heldout split: which documents are held out.

The hash of a document's key assigns it to `train` or `heldout`, independently of the order and of the other documents.
A text file is one document (so the split is by file); in JSON and tabular files, each line, element or row is a document.
A corpus with a single document is split by position instead, and its last part is held out.
"""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass

from boost.data.readers import Document
from boost.errors import DataError


@dataclass(frozen=True)
class SplitRule:
    """Assigns documents to splits. `moved`: (key, split) for a document that is reassigned so that neither split is empty."""

    heldout: float
    moved: tuple[str, str] | None = None
    single: bool = False

    def parts(self, document: Document) -> list[tuple[str, str]]:
        """Returns (split name, text) pairs: two if the document is the whole corpus, else one. Keeps a split set by the source.

        Raises `DataError` if the whole corpus is too short to split.
        """
        if document.split is not None:
            return [(document.split, document.text)]
        if self.single:
            if len(document.text) < 2:
                raise DataError("the corpus is a single character, too short for a held-out split; add text")
            position = split_position(document.text, self.heldout)
            return [("train", document.text[:position]), ("heldout", document.text[position:])]
        name = "heldout" if key_hash(document.key) < self.heldout else "train"
        if self.moved and self.moved[0] == document.key:
            name = self.moved[1]
        return [(name, document.text)]


def key_hash(key: str) -> float:
    """A number in [0, 1) that depends only on the key and is the same on every machine."""
    digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:6], "big") / (1 << 48)


def choose_split(keys: Iterable[str], heldout: float) -> SplitRule | None:
    """Reads document keys until both splits have one. If a split stays empty, the document closest to the threshold is moved to
    it. Returns None if there are no documents."""
    splits: set[str] = set()
    lowest, highest, count = (2.0, ""), (-1.0, ""), 0
    for key in keys:
        hashed = key_hash(key)
        lowest, highest, count = min(lowest, (hashed, key)), max(highest, (hashed, key)), count + 1
        splits.add("heldout" if hashed < heldout else "train")
        if len(splits) == 2:
            return SplitRule(heldout)
    if not count:
        return None
    if count == 1:
        return SplitRule(heldout, single=True)
    return SplitRule(heldout, moved=(lowest[1], "heldout") if "train" in splits else (highest[1], "train"))


def split_position(text: str, heldout: float) -> int:
    """Where to split a text of at least 2 characters into two non-empty parts, near the fraction 1 - heldout.

    Prefers a position after a newline, then after other whitespace, within half of the held-out length.
    """
    target = min(max(round(len(text) * (1 - heldout)), 1), len(text) - 1)
    reach = int(len(text) * min(heldout, 1 - heldout) / 2)
    low, high = max(target - reach, 1), min(target + reach, len(text) - 1)
    for pattern in (r"\n", r"\s"):
        positions = [match.end() + low - 1 for match in re.finditer(pattern, text[low - 1 : high])]
        if positions:
            return min(positions, key=lambda position: abs(position - target))
    return target
