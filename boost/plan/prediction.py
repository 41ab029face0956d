"""Predictions to compare with a measured step: seconds, peak memory and bytes sent."""

from dataclasses import dataclass

from boost.config.schema import Config
from boost.plan.collectives import step_collectives
from boost.plan.hardware import Hardware
from boost.plan.peak import peak
from boost.plan.timing import predict


@dataclass(frozen=True)
class Prediction:
    """Predicted maxima over pipeline ranks."""

    predicted_s: float
    predicted_peak: int
    predicted_sent: int


def prediction(config: Config, hardware: Hardware) -> Prediction:
    """Predicts a step."""
    ranks = range(config.parallel.pp)
    return Prediction(
        predicted_s=predict(config, hardware).seconds,
        predicted_peak=max(peak(config, rank, hardware.is_gpu).total for rank in ranks),
        predicted_sent=max(sum(c.sent_bytes for c in step_collectives(config, rank)) for rank in ranks),
    )
