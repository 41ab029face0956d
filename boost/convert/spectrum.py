"""Truncated SVD of every linear in a dense model, to start a low-rank model from trained weights.

W is replaced by its best rank-r approximation B A (`boost.models.init.factorize`), in the Frobenius norm or a norm weighted by
second moments. The report gives the error of each linear.

Legend: W [O, I], B [O, r], A [r, I]; C = E[x x^T] [I, I] second moment of the inputs, G = E[g g^T] [O, O] second moment of the
output gradients.
"""

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from boost.config.architecture import SLOTS, Parameter
from boost.config.schema import ModelConfig
from boost.errors import ConfigError
from boost.models.init import Factorization, factorize
from boost.text import JsonObject


@dataclass(frozen=True)
class Truncation:
    """How ranks are chosen: by `rank` or by `energy`."""

    rank: int | None = None
    """Rank r for every linear, capped at its smaller dimension (small for k and v if there are few key/value heads)."""
    energy: float | None = None
    """Fraction of each linear's squared singular values to keep."""
    multiple: int = 1
    """With `energy`, ranks are rounded up to a multiple of this number."""
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
    """Expected rise in the loss from factorizing this linear alone, in nats per token; None without calibration."""
    correction: float | None = None
    """Share of the correction that is applied to W (`boost.convert.compress.corrected`); None without calibration."""


class Factorizer:
    """Factorizes linears one at a time and records the errors."""

    def __init__(self, dense: ModelConfig, truncation: Truncation) -> None:
        truncation.check(dense)
        self._dense, self._truncation = dense, truncation
        self.linears: list[FactoredLinear] = []

    def factor(self, parameter: Parameter, w_OI: Tensor, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, tensor) for the factors A and B of a dense weight, in `dtype`, on the CPU."""
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

    def model(self) -> JsonObject:
        """Returns the result's [model] section once all linears are factorized; `ranks` lists the exceptions to `rank`."""
        ranks = {linear.name: linear.rank for linear in self.linears}
        default = self._truncation.rank or min(max(ranks.values()), self._dense.dim, self._dense.ffn_dim)
        return low_rank_table(self._dense, default, ranks)

    def report(self) -> JsonObject:
        """Returns the options, a summary per slot, and every linear."""
        options = {k: v for k, v in asdict(self._truncation).items() if k != "device" and v is not None}
        linears = [asdict(linear) for linear in self.linears]
        return {"asked": options, "slots": slot_rows(self.linears), "linears": linears}


def low_rank_table(dense: ModelConfig, rank: int, ranks: Mapping[str, int]) -> JsonObject:
    """Returns the [model] section of an svd model with a dense model's shape. `ranks`: rank of every linear; those that differ from
    `rank` are listed by slot if all blocks have the same rank, else by linear."""
    exceptions: dict[str, int] = {}
    for slot in SLOTS:
        of_slot = {name: other for name, other in ranks.items() if name.endswith(f".{slot}") and other != rank}
        uniform = len(of_slot) == dense.layers and len(set(of_slot.values())) == 1
        exceptions |= {slot: next(iter(of_slot.values()))} if uniform else of_slot
    return {**dense.model_dump(exclude={"family"}), "family": "svd", "rank": rank, "ranks": exceptions}


def slot_rows(linears: list[FactoredLinear]) -> list[dict[str, object]]:
    """Summarizes each of the seven slots over all blocks for the report; energy is averaged and cost is summed."""
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


# Truncation in a norm that is weighted by second moments.

DAMPING = 1e-6
"""Fraction of a second moment's mean eigenvalue that is added to its diagonal, to make it invertible even without data."""


@dataclass(frozen=True)
class MomentRoot:
    """A square root R of a damped second moment C = R R^T, and its inverse. Both [N, N], fp64."""

    root: Tensor
    inverse: Tensor


def moment_root(moment_NN: Tensor) -> MomentRoot:
    """R = Q sqrt(L) for C = Q L Q^T (fp64). Negative eigenvalues, which are rounding errors, count as 0 before damping.

    A zero moment, from gradients that are all zero, counts as a multiple of the identity.
    """
    values, q_NN = torch.linalg.eigh(moment_NN.double())
    values = values.clamp_min(0)
    mean = values.mean()
    roots = (values + DAMPING * torch.where(mean > 0, mean, 1)).sqrt()
    return MomentRoot(q_NN * roots, (q_NN / roots).T)


def solve_right(m_ON: Tensor, moment_NN: Tensor) -> Tensor:
    """M C^-1 for a second moment C, damped as in `moment_root`."""
    damped_NN = moment_NN.clone()
    damped_NN.diagonal().add_(DAMPING * moment_NN.diagonal().mean())
    return torch.linalg.solve(damped_NN, m_ON.T).T


def weighted_values(w_OI: Tensor, outputs: MomentRoot, inputs: MomentRoot) -> Tensor:
    """Singular values of R_G^T W R_C in descending order. If g and x are independent, the squares of the values that a rank
    discards sum to E[(g^T (W - B A) x)^2], which is twice the expected rise in the loss, to second order."""
    return factorize(outputs.root.T @ w_OI.double() @ inputs.root, rank=1).values


def factorize_weighted(w_OI: Tensor, rank: int, outputs: MomentRoot, inputs: MomentRoot) -> Factorization:
    """Returns the B A of rank r that minimizes tr(G (W - B A) C (W - B A)^T), balanced as in `factorize`, and the values of
    `weighted_values`.

    With G = 1, this is SVD-LLM's truncation (arXiv 2403.07378); with both moments, it uses a Kronecker-factored Fisher matrix.
    """
    weighted = factorize(outputs.root.T @ w_OI.double() @ inputs.root, rank)
    a_RI, b_OR = balanced(weighted.a_RI @ inputs.inverse, outputs.inverse.T @ weighted.b_OR)
    return Factorization(a_RI, b_OR, weighted.values)


def balanced(a_RI: Tensor, b_OR: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (A, B) with the same product and equal, diagonal Gram matrices A A^T = B^T B, so that both start at one scale."""
    q_OR, left_RR = torch.linalg.qr(b_OR)
    q_IR, right_RR = torch.linalg.qr(a_RI.T)
    u_RR, s_R, v_RR = torch.linalg.svd(left_RR @ right_RR.T)
    root_R = s_R.sqrt()
    b_OR, a_RI = q_OR @ (u_RR * root_R), (root_R[:, None] * v_RR) @ q_IR.T
    sign_R = b_OR.gather(0, b_OR.abs().argmax(dim=0, keepdim=True)).sign()
    sign_R = torch.where(sign_R == 0, 1, sign_R)
    return (a_RI * sign_R.T).contiguous(), (b_OR * sign_R).contiguous()
