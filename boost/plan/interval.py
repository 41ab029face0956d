"""How far a measured step may be from the predicted one: the interval that holds eight of ten, and the probability that it fits.

`intervals.toml` has the spread of measured over predicted seconds of the public record (`boost.plan.record`), of the half of its
rows that constants are fitted to, and of steps measured beside a calibrated profile. `boost plan validate --record` makes these
numbers again, and says how many rows of the other half they hold.
"""

import functools
import math
from pathlib import Path
from typing import Literal

from boost.config.schema import ParallelConfig, Positive, Section
from boost.config.text import read_toml
from boost.plan.hardware import Hardware

FILE = Path(__file__).parent / "intervals.toml"

Kind = Literal["replicas", "sharded", "blocking", "calibrated", "unmeasured"]

MEASURED = ("a100", "h100")
"""Architectures that the record has rows of."""

SHARE = 0.8
"""Fraction of steps that an interval holds."""

MEMORY_ERROR = 0.05
"""Standard deviation of the log of measured over predicted peak memory. An estimate: bytes that tensors need are exact (`boost plan
validate`), what a GPU's allocator adds in fragments and NCCL in buffers is not."""


class Spread(Section):
    """Of measured over predicted seconds."""

    low: Positive
    """A tenth of steps took less."""
    high: Positive
    """A tenth took more."""
    rows: int
    """Steps that it comes from."""


@functools.cache
def spreads() -> dict[str, Spread]:
    """By `Kind`."""
    return {name: Spread.model_validate(tree) for name, tree in read_toml(FILE).items()}


def kind_of(tp: int, pp: int, cp: int = 1, blocking: bool = False) -> Kind:
    """Which steps of the record a mesh is like. `blocking`: whether sends between stages block."""
    if pp > 1 and blocking:
        return "blocking"
    return "replicas" if tp * pp * cp == 1 else "sharded"


def interval(seconds: float, parallel: ParallelConfig, hardware: Hardware) -> tuple[float, float]:
    """(low, high) seconds of a predicted step: SHARE of measured ones are between."""
    kind: Kind = kind_of(parallel.tp, parallel.pp, parallel.cp, hardware.pipeline.blocking > 0)
    if not hardware.architecture:
        kind = "calibrated"
    elif hardware.architecture not in MEASURED:
        kind = "unmeasured"
    spread = spreads()[kind]
    return seconds * spread.low, seconds * spread.high


def fit_probability(peak: int, usable: int) -> float:
    """Probability that a predicted peak of `peak` bytes fits in `usable` bytes (MEMORY_ERROR)."""
    return 0.5 * math.erfc(math.log(peak / usable) / (MEMORY_ERROR * math.sqrt(2)))
