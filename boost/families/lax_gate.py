"""The mathematics of `lax` (`boost.families.lax`): a block's latents are combined with those of the same linears in the previous
block.

Legend: T tokens; R latent width of a group (all slots side by side), r of one slot, a x b its most balanced factors. All
are local to this process, except that a gate's inputs are whole (and this process computes some rows of its output).
"""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from boost.config.schema import ModelConfig
from boost.models.kernels import Node, linear
from boost.models.latents import Math, Mixer

EPS = 1e-6
"""Epsilon of the latents' LayerNorm, added to the variance."""


class Gate(Math):
    """u + G(h), then a LayerNorm per slot."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__(model)
        self.gate: str = model.gate  # type: ignore[attr-defined]

    def mix(self, u_TR: Tensor, prev: Sequence[Tensor], mixer: Mixer) -> Tensor:
        """u + G(h)."""
        gated = [self._gated(h_Tr, mixer, slot) for slot, h_Tr in enumerate(prev)]
        return u_TR + (gated[0] if len(gated) == 1 else torch.cat(gated, dim=-1))

    def _gated(self, h_Tr: Tensor, mixer: Mixer, slot: int) -> Tensor:
        """G(h) for one slot: this process's rows."""
        if self.gate == "dense":
            return linear(h_Tr, mixer.of("gate_weight", slot), mixer.of("gate_bias", slot))
        if self.gate == "tensor":
            rows_Aa, columns_bb = (mixer.of(name, slot).to(h_Tr.dtype) for name in ("gate_rows", "gate_columns"))
            h_Tab = h_Tr.unflatten(-1, (rows_Aa.shape[1], columns_bb.shape[1]))
            # If sharded, multiply by this process's rows first, which skips other processes' rows.
            if rows_Aa.shape[0] < rows_Aa.shape[1]:
                return linear(rows_Aa @ h_Tab, columns_bb).flatten(1)
            return (rows_Aa @ linear(h_Tab, columns_bb)).flatten(1)
        return h_Tr

    def sums(self, mixed_TR: Tensor, mixer: Mixer) -> Tensor:
        """Of the elements in this process's shard of each latent, and of their squares."""
        return _NormStats.apply(mixed_TR, mixer.widths)

    def normalize(self, mixed_TR: Tensor, sums_T2k: Tensor | None, mixer: Mixer) -> Tensor:
        """LayerNorm of each latent."""
        widths = mixer.widths
        if sums_T2k is not None:
            pairs = tuple(zip(widths, mixer.whole_widths, strict=True))
            return _ApplyNorm.apply(mixed_TR, sums_T2k, *map(mixer.joined, ("norm_weight", "norm_bias")), pairs)
        if len(set(widths)) == 1:
            parts = mixed_TR.unflatten(-1, (len(widths), widths[0]))
            normed = F.layer_norm(parts, widths[:1], eps=EPS).flatten(1)
        else:
            slots = zip(mixed_TR.split(widths, dim=-1), widths, strict=True)
            normed = torch.cat([F.layer_norm(v, (r,), eps=EPS) for v, r in slots], dim=-1)
        weight, bias = map(mixer.joined, ("norm_weight", "norm_bias"))
        return torch.addcmul(bias.to(normed.dtype), normed, weight.to(normed.dtype))


class _NormStats(torch.autograd.Function):
    """forward: v [T, R] -> s [T, 2k], the sums of v and of v^2 for each of k slots, fp64; dgrad: dv = ds_1 + 2 v ds_2. No
    collective.

    The variance of a whole latent, s_2 / n - m^2, suffers from cancellation if the mean is much larger than the deviation. So only
    per-token numbers are combined this way, in fp64. Per-element numbers are deviations from the mean of this process's shard.
    """

    @staticmethod
    def forward(ctx: Node, v_TR: Tensor, ranks: tuple[int, ...]) -> Tensor:
        ctx.save_for_backward(v_TR)
        ctx.ranks = ranks
        sums = []
        for mean_T1, deviation in _centered_parts(v_TR, ranks):
            mean_T, n = mean_T1[:, 0].to(torch.float64), deviation.shape[-1]
            sums += [mean_T * n, deviation.square().sum(-1).to(torch.float64) + mean_T.square() * n]
        return torch.stack(sums, dim=-1)

    @staticmethod
    def backward(ctx: Node, ds_T2k: Tensor) -> tuple[Tensor, None]:
        (v_TR,) = ctx.saved_tensors
        dv = []
        for i, (mean_T1, deviation) in enumerate(_centered_parts(v_TR, ctx.ranks)):
            first_T1, second_T1 = ds_T2k[:, 2 * i, None], ds_T2k[:, 2 * i + 1, None]
            of_mean_T1 = first_T1 + 2 * mean_T1.to(torch.float64) * second_T1
            dv.append(of_mean_T1.to(mean_T1.dtype) + 2 * deviation * second_T1.to(mean_T1.dtype))
        return torch.cat(dv, dim=-1).to(v_TR.dtype), None


class _ApplyNorm(torch.autograd.Function):
    """forward: y = w (v - m) c + b, with the mean m = s_1 / n and c = (s_2 / n - m^2 + eps)^(-1/2) of a whole latent of width
    n; v, y [T, R]; s [T, 2k]; w, b [R].
    dgrad: dv = c w dy; ds from dm = -c <w, dy> + m c^3 <w dy, v - m> and dc = <w dy, v - m> over this process's shard: a
    partial sum.
    wgrad: dw, db complete. No collective."""

    @staticmethod
    def forward(
        ctx: Node, v_TR: Tensor, s_T2k: Tensor, w_R: Tensor, b_R: Tensor, widths: tuple[tuple[int, int], ...]
    ) -> Tensor:
        ctx.save_for_backward(v_TR, s_T2k, w_R)
        ctx.widths = widths
        parts = [(v - m_T1) * c_T1 for v, m_T1, c_T1 in _standardized_parts(v_TR, s_T2k, widths)]
        normed = torch.cat(parts, dim=-1)
        y_TR = torch.addcmul(b_R.to(normed.dtype), normed, w_R.to(normed.dtype))
        return y_TR if y_TR.dtype == v_TR.dtype else y_TR.to(v_TR.dtype)

    @staticmethod
    def backward(ctx: Node, dy_TR: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, None]:
        v_TR, s_T2k, w_R = ctx.saved_tensors
        dy_TR = _upcast(dy_TR)
        ranks = [rank for rank, _ in ctx.widths]
        inner = (dy_TR * w_R.to(dy_TR.dtype)).split(ranks, dim=-1)
        dv, ds, normed = [], [], []
        for (v, m_T1, c_T1), g, (_, n) in zip(
            _standardized_parts(v_TR, s_T2k, ctx.widths), inner, ctx.widths, strict=True
        ):
            centered = v - m_T1
            dvar_T = -0.5 * (g * centered).sum(-1) * c_T1[:, 0] ** 3
            dvar_T = dvar_T.to(torch.float64)
            dmean_T = -(g.sum(-1) * c_T1[:, 0]).to(torch.float64) - 2 * m_T1[:, 0].to(torch.float64) * dvar_T
            ds += [dmean_T / n, dvar_T / n]
            dv.append(g * c_T1)
            normed.append(centered * c_T1)
        dw_R = (dy_TR * torch.cat(normed, dim=-1)).sum(0).to(w_R.dtype)
        dv_TR = torch.cat(dv, dim=-1).to(v_TR.dtype)
        return dv_TR, torch.stack(ds, dim=-1), dw_R, dy_TR.sum(0).to(w_R.dtype), None


def _upcast(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _centered_parts(v_TR: Tensor, ranks: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """(mean of this process's shard, deviations from it) for each slot, fp32 or wider."""
    for v in _upcast(v_TR).split(ranks, dim=-1):
        mean_T1 = v.sum(-1)[:, None] / v.shape[-1]
        yield mean_T1, v - mean_T1


def _standardized_parts(
    v_TR: Tensor, s_T2k: Tensor, widths: Sequence[tuple[int, int]]
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """(latent, mean, inverse standard deviation) for each slot, fp32 or wider."""
    parts = _upcast(v_TR).split([rank for rank, _ in widths], dim=-1)
    for i, (v, (_, n)) in enumerate(zip(parts, widths, strict=True)):
        m_T1 = s_T2k[:, 2 * i, None] / n
        variance_T1 = s_T2k[:, 2 * i + 1, None] / n - m_T1.square()  # may be negative after rounding
        yield v, m_T1.to(v.dtype), torch.rsqrt(variance_T1.clamp_min(0) + EPS).to(v.dtype)
