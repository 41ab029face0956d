"""Which documents are held out.

The hash of a document's key puts it into `train` or `heldout`, so a document's split depends on neither the order nor
the other documents. Text files are one document each (a split by file); elsewhere a line or a row is a document.
A corpus of one document is cut by position instead, its last part held out.
"""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass

from boost.data.readers import Document
from boost.errors import DataError


@dataclass(frozen=True)
class SplitRule:
    """Which split a document belongs to. `moved` names the one document whose hash would leave a split empty."""

    heldout: float
    moved: tuple[str, str] | None = None
    single: bool = False

    def parts(self, document: Document) -> list[tuple[str, str]]:
        """The document's text under the name of its split; two parts when it is the whole corpus."""
        if self.single:
            cut_at = split_position(document.text, self.heldout)
            return [("train", document.text[:cut_at]), ("heldout", document.text[cut_at:])]
        if self.moved and self.moved[0] == document.key:
            return [(self.moved[1], document.text)]
        return [("heldout" if key_hash(document.key) < self.heldout else "train", document.text)]


def key_hash(key: str) -> float:
    """A number in [0, 1) that depends on the key only, the same on every machine."""
    digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:6], "big") / (1 << 48)


def choose_split(documents: Iterable[Document], heldout: float) -> SplitRule | None:
    """Reads until both splits have a document, or else to the end, where the nearest document is moved over.

    None when there is no document at all. Raises `DataError` for a single one too short to cut.
    """
    found: dict[str, str] = {}
    lowest, highest, count, only = (2.0, ""), (-1.0, ""), 0, ""
    for document in documents:
        hashed = key_hash(document.key)
        lowest, highest = min(lowest, (hashed, document.key)), max(highest, (hashed, document.key))
        found["heldout" if hashed < heldout else "train"] = document.key
        count, only = count + 1, document.text if not count else ""
        if len(found) == 2:
            return SplitRule(heldout)
    if not count:
        return None
    if count == 1:
        if len(only) < 2:
            raise DataError("the corpus is a single character, too short to hold a part out; give more text")
        return SplitRule(heldout, single=True)
    return SplitRule(heldout, moved=(lowest[1], "heldout") if "train" in found else (highest[1], "train"))


def split_position(text: str, heldout: float) -> int:
    """Where to split one text (of 2 characters or more) into two non-empty parts: the best position near 1 - heldout.

    Best is after a newline, then after other white space, then anywhere; near is half of the held-out length away.
    """
    middle = min(max(round(len(text) * (1 - heldout)), 1), len(text) - 1)
    reach = int(len(text) * min(heldout, 1 - heldout) / 2)
    low, high = max(middle - reach, 1), min(middle + reach, len(text) - 1)
    for pattern in (r"\n", r"\s"):
        places = [match.end() + low - 1 for match in re.finditer(pattern, text[low - 1 : high])]
        if places:
            return min(places, key=lambda place: abs(place - middle))
    return middle
