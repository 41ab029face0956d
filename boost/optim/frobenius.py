"""Frobenius decay (Khodak et al., arXiv 2105.01029): the gradient of |BA|_F^2 / 2 of each linear, without computing BA.

It is B (A A^T) for B and (B^T B) A for A. With tall factors N = A^T and M = B: M (N^T N) and N (M^T M), so processes that shard
the wide side exchange only small Gram matrices. The decay is decoupled like AdamW's, is multiplied by the learning rate, and
replaces weight decay for factors.
"""

from collections.abc import Sequence

import torch

from boost.config import Config
from boost.models.fused import FusedParam
from boost.optim.adamw import Optimizer, build_adamw
from boost.optim.factors import FactorBuckets
from boost.parallel.mesh import Mesh


class FrobeniusAdamW(Optimizer):
    """AdamW with Frobenius decay of the factors."""

    def __init__(self, fused_params: Sequence[FusedParam], config: Config, mesh: Mesh) -> None:
        optim = config.optim
        super().__init__(build_adamw(fused_params, optim))
        self.decay = optim.frobenius_decay
        dtype = torch.float64 if fused_params[0].tensor.dtype == torch.float64 else torch.float32
        self.factors = FactorBuckets(fused_params, optim, mesh, dtype)

    @torch.no_grad()
    def step(self, number: int, rate: float) -> None:
        """Decays both factors of each pair, based on their values before the step, then runs AdamW."""
        for bucket in self.factors.buckets:
            tall = self.factors.tall(bucket, lambda fused: fused.tensor.detach().unsqueeze(-1))
            tall = {name: x[..., 0] for name, x in tall.items()}
            grams = self.factors.grams(tall, bucket)
            for a, b in (pair for unit in bucket for pair in unit.pairs):
                for factor, other in ((a, b), (b, a)):
                    gradient_NR = tall[factor.name] @ grams[other.name]
                    for view, value in factor.own(factor.fused.tensor, gradient_NR):
                        view.sub_(value, alpha=rate * self.decay)
        super().step(number, rate)
