"""Step time by part, for one micro-batch on one pipeline rank and for a whole step, and the uncertainty of predictions.

The spread of measured over predicted seconds comes from published speeds to which nothing was fitted (docs/results.md), and from
steps measured on a machine with a calibrated profile. `python -m benchmarks record` recomputes it.
"""

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

from boost.config.layouts import spec_of
from boost.config.schema import Config
from boost.plan.hardware import Hardware

GEMMS = "GEMMs"
ATTENTION_TIME = "attention"
OTHER = "element-wise"
RECOMPUTED = "recomputed"
HOST = "host"
TENSOR = "TP collectives"
CONTEXT = "CP collectives"
PIPELINE = "pipeline sends"
BUBBLE = "pipeline bubble"
REPLICAS = "DP collectives"
OPTIMIZER_TIME = "optimizer"
STRAGGLERS = "stragglers"
REST = "rest"

PARTS = {
    GEMMS: ("forward and backward pass, including the head", "in GEMMs"),
    ATTENTION_TIME: ("softmax(q k^T) v and its gradients", "in attention"),
    OTHER: ("norms, activations, rotary, residual, loss, casts", "in element-wise operations"),
    RECOMPUTED: ("operations recomputed in the backward pass", "of recomputation"),
    HOST: ("device waits for kernel launches", "waiting for the host"),
    TENSOR: ("exposed part of collectives over TP ranks", "in TP collectives"),
    CONTEXT: ("exposed part of attention's collectives over CP ranks", "in CP collectives"),
    PIPELINE: ("to and from neighboring stages", "of pipeline sends"),
    BUBBLE: ("stages wait for each other", "of pipeline bubble"),
    REPLICAS: ("exposed part of collectives for gradients and sharded weights", "in DP collectives"),
    OPTIMIZER_TIME: ("gradient norm, clipping, update", "in the optimizer"),
    STRAGGLERS: ("waiting for the slowest node", "waiting for stragglers"),
    REST: ("batches, step stats", "elsewhere"),
}
"""Parts of the step time, each with a description and a phrase that completes '12 ms more ...'."""

Seconds = defaultdict[str, float]
"""Seconds by name."""


@dataclass
class PassTime:
    """Seconds for one micro-batch on one pipeline process."""

    parts: Seconds = field(default_factory=lambda: defaultdict(float))
    forward: float = 0.0
    backward: float = 0.0
    """Backward pass, including recomputation."""
    calls: int = 0
    """Number of operations that the host launches."""
    hidden: tuple[float, float] = (0.0, 0.0)
    """(forward, backward) seconds of TP and CP collectives that overlap with computation."""
    waits: tuple[float, float] = (0.0, 0.0)
    """(forward, backward) seconds of waiting for collectives and sends; part of `forward` and `backward`."""

    @property
    def total(self) -> float:
        """Seconds for the forward and the backward pass."""
        return self.forward + self.backward

    def add(self, other: "PassTime", times: int) -> None:
        """Adds `times` sequential passes."""
        for part, seconds in other.parts.items():
            self.parts[part] += times * seconds
        self.forward += times * other.forward
        self.backward += times * other.backward
        self.calls += times * other.calls
        self.hidden = self.hidden[0] + times * other.hidden[0], self.hidden[1] + times * other.hidden[1]
        self.waits = self.waits[0] + times * other.waits[0], self.waits[1] + times * other.waits[1]

    def wait(self, seconds: float) -> None:
        """Adds time spent waiting for the host, a third of it in the forward pass."""
        self.parts[HOST] += seconds
        self.forward += seconds / 3
        self.backward += seconds * 2 / 3


@dataclass(frozen=True)
class StepTime:
    """A predicted optimizer step."""

    seconds: float
    parts: dict[str, float]
    """Seconds by PARTS on the slowest pipeline rank; they sum to `seconds`."""
    tokens: int
    """Tokens per global batch."""
    devices: int
    flops: float
    """Model FLOPs in a step over all devices, without recomputation."""
    peak_flops: float
    """Peak FLOP/s of one device."""
    hidden: float
    """Seconds of DP, TP and CP collectives that overlap with computation."""
    masked_flops: float = 0.0
    """FLOPs for the masked half of the attention scores. That half is not computed, but some definitions of MFU count it."""

    @property
    def tokens_per_second(self) -> float:
        """Throughput of all devices."""
        return self.tokens / self.seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization (MFU), as a fraction."""
        return self.flops / (self.seconds * self.devices * self.peak_flops)

    @property
    def mfu_of_all_scores(self) -> float:
        """MFU as PaLM and Megatron-LM count it, with the masked half of the attention scores."""
        return self.mfu * (1 + self.masked_flops / self.flops)


MEMORY_ERROR = 0.05
"""Estimated standard deviation of log(measured / predicted peak memory). Tensor bytes are nearly exact (`python -m benchmarks
validation`); allocator fragmentation and NCCL buffers are not modeled."""


class Spread(NamedTuple):
    """Spread of measured over predicted seconds."""

    low: float
    high: float
    rows: int
    """Number of steps it is based on."""
    inside: float
    """Fraction of runs that lie between them, for software to which nothing was fitted and that this spread does not know."""


SPREADS = {
    "replicas": Spread(0.836, 1.119, 34, 0.90),
    "sharded": Spread(0.88, 1.701, 32, 0.73),
    # Steps measured on the machine on which a profile was calibrated (benchmarks/results/validation.json).
    "calibrated": Spread(0.982, 1.234, 19, 0.8),
    # Configurations without published runs (estimate).
    "unmeasured": Spread(0.75, 1.5, 0, 0.0),
}

PUBLISHED_LAYOUTS, LONGEST_PUBLISHED = frozenset({"single", "vanilla", "btp", "megatron", "megatron-sp"}), 65_536
"""Layouts and the longest sequence of published runs."""


def kind_of(tp: int, pp: int) -> str:
    """The key in SPREADS for a mesh with published runs."""
    return "replicas" if tp * pp == 1 else "sharded"


def unpublished(config: Config, hardware: Hardware) -> str:
    """Names what no published run has, such as 'CP'; '' if there are runs of this kind, or the profile is calibrated."""
    parallel, seq_len = config.parallel, config.train.seq_len
    lacks = [
        *(["this GPU"] if not hardware.has_runs else []),
        *(["CP"] if parallel.cp > 1 else []),
        *([parallel.layout] if spec_of(parallel).name not in PUBLISHED_LAYOUTS else []),
        *([f"{seq_len:,} tokens per sequence"] if seq_len > LONGEST_PUBLISHED else []),
    ]
    return ", ".join(lacks) if hardware.architecture else ""


def spread_of(config: Config, hardware: Hardware) -> Spread:
    """The spread around a predicted step time."""
    kind = "unmeasured" if unpublished(config, hardware) else kind_of(config.parallel.tp, config.parallel.pp)
    return SPREADS[kind if hardware.architecture else "calibrated"]


def fit_probability(peak: int, usable: int) -> float:
    """Probability that a predicted peak of `peak` bytes fits in `usable` bytes, given MEMORY_ERROR."""
    return 0.5 * math.erfc(math.log(peak / usable) / (MEMORY_ERROR * math.sqrt(2)))
