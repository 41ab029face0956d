"""LORO (ICLR 2025): AdamW whose steps on factor pairs follow the manifold of matrices of rank r.

Where the paper leaves a detail open, the implementation follows the published code (repository mzf666/LORO-main):
- directions are m / (sqrt(v) + eps), without bias correction, which is applied to the learning rate of all parameters;
- approximate steps move factors at rate * r / d and everything else at the full rate; the exact step uses the full rate;
- every K-th training step is exact and its directions include that step's gradient; after it, the moments of all parameters
  and the number of updates are reset.

Weight decay, which the published runs do not use, multiplies the factors by 1 - rate * weight_decay before either kind of step.

The exact step replaces W with the best rank-r approximation of W - rate * T; the factors' directions define the tangent vector T.

With W = M N^T (M = B, N = A^T), directions dM, dN and pseudo-inverses M+, N+, the published algorithm (ICLR 2025, equation 10
and its code) takes the best rank-r approximation of

    M N^T - rate * ((M+)^T dN^T + (I - M M+) dM (N+)^T),

and splits it evenly, M = U sqrt(S), N = V sqrt(S). The result lies in the column spaces of [M dM] and [N dN]. With orthonormal
bases Q and P, [M dM] = Q [M' dM'] and [N dN] = P [N' dN']. The same formula holds for M', dM', N', dN', which have at
most 2r rows, and the new factors are Q and P times small matrices. The published code computes QRs of M and of N, and two more
of the components orthogonal to them; one QR of [M dM] contains both. If M or N is rank-deficient, its pseudo-inverse replaces
the inverse.

Exact steps are computed in fp64. Legend: N local rows of the wide side, K columns of a basis (2r or fewer), R rank.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from boost.config import Config
from boost.config.factors import deal_pairs, is_factor, rate_scale
from boost.config.optimizers import LOROConfig
from boost.models.fused import FusedParam, ParamSlice
from boost.optim.adamw import MOMENTS, Optimizer, State, decays, fresh_state, fused_adamw, zeros
from boost.optim.factors import Factor, FactorBuckets, solve_all
from boost.parallel.collectives import all_gather
from boost.parallel.mesh import Axis, Mesh


class Loro(Optimizer):
    """torch's AdamW with per-group learning rates, and exact steps when they are due."""

    name = "loro"

    def __init__(self, fused_params: Sequence[FusedParam], config: Config, mesh: Mesh) -> None:
        assert isinstance(config.optim, LOROConfig)
        self.optim = optim = config.optim
        self._slices: list[tuple[Tensor, FusedParam, ParamSlice]] = []
        """Separately updated views into stored tensors whose linears have different ranks."""
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
            moved = scale < 0 or not exact  # in an exact step, AdamW updates only the factors' moments, not the factors
            group["lr"] = rate * abs(scale) if moved else 0.0
            # Decay uses the unscaled rate, but torch multiplies weight_decay by the group's rate.
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
        """Moves every pair along the directions that its moments define."""

        def with_direction(fused: FusedParam) -> Tensor:
            """A stored tensor and its direction m / (sqrt(v) + eps), stacked, in fp64."""
            m, v = (self.moments[fused.tensor][name].double() for name in MOMENTS)
            return torch.stack((fused.tensor.double(), m / (v.sqrt() + self.optim.eps)), dim=-1)

        for bucket in self.factors.buckets:
            factors = [factor for unit in bucket for factor in unit.factors]
            pairs = [pair for unit in bucket for pair in unit.pairs]
            basis_of = bases(self.factors.tall(bucket, with_direction), factors, self.factors.mesh.tp)
            small = [(basis_of[b.name][1], basis_of[a.name][1]) for a, b in pairs]
            solved = retract_all(small, rate, decay, self.factors.mesh.update_axis)
            for (a, b), new in zip(pairs, solved, strict=True):
                for factor, x_KR in zip((b, a), new, strict=True):
                    for view, value in factor.own(factor.fused.tensor, basis_of[factor.name][0] @ x_KR):
                        view.copy_(value)


def _scales(fused: FusedParam, dim: int) -> Iterator[tuple[float, ParamSlice | None]]:
    """Yields (scale r / d, slice) for the factors in a stored tensor. Slice None: the whole tensor. Scale -1: no factors, so the
    full rate applies."""
    if not is_factor(fused.slices[0].parameter.role):
        yield -1.0, None
        return
    scales = {rate_scale(param_slice.parameter, dim) for param_slice in fused.slices}
    if len(scales) == 1:
        yield scales.pop(), None
        return
    for param_slice in fused.local_slices():
        yield rate_scale(param_slice.parameter, dim), param_slice


def bases(tall: Mapping[str, Tensor], factors: Sequence[Factor], axis: Axis) -> dict[str, tuple[Tensor, Tensor]]:
    """For each factor's [N, R, 2]: (local rows [N, K] of an orthonormal basis, coordinates [K, 2R] of the factor and its
    direction).

    A tall-skinny QR: each process computes the QR of its own rows. One all-gather over TP collects the triangles of all factors
    whose rows are sharded, and every process computes the QR of the stacked triangles, bitwise equal everywhere. Unlike the
    Cholesky factor of a Gram matrix, this does not square the condition number.
    """
    qr_of = {}
    for factor in factors:
        t_NR2 = tall[factor.name]
        qr_of[factor.name] = torch.linalg.qr(t_NR2.transpose(1, 2).flatten(1))
    sharded = [f.name for f in factors if f.shape.sharded == "rows" and axis.size > 1]
    if sharded:
        flat = torch.cat([qr_of[name][1].flatten() for name in sharded])
        gathered = all_gather(flat, axis).view(axis.size, -1)
        sizes = [qr_of[name][1].numel() for name in sharded]
        for name, parts in zip(sharded, gathered.split(sizes, dim=1), strict=True):
            q_NJ, r_JC = qr_of[name]
            rows = r_JC.shape[0]
            outer_PJK, r_KC = torch.linalg.qr(parts.reshape(axis.size * rows, -1))
            qr_of[name] = (q_NJ @ outer_PJK.narrow(0, axis.rank * rows, rows), r_KC)
    return qr_of


def retract_all(
    pairs: Sequence[tuple[Tensor, Tensor]], rate: float, decay: float, axis: Axis
) -> list[tuple[Tensor, Tensor]]:
    """`retract` for every pair. Pairs are replicated over `axis`; its processes divide the work, with one collective."""
    sides = [(m_K2R.shape[0], n_K2R.shape[0], m_K2R.shape[1] // 2) for m_K2R, n_K2R in pairs]

    def solve(number: int) -> Tensor:
        return torch.cat(retract(*pairs[number], rate, decay))

    solved = solve_all(deal_pairs(sides, axis.size), solve, pairs[0][0], axis)
    both = [flat.view(-1, rank).tensor_split((m_rows,)) for flat, (m_rows, _, rank) in zip(solved, sides, strict=True)]
    return [(m_KR, n_KR) for m_KR, n_KR in both]


def retract(m_K2R: Tensor, n_K2R: Tensor, rate: float, decay: float = 1.0) -> tuple[Tensor, Tensor]:
    """The step in coordinates: [M dM] and [N dN] -> new M and N, [K, R] each. The factors are multiplied by `decay` first.
    Columns beyond the numerical rank of the result are zero.

    An SVD does not determine the sign of a column pair. The sign is chosen so that the largest inner product of a new column of M
    with an old one is positive, a choice that does not depend on the basis.
    """
    rank = m_K2R.shape[1] // 2
    m, dm = m_K2R[:, :rank] * decay, m_K2R[:, rank:]
    n, dn = n_K2R[:, :rank] * decay, n_K2R[:, rank:]
    # pinv truncates at max(shape) * epsilon of the largest singular value.
    m_plus, n_plus = torch.linalg.pinv(m), torch.linalg.pinv(n)
    across = dm @ n_plus
    tangent = m_plus.mT @ dn.mT + across - m @ (m_plus @ across)
    u, s, vh = torch.linalg.svd(m @ n.mT - rate * tangent, full_matrices=False)
    u, s, v = u[:, :rank], s[:rank], vh.mT[:, :rank]
    noise = max(m.shape[0], n.shape[0]) * torch.finfo(s.dtype).eps * s[0]
    root = torch.where(s > noise, s, 0).sqrt()
    products = m.mT @ u
    along = products.gather(0, products.abs().argmax(0, keepdim=True)).squeeze(0)
    sign = torch.where(along < 0, -1.0, 1.0).to(root)
    missing = rank - len(s)  # the wide side may be narrower than the rank: pad with zero columns
    new_m, new_n = (torch.nn.functional.pad(x * (root * sign), (0, missing)) for x in (u, v))
    return new_m, new_n
