"""The project's goals for speed and memory, in order, and how findings of experiments decide them."""

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
    """Name, shared with the `Goal` of an experiment."""
    figure: str
    where: str
    """Devices and dtypes to measure it with."""
    experiment: str
    """The experiment that measures it."""
    gpu: bool = False
    """Whether it needs a GPU."""
    arithmetic: bool = False
    """Whether it is about the performance model itself, so that a prediction decides it."""


_MODEL = "everywhere it can be measured"

_WIRE = "CPU and gloo, fp32, TP 2, d 1024"
_MANY = "CPU and gloo, fp32, TP 2, as many tokens a step per d"
_SEVEN = "7B, TP 4, by the tables"

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
        ">= 0.65 where it is 40 to 60 % of the step, every layout",
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
        "0.60x (TP 4), 0.33x (TP 8), 0.40x (TP 4, 8 kv heads) at 262k tokens a step",
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
        ">= 0.93 of half the TP 1 compute plus its communication time",
        "CPU and gloo",
        "ideal",
    ),
    Target(
        "low-rank MFU on an H100, predicted",
        "7B, TP 4: btp >= 36 %, btp-sp >= 40 %",
        "arithmetic",
        "modeled",
        arithmetic=True,
    ),
    Target("low-rank MFU, 1B, bf16, one GPU", ">= 50 % of the measured GEMM ceiling", "H200", "single", gpu=True),
    Target(
        "low-rank checkpointing, memory saved per added time",
        ">= 1.7x that of full-block recomputation, its interval above 1.4",
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
    Target("performance model: time", "within 10 % of every measured step", _MODEL, "validation"),
    Target("performance model: bytes", "equal to those counted", _MODEL, "validation"),
    Target("performance model: memory", "within 5 % at the peak", _MODEL, "validation"),
    Target(
        "performance model: the public record",
        "MAPE <= 10 % of the half that nothing was fitted to",
        "arithmetic",
        "record",
        arithmetic=True,
    ),
    Target(
        "performance model: its interval",
        "holds 80 % of the half that nothing was fitted to",
        "arithmetic",
        "record",
        arithmetic=True,
    ),
    Target(
        "performance model: published ratios",
        "every ratio of the paper's five sizes within 15 %",
        "arithmetic",
        "validation",
        arithmetic=True,
    ),
)
"""The Performance table, in its order."""


def target_of(what: str) -> Target:
    """The target of an experiment's goal: one name must be a prefix of the other.

    Case, punctuation and spaces are ignored. Raises MeasurementError if there is none, or more than one.
    """
    named = _plain(what)
    exact = [target for target in TARGETS if _plain(target.what) == named]
    close = [target for target in TARGETS if _begins(named, _plain(target.what)) or _begins(_plain(target.what), named)]
    found = exact or close
    if len(found) != 1:
        which = "is none of the project's figures" if not found else "could be " + " or ".join(t.what for t in found)
        raise MeasurementError(f"goal '{what}' {which}; the names are in benchmarks/experiments/goals.py")
    return found[0]


def counts(target: Target, goal: Goal) -> bool:
    """Whether a finding decides a target: it has a verdict, and is not a prediction of something to be measured."""
    return goal.met is not None and (target.arithmetic or goal.kind != "modeled")


def status(target: Target, goals: Iterable[Goal]) -> Status:
    """Met if all measurements meet the target, not met if one does not. Predictions do not count."""
    verdicts = [goal.met for goal in goals if counts(target, goal)]
    if not verdicts:
        return "not measured"
    return "met" if all(verdicts) else "not met"


def missing(target: Target) -> str:
    """Why there is no finding for a target."""
    needs = ", which needs a CUDA GPU" if target.gpu else ""
    return f"No result of `python -m benchmarks {target.experiment}`{needs}, here."


def _plain(text: str) -> str:
    return " ".join(re.findall(r"[a-z0-9./]+", text.lower()))


def _begins(shorter: str, longer: str) -> bool:
    """Whether the first words of one text are all of another."""
    return bool(shorter) and longer.split()[: len(shorter.split())] == shorter.split()
