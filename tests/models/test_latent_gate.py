"""A latent gate in steps, as a layout that shards latents runs it, against a single LayerNorm."""

import torch
from torch.autograd import gradcheck

from boost.models.group import LinearGroup
from boost.models.latent_gate import LatentGate, _ApplyNorm, _NormStats
from tests import toy


def crossing(**model: object) -> LatentGate:
    """The latent gate of q, k, v in the second block, with weights different from the initial ones."""
    config = toy.toy_config(model={"family": "lax", "ranks": {"attn.v": 6}, **model})
    decoder, _ = toy.toy_decoder(config)
    group = decoder.blocks[1].qkv
    assert isinstance(group, LinearGroup) and group.latent_gate is not None
    found = group.latent_gate.double()
    with torch.no_grad():
        found.norm_weight.normal_()
        found.norm_bias.normal_()
    return found


def test_norm_stats_and_apply_norm_are_layer_norm() -> None:
    it = crossing()
    mixed = torch.randn(5, sum(it.ranks), dtype=torch.float64) * 3 + 1
    for slots in (range(3), range(1, 2), range(2, 3)):
        start = sum(it.ranks[: slots[0]])
        part = mixed[:, start : start + sum(it.ranks[slot] for slot in slots)]
        whole = it._layer_norm(part, slots)
        assert torch.allclose(it.apply_norm(part, it.norm_stats(part, slots), slots), whole, rtol=1e-11, atol=1e-12)


def test_their_gradients_are_those_of_finite_differences() -> None:
    v = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    w, b = (torch.randn(7, dtype=torch.float64, requires_grad=True) for _ in range(2))
    s = torch.rand(3, 4, dtype=torch.float64) + torch.tensor([0.0, 9.0, 0.0, 9.0])  # variances well above zero
    assert gradcheck(lambda v: _NormStats.apply(v, (3, 4)), (v,))
    assert gradcheck(lambda *x: _ApplyNorm.apply(*x, ((3, 6), (4, 8))), (v, s.requires_grad_(), w, b))


def test_a_latent_far_from_zero_that_hardly_varies_stays_finite() -> None:
    """The variance is a difference of two large numbers and may come out negative."""
    it = crossing()
    generator = torch.Generator().manual_seed(0)
    mixed = 100 + 1e-3 * torch.randn(64, sum(it.ranks), generator=generator)
    found = it.apply_norm(mixed, it.norm_stats(mixed, range(3)), range(3))
    assert torch.isfinite(found).all()
