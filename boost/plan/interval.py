"""Uncertainty of predictions: the 80% interval of step time, and the probability that a configuration fits in memory.

`intervals.toml` lists the spread of measured over predicted seconds. It comes from the fitted half of the public record
(`boost.plan.record`), and from steps measured on a machine with a calibrated profile. `boost plan validate --record` recomputes
these numbers and reports how many held-out rows lie inside the intervals.
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
"""Architectures with rows in the public record."""

SHARE = 0.8
"""Fraction of measured steps that lie inside an interval."""

MEMORY_ERROR = 0.05
"""Standard deviation of log(measured / predicted peak memory), an estimate. Tensor bytes are exact (`boost plan validate`);
allocator fragmentation and NCCL buffers are not."""


class Spread(Section):
    """Spread of measured over predicted seconds."""

    low: Positive
    """10th percentile."""
    high: Positive
    """90th percentile."""
    rows: int
    """Number of steps it is based on."""


@functools.cache
def spreads() -> dict[str, Spread]:
    """Returns the spread of each `Kind`."""
    return {name: Spread.model_validate(tree) for name, tree in read_toml(FILE).items()}


def kind_of(tp: int, pp: int, cp: int = 1, blocking: bool = False) -> Kind:
    """Returns the kind of steps in the record that a mesh resembles. `blocking`: whether sends between stages block."""
    if pp > 1 and blocking:
        return "blocking"
    return "replicas" if tp * pp * cp == 1 else "sharded"


def interval(seconds: float, parallel: ParallelConfig, hardware: Hardware) -> tuple[float, float]:
    """(low, high) seconds of a predicted step: a fraction SHARE of measured steps lie between them."""
    kind: Kind = kind_of(parallel.tp, parallel.pp, parallel.cp, hardware.pipeline.blocking > 0)
    if not hardware.architecture:
        kind = "calibrated"
    elif hardware.architecture not in MEASURED:
        kind = "unmeasured"
    spread = spreads()[kind]
    return seconds * spread.low, seconds * spread.high


def fit_probability(peak: int, usable: int) -> float:
    """Probability that a predicted peak of `peak` bytes fits in `usable` bytes, given MEMORY_ERROR."""
    return 0.5 * math.erfc(math.log(peak / usable) / (MEMORY_ERROR * math.sqrt(2)))
