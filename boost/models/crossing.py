"""Latent crossing (LaX, arXiv 2505.21732): latents of a block meet those of the same linears of the block before.

    u = A x;  u = LayerNorm(u + G(h of the block before));  h = act(u);  y = B h

Legend: T tokens; R latent width of a group (all slots side by side), r of one slot, a x b its most balanced factors; as held by
this process, except that what passes a gate is whole (`rows` of it come out).
"""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from boost.config import architecture
from boost.config.schema import ModelConfig
from boost.models.interface import Layout
from boost.models.stored import Stored

EPS = 1e-6
"""Added to the variance by the latents' LayerNorm."""


class Crossing(Stored):
    """What acts on the latents of one group where those of the block before arrive: a gate, and a LayerNorm a slot.

    Latents come as one tensor for the whole group or as one a slot. `mix`, `moments` and `settle` are the steps between
    which a layout that cuts latents puts its collectives; `forward` is all of them where latents are whole.
    """

    norm_weight: Tensor
    norm_bias: Tensor

    def __init__(self, model: ModelConfig, shape: architecture.Group, prefix: str, layout: Layout) -> None:
        super().__init__()
        self.gate = model.gate
        self.whole_ranks = shape.ranks
        self._names = [slot.name.partition(".")[2] for slot in shape.slots]
        for name, parameters in architecture.crossing_parameters(model, shape, prefix).items():
            self.store(name, parameters, layout)
        self.ranks = tuple(part.rows for part in self.parts["norm_weight"])

    @property
    def mixes(self) -> bool:
        """Whether the gate needs whole latents."""
        return self.gate != "identity"

    def forward(self, latents: Sequence[Tensor], arrived: Sequence[Tensor]) -> list[Tensor]:
        """LayerNorm(u + G(h)), tensor by tensor, where this process holds latents whole."""
        mixed = self.mix(latents, list(self._by_slot(arrived)))
        return [self._layer_norm(v, slots) for v, slots in zip(mixed, self.slots_of(latents), strict=True)]

    def mix(self, latents: Sequence[Tensor], arrived: Sequence[Tensor]) -> list[Tensor]:
        """u + G(h); `arrived` is one whole latent [T, r] a slot, or this process's part where the gate does not mix."""
        gated = [self._gated(h, slot) for slot, h in enumerate(arrived)]
        of_each = [[gated[slot] for slot in slots] for slots in self.slots_of(latents)]
        return [u + (g[0] if len(g) == 1 else torch.cat(g, dim=-1)) for u, g in zip(latents, of_each, strict=True)]

    def moments(self, mixed: Tensor, slots: range) -> Tensor:
        """Sums over this process's part of each latent and of its squares, [T, 2 slots], fp32 or wider."""
        wide = mixed.to(torch.promote_types(mixed.dtype, torch.float32))
        parts = wide.split([self.ranks[slot] for slot in slots], dim=-1)
        return torch.stack([f(v) for v in parts for f in (_sum, _sum_of_squares)], dim=-1)

    def settle(self, mixed: Tensor, moments: Tensor, slots: range) -> Tensor:
        """LayerNorm of this process's part of latents, by the moments of the whole ones."""
        wide = mixed.to(moments.dtype)
        normed = []
        parts = wide.split([self.ranks[slot] for slot in slots], dim=-1)
        for place, (slot, v) in enumerate(zip(slots, parts, strict=True)):
            mean_T1, square_T1 = (moments[:, 2 * place + i, None] / self.whole_ranks[slot] for i in (0, 1))
            normed.append((v - mean_T1) * torch.rsqrt(square_T1 - mean_T1.square() + EPS))
        return self._affine(torch.cat(normed, dim=-1).to(mixed.dtype), slots)

    def slots_of(self, latents: Sequence[Tensor]) -> list[range]:
        """Numbers of the slots that each tensor holds: all of them, or one each."""
        if len(latents) == 1:
            return [range(len(self.ranks))]
        return [range(slot, slot + 1) for slot in range(len(self.ranks))]

    def _by_slot(self, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
        for tensor, slots in zip(tensors, self.slots_of(tensors), strict=True):
            yield from tensor.split([self.ranks[slot] for slot in slots], dim=-1)

    def _gated(self, h_Tr: Tensor, slot: int) -> Tensor:
        """G(h) of one slot: this process's rows of it."""
        if self.gate == "dense":
            return F.linear(
                h_Tr, self._matrix("gate_weight", slot, h_Tr), self._vector("gate_bias", slot).to(h_Tr.dtype)
            )
        if self.gate == "tensor":
            rows_Aa, columns_bb = self._matrix("gate_rows", slot, h_Tr), self._matrix("gate_columns", slot, h_Tr)
            h_Tab = h_Tr.unflatten(-1, (rows_Aa.shape[1], columns_bb.shape[1]))
            return (rows_Aa @ h_Tab @ columns_bb.T).flatten(1)
        return h_Tr

    def _matrix(self, name: str, slot: int, like: Tensor) -> Tensor:
        return getattr(self, f"{name}_{self._names[slot]}").to(like.dtype)

    def _vector(self, name: str, slot: int) -> Tensor:
        return self.parts[name][slot].view(getattr(self, name))

    def _layer_norm(self, mixed: Tensor, slots: range) -> Tensor:
        ranks = [self.ranks[slot] for slot in slots]
        if len(set(ranks)) == 1:
            normed = F.layer_norm(mixed.unflatten(-1, (len(ranks), ranks[0])), (ranks[0],), eps=EPS).flatten(1)
        else:
            parts = mixed.split(ranks, dim=-1)
            normed = torch.cat([F.layer_norm(v, (r,), eps=EPS) for v, r in zip(parts, ranks, strict=True)], dim=-1)
        return self._affine(normed, slots)

    def _affine(self, normed: Tensor, slots: range) -> Tensor:
        weight, bias = self.norm_weight, self.norm_bias
        if len(slots) < len(self.ranks):
            weight, bias = (self._vector(name, slots[0]) for name in ("norm_weight", "norm_bias"))
        return torch.addcmul(bias.to(normed.dtype), normed, weight.to(normed.dtype))


def _sum(v: Tensor) -> Tensor:
    return v.sum(dim=-1)


def _sum_of_squares(v: Tensor) -> Tensor:
    return v.square().sum(dim=-1)
