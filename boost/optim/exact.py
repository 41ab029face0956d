"""LORO's exact step: the best rank-r approximation of W - rate * T, where two directions define the tangent vector T.

With W = M N^T (M = B, N = A^T), directions dM, dN and pseudo-inverses M+, N+, the published algorithm (ICLR 2025, equation 10
and its code) takes the best rank-r approximation of

    M N^T - rate * ((M+)^T dN^T + (I - M M+) dM (N+)^T),

and splits it evenly, M = U sqrt(S), N = V sqrt(S). The result lies in the column spaces of [M dM] and [N dN]. With orthonormal
bases Q and P of these, [M dM] = Q [M' dM'] and [N dN] = P [N' dN']. The same formula holds for the small M', dM', N', dN' of at
most 2r rows, and the new factors are Q and P times small matrices. The published code computes QRs of M and of N, and two more
of the components orthogonal to them; one QR of [M dM] contains both. If M or N is rank-deficient, its pseudo-inverse replaces
the inverse.

All computation is in fp64. Legend: N local rows of the wide side, K columns of a basis (2r or fewer), R rank.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from boost.config.factors import deal_pairs
from boost.optim.factors import Factor, solve_all
from boost.parallel.collectives import all_gather
from boost.parallel.mesh import Axis


def bases(tall: Mapping[str, Tensor], factors: Sequence[Factor], axis: Axis) -> dict[str, tuple[Tensor, Tensor]]:
    """For [N, R, 2] of each factor: (local rows [N, K] of an orthonormal basis, coordinates [K, 2R] of the factor and its
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
    """`retract` of every pair. Pairs are replicated over an axis and dealt out to its processes, with one collective over it."""
    sides = [(m_K2R.shape[0], n_K2R.shape[0], m_K2R.shape[1] // 2) for m_K2R, n_K2R in pairs]

    def solve(number: int) -> Tensor:
        return torch.cat(retract(*pairs[number], rate, decay))

    solved = solve_all(deal_pairs(sides, axis.size), solve, pairs[0][0], axis)
    both = [flat.view(-1, rank).tensor_split((m_rows,)) for flat, (m_rows, _, rank) in zip(solved, sides, strict=True)]
    return [(m_KR, n_KR) for m_KR, n_KR in both]


def retract(m_K2R: Tensor, n_K2R: Tensor, rate: float, decay: float = 1.0) -> tuple[Tensor, Tensor]:
    """The step in coordinates: [M dM] and [N dN] -> new M and N, [K, R] each. The factors are multiplied by `decay` first.
    Columns beyond the numerical rank of the result are zero.

    An SVD does not determine the sign of a pair of columns. It is chosen so that the largest inner product of a new column of M
    with an old one is positive, which does not depend on the basis.
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
    return _widened(u * (root * sign), rank), _widened(v * (root * sign), rank)


def _widened(x_KJ: Tensor, rank: int) -> Tensor:
    """Pads zero columns up to the rank: the wide side may be narrower than the rank."""
    return torch.nn.functional.pad(x_KJ, (0, rank - x_KJ.shape[1]))
