"""Spectron (arXiv 2602.12429): orthogonalized momentum of both factors, at a rate that bounds the update of their product.

With M = EMA of the gradient and O = Newton-Schulz(M) of each factor, both factors of W = B A move by -rho O with

    rho = eta / (|A| + |B| + 1), so that |dW| <= rho (|A| + |B| + rho) <= eta   (spectral norms; |O| <= 1, rho <= 1)

The iteration and its coefficients are Muon's (`boost.optim.muon`), which take |O| to at most 1.2. The published algorithm estimates
|A| and |B| by one power iteration per step, from the vector of the previous step. Here the Gram matrix of each whole factor is
available once momentum and factors are gathered together, so a power iteration is one product with an [r, r] matrix: we do several,
from the same vector in every step, and keep no state for them. Where the layout shards rows, both Gram matrices are in one
all-reduce; the norm travels with the solution of the iteration. With DLR, B is the matrix with its residual.

Weight decay multiplies the factors by 1 - eta * weight_decay first.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from boost.config import Config
from boost.config.architecture import slot_of
from boost.config.families import ModelConfig
from boost.config.optimizers import SpectronConfig
from boost.models.fused import FusedParam
from boost.models.latent_residual import LatentResidual, latent_residual
from boost.optim.factors import FactorUnit
from boost.optim.muon import Orthogonalized, newton_schulz
from boost.parallel.mesh import Mesh


class Spectron(Orthogonalized):
    """Orthogonalized momentum for factors, with a bounded update of each product; torch's fused AdamW for the rest."""

    name = "spectron"
    optim: SpectronConfig

    def __init__(self, fused_params: Sequence[FusedParam], config: Config, mesh: Mesh) -> None:
        assert isinstance(config.optim, SpectronConfig)
        self.optim, self.rate, self.decay = config.optim, config.optim.spectron_lr, config.optim.spectron_momentum
        super().__init__(fused_params, config, mesh)
        self._residuals = _residuals(fused_params, config.model, mesh)

    def update(self, bucket: Sequence[FactorUnit], rate: float) -> None:
        """Both factors of each pair move at rate / (|A| + |B| + 1)."""
        gathered = self.factors.tall(bucket, self._momentum_and_factor)
        tall = {name: x.movedim(-1, 0).contiguous() for name, x in gathered.items()}
        del gathered
        solutions = {factor.name: flat for factor, flat in self.solved(bucket, tall, self._solve)}
        for pair in (pair for unit in bucket for pair in unit.pairs):
            norms = [solutions[factor.name][-1] for factor in pair]
            bound = 1 / (norms[0] + norms[1] + 1)
            for factor in pair:
                p_RR = solutions[factor.name][:-1].view(factor.shape.rank, factor.shape.rank) * bound
                for view, value in factor.own(factor.fused.tensor, tall[factor.name][0] @ p_RR):
                    view.sub_(value, alpha=rate)

    def _solve(self, grams_2RR: Tensor) -> Tensor:
        """Gram matrices of momentum and factor -> (matrix of the iteration, flattened; spectral norm of the factor)."""
        p_RR = newton_schulz(grams_2RR[0], self.optim.spectron_steps)
        norm = spectral_norm(grams_2RR[1], self.optim.spectron_power_steps)
        return torch.cat((p_RR.flatten(), norm.unsqueeze(0)))

    def _momentum_and_factor(self, fused: FusedParam) -> Tensor:
        """[rows, columns, 2] of a fused parameter; its momentum is updated first."""
        factor, residual = fused.tensor.detach(), self._residuals.get(fused.tensor)
        if residual is not None:
            factor = residual.added(factor, self.factors.dtype)
        return torch.stack((self.momentum(fused).to(factor.dtype), factor), dim=-1)


def spectral_norm(gram_RR: Tensor, steps: int) -> Tensor:
    """The largest singular value of X, given X^T X, by power iterations from a fixed vector; a scalar, never above the true value.

    With v after all steps but the last: |X^T X v| / |X v|.
    """
    tiny = torch.finfo(gram_RR.dtype).tiny
    start = torch.randn(gram_RR.shape[0], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    v_R = start.to(gram_RR)
    v_R = v_R / v_R.norm()
    for _ in range(steps - 1):
        v_R = gram_RR @ v_R
        v_R = v_R / v_R.norm().clamp(min=tiny)
    w_R = gram_RR @ v_R
    return w_R.norm() / (v_R @ w_R).clamp(min=tiny).sqrt()


def _residuals(fused_params: Sequence[FusedParam], model: ModelConfig, mesh: Mesh) -> dict[Tensor, LatentResidual]:
    """The residual (DLR) of the rows of each B on this process."""
    found: dict[Tensor, LatentResidual] = {}
    for fused in fused_params if model.dlr_alpha else ():
        if not fused.slices[0].parameter.role.endswith(".B"):
            continue
        for part in fused.local_slices():  # one, because each B is stored by itself; none on a replica that has no rows
            first, dim = [part.offset, 0], fused.placement.dim
            if dim is not None:
                first[dim] += mesh.tp.rank * (part.parameter.shape[dim] // mesh.tp.size)
            residual = latent_residual(model, slot_of(model, part.parameter.name), *first)
            assert residual is not None
            found[fused.tensor] = residual
    return found
