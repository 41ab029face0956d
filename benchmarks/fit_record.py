"""Fits the numbers of the software stacks (benchmarks/experiments/stacks.toml), and the straggling of the hardware profiles, to the
fitting half of the public record.

    python -m benchmarks.fit_record

Prints each number as a multiple of its current value (1.00: no change needed), and the error before and after. Minimizes the mean
absolute error of log(predicted / measured seconds) by coordinate descent. Deterministic; takes about two minutes.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.experiments.record import (
    FITTED,
    Row,
    Stack,
    StackPredictor,
    configurations,
    halves,
    hardware_of,
    record,
    stack_name,
    stack_of,
)
from boost.plan.hardware import AttentionSpeed, GemmSpeed, Hardware

STEPS = (0.1, 0.03, 0.01)
FIELDS = {"host": "host_us", "straggling": "straggling"}


@dataclass(frozen=True)
class Fit:
    """A set of multipliers to fit, and the rows to fit them on."""

    title: str
    of: Callable[[Row], bool]
    names: tuple[str, ...]


def changed(hardware: Hardware, stack: Stack, values: dict[str, float]) -> StackPredictor:
    """A predictor with the speeds of the hardware and the stack scaled by these multipliers."""

    def attention(speed: AttentionSpeed) -> AttentionSpeed:
        factor = values.get("attention", 1.0)
        return speed.model_copy(update={"forward": speed.forward * factor, "backward": speed.backward * factor})

    def gemm(speed: GemmSpeed) -> GemmSpeed:
        return speed.model_copy(update={"fraction": speed.fraction * values.get("gemm", 1.0)})

    speeds = hardware.speeds.model_copy(
        update={
            "gemm": {dtype: gemm(speed) for dtype, speed in hardware.speeds.gemm.items()},
            "attention": {dtype: tuple(map(attention, table)) for dtype, table in hardware.speeds.attention.items()},
        }
    )
    factors = {name: getattr(hardware, field) * values.get(name, 1.0) for name, field in FIELDS.items()}
    hardware = hardware.model_copy(update={"speeds": speeds} | {FIELDS[name]: value for name, value in factors.items()})
    return StackPredictor(hardware, stack.model_copy(update={"blocking": stack.blocking * values.get("blocking", 1.0)}))


def error(rows: Sequence[Row], values: dict[str, float]) -> float:
    """Mean |log(predicted / measured)|."""
    known: dict[tuple[str, str], StackPredictor] = {}
    errors = []
    for row in rows:
        key = row.gpu, stack_name(row)
        if key not in known:
            known[key] = changed(hardware_of(row), stack_of(row), values)
        seconds = min(known[key].predict(config).seconds for config in configurations(row))
        errors.append(abs(math.log(seconds / row.seconds)))
    return statistics.fmean(errors)


def descend(rows: Sequence[Row], names: Sequence[str]) -> tuple[dict[str, float], float]:
    """Returns (best multipliers, their error)."""
    best = dict.fromkeys(names, 1.0)
    least = error(rows, best)
    for step in STEPS:
        improved = True
        while improved:
            improved = False
            for name in names:
                for factor in (1 + step, 1 / (1 + step)):
                    tried = best | {name: best[name] * factor}
                    if (found := error(rows, tried)) < least - 1e-5:
                        best, least, improved = tried, found, True
    return best, least


FITS = (
    Fit("llm-foundry, A100", lambda row: row.source == "llm-foundry" and row.gpu.startswith("a100"), ("gemm", "attention")),
    Fit("llm-foundry, H100", lambda row: row.source == "llm-foundry" and row.gpu.startswith("h100"), ("gemm", "attention")),
    Fit("stragglers", lambda row: row.source == "llm-foundry" and row.gpus > 8, ("straggling",)),
    Fit("fused, H100", lambda row: stack_name(row) == "fused", ("gemm",)),
    Fit("nanotron", lambda row: row.source == "nanotron", ("blocking", "host")),
)  # fmt: skip


def main() -> None:
    rows = record().rows
    fitted = [row for row, half in zip(rows, halves(rows), strict=True) if half == FITTED]
    for fit in FITS:
        members = [row for row in fitted if fit.of(row)]
        before = error(members, {})
        values, after = descend(members, fit.names)
        words = ", ".join(f"{name} x {value:.3f}" for name, value in values.items())
        print(f"{fit.title:<20}{len(members):>4} rows   error {before:.3f} -> {after:.3f}   {words}", flush=True)


if __name__ == "__main__":
    main()
