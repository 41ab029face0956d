"""Arithmetic for error messages."""

from collections.abc import Callable


def nearest(value: int, largest: int, legal: Callable[[int], bool]) -> int:
    """The legal integer from 1 to `largest` that is closest to `value`; of two at the same distance, the larger one.

    Some value up to `largest` must be legal. Fields are bounded, so the search is short.
    """
    for distance in range(max(value, largest)):
        for candidate in (value + distance, value - distance):
            if 1 <= candidate <= largest and legal(candidate):
                return candidate
    return 1
