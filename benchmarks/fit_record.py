"""Fits the planner's software-stack efficiencies to the fitting half of the public record: the numbers in boost/plan/stacks.toml,
and the FlashAttention-1 and straggler numbers in the hardware profiles.

    python -m benchmarks.fit_record

Prints each number as a multiple of its current value (1.00: no change needed), and the error before and after. Minimizes the mean
absolute error of log(predicted / measured seconds) by coordinate descent. Deterministic; takes about two minutes.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from boost.measure.record import FITTED, halves
from boost.plan.hardware import Hardware
from boost.plan.record import Row, configurations, hardware_of, record, stack_of
from boost.plan.stack import Reached, with_reached
from boost.plan.timing import Predictor

STEPS = (0.1, 0.03, 0.01)


@dataclass(frozen=True)
class Fit:
    """A set of multipliers to fit, and the rows to fit them on."""

    title: str
    of: Callable[[Row], bool]
    names: tuple[str, ...]


def changed(hardware: Hardware, values: dict[str, float]) -> Hardware:
    """The hardware with its stack efficiencies scaled by these multipliers."""
    reached = Reached(gemm=values.get("gemm", 1.0), attention=values.get("attention", 1.0))
    pipeline = hardware.pipeline.model_copy(
        update={"blocking": hardware.pipeline.blocking * values.get("blocking", 1.0)}
    )
    changes = {
        "speeds": with_reached(hardware.speeds, reached),
        "pipeline": pipeline,
        "host_us": hardware.host_us * values.get("host", 1.0),
        "straggling": hardware.straggling * values.get("straggling", 1.0),
    }
    return hardware.model_copy(update=changes)


def error(rows: Sequence[Row], values: dict[str, float]) -> float:
    """Mean |log(predicted / measured)|."""
    known: dict[tuple[str, str], Predictor] = {}
    found = []
    for row in rows:
        stack = stack_of(row)
        key = row.gpu, stack
        if key not in known:
            known[key] = Predictor(changed(hardware_of(row), values))
        seconds = min(known[key].predict(config).seconds for config in configurations(row))
        found.append(abs(math.log(seconds / row.seconds)))
    return statistics.fmean(found)


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
    Fit("fused, H100", lambda row: stack_of(row) == "fused", ("gemm",)),
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
