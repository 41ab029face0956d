"""Arithmetic of error messages."""

from collections.abc import Callable


def nearest(value: int, largest: int, legal: Callable[[int], bool]) -> int:
    """The legal integer from 1 to `largest` that is closest to `value`, the larger of two at one distance.

    Some value up to `largest` must be legal; fields are bounded, so the search is short.
    """
    for distance in range(max(value, largest)):
        for candidate in (value + distance, value - distance):
            if 1 <= candidate <= largest and legal(candidate):
                return candidate
    return 1
