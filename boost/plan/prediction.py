"""What is compared with a measured step: its seconds, the bytes that it holds at the worst moment, and those that it sends."""

from dataclasses import dataclass

from boost.config.schema import Config
from boost.plan.collectives import step_collectives
from boost.plan.hardware import Hardware
from boost.plan.peak import peak
from boost.plan.timing import REPLICAS, TENSOR, StepTime, predict


@dataclass(frozen=True)
class Prediction:
    """Of the busiest process."""

    predicted_s: float
    predicted_peak: int
    predicted_sent: int


def prediction(config: Config, hardware: Hardware, share: bool = False) -> Prediction:
    """`share`: of the work of one TP process by itself, without its collectives."""
    ranks = range(config.parallel.pp)
    step = predict(config, hardware.model_copy(update={"speeds": hardware.speeds_of(1)}) if share else hardware)
    sent = waited_for(step) if share else 0.0
    return Prediction(
        predicted_s=step.seconds - sent,
        predicted_peak=max(peak(config, rank, hardware.has_fused_norm).total for rank in ranks),
        predicted_sent=max(sum(c.sent_bytes for c in step_collectives(config, rank)) for rank in ranks),
    )


def waited_for(step: StepTime) -> float:
    """Seconds of a step in collectives of TP, and in those of gradients that computation does not hide."""
    return sum(step.parts.get(part, 0.0) for part in (TENSOR, REPLICAS))
