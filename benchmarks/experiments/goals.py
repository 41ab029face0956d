"""The project's speed and memory goals, in order, and how results decide whether they are met."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from boost.errors import MeasurementError
from boost.measure.document import Goal

Status = Literal["met", "not met", "not measured"]


@dataclass(frozen=True)
class Target:
    """A goal."""

    what: str
    """Name, matched against the `Goal` of an experiment."""
    figure: str
    where: str
    """Devices and dtypes to measure it on."""
    experiment: str
    """The experiment that measures it."""
    gpu: bool = False
    """Whether it needs a GPU."""
    arithmetic: bool = False
    """Whether the goal is about the performance model itself; then a prediction decides it."""


_MODEL = "wherever it can be measured"

_WIRE = "CPU and gloo, fp32, TP 2, d 1024"
_MANY = "CPU and gloo, fp32, TP 2, same tokens per step relative to d"
_SEVEN = "7B, TP 4, from the collective table"

TARGETS = (
    Target(
        "share-matched wire: best low-rank layout against published vanilla",
        ">= 2.3x a training step, baseline without overlap (the paper: 2.27x)",
        _WIRE,
        "wire",
    ),
    Target("share-matched wire: best low-rank layout against strong vanilla", ">= 1.8x a training step", _WIRE, "wire"),
    Target(
        "slow wire: best low-rank layout against strong vanilla",
        ">= 3x a training step, baseline overlapped too",
        _WIRE,
        "wire",
    ),
    Target(
        "share-matched wire: best low-rank layout against megatron-sp",
        ">= 1.95x a training step (the paper: 1.91x)",
        _WIRE,
        "wire",
    ),
    Target(
        "slow wire: best low-rank layout against megatron-sp",
        ">= 2x a training step, baseline overlapped too",
        _WIRE,
        "wire",
    ),
    Target(
        "communication of TP hidden",
        ">= 0.65 in every layout, where it is 40 to 60% of the step",
        _WIRE,
        "wire",
    ),
    Target("btp-sp against btp, time", ">= 1.0x", "CPU and gloo", "steps"),
    Target("slow wire: btp-sp against btp", ">= 1.5x a training step", _WIRE, "wire"),
    Target(
        "many tokens, share-matched wire: btp-cp against btp-sp",
        "never slower where a step has >= 131k tokens at d 4096",
        _MANY,
        "wire",
    ),
    Target(
        "many tokens, slow wire: btp-cp against btp-sp",
        ">= 1.25x where a step has >= 131k tokens at d 4096",
        _MANY,
        "wire",
    ),
    Target("btp-sp against btp, bytes", "0.50x", "counted", "steps"),
    Target(
        "btp-cp against btp-sp, bytes",
        "0.60x (TP 4), 0.33x (TP 8), 0.40x (TP 4, 8 kv heads) at 262k tokens per step",
        _SEVEN,
        "modeled",
    ),
    Target("bytes of element-wise work, a block", "btp <= 5 GB, btp-sp <= 2.7 GB", _SEVEN, "modeled"),
    Target("latents kept without recomputation", "once", _SEVEN, "modeled"),
    Target(
        "low-rank at TP=1 against dense, tokens/s",
        ">= 0.90 x the ratio of FLOPs at d 1024, 0.85 x at d 512",
        "CPU; H200",
        "single",
    ),
    Target("layout machinery at TP=1 against plain PyTorch modules", "<= 1.00x the time", "CPU; H200", "single"),
    Target(
        "TP=2 against the ideal",
        ">= 0.93 of the ideal: half the TP 1 compute plus communication time",
        "CPU and gloo",
        "ideal",
    ),
    Target(
        "low-rank MFU on an H100, predicted",
        "7B, TP 4: btp >= 36%, btp-sp >= 40%",
        "arithmetic",
        "modeled",
        arithmetic=True,
    ),
    Target("low-rank MFU, 1B, bf16, one GPU", ">= 50% of the measured GEMM ceiling", "H200", "single", gpu=True),
    Target(
        "low-rank checkpointing, memory saved per added time",
        ">= 1.7x that of full-block recomputation, interval above 1.4",
        "CPU; H200",
        "recompute",
    ),
    Target(
        "online norm against sync, predicted",
        "never slower, at every published size",
        "arithmetic",
        "modeled",
        arithmetic=True,
    ),
    Target("online norm against sync, measured", "never slower", "CPU and gloo", "norms"),
    Target("performance model: time", "within 10% of every measured step", _MODEL, "validation"),
    Target("performance model: bytes", "equal to the counted bytes", _MODEL, "validation"),
    Target("performance model: memory", "within 5% at the peak", _MODEL, "validation"),
    Target(
        "performance model: the public record",
        "MAPE <= 10% on the held-out half",
        "arithmetic",
        "record",
        arithmetic=True,
    ),
    Target(
        "performance model: its interval",
        "covers 80% of the held-out half",
        "arithmetic",
        "record",
        arithmetic=True,
    ),
    Target(
        "performance model: published ratios",
        "every ratio within 15% for the paper's five sizes",
        "arithmetic",
        "validation",
        arithmetic=True,
    ),
)
"""All goals, in report order."""


def target_of(what: str) -> Target:
    """Finds the target of an experiment's goal: one name must be a prefix of the other.

    Ignores case, punctuation and spaces. Raises MeasurementError unless exactly one target matches.
    """
    named = _plain(what)
    exact = [target for target in TARGETS if _plain(target.what) == named]
    close = [target for target in TARGETS if _begins(named, _plain(target.what)) or _begins(_plain(target.what), named)]
    found = exact or close
    if len(found) != 1:
        which = "is none of the project's goals" if not found else "could be " + " or ".join(t.what for t in found)
        raise MeasurementError(f"goal '{what}' {which}; the names are in benchmarks/experiments/goals.py")
    return found[0]


def counts(target: Target, goal: Goal) -> bool:
    """Whether a result decides a target: it has a verdict, and is not a prediction where a measurement is required."""
    return goal.met is not None and (target.arithmetic or goal.kind != "modeled")


def status(target: Target, goals: Iterable[Goal]) -> Status:
    """'met' if all measurements meet the target, 'not met' if any does not. Predictions do not count."""
    verdicts = [goal.met for goal in goals if counts(target, goal)]
    if not verdicts:
        return "not measured"
    return "met" if all(verdicts) else "not met"


def missing(target: Target) -> str:
    """Explains why a target has no result."""
    needs = " (needs a CUDA GPU)" if target.gpu else ""
    return f"No result of `python -m benchmarks {target.experiment}`{needs}."


def _plain(text: str) -> str:
    return " ".join(re.findall(r"[a-z0-9./]+", text.lower()))


def _begins(shorter: str, longer: str) -> bool:
    """Whether `longer` starts with all words of `shorter`."""
    return bool(shorter) and longer.split()[: len(shorter.split())] == shorter.split()
