"""Several token stores as one corpus: training reads sequences from each in proportion to its weight.

Which store a sequence comes from, and which of that store's sequences it is, follow from its position in the run alone
(`Proportions`). Each store keeps its own shuffled order and its own epochs (`boost.data.batches`).
"""

import hashlib
import heapq
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np

from boost.data.store import Split, TokenStore
from boost.errors import ConfigError, DataError
from boost.text import JsonObject


class Proportions:
    """An endless sequence of sources in proportion to their weights: item p is (source, number of earlier items of that source).

    The sources are the leaves of a Huffman tree. A node whose left child has share w of its weight gives round(m w) of its first m
    items to that child, so every item can be found from its position, without the earlier ones. Counts of random draws would
    deviate by the square root of the number of items; `grain.MapDataset.mix` rounds the weights and drifts away from them.

    With 2 sources, each source's count is within 1/2 item of its share after any number of items, and so within 1 item in any
    window; with 3, these bounds are 1 and 2 items. With more sources, the deviation stays below 1.7 items: it is at most half the
    sum of (leaf weight / node weight) over the path to the root, where node weights grow at least like Fibonacci numbers.
    """

    def __init__(self, weights: Sequence[Fraction]) -> None:
        """`weights`: positive."""
        scale = math.lcm(*(weight.denominator for weight in weights))
        # The second entry makes ties independent of how nodes compare.
        heap: list[tuple[int, int, _Node | int]] = [(int(w * scale), i, i) for i, w in enumerate(weights)]
        heapq.heapify(heap)
        while len(heap) > 1:
            (first, _, lighter), (second, at, heavier) = heapq.heappop(heap), heapq.heappop(heap)
            heapq.heappush(heap, (first + second, at, _Node(second, first + second, heavier, lighter)))
        self._root = heap[0][2]

    def __getitem__(self, position: int) -> tuple[int, int]:
        node, count = self._root, position
        while isinstance(node, _Node):
            before = node.of_left(count)
            if node.of_left(count + 1) > before:
                node, count = node.left, before
            else:
                node, count = node.right, count - before
        return node, count


@dataclass(frozen=True)
class _Node:
    weight: int
    """Weight of the left child."""
    total: int
    left: "_Node | int"
    right: "_Node | int"

    def of_left(self, count: int) -> int:
        """How many of the first `count` items go to the left child: count x weight / total, rounded."""
        return (2 * count * self.weight + self.total) // (2 * self.total)


@dataclass(frozen=True)
class MixedSplit:
    """The same split from several stores. `weights` add up to 1; `names` are unique."""

    parts: tuple[Split, ...]
    weights: tuple[Fraction, ...]
    names: tuple[str, ...]

    def unigram_entropy(self) -> float:
        """Entropy of the token frequencies in the mixture, in nats per token: the loss of the best unigram model."""
        parts = zip(self.parts, self.weights, strict=True)
        counts = [(part.token_counts(), float(weight)) for part, weight in parts]
        share = np.sum([of_store * (weight / of_store.sum()) for of_store, weight in counts], axis=0)
        share = share[share > 0]
        return float(-(share * np.log(share)).sum())


AnySplit = Split | MixedSplit


@dataclass(frozen=True)
class Corpus:
    """The token stores for a run and their weights, which add up to 1. The stores are ordered by weight, heaviest first, not as in
    the configuration, because the order of the data depends on the order of the stores."""

    stores: tuple[TokenStore, ...]
    weights: tuple[Fraction, ...]

    @classmethod
    def open(cls, sources: Mapping[str, float]) -> "Corpus":
        """Opens the stores at the keys of `sources`; the values are weights. Raises DataError if a store is missing or
        damaged, or if their tokenizers differ, and ConfigError if two keys name the same store."""
        paths = {Path(path).resolve(): path for path in sources}
        if len(paths) < len(sources):
            one = next(path for path in sources if path not in paths.values())
            twin = paths[Path(one).resolve()]
            raise ConfigError(f"data.mixture: '{one}' and '{twin}' are the same store; keep one of them")
        weights = {path: Fraction(repr(float(weight))) for path, weight in sources.items()}
        opened = [(TokenStore.open(Path(path)), weight / sum(weights.values())) for path, weight in weights.items()]
        opened.sort(key=lambda pair: (-pair[1], pair[0].content("train")))
        corpus = cls(tuple(store for store, _ in opened), tuple(weight for _, weight in opened))
        first, *others = corpus.stores
        for other in others:
            other.require_tokenizer(first.fingerprint, f"'{first.path}' in data.mixture")
            if other.eos != first.eos:
                raise DataError(
                    f"{other.path}: its documents end with token {other.eos}, but those in '{first.path}' end with {first.eos}; "
                    "prepare it with the same --eos"
                )
        return corpus

    @property
    def names(self) -> tuple[str, ...]:
        """A short, unique name for each store: the last part of its path, or the whole path if two last parts are equal."""
        last = [store.path.name for store in self.stores]
        return tuple(
            name if last.count(name) == 1 else str(store.path) for name, store in zip(last, self.stores, strict=True)
        )

    def split(self, name: str) -> AnySplit:
        """The split `train` or `heldout`."""
        parts = tuple(store.split(name) for store in self.stores)
        return parts[0] if len(parts) == 1 else MixedSplit(parts, self.weights, self.names)

    def identity(self) -> JsonObject:
        """What a checkpoint records about its data: `content`, the seed and the batch size determine the order of the data."""
        first = self.stores[0]
        common = {"tokenizer": first.fingerprint, "eos": first.eos}
        if len(self.stores) == 1:
            return {**common, "content": first.content("train")}
        sources = [
            {"content": store.content("train"), "weight": str(weight)}
            for store, weight in zip(self.stores, self.weights, strict=True)
        ]
        return {**common, "content": hashlib.sha256(json.dumps(sources).encode()).hexdigest(), "sources": sources}
