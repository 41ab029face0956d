"""BTP (arXiv 2512.12131) as differentiable functions, for your own model. They compute the same results as a single process.

A residual stream is sharded along its width: each of p TP ranks holds [..., dim / p]. A sublayer is:

    z = norm_down_proj(x, norm_weight, [A_q, A_k, A_v], mesh=mesh)     one all-reduce of 3 r + 1 numbers per token
    q, k, v = (up_proj(u, B) for u, B in zip(z, [B_q, B_k, B_v]))      local: this process's heads or channels
    ...                                                               attention over these heads
    x = x + up_proj(down_proj(a, A_o, mesh=mesh), B_o)                 one all-reduce of r numbers per token

The backward pass all-reduces the gradients of the latents and communicates nothing else. Weights are shards: A [r, in / p],
B [out / p, r], norm_weight [dim / p]. They are plain tensors or DTensors (Shard(1), Shard(0), Shard(0)), which clipping, FSDP2 and
DCP treat as shards. A replicated parameter that acts on latents, such as a bias, gets a partial gradient.

Legend: D = dim / p, width of the residual stream held here; r bottleneck rank; O output width held here.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from boost.config.layouts.spec import SUM_BOTH
from boost.errors import ConfigError
from boost.layouts.btp import StartSum, WaitForSum
from boost.models.kernels import inverse_rms, linear, rms_norm, scale
from boost.nn.spec import autocast_resolved, tp_axis
from boost.nn.weights import once_differentiable, own_shard
from boost.parallel import collectives

TP = DeviceMesh | dist.ProcessGroup | None


def norm_down_proj(
    x: Tensor, norm_weight: Tensor, down_weights: Sequence[Tensor], *, eps: float = 1e-6, mesh: TP = None
) -> list[Tensor]:
    """A_k RMSNorm(x) for several projections of one input: online RMSNorm, one GEMM, one all-reduce in each pass.

    Args:
        x: [..., D], this process's columns.
        norm_weight: [D].
        down_weights: the factors A_k, [r_k, D] each.
        eps: added to the mean square.
        mesh: the TP ranks, as in `boost.nn.Spec`.

    Returns:
        Latents [..., r_k], complete and equal on all TP ranks.
    """
    axis, gamma = tp_axis(mesh), own_shard(norm_weight)
    weights = [own_shard(weight) for weight in down_weights]
    weight = weights[0] if len(weights) == 1 else torch.cat(weights)
    with autocast_resolved(x.device, x.dtype) as dtype:
        rows = x.reshape(-1, x.shape[-1]).to(dtype)
        if axis.size == 1:
            latents = linear(rms_norm(rows, gamma, eps), weight)
        else:
            width = axis.size * x.shape[-1]
            u, s = WaitForSum.apply(*StartSum.apply(rows, weight, gamma, axis, width, eps), axis, False)
            latents = scale(u, inverse_rms(s, width, eps))
        latents = once_differentiable(latents)
    parts = latents.split([weight.shape[0] for weight in down_weights], dim=-1)
    return [part.reshape(*x.shape[:-1], -1) for part in parts]


def down_proj(x: Tensor, down_weight: Tensor, *, mesh: TP = None) -> Tensor:
    """A x for heads or channels x: [..., in / p], [r, in / p] -> latents [..., r], complete on all TP ranks. One all-reduce in each
    pass."""
    axis = tp_axis(mesh)
    with autocast_resolved(x.device, x.dtype) as dtype:
        u = linear(x.to(dtype), own_shard(down_weight))
        return u if axis.size == 1 else once_differentiable(collectives.run(SUM_BOTH, u, axis))


def up_proj(latents: Tensor, up_weight: Tensor, *, activation: str = "none") -> Tensor:
    """B act(z): latents [..., r], B [O, r] -> [..., O]; activation is "none" or "silu". No communication.

    Raises ConfigError for any other activation.
    """
    if activation not in ("none", "silu"):
        raise ConfigError(f"activation = '{activation}' is unknown; valid values: none, silu")
    with autocast_resolved(latents.device, latents.dtype) as dtype:
        h = latents.to(dtype)
        return linear(F.silu(h) if activation == "silu" else h, own_shard(up_weight))
