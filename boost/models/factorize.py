"""A matrix as a product of two thin ones: the truncated SVD, its singular values shared equally between the factors.

Legend: W [O, I] of rank up to min(O, I); B [O, r], A [r, I]; B A is the closest matrix of rank r to W (Eckart-Young).
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Factorization:
    """B A, close to W."""

    a_RI: Tensor
    b_OR: Tensor
    values: Tensor
    """All singular values of W, the largest first."""

    @property
    def rank(self) -> int:
        """r."""
        return self.a_RI.shape[0]

    @property
    def error(self) -> float:
        """||W - B A|| / ||W|| in the Frobenius norm: what of the singular values was left out."""
        squares = self.values.square()
        return float((squares[self.rank :].sum() / squares.sum().clamp_min(torch.finfo(squares.dtype).tiny)).sqrt())


def factorize(w_OI: Tensor, rank: int | None = None, energy: float | None = None, multiple: int = 1) -> Factorization:
    """The truncated SVD of W, in fp64 on W's device: B = U_r sqrt(S_r), A = sqrt(S_r) V_r^T, both fp64.

    r is `rank`, or the smallest that keeps the share `energy` of the sum of squared singular values, rounded up to a multiple
    of `multiple` and never more than min(O, I). The largest entry of each column of U is positive, so that the result
    does not depend on the library's choice of sign.
    """
    assert (rank is None) != (energy is None), "a rank or an energy"
    is_wide = w_OI.shape[0] <= w_OI.shape[1]
    w_MN = (w_OI if is_wide else w_OI.T).double()
    # By the eigenvectors of the smaller Gram matrix, in half the time of an SVD. What squaring loses are directions of singular
    # values below 1e-8 of the largest; the factors' product is a projection of W, as exact as eigenvectors are orthogonal.
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
    """The smallest rank that keeps the share `energy` (0 to 1) of the sum of squares, rounded up to a multiple."""
    squares = values.double().square()
    kept = squares.cumsum(0)
    smallest = int((kept < energy * kept[-1]).sum()) + 1
    return min(-(-smallest // multiple) * multiple, len(values))
