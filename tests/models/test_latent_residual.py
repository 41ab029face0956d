"""DLR's residual as an addition to B: matches the matrix written out, for every part of B."""

import math

import pytest
import torch

from boost.config import load
from boost.config.architecture import flops_per_token, groups, parameter_count
from boost.errors import ConfigError
from boost.models.latent_residual import LatentResidual, folded, latent_residual, with_residual
from boost.plan.collectives import step_collectives
from boost.plan.memory import memory
from boost.plan.step import elementwise_bytes
from tests import toy

SHAPES = ((12, 4), (13, 4), (32, 6), (48, 6), (8, 6), (5, 5), (4, 6), (7, 1))
"""(outputs, rank): a whole number of rows per latent or not, fewer outputs than latents, and one latent."""


def matrix(outputs: int, rank: int, alpha: float) -> torch.Tensor:
    """alpha / sqrt(K) E, entry by entry."""
    times = math.ceil(outputs / rank)
    result = torch.zeros(outputs, rank, dtype=torch.float64)
    for output in range(outputs):
        result[output, output // times] = alpha / math.sqrt(times)
    return result


@pytest.mark.parametrize(("outputs", "rank"), SHAPES)
def test_every_part_is_that_part_of_the_matrix(outputs: int, rank: int) -> None:
    times = math.ceil(outputs / rank)
    whole = matrix(outputs, rank, 0.7)
    rows = [(a, b) for a in range(outputs) for b in range(a + 1, outputs + 1)]
    columns = [(a, b) for a in range(rank) for b in range(a + 1, rank + 1)]
    for first_row, row in rows:
        for first_column, column in columns:
            own = LatentResidual(0.7 / math.sqrt(times), times, first_row, first_column)
            part = own.add_to(torch.zeros(row - first_row, column - first_column, dtype=torch.float64))
            assert torch.equal(part, whole[first_row:row, first_column:column]), (first_row, row, first_column, column)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_changes_a_copy_and_passes_the_gradient_on(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    b = torch.randn(13, 4, requires_grad=True)
    before = b.detach().clone()
    own = LatentResidual(0.5, 4)
    made = with_residual(b, own, dtype)
    gradient = torch.randn(13, 4).to(dtype)
    made.backward(gradient)
    assert made.dtype == dtype and torch.equal(b, before) and b.grad is not None
    assert torch.equal(b.grad, gradient.float())
    torch.testing.assert_close(made, (before.double() + matrix(13, 4, 1.0)).to(dtype), rtol=2**-7, atol=2**-8)
    h = torch.randn(3, 4)
    expected = (h.double() @ matrix(13, 4, 1.0).T).float()
    torch.testing.assert_close(own.of_latents(h, 13), expected)


def test_folding_a_weight_leaves_all_others() -> None:
    model = toy.toy_config(model={"family": "cola", "rank": 6, "dlr_alpha": 0.7}).model
    weight = torch.randn(32, 6)
    expected = weight.double() + matrix(32, 6, 0.7)
    torch.testing.assert_close(folded(model, "layers.1.attn.q.B", weight).double(), expected, rtol=0, atol=1e-7)
    for name in ("layers.1.attn.q.A", "layers.0.attn_norm", "embed"):
        assert folded(model, name, weight) is weight
    assert folded(model, "layers.0.mlp.up.B", weight.bfloat16()).dtype == torch.float32
    plain = toy.toy_config(model={"family": "cola"}).model
    assert folded(plain, "layers.1.attn.q.B", weight) is weight
    assert latent_residual(plain, groups(plain, 0)[0].slots[0]) is None


def test_a_folded_decoder_has_the_same_logits() -> None:
    config = toy.toy_config(model={"family": "lax", "rank": 6, "dlr_alpha": 0.7})
    decoder, _ = toy.toy_decoder(config)
    tokens, _ = toy.toy_tokens(config)

    def logits() -> torch.Tensor:
        return decoder.next_logits(tokens, decoder.make_caches(2, tokens.shape[1]))

    expected = logits()
    decoder.fold_residuals()
    assert all(group.residuals == () for group in (decoder.blocks[0].qkv, decoder.blocks[1].down))
    torch.testing.assert_close(logits(), expected, rtol=1e-12, atol=1e-14)


def test_it_costs_no_parameter_no_flop_and_no_communication() -> None:
    """The planner runs the decoder, so its element-wise work has the additions; nothing is kept for the backward pass."""
    plain, with_dlr = (load("boost-7b", ["--model.dlr_alpha", alpha]) for alpha in ("0", "1"))
    assert parameter_count(with_dlr.model) == parameter_count(plain.model)
    assert flops_per_token(with_dlr.model, 4096) == flops_per_token(plain.model, 4096)
    assert step_collectives(with_dlr) == step_collectives(plain)
    assert memory(with_dlr).by_category == memory(plain).by_category
    added = elementwise_bytes(with_dlr) / elementwise_bytes(plain)
    assert 1 <= added < 1.1


def test_what_does_not_go_with_it() -> None:
    with pytest.raises(ConfigError, match="factor_init = 'spectral' makes B A the truncated SVD"):
        load("cola-60m", ["--model.dlr_alpha", "1", "--model.factor_init", "spectral"])
    with pytest.raises(ConfigError, match="model.dlr_alpha = 1.0 is not invariant to that"):
        load("loro-60m", ["--model.dlr_alpha", "1"])
    with pytest.raises(ConfigError, match="dlr_alpha"):
        load("cola-60m", ["--model.dlr_alpha", "-1"])
    load("loro-60m", ["--model.dlr_alpha", "1", "--optim.refresh_only", "true"])


def test_one_rank_for_keys_and_values() -> None:
    ranks = load("cola-60m", ["--model.ranks.kv", "32", "--model.ranks.attn", "64"]).model
    assert [ranks.rank_of(3, f"attn.{name}") for name in "qkvo"] == [64, 32, 32, 64]
    own = load("cola-60m", ["--model.ranks.kv", "32", "--model.ranks.attn.v", "48"]).model
    assert [own.rank_of(0, f"attn.{name}") for name in "qkv"] == [128, 32, 48]
