"""Factorizes a matrix into two thin ones by truncated SVD, with its singular values split evenly between the factors.

Legend: W [O, I] of rank up to min(O, I); B [O, r], A [r, I]; B A is the closest matrix of rank r to W (Eckart-Young).
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Factorization:
    """A rank-r approximation B A of W."""

    a_RI: Tensor
    b_OR: Tensor
    values: Tensor
    """All singular values of W in descending order."""

    @property
    def rank(self) -> int:
        """The rank r."""
        return self.a_RI.shape[0]

    @property
    def error(self) -> float:
        """Relative error ||W - B A|| / ||W|| in the Frobenius norm, from the discarded singular values."""
        squares = self.values.square()
        return float((squares[self.rank :].sum() / squares.sum().clamp_min(torch.finfo(squares.dtype).tiny)).sqrt())


def factorize(w_OI: Tensor, rank: int | None = None, energy: float | None = None, multiple: int = 1) -> Factorization:
    """Truncated SVD of W, in fp64 on W's device: B = U_r sqrt(S_r), A = sqrt(S_r) V_r^T, both fp64.

    r is `rank`, or the smallest rank that keeps the fraction `energy` of the sum of squared singular values, rounded up to a
    multiple of `multiple` and at most min(O, I). Signs are chosen so that the largest entry of each column of U is positive,
    which makes the result independent of the library.
    """
    assert (rank is None) != (energy is None), "give either rank or energy"
    is_wide = w_OI.shape[0] <= w_OI.shape[1]
    w_MN = (w_OI if is_wide else w_OI.T).double()
    # Eigenvectors of the smaller Gram matrix take half the time of an SVD. Squaring loses only directions whose singular values
    # are below 1e-8 of the largest. The product of the factors is a projection of W, as exact as the eigenvectors are
    # orthogonal.
    q_MM = torch.linalg.eigh(w_MN @ w_MN.T).eigenvectors
    projected_MN = q_MM.T @ w_MN
    s, order = projected_MN.norm(dim=1).sort(descending=True, stable=True)
    if rank is None:
        rank = rank_for(s, energy or 0.0, multiple)
    order = order[:rank]
    root = s[: len(order)].sqrt()
    thin_MR = q_MM[:, order] * root
    long_RN = projected_MN[order] / torch.where(root > 0, root, 1)[:, None]
    u_OR = thin_MR if is_wide else long_RN.T
    sign = u_OR.gather(0, u_OR.abs().argmax(dim=0, keepdim=True)).sign()
    sign = torch.where(sign == 0, 1, sign)
    a_RI, b_OR = (long_RN, thin_MR) if is_wide else (thin_MR.T, long_RN.T)
    return Factorization((a_RI * sign.T).contiguous(), (b_OR * sign).contiguous(), s)


def rank_for(values: Tensor, energy: float, multiple: int = 1) -> int:
    """The smallest rank that keeps the fraction `energy` (0 to 1) of the sum of squares, rounded up to a multiple."""
    squares = values.double().square()
    kept = squares.cumsum(0)
    smallest = int((kept < energy * kept[-1]).sum()) + 1
    return min(-(-smallest // multiple) * multiple, len(values))
