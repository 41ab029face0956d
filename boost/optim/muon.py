"""Muon for the factors (momentum orthogonalized by Newton-Schulz iterations) and AdamW for all other parameters.

The update is the same as torch.optim.Muon's, with its coefficients, but applied to each WHOLE factor, not to a shard or the stack
in which the A factors for one input are stored. torch's own class would treat either as one matrix, and it iterates in bf16, so its
rounding errors would depend on the sharding.

An iterate of X is X times a polynomial in X^T X. The iteration can therefore run on this Gram matrix [r, r], all-reduced once over
the processes that shard X, and all work on tall matrices is local: X_k = X P_k. The iterations are divided among all processes that
hold the factors (`solve_all`). Sums and iterations are in fp32 (fp64 for fp64 weights). Unlike an inverse root, a
polynomial amplifies rounding errors in the Gram matrix's small eigenvalues by no more than the eigenvalues themselves (see
docs/negative-results.md).
"""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from boost.config import Config
from boost.config.factors import deal_grams, is_factor
from boost.config.optimizers import MuonConfig
from boost.models.fused import FusedParam
from boost.models.kernels import STATISTIC_DTYPE
from boost.optim.adamw import Optimizer, build_adamw, decays, zeros
from boost.optim.factors import Factor, FactorBuckets, FactorUnit, solve_all
from boost.parallel.mesh import Mesh

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Newton-Schulz coefficients from torch.optim.Muon (Keller Jordan): steep at zero; they map singular values to about 0.7 to 1.2."""

EPSILON = 1e-7
"""Lower bound on the norm by which momentum is divided, as in torch.optim.Muon."""

MOMENTUM = "momentum_buffer"


class Muon(Optimizer):
    """Orthogonalized momentum for factors, and torch's fused AdamW for the rest."""

    name = "muon"

    def __init__(self, fused_params: Sequence[FusedParam], config: Config, mesh: Mesh) -> None:
        assert isinstance(config.optim, MuonConfig)
        self.optim = optim = config.optim
        pairs = [s for s in fused_params if is_factor(s.slices[0].parameter.role)]
        super().__init__(build_adamw([s for s in fused_params if not is_factor(s.slices[0].parameter.role)], optim))
        self._decaying: list[Tensor] = [s.tensor for s in pairs if decays(s, optim)]
        self.moments |= {s.tensor: zeros(s.tensor, (MOMENTUM,)) for s in pairs}
        dtype = STATISTIC_DTYPE[pairs[0].tensor.dtype]
        self.factors = FactorBuckets(fused_params, optim, mesh, dtype)

    @torch.no_grad()
    def step(self, number: int, rate: float) -> None:
        """Updates both kinds of parameters."""
        super().step(number, rate)
        rate *= self.optim.muon_lr / self.optim.lr if self.optim.muon_lr else 1.0
        if self.optim.weight_decay and self._decaying:
            torch._foreach_mul_(self._decaying, 1 - rate * self.optim.weight_decay)
        with without_tf32():
            for bucket in self.factors.buckets:
                # Each factor moves along its own orthogonalized momentum.
                tall = {name: x[..., 0] for name, x in self.factors.tall(bucket, self._direction).items()}
                for factor, p_RR in self._solved(bucket, tall):
                    rows, columns = factor.parameter.shape  # of the whole parameter, not of this process's shard
                    if self.optim.muon_adjust == "match_rms_adamw":
                        adjusted = 0.2 * math.sqrt(max(rows, columns))
                    else:
                        adjusted = math.sqrt(max(1, rows / columns))
                    for view, value in factor.own(factor.fused.tensor, tall[factor.name] @ p_RR):
                        view.sub_(value, alpha=rate * adjusted)

    def _solved(self, bucket: Sequence[FactorUnit], tall: Mapping[str, Tensor]) -> Iterator[tuple[Factor, Tensor]]:
        """The iteration's matrix [R, R] for every factor in a bucket.

        All processes with a copy of a weight have the same Gram matrices or can compute them. Each process iterates on its share of
        them, because in fp32, iterating on all of them would take longer than the rest of this step.
        """
        factors = [factor for unit in bucket for factor in unit.factors]
        grams, axis = self.factors.summed_grams(tall, bucket), self.factors.mesh.update_axis

        def of_factor(number: int) -> Tensor:
            name = factors[number].name
            return newton_schulz(grams[name] if name in grams else tall[name].mT @ tall[name], self.optim.muon_steps)

        deal = deal_grams([factor.shape for factor in factors], axis.size)
        for factor, flat in zip(factors, solve_all(deal, of_factor, tall[factors[0].name], axis), strict=True):
            yield factor, flat.view(factor.shape.rank, factor.shape.rank)

    def _direction(self, fused: FusedParam) -> Tensor:
        """Updates the momentum for a fused parameter. Returns the update before orthogonalization, [rows, columns, 1]."""
        gradient, momentum = fused.tensor.grad, self.moments[fused.tensor][MOMENTUM]
        assert gradient is not None, "every parameter must have a gradient in every step"
        momentum.lerp_(gradient, 1 - self.optim.muon_momentum)
        if self.optim.muon_nesterov:
            momentum = gradient.lerp(momentum, self.optim.muon_momentum)
        return momentum.unsqueeze(-1)


@contextlib.contextmanager
def without_tf32() -> Iterator[None]:
    """Context manager in which fp32 products use fp32, even if the process allows TF32 on GPUs (as some container images do).

    An iteration on a Gram matrix amplifies rounding errors; TF32's errors would make steps several times too long
    (docs/negative-results.md).
    """
    products = torch.backends.cuda.matmul
    before, products.fp32_precision = products.fp32_precision, "ieee"
    try:
        yield
    finally:
        products.fp32_precision = before


def newton_schulz(gram_RR: Tensor, steps: int) -> Tensor:
    """Returns P [R, R] such that X P equals `steps` Newton-Schulz iterations of X, given X^T X.

    X is divided by its Frobenius norm first. Each iteration multiplies it by a + b X^T X + c (X^T X)^2.
    """
    a, b, c = COEFFICIENTS
    norm = gram_RR.trace().sqrt().clamp(min=EPSILON)
    g_RR = gram_RR / norm.square()
    identity_RR = torch.eye(g_RR.shape[0], dtype=g_RR.dtype, device=g_RR.device)
    p_RR = identity_RR / norm
    for step in range(steps):
        q_RR = torch.addmm(b * g_RR, g_RR, g_RR, alpha=c) + a * identity_RR
        p_RR = p_RR @ q_RR
        if step < steps - 1:
            g_RR = q_RR @ g_RR @ q_RR
    return p_RR
