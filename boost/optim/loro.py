"""LORO (ICLR 2025): AdamW whose steps on factor pairs follow the manifold of matrices of rank r.

Details that the paper leaves open follow the published code (repository mzf666/LORO-main):
- directions are m / (sqrt(v) + eps), without bias correction, which is applied to the learning rate of all parameters;
- approximate steps move factors at rate * r / d and everything else at the full rate; the exact step uses the full rate;
- every K-th training step is exact and includes that step's gradient in its directions; after it, the moments of all parameters
  and the number of updates are reset.

Weight decay, which the published runs do not use, multiplies the factors by 1 - rate * weight_decay before either step.
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from boost.config import Config
from boost.config.factors import is_factor, rate_scale
from boost.config.optimizers import LOROConfig
from boost.models.fused import FusedParam, ParamSlice
from boost.optim.adamw import MOMENTS, Optimizer, State, decays, fresh_state, fused_adamw, zeros
from boost.optim.exact import bases, retract_all
from boost.optim.factors import FactorBuckets
from boost.parallel.mesh import Mesh


class Loro(Optimizer):
    """torch's AdamW with per-group learning rates, and exact steps when they are due."""

    name = "loro"

    def __init__(self, fused_params: Sequence[FusedParam], config: Config, mesh: Mesh) -> None:
        assert isinstance(config.optim, LOROConfig)
        self.optim = optim = config.optim
        self._slices: list[tuple[Tensor, FusedParam, ParamSlice]] = []
        """Views that are updated separately, into stored tensors whose linears have different ranks."""
        moments: State = {fused.tensor: zeros(fused.tensor, MOMENTS) for fused in fused_params}
        groups: dict[tuple[bool, float], list[Tensor]] = {}
        states: State = {}
        for fused in fused_params:
            for scale, param_slice in _scales(fused, config.model.dim):
                param: Tensor = fused.tensor
                state = moments[fused.tensor]
                if param_slice is not None:
                    param = param_slice.view(fused.tensor.detach())
                    state = {name: param_slice.view(value) for name, value in state.items()}
                    self._slices.append((param, fused, param_slice))
                groups.setdefault((decays(fused, optim), scale), []).append(param)
                states[param] = fresh_state(param, state)
        adamw = fused_adamw([{"params": params, "place": key} for key, params in groups.items()], optim)
        adamw.state.update(states)
        super().__init__(adamw)
        self.moments = moments
        self.factors = FactorBuckets(fused_params, optim, mesh, torch.float64)

    @torch.no_grad()
    def step(self, number: int, rate: float) -> None:
        """Performs an approximate step, or an exact one followed by a reset of the moments, depending on `number`."""
        optim = self.optim
        exact = optim.is_exact(number)
        first, second = (1 - beta ** (self.updates + 1) for beta in (optim.beta1, optim.beta2))
        for group in self.adamw.param_groups:
            decaying, scale = group["place"]
            moved = scale < 0 or not exact  # before an exact step, only the factors' moments are updated
            group["lr"] = rate * abs(scale) if moved else 0.0
            # Decay uses the unscaled rate, but torch multiplies it by the group's rate.
            group["weight_decay"] = optim.weight_decay / abs(scale) if decaying else 0.0
            group["eps"] = optim.eps / math.sqrt(second)
        for view, fused, param_slice in self._slices:
            assert fused.tensor.grad is not None, "every parameter must have a gradient in every step"
            view.grad = param_slice.view(fused.tensor.grad)
        self.adamw.step()
        self._updates += 1
        for view, _, _ in self._slices:
            view.grad = None
        if exact:
            self._exact(rate * math.sqrt(second) / first, 1 - rate * optim.weight_decay)
            for moments in self.moments.values():
                for value in moments.values():
                    value.zero_()
            self.updates = 0

    def _exact(self, rate: float, decay: float) -> None:
        """Moves every pair along the directions given by the moments."""
        for bucket in self.factors.buckets:
            factors = [factor for unit in bucket for factor in unit.factors]
            pairs = [pair for unit in bucket for pair in unit.pairs]
            basis_of = bases(self.factors.tall(bucket, self._with_direction), factors, self.factors.mesh.tp)
            small = [(basis_of[b.name][1], basis_of[a.name][1]) for a, b in pairs]
            solved = retract_all(small, rate, decay, self.factors.mesh.update_axis)
            for (a, b), new in zip(pairs, solved, strict=True):
                for factor, x_KR in zip((b, a), new, strict=True):
                    for view, value in factor.own(factor.fused.tensor, basis_of[factor.name][0] @ x_KR):
                        view.copy_(value)

    def _with_direction(self, fused: FusedParam) -> Tensor:
        """A stored tensor and its direction m / (sqrt(v) + eps), stacked, in fp64."""
        m, v = (self.moments[fused.tensor][name].double() for name in MOMENTS)
        return torch.stack((fused.tensor.double(), m / (v.sqrt() + self.optim.eps)), dim=-1)


def _scales(fused: FusedParam, dim: int) -> Iterator[tuple[float, ParamSlice | None]]:
    """(r / d, slice that it applies to) for the factors in a stored tensor; slice None: the whole tensor; scale -1: not a
    factor, full rate."""
    if not is_factor(fused.slices[0].parameter.role):
        yield -1.0, None
        return
    scales = {rate_scale(param_slice.parameter, dim) for param_slice in fused.slices}
    if len(scales) == 1:
        yield scales.pop(), None
        return
    for param_slice in fused.local_slices():
        yield rate_scale(param_slice.parameter, dim), param_slice
