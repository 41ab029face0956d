"""Truncated SVD of every linear of a dense model, to start a low-rank model from trained weights.

W is replaced by the closest B A of its rank (Eckart-Young); what is lost is said of each linear. `boost/models/factorize.py`
has the mathematics.
"""

from collections.abc import Iterator
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
    """How ranks are chosen: one of rank and energy."""

    rank: int | None = None
    """r of every linear, or its own smaller side where that is less (few key/value heads)."""
    energy: float | None = None
    """The share of each linear's squared singular values to keep."""
    multiple: int = 1
    """With energy: ranks are rounded up to a multiple of it."""
    device: str = "cpu"
    """Where the decompositions are computed."""

    def check(self, model: ModelConfig) -> None:
        """Raises ConfigError naming the flag, its value and the nearest valid one."""
        most = min(model.dim, model.ffn_dim)
        if (self.rank is None) == (self.energy is None):
            raise ConfigError("--family svd needs one of --rank R and --energy SHARE, as --energy 0.95")
        if self.rank is not None and not 1 <= self.rank <= most:
            best = 1 if self.rank < 1 else most
            raise ConfigError(
                f"--rank = {self.rank} is out of range for linears of {most} and more; nearest valid value: {best}"
            )
        if self.energy is not None and not 0 < self.energy <= 1:
            raise ConfigError(f"--energy = {self.energy} must be in (0, 1]; the usual value is 0.95")
        if self.multiple < 1:
            raise ConfigError(f"--multiple = {self.multiple} is too small; smallest valid value: 1")


@dataclass(frozen=True)
class FactoredLinear:
    """Result for one linear."""

    name: str
    """layers.3.attn.q"""
    d_out: int
    d_in: int
    rank: int
    energy: float
    """Share of the squared singular values that is kept."""
    error: float
    """||W - B A|| / ||W||, Frobenius."""


class Factorizer:
    """Factors linears one after another and records the error."""

    def __init__(self, dense: ModelConfig, truncation: Truncation) -> None:
        truncation.check(dense)
        self._dense, self._how = dense, truncation
        self.linears: list[FactoredLinear] = []

    def factor(self, parameter: Parameter, w_OI: Tensor, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """A and B of a dense weight, named and in `dtype`, on the CPU."""
        how, name = self._how, parameter.name.removesuffix(".W")
        if not bool(torch.isfinite(w_OI).all()):
            raise ConfigError(f"{name} holds numbers that are not finite: it has no singular values; mend the weights")
        rank = None if how.rank is None else min(how.rank, *w_OI.shape)
        # A linear that is one key/value head wide has fewer singular values than a multiple may ask for.
        factors = factorize(w_OI.to(how.device), rank, how.energy, how.multiple)
        energy = 1 - factors.error**2
        self.linears.append(FactoredLinear(name, w_OI.shape[0], w_OI.shape[1], factors.rank, energy, factors.error))
        yield f"{name}.A", factors.a_RI.to("cpu", dtype)
        yield f"{name}.B", factors.b_OR.to("cpu", dtype)

    def model(self) -> dict[str, Any]:
        """The [model] section of the result, once all linears are factored: ranks of single linears where they differ."""
        ranks = {linear.name: linear.rank for linear in self.linears}
        usual = self._how.rank or min(max(ranks.values()), self._dense.dim, self._dense.ffn_dim)
        table = self._dense.model_dump(exclude={"family", "rank", "ranks", "latent_act", "factor_init", "over", "gate"})
        others = {name: rank for name, rank in ranks.items() if rank != usual}
        return {**table, "family": "svd", "rank": usual, "ranks": _shortened(others, self._dense.layers)}

    def report(self) -> dict[str, Any]:
        """Every linear, and the whole."""
        asked = {key: value for key, value in asdict(self._how).items() if key != "device" and value is not None}
        return {
            "asked": asked,
            "slots": [asdict(summary) for summary in summaries(self.linears)],
            "linears": [asdict(linear) for linear in self.linears],
        }


def _shortened(ranks: dict[str, int], layers: int) -> dict[str, int]:
    """The same with `attn.k` in place of `layers.0.attn.k`, ... where all blocks agree."""
    result: dict[str, int] = {}
    for slot in SLOTS:
        of_slot = {name: rank for name, rank in ranks.items() if name.endswith(f".{slot}")}
        alike = len(of_slot) == layers and len(set(of_slot.values())) == 1
        result |= {slot: next(iter(of_slot.values()))} if alike else of_slot
    return result


@dataclass(frozen=True)
class Summary:
    """One linear of a block, over all blocks."""

    slot: str
    blocks: int
    rank_min: int
    rank_mean: float
    rank_max: int
    energy: float
    """Mean."""
    error_mean: float
    error_max: float


def summaries(linears: list[FactoredLinear]) -> list[Summary]:
    """What became of each of the seven linears."""
    result = []
    for slot in SLOTS:
        of_slot = [linear for linear in linears if linear.name.endswith(f".{slot}")]
        ranks, errors = [linear.rank for linear in of_slot], [linear.error for linear in of_slot]
        count = len(of_slot)
        energy = sum(linear.energy for linear in of_slot) / count
        mean = sum(ranks) / count
        result.append(Summary(slot, count, min(ranks), mean, max(ranks), energy, sum(errors) / count, max(errors)))
    return result
