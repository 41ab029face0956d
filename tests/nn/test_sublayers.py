"""Attention, MLP and blocks on their own, with the residual stream sharded as each layout does."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from boost.config.layouts import layout_spec, layouts_of
from boost.errors import ConfigError
from boost.measure.counting import CollectiveCounter
from boost.nn import Block, Decoder, LowRankAttention, LowRankMLP, Spec
from boost.nn.weights import whole_weight
from tests import references
from tests.distributed import run_distributed
from tests.families import known

SIZES: dict[str, Any] = {"dim": 32, "ffn_dim": 48, "heads": 8, "rank": 8, "dtype": torch.float64}


def stream(seed: int = 0) -> Tensor:
    """[2, 6, 32]."""
    return torch.randn(2, 6, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_a_block_is_the_papers_formula() -> None:
    block, x = Block(**SIZES), stream()
    w = {name.removesuffix(".weight"): value for name, value in block.named_parameters()}
    z = references.rms_norm(x, w["attn.norm"], 1e-6)

    def linear(name: str, value: Tensor) -> Tensor:
        return torch.nn.functional.silu(value @ w[f"{name}.A"].T) @ w[f"{name}.B"].T

    shape = references.Shape(8, 8, 1e-6, 1e4)
    q, k, v = (linear(f"attn.{name}_proj", z) for name in "qkv")
    attended = x + linear("attn.o_proj", references.attention(q, k, v, shape, None))
    torch.testing.assert_close(block.attn(x), attended, rtol=1e-10, atol=1e-12)
    z = references.rms_norm(attended, w["mlp.norm"], 1e-6)
    product = torch.nn.functional.silu(linear("mlp.gate_proj", z)) * linear("mlp.up_proj", z)
    expected = attended + linear("mlp.down_proj", product)
    torch.testing.assert_close(block(x), expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(block.mlp(block.attn(x)), expected, rtol=1e-10, atol=1e-12)


def test_one_spec_builds_all() -> None:
    spec = Spec(**SIZES)
    assert "dim=32" in repr(spec) and "rank=8" in repr(spec)
    assert torch.equal(Block(spec)(stream()), Block(**SIZES)(stream()))
    assert not torch.equal(Block(spec, layer=1)(stream()), Block(spec)(stream())), "each layer has weights of its own"
    attention, mlp = LowRankAttention(**SIZES), LowRankMLP(**SIZES)
    torch.testing.assert_close(mlp(attention(stream())), Block(spec)(stream()), rtol=1e-12, atol=0)
    assert [name for name, _ in mlp.named_children()] == ["norm", "gate_proj", "up_proj", "down_proj"]
    with pytest.raises(ConfigError, match="rank cannot be combined with spec; pass either spec or sizes"):
        Block(spec, rank=4)


def shard(x: Tensor, layout: str) -> Tensor:
    """This process's part of a residual stream [B, S, d]."""
    rank, size = dist.get_rank(), dist.get_world_size()
    kind = layout_spec(layout).residual
    if kind == "hidden":
        return x.chunk(size, dim=-1)[rank]
    return x.flatten(0, 1).chunk(size)[rank] if kind == "tokens" else x


def under_tp(layout: str, family: str) -> tuple[float, int]:
    """(largest error of outputs and of gradients against one process, collectives of both passes)."""
    sizes = {**SIZES, "family": family} if family != "dense" else {**SIZES, "family": family, "rank": None}
    sizes = {name: value for name, value in sizes.items() if value is not None}
    single, block = Block(**sizes), Block(**sizes, layout=layout, mesh=dist.group.WORLD)
    whole = stream().requires_grad_()
    own = shard(whole.detach(), layout).clone().requires_grad_()
    out = single(whole)
    out.square().sum().backward()
    with CollectiveCounter() as counter:
        found = block(own, batch=2)
        found.square().sum().backward()
    errors = [
        (found - shard(out, layout)).abs().max(),
        (own.grad - shard(whole.grad, layout)).abs().max(),  # type: ignore[arg-type,operator]
    ]
    parameters = dict(single.named_parameters())
    for name, parameter in block.named_parameters():
        expected, actual = parameters[name].grad, parameter.grad
        assert expected is not None and actual is not None
        errors.append((whole_weight(actual) - expected).abs().max())
    return max(map(float, errors)), len(counter.collectives)


CASES = [
    (layout, family)
    for family, spec in (("cola", Spec(**SIZES)), ("dense", Spec(family="dense", dim=32, heads=8, ffn_dim=48)))
    for layout in layouts_of(spec.model)
]


@pytest.mark.parametrize(("layout", "family"), CASES)
def test_a_block_is_the_same_function_under_every_layout(layout: str, family: str) -> None:
    for error, count in run_distributed(2, under_tp, layout, family):
        assert error <= 1e-9
        if layout == "btp":
            assert count == 8, "four forward, four backward"


class Twice(Block):
    def forward(self, *x: Any, **options: Any) -> Any:
        return 2 * super().forward(*x, **options)


def test_a_forward_of_ones_own_runs_once() -> None:
    expected = 2 * Block(**SIZES)(stream())
    torch.testing.assert_close(Twice(**SIZES)(stream()), expected, rtol=1e-12, atol=0)
    for module in (Block(**SIZES), LowRankAttention(**SIZES), LowRankMLP(**SIZES)):
        expected, usual = 2 * module(x=stream()), module.forward
        vars(module)["forward"] = lambda x, usual=usual, **options: 2 * usual(x, **options)
        torch.testing.assert_close(module(stream()), expected, rtol=1e-12, atol=0)


def test_latents_that_cross_need_a_decoder() -> None:
    with pytest.raises(ConfigError, match="family = 'lax' passes latents or outputs from block to block"):
        Block(**SIZES, family="lax")(stream())


def test_outputs_that_a_block_combines_are_before_biases() -> None:
    """A linear that is called adds its bias, and that must not pass to the next block."""
    with known.registered():
        sizes = {"dim": 32, "ffn_dim": 48, "layers": 2, "heads": 4, "rank": 8, "vocab_size": 64, "family": "cr_net"}
        for bias in ("none", "qkv"):
            decoder = Decoder(Spec(**sizes, attn_bias=bias, dtype=torch.float64))
            tokens = torch.arange(16).view(2, 8)
            usual = decoder(tokens)
            decoder.layers[1].attn.q_proj.register_forward_hook(lambda *_: None)
            if bias == "none":
                assert (decoder(tokens) - usual).abs().max() < 1e-12
                continue
            with pytest.raises(
                ConfigError, match="q_proj is not plain, but its block computes with outputs before biases"
            ):
                decoder(tokens)
