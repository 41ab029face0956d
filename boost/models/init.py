"""Initial weights, and factors of a matrix by truncated SVD. Initial weights depend only on (seed, parameter name), so they are
bitwise identical on every mesh and under every layout.

Legend: W [O, I] of rank up to min(O, I); B [O, r], A [r, I]; B A is the closest matrix of rank r to W in the Frobenius norm
(Eckart-Young).
"""

import contextlib
import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from boost.config.architecture import Parameter, slot_of
from boost.config.linears import SPECTRAL
from boost.config.schema import ModelConfig
from boost.config.section import resolved
from boost.errors import ConfigError
from boost.models.decoder import Decoder
from boost.models.fused import FusedParam, fused_params, local_slice


@torch.no_grad()
def initialize(decoder: Decoder, seed: int, over: Callable[[list[FusedParam]], Iterable[FusedParam]] = iter) -> None:
    """Initializes every weight of a decoder in place. `over` iterates over the fused parameters and may show progress.

    Each whole parameter is drawn on the CPU in fp32 and then sharded. Values drawn per shard would depend on the mesh.
    """
    fused_of_all = list(fused_params(decoder))
    with _drawn_ahead(decoder.model, fused_of_all, seed) as value:
        for fused in over(fused_of_all):
            for param_slice in fused.local_slices():
                whole = value(param_slice.parameter)
                own = local_slice(param_slice.parameter, decoder.layout, whole)
                param_slice.view(fused.tensor).copy_(own.narrow(0, param_slice.offset, param_slice.rows))


def initial_value(parameter: Parameter, model: ModelConfig, seed: int) -> Tensor:
    """A parameter's whole initial tensor, fp32 on the CPU."""
    initial = parameter.initial
    if isinstance(initial, str):
        initial = resolved(initial, f"the initial value of {parameter.name}")
    if callable(initial):
        made = cast(Tensor, initial(parameter, model, seed))
        if made.shape != parameter.shape:
            raise ConfigError(
                f"the initial value of {parameter.name} must have shape {parameter.shape}, not {(*made.shape,)}"
            )
        if parameter.is_index:
            require_index(made, parameter, model)
        return made
    if initial is not None:
        return _draw(torch.randn, parameter.shape, parameter.name, seed).mul_(initial)
    if parameter.role.startswith("bias."):
        return zeros(parameter, model, seed)
    if parameter.role in ("norm", "final_norm", "qk_norm"):
        return ones(parameter, model, seed)
    return _draw(torch.randn, parameter.shape, parameter.name, seed).mul_(model.init_std)


def zeros(parameter: Parameter, model: ModelConfig, seed: int) -> Tensor:
    """Initial value 0."""
    return torch.zeros(parameter.shape, dtype=torch.float32)


def ones(parameter: Parameter, model: ModelConfig, seed: int) -> Tensor:
    """Initial value 1."""
    return torch.ones(parameter.shape, dtype=torch.float32)


def as_linear(parameter: Parameter, model: ModelConfig, seed: int) -> Tensor:
    """Kaiming-uniform by the last dimension, as torch.nn.Linear draws its weight, and its bias if that is as long as its input."""
    bound = parameter.shape[-1] ** -0.5
    return _draw(torch.rand, parameter.shape, parameter.name, seed).mul_(2 * bound).sub_(bound)


def require_index(index_K: Tensor, parameter: Parameter, model: ModelConfig) -> None:
    """Raises ConfigError for values of a parameter that are not distinct inputs of its linear."""
    inputs, distinct = slot_of(model, parameter.name).d_in, index_K.unique()
    if index_K.dtype != torch.int64 or len(distinct) < len(index_K) or distinct[0] < 0 or distinct[-1] >= inputs:
        raise ConfigError(
            f"{parameter.name} of model.family = '{model.family}' must be int64, distinct and from 0 to {inputs - 1}; it is "
            f"{index_K.dtype}, {len(distinct)} of {len(index_K)} are distinct, and they are from {distinct[0]} to {distinct[-1]}"
        )


def spectral(parameter: Parameter, model: ModelConfig, seed: int) -> Tensor:
    """Initial value of a factor A or B of a linear: of the truncated SVD of the dense linear's own initial weight."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the number of threads would change the last bits
    try:
        return _spectral(*_drawn(parameter, model), seed)[parameter.name.rpartition(".")[2]]
    finally:
        torch.set_num_threads(threads)


def _drawn(parameter: Parameter, model: ModelConfig) -> tuple[str, tuple[int, int], int, float]:
    """(name, shape, rank, standard deviation) of the dense linear that a factor belongs to."""
    slot = slot_of(model, parameter.name)
    rank = parameter.shape[1 if parameter.role.endswith(".outer") else 0]
    return f"{parameter.name.rpartition('.')[0]}.W", (slot.d_out, slot.d_in), rank, model.init_std


@contextlib.contextmanager
def _drawn_ahead(
    model: ModelConfig, fused_params: Sequence[FusedParam], seed: int
) -> Iterator[Callable[[Parameter], Tensor]]:
    """Yields a function that returns initial values, which threads draw ahead of time, one parameter or spectral linear each.

    The spectral factors of a 7B model take six core-hours. Each factorization is single-threaded, because the number of threads
    differs between meshes and would change the last bits.
    """

    def source(parameter: Parameter) -> _Source:
        return _drawn(parameter, model) if parameter.initial == SPECTRAL else parameter

    def values(key: _Source) -> dict[str, Tensor]:
        return {"": initial_value(key, model, seed)} if isinstance(key, Parameter) else _spectral(*key, seed)

    def elements(key: _Source) -> int:
        return math.prod(key.shape if isinstance(key, Parameter) else key[1])

    wanted = Counter(source(s.parameter) for fused in fused_params for s in fused.local_slices())
    order = iter(list(wanted))  # in order of first occurrence
    ahead: dict[_Source, Future[dict[str, Tensor]]] = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with ThreadPoolExecutor(threads) as pool:

        def begin(least: int) -> None:
            """Starts drawing values for the next `least` sources, and for more if few values are in memory."""
            while least > 0 or (len(ahead) < threads + _UNFINISHED and sum(map(elements, ahead)) < _MOST_ELEMENTS):
                key = next(order, None)
                if key is None:
                    return
                ahead[key], least = pool.submit(values, key), least - 1

        def value(parameter: Parameter) -> Tensor:
            key = source(parameter)
            while key not in ahead:
                begin(1)
            found = ahead[key].result()["" if key is parameter else parameter.name.rpartition(".")[2]]
            wanted[key] -= 1
            if not wanted[key]:
                del ahead[key]
                begin(0)
            return found

        begin(0)
        try:
            yield value
        finally:
            torch.set_num_threads(threads)


_Source = Parameter | tuple[str, tuple[int, int], int, float]
"""Source of initial values: a parameter, or a linear to factorize."""

_UNFINISHED = 2
"""Extra values to draw ahead: the A factors of a group's linears (up to three) are requested before the B factors."""

_MOST_ELEMENTS = 1 << 29
"""Number of elements in memory (2 GiB in fp32) above which values are drawn only when needed."""


def _spectral(name: str, shape: tuple[int, int], rank: int, std: float, seed: int) -> dict[str, Tensor]:
    """Factors A and B, fp32, of a linear: the best approximation, at their rank, of the dense linear's own initial weight (spectral
    initialization: Khodak et al., arXiv 2105.01029)."""
    factors = factorize(_draw(torch.randn, shape, name, seed).mul_(std), rank)
    a_RI, b_OR = factors.a_RI.float(), factors.b_OR.float()
    missing = rank - factors.rank
    if missing > 0:  # the rank may exceed the width of the key/value heads: B starts at 0 there, and A must not
        extra = _draw(torch.randn, (missing, shape[1]), f"{name}.A", seed).mul_(std)
        a_RI, b_OR = torch.cat((a_RI, extra)), torch.cat((b_OR, b_OR.new_zeros(shape[0], missing)), dim=1)
    return {"A": a_RI, "B": b_OR}


def _draw(distribution: Callable[..., Tensor], shape: tuple[int, ...], name: str, seed: int) -> Tensor:
    of_name = int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little", signed=True)
    return distribution(shape, generator=torch.Generator().manual_seed(of_name), dtype=torch.float32)


# Factors of a matrix.


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
        """Relative error ||W - B A|| / ||W|| in the Frobenius norm, computed from the discarded singular values."""
        squares = self.values.square()
        return float((squares[self.rank :].sum() / squares.sum().clamp_min(torch.finfo(squares.dtype).tiny)).sqrt())


def factorize(w_OI: Tensor, rank: int | None = None, energy: float | None = None, multiple: int = 1) -> Factorization:
    """Truncated SVD of W, in fp64 on W's device: B = U_r sqrt(S_r), A = sqrt(S_r) V_r^T, both fp64.

    r is `rank`, or the smallest rank that keeps the fraction `energy` of the sum of squared singular values, rounded up to a
    multiple of `multiple` and at most min(O, I). Signs are chosen so that the largest entry of each column of U is positive,
    which makes the result independent of the library.
    """
    assert (rank is None) != (energy is None), "pass exactly one of rank and energy"
    is_wide = w_OI.shape[0] <= w_OI.shape[1]
    w_MN = (w_OI if is_wide else w_OI.T).double()
    # Finding the eigenvectors of the smaller Gram matrix takes half as long as an SVD. Squaring loses only directions
    # whose singular values are below 1e-8 times the largest. The product of the factors is a projection of W, whose error
    # depends only on how far the eigenvectors are from orthogonal.
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
