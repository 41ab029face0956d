"""Runs a comparison on many random inputs, each drawn from its seed."""

import os
import random
from collections.abc import Callable
from functools import partial

import pytest

Seeds = Callable[[], range]


def drawn(few: int, many: int) -> pytest.MarkDecorator:
    """Parametrizes a test by its `seeds`: the same few on each commit, and many others each night."""
    by_night = pytest.param(partial(nightly_seeds, many), marks=pytest.mark.nightly, id="many")
    return pytest.mark.parametrize("seeds", [pytest.param(partial(range, few), id="few"), by_night])


def nightly_seeds(count: int) -> range:
    """Other seeds each night, or from BORDER_SEED on."""
    first = int(os.environ.get("BORDER_SEED", random.SystemRandom().randrange(1 << 30)))
    print(f"BORDER_SEED={first}")
    return range(first, first + count)


def run(compare: Callable[[int], str], seeds: Seeds, at_least: float) -> None:
    """`compare` returns "equal", or one line with why the input was refused; `at_least`: the share that must be equal."""
    outcomes = []
    for seed in seeds():
        try:
            outcomes.append(compare(seed))
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    assert not [line for line in outcomes if "\n" in line]
    assert outcomes.count("equal") > at_least * len(outcomes), outcomes
