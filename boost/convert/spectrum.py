"""Truncated SVD of every linear of a dense model, to start a low-rank model from trained weights.

W is replaced by its best rank-r approximation B A (Eckart-Young); the error of each linear is reported. The mathematics is in
`boost/models/factorize.py`.
"""

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from boost.config.architecture import SLOTS, Parameter
from boost.config.schema import ModelConfig
from boost.errors import ConfigError
from boost.models.factorize import factorize


@dataclass(frozen=True)
class Truncation:
    """How ranks are chosen: by `rank` or by `energy`."""

    rank: int | None = None
    """Rank r of every linear, at most its smaller dimension (few key/value heads)."""
    energy: float | None = None
    """Fraction of each linear's squared singular values to keep."""
    multiple: int = 1
    """With energy: ranks are rounded up to a multiple of this."""
    device: str = "cpu"
    """Device on which the SVDs are computed."""

    def check(self, model: ModelConfig) -> None:
        """Raises ConfigError naming the flag, its value and the nearest valid one."""
        largest = min(model.dim, model.ffn_dim)
        if self.rank is not None and not 1 <= self.rank <= largest:
            nearest = 1 if self.rank < 1 else largest
            raise ConfigError(f"--rank = {self.rank} is out of range (1 to {largest}); nearest valid value: {nearest}")
        if self.energy is not None and not 0 < self.energy <= 1:
            raise ConfigError(f"--energy = {self.energy} must be in (0, 1]; typical value: 0.95")
        if self.multiple < 1:
            raise ConfigError(f"--multiple = {self.multiple} is too small; smallest valid value: 1")


@dataclass(frozen=True)
class FactoredLinear:
    """Result of the SVD of one linear."""

    name: str
    """layers.3.attn.q"""
    d_out: int
    d_in: int
    rank: int
    energy: float
    """Fraction of the squared singular values that is kept."""
    error: float
    """||W - B A|| / ||W||, Frobenius."""
    cost: float | None = None
    """Expected rise of the loss from this linear alone, nats per token; None without calibration."""
    correction: float | None = None
    """Share of the correction towards the dense model's outputs (`boost.convert.compress.corrected`); None without calibration."""


class Factorizer:
    """Factorizes linears one at a time and records the errors."""

    def __init__(self, dense: ModelConfig, truncation: Truncation) -> None:
        truncation.check(dense)
        self._dense, self._truncation = dense, truncation
        self.linears: list[FactoredLinear] = []

    def factor(self, parameter: Parameter, w_OI: Tensor, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, tensor) of the factors A and B of a dense weight, in `dtype`, on the CPU."""
        truncation, name = self._truncation, parameter.name.removesuffix(".W")
        if not bool(torch.isfinite(w_OI).all()):
            raise ConfigError(f"{name} contains non-finite values, so it has no SVD; fix the weights")
        rank = None if truncation.rank is None else min(truncation.rank, *w_OI.shape)
        # With one key/value head, a linear may have fewer singular values than the multiple.
        factors = factorize(w_OI.to(truncation.device), rank, truncation.energy, truncation.multiple)
        energy = 1 - factors.error**2
        self.linears.append(FactoredLinear(name, w_OI.shape[0], w_OI.shape[1], factors.rank, energy, factors.error))
        yield f"{name}.A", factors.a_RI.to("cpu", dtype)
        yield f"{name}.B", factors.b_OR.to("cpu", dtype)

    def model(self) -> dict[str, Any]:
        """Returns the [model] section of the result, once all linears are factorized; `ranks` lists the exceptions from `rank`."""
        ranks = {linear.name: linear.rank for linear in self.linears}
        default = self._truncation.rank or min(max(ranks.values()), self._dense.dim, self._dense.ffn_dim)
        return low_rank_table(self._dense, default, ranks)

    def report(self) -> dict[str, Any]:
        """Returns the options, a summary per slot, and every linear."""
        options = {k: v for k, v in asdict(self._truncation).items() if k != "device" and v is not None}
        return {
            "asked": options,
            "slots": slot_rows(self.linears),
            "linears": [asdict(linear) for linear in self.linears],
        }


def low_rank_table(dense: ModelConfig, rank: int, ranks: Mapping[str, int]) -> dict[str, Any]:
    """The [model] section of an svd model with the shape of a dense one. `ranks`: of every linear; those that differ from `rank`
    are listed, by block or, if all blocks have the same, by slot."""
    exceptions: dict[str, int] = {}
    for slot in SLOTS:
        of_slot = {name: other for name, other in ranks.items() if name.endswith(f".{slot}") and other != rank}
        uniform = len(of_slot) == dense.layers and len(set(of_slot.values())) == 1
        exceptions |= {slot: next(iter(of_slot.values()))} if uniform else of_slot
    return {**dense.model_dump(exclude={"family"}), "family": "svd", "rank": rank, "ranks": exceptions}


def slot_rows(linears: list[FactoredLinear]) -> list[dict[str, Any]]:
    """For the report: each of the seven slots, summarized over all blocks; energy is the mean, cost the sum."""
    rows = []
    for slot in SLOTS:
        of_slot = [linear for linear in linears if linear.name.endswith(f".{slot}")]
        ranks, errors = [linear.rank for linear in of_slot], [linear.error for linear in of_slot]
        costs = [linear.cost for linear in of_slot if linear.cost is not None]
        row = {
            "slot": slot,
            "blocks": len(of_slot),
            "rank_min": min(ranks),
            "rank_mean": statistics.fmean(ranks),
            "rank_max": max(ranks),
            "energy": statistics.fmean(linear.energy for linear in of_slot),
            "error_mean": statistics.fmean(errors),
            "error_max": max(errors),
            "cost": sum(costs) if costs else None,
        }
        rows.append(row)
    return rows
