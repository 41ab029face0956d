"""Predictions to compare with a measured step: seconds, peak memory and bytes sent."""

from dataclasses import dataclass

from boost.config.schema import Config
from boost.plan.collectives import step_collectives
from boost.plan.hardware import Hardware
from boost.plan.peak import peak
from boost.plan.step_time import CONTEXT, REPLICAS, TENSOR, StepTime
from boost.plan.timing import predict


@dataclass(frozen=True)
class Prediction:
    """Predicted maxima over pipeline ranks."""

    predicted_s: float
    predicted_peak: int
    predicted_sent: int


def prediction(config: Config, hardware: Hardware, share: bool = False) -> Prediction:
    """Predicts a step. `share`: single-rank emulation, the work of one TP process without its collectives."""
    ranks = range(config.parallel.pp)
    step = predict(config, hardware.model_copy(update={"speeds": hardware.speeds_of(1)}) if share else hardware)
    sent = exposed_collectives(step) if share else 0.0
    return Prediction(
        predicted_s=step.seconds - sent,
        predicted_peak=max(peak(config, rank, hardware.is_gpu).total for rank in ranks),
        predicted_sent=max(sum(c.sent_bytes for c in step_collectives(config, rank)) for rank in ranks),
    )


def exposed_collectives(step: StepTime) -> float:
    """Seconds of a step in TP and DP collectives that do not overlap with computation."""
    return sum(step.parts.get(part, 0.0) for part in (TENSOR, CONTEXT, REPLICAS))
