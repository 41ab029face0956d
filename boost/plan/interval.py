"""Uncertainty of predictions: the 80% interval of step time, and the probability that a configuration fits in memory.

The spread of measured over predicted seconds comes from half of the published speeds that docs/record.md lists, and from steps
measured on a machine with a calibrated profile. `python -m benchmarks record` recomputes it, and counts how many rows of the other
half lie inside.
"""

import math
from typing import NamedTuple

from boost.config.schema import ParallelConfig
from boost.plan.hardware import Hardware

MEASURED = ("a100", "h100")
"""Architectures with published speeds."""

SHARE = 0.8
"""Fraction of measured steps that lie inside an interval."""

MEMORY_ERROR = 0.05
"""Standard deviation of log(measured / predicted peak memory), an estimate. Tensor bytes are exact (`python -m benchmarks
validation`); allocator fragmentation and NCCL buffers are not."""


class Spread(NamedTuple):
    """Spread of measured over predicted seconds."""

    low: float
    """10th percentile."""
    high: float
    """90th percentile."""
    rows: int
    """Number of steps it is based on."""


SPREADS = {
    "replicas": Spread(0.952, 1.067, 109),
    "sharded": Spread(0.921, 1.376, 15),
    # Steps measured on the machine on which a profile was calibrated (benchmarks/results/validation.json).
    "calibrated": Spread(0.918, 1.148, 19),
    # GPUs without published speeds (estimate).
    "unmeasured": Spread(0.75, 1.5, 0),
}


def kind_of(tp: int, pp: int, cp: int = 1) -> str:
    """The key of SPREADS for a mesh on a GPU with published speeds."""
    return "replicas" if tp * pp * cp == 1 else "sharded"


def interval(seconds: float, parallel: ParallelConfig, hardware: Hardware) -> tuple[float, float]:
    """(low, high) seconds of a predicted step: a fraction SHARE of measured steps lie between them."""
    kind = kind_of(parallel.tp, parallel.pp, parallel.cp)
    if not hardware.architecture:
        kind = "calibrated"
    elif hardware.architecture not in MEASURED:
        kind = "unmeasured"
    spread = SPREADS[kind]
    return seconds * spread.low, seconds * spread.high


def fit_probability(peak: int, usable: int) -> float:
    """Probability that a predicted peak of `peak` bytes fits in `usable` bytes, given MEMORY_ERROR."""
    return 0.5 * math.erfc(math.log(peak / usable) / (MEMORY_ERROR * math.sqrt(2)))
