"""Factorizes a matrix into two thin ones by truncated SVD, with its singular values split evenly between the factors.

Legend: W [O, I] of rank up to min(O, I); B [O, r], A [r, I]; B A is the closest matrix of rank r to W (Eckart-Young), in the
Frobenius norm or in a norm weighted by second moments: C = E[x x^T] [I, I] of the inputs, G = E[g g^T] [O, O] of the outputs'
gradients.
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


DAMPING = 1e-6
"""Fraction of a second moment's mean eigenvalue that is added to its diagonal, so that directions without data have an inverse."""


@dataclass(frozen=True)
class MomentRoot:
    """A square root R of a damped second moment C = R R^T, and its inverse. Both [N, N], fp64."""

    root: Tensor
    inverse: Tensor


def moment_root(moment_NN: Tensor, damping: float = DAMPING) -> MomentRoot:
    """R = Q sqrt(L) of C = Q L Q^T (fp64). Negative eigenvalues, which are rounding errors, count as 0 before damping.

    A moment of zero, of gradients that never arrive, counts as a multiple of the identity.
    """
    values, q_NN = torch.linalg.eigh(moment_NN.double())
    values = values.clamp_min(0)
    mean = values.mean()
    roots = (values + damping * torch.where(mean > 0, mean, 1)).sqrt()
    return MomentRoot(q_NN * roots, (q_NN / roots).T)


def solve_right(m_ON: Tensor, moment_NN: Tensor) -> Tensor:
    """M C^-1 of a second moment C, damped as by `moment_root`."""
    damped_NN = moment_NN.clone()
    damped_NN.diagonal().add_(DAMPING * moment_NN.diagonal().mean())
    return torch.linalg.solve(damped_NN, m_ON.T).T


def weighted_values(w_OI: Tensor, outputs: MomentRoot, inputs: MomentRoot) -> Tensor:
    """Singular values of R_G^T W R_C in descending order. The squares that a rank discards sum to E[(g^T (W - B A) x)^2] if g and
    x are independent: twice the expected rise of the loss, to second order."""
    return factorize(outputs.root.T @ w_OI.double() @ inputs.root, rank=1).values


def factorize_weighted(w_OI: Tensor, rank: int, outputs: MomentRoot, inputs: MomentRoot) -> Factorization:
    """The B A of rank r that minimizes tr(G (W - B A) C (W - B A)^T), balanced as by `factorize`. `values` are those of
    `weighted_values`.

    With G = 1 this is the truncation of SVD-LLM (arXiv 2403.07378); with both, that of a Kronecker-factored Fisher matrix.
    """
    weighted = factorize(outputs.root.T @ w_OI.double() @ inputs.root, rank)
    a_RI, b_OR = balanced(weighted.a_RI @ inputs.inverse, outputs.inverse.T @ weighted.b_OR)
    return Factorization(a_RI, b_OR, weighted.values)


def balanced(a_RI: Tensor, b_OR: Tensor) -> tuple[Tensor, Tensor]:
    """(A, B) with the same product and equal Gram matrices A A^T = B^T B, diagonal, from which training starts evenly."""
    q_OR, left_RR = torch.linalg.qr(b_OR)
    q_IR, right_RR = torch.linalg.qr(a_RI.T)
    u_RR, s_R, v_RR = torch.linalg.svd(left_RR @ right_RR.T)
    root_R = s_R.sqrt()
    b_OR, a_RI = q_OR @ (u_RR * root_R), (root_R[:, None] * v_RR) @ q_IR.T
    sign_R = b_OR.gather(0, b_OR.abs().argmax(dim=0, keepdim=True)).sign()
    sign_R = torch.where(sign_R == 0, 1, sign_R)
    return (a_RI * sign_R.T).contiguous(), (b_OR * sign_R).contiguous()
