"""A matrix as a product of two thin ones: the truncated SVD, its singular values shared equally between the factors.

Legend: W [O, I] of rank up to min(O, I); B [O, r], A [r, I]; B A is the closest matrix of rank r to W (Eckart-Young).
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Factors:
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


def factorize(w_OI: Tensor, rank: int | None = None, energy: float | None = None, multiple: int = 1) -> Factors:
    """The truncated SVD of W, computed in fp64 on W's device: B = U_r sqrt(S_r), A = sqrt(S_r) V_r^T, both fp64.

    r is `rank`, or the smallest that keeps the share `energy` of the sum of squared singular values, rounded up to a multiple
    of `multiple` and never more than min(O, I). The largest entry of each column of U is positive, so that the result
    does not depend on the library's choice of sign.
    """
    assert (rank is None) != (energy is None), "a rank or an energy"
    u, s, vt = torch.linalg.svd(w_OI.double(), full_matrices=False)
    if rank is None:
        rank = rank_for(s, energy or 0.0, multiple)
    u, root, vt = u[:, :rank], s[:rank].sqrt(), vt[:rank]
    sign = u.gather(0, u.abs().argmax(dim=0, keepdim=True)).sign()
    return Factors((vt * sign.T) * root[:, None], u * sign * root, s)


def rank_for(values: Tensor, energy: float, multiple: int = 1) -> int:
    """The smallest rank that keeps the share `energy` (0 to 1) of the sum of squares, rounded up to a multiple."""
    squares = values.double().square()
    kept = squares.cumsum(0)
    smallest = int((kept < energy * kept[-1]).sum()) + 1
    return min(-(-smallest // multiple) * multiple, len(values))
