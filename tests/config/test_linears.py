"""What a family may describe, and what is refused in one line."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import pytest
import torch

from boost.config.architecture import (
    GroupSpec,
    Parameter,
    Slot,
    block_parameters,
    first_alike,
    groups,
    is_product,
    is_usual,
)
from boost.config.families import ModelConfig
from boost.config.linears import Extra, Linear, Map, Select, Size
from boost.convert.formats import entries, form_of, modeling
from boost.errors import ConfigError
from boost.families import CoLAConfig, DenseConfig, SVDConfig
from boost.layouts.vanilla import Vanilla
from boost.models.init import initial_value
from boost.models.latents import Math, Mixer
from boost.plan.collectives import step_collectives
from tests import toy
from tests.families import known

A, B, G, W = (Map(name, 4, 0.1) for name in "ABGW")
I = Select("I", 3, "tests.config.test_linears:same")  # noqa: E741 (the index)


@pytest.mark.parametrize(
    "maps",
    [
        *({}, {"inner": (A, G)}, {"inner": (A,), "select": (I,)}, {"outer": (B,)}),
        *({"select": (I,), "weight": (W,)}, {"outer": (B,), "weight": (W,)}),
    ],
)
def test_other_maps_are_refused(maps: dict[str, tuple[Map, ...]]) -> None:
    with pytest.raises(
        ConfigError, match="is not supported; it has inner and outer maps, one inner map, or one weight"
    ):
        Linear(**maps)


def test_a_linear_of_full_rank_has_outputs_only() -> None:
    beta = Extra("beta", (1,), 0.1, is_output=True)
    assert Linear((W,), extra=(beta,), carries="outputs").up_width == 4
    with pytest.raises(ConfigError, match="a linear of maps W has no latents to mix"):
        Linear((W,), carries="latents")
    with pytest.raises(ConfigError, match="a linear of maps W has no latents to mix"):
        Linear((W,), extra=(Extra("gain", (4,), 0.1),))
    with pytest.raises(ConfigError, match=r"beta is for outputs, so its shape is \(1,\), not \(4,\)"):
        Linear((A,), (B,), extra=(replace(beta, shape=(4,)),))


def test_an_index_is_not_drawn() -> None:
    with pytest.raises(ConfigError, match="I selects inputs, so its initial values come from a function"):
        Linear((A,), (B,), select=(Select("I", 4, 0.1),))


@pytest.mark.parametrize("inner", [(A, A), (A, Map("gate.A", 4, 0.1)), (Map("norm", 4, 0.1),), (Map("bias", 4, 0.1),)])
def test_every_map_has_a_name_of_its_own(inner: tuple[Map, ...]) -> None:
    with pytest.raises(ConfigError, match="each needs a name of its own, such as G"):
        Linear(inner, (B,))


def test_linears_that_share_an_input_have_equally_many_inner_maps() -> None:
    pair, gated = Linear((A,), (B,)), Linear((A, G), (B,))
    slots = Slot("attn.q", 8, 8, pair), Slot("attn.k", 8, 8, gated)
    with pytest.raises(ConfigError, match=r"attn\.q, attn\.k share an input, so they must have equally many maps"):
        GroupSpec("qkv", "enter", slots)


@pytest.mark.parametrize("mixed", [{"extra": (Extra("g", (4,), 0.1),)}, {"carries": "latents"}, {"sums": 2}])
@pytest.mark.parametrize(
    "maps",
    [
        {"weight": (W,)},
        {"inner": (A, G), "outer": (B,)},
        {"inner": (A,), "outer": (B, W)},
        {"inner": (A,), "outer": (B,), "select": (I,)},
    ],
)
def test_only_latents_of_one_map_are_mixed(maps: dict[str, Any], mixed: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="has no latents to mix; .* need one inner and one outer map"):
        Linear(**maps, **mixed)


@pytest.mark.parametrize("shape", [(), (0,), (4, 0)])
def test_an_extra_parameter_has_elements(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="g has no elements or no rows"):
        Linear((A,), (B,), extra=(Extra("g", shape, 0.1),))


@pytest.mark.parametrize("other", [{"is_whole": True}, {"is_joined": False}, {"shape": (4, 3)}])
def test_linears_that_share_an_input_have_the_same_extra_parameters(other: dict[str, Any]) -> None:
    extra = Extra("g", (4, 2), 0.1, is_joined=True)
    one, two = (Linear((A,), (B,), extra=(part,)) for part in (extra, replace(extra, **other)))
    with pytest.raises(ConfigError, match="must have equally many maps and the same extra parameters"):
        GroupSpec("gate_up", "enter", (Slot("mlp.gate", 8, 6, one), Slot("mlp.up", 8, 6, two)))


def test_maps_of_a_group_stand_map_by_map() -> None:
    gated = Linear((A, G), (B,), select=(I,))
    group = GroupSpec("gate_up", "enter", (Slot("mlp.gate", 8, 6, gated), Slot("mlp.up", 8, 6, gated)))
    assert [(p.name, p.shape, p.role) for p in group.maps("x", "select")] == [
        (f"x.mlp.{slot}.I", (3,), "select.enter") for slot in ("gate", "up")
    ]
    assert [p.name for p in group.maps("x", "inner")] == ["x.mlp.gate.A", "x.mlp.up.A", "x.mlp.gate.G", "x.mlp.up.G"]
    assert [p.shape for p in group.maps("x", "outer")] == [(6, 4), (6, 4)]
    assert group.down_widths == (11, 11) and group.up_widths == (4, 4)


def test_blocks_are_alike_by_their_linears() -> None:
    ranks = {"layers.2.attn.q": 4, "layers.3.attn.q": 8}
    model = toy.toy_config(model={"family": "svd", "layers": 4, "rank": 8, "ranks": ranks}).model
    assert [first_alike(model, layer) for layer in range(4)] == [0, 0, 2, 0]
    assert groups(model, 0) == groups(model, 3)


def test_a_block_of_full_rank_has_no_factors_of_a_product() -> None:
    with known.registered():
        model = toy.toy_config(model={"family": "cr_net", "layers": 4}).model
        assert [first_alike(model, layer) for layer in range(4)] == [0, 1, 1, 1]
        with pytest.raises(ConfigError, match="to which model.family = 'cr_net' is not invariant"):
            toy.toy_config(model={"family": "cr_net"}, optim={"name": "loro"})


def test_what_a_family_does_not_define_is_refused() -> None:
    spectral = "defines A and B of one rank, but attn.q of model.family = 'gated' has A .8., G .8., B .8.; use 'cola' or 'xavier'"
    with known.registered():
        for fields, optim, error in (
            ({"factor_init": "spectral"}, {}, spectral),
            ({}, {"name": "loro"}, "to which model.latent_act = 'gate' is not invariant"),
            ({"latent_act": "silu"}, {}, "model.latent_act = 'silu' is not one of gate"),
        ):
            with pytest.raises(ConfigError, match=error):
                toy.toy_config(model={"family": "gated", **fields}, optim=optim)
        assert toy.toy_config(model={"family": "gated"}, optim={"name": "muon"})


class Wide(CoLAConfig):
    """A wider latent in the MLP than `rank` says."""

    family: Literal["wide"] = "wide"  # type: ignore[assignment]

    def linear(self, layer: int, size: Size) -> Linear:
        return (
            Linear((Map("A", 9, 0.1),), (Map("B", 9, 0.1),)) if size.name == "mlp.up" else super().linear(layer, size)
        )


class WideWhole(CoLAConfig):
    """Of full rank, but of no linear's width."""

    family: Literal["wide-whole"] = "wide-whole"  # type: ignore[assignment]

    def linear(self, layer: int, size: Size) -> Linear:
        return Linear((Map("W", 5, 0.1),))


class Mixed(CoLAConfig):
    """Whole weights in attention."""

    family: Literal["mixed"] = "mixed"  # type: ignore[assignment]

    def linear(self, layer: int, size: Size) -> Linear:
        return DenseConfig.linear(self, layer, size) if size.name.startswith("attn") else super().linear(layer, size)  # type: ignore[arg-type]


class Whole(DenseConfig):
    """Mathematics without a place."""

    family: Literal["whole"] = "whole"  # type: ignore[assignment]
    math: ClassVar[str] = "gated_bottleneck:Gated"


class Bent(CoLAConfig):
    """Other mathematics under our modeling file, and a map whose name looks like a gate's."""

    family: Literal["bent"] = "bent"  # type: ignore[assignment]
    modeling: ClassVar[str] = "boost"
    math: ClassVar[str] = "gated_bottleneck:Gated"

    def linear(self, layer: int, size: Size) -> Linear:
        return Linear((Map("A", 4, 0.1), Map("gate_A", 4, 5.0)), (Map("B", 4, 0.1),))


class Partly(SVDConfig):
    """Another map in attention only, under our modeling file; B has another name."""

    family: Literal["partly"] = "partly"  # type: ignore[assignment]
    modeling: ClassVar[str] = "boost"

    def linear(self, layer: int, size: Size) -> Linear:
        usual = super().linear(layer, size)
        return Linear(usual.inner, (replace(usual.outer[0], name="Up"),)) if size.name.startswith("attn") else usual


def same(parameter: Parameter, model: ModelConfig, seed: int) -> torch.Tensor:
    """The first input, again and again."""
    return torch.zeros(parameter.shape, dtype=torch.int64)


class Greedy(CoLAConfig):
    """Selects more inputs than attention has."""

    family: Literal["greedy"] = "greedy"  # type: ignore[assignment]
    channels: int = 33

    def linear(self, layer: int, size: Size) -> Linear:
        index = Select("index", self.channels, f"{__name__}:same")
        pair = super().linear(layer, size)
        return replace(pair, outer=(*pair.outer, Map("S", self.channels, 0.1)), select=(index,))


class Loud(CoLAConfig):
    """A gain beside the maps, which is stored in fp32, and latents that pass on; the first block sums nothing."""

    family: Literal["loud"] = "loud"  # type: ignore[assignment]
    math: ClassVar[str] = f"{__name__}:Gain"
    start: str = "boost.models.init:ones"

    def linear(self, layer: int, size: Size) -> Linear:
        pair = replace(super().linear(layer, size), carries="latents", sums=1)
        return replace(pair, extra=(Extra("gain", (pair.up_width,), self.start),)) if layer else pair


class Gain(Math):
    """u times the gain, in the dtype that this has."""

    def mix(self, u_TR: torch.Tensor, prev: Sequence[torch.Tensor], mixer: Mixer) -> torch.Tensor:
        return u_TR * torch.cat([mixer.of("gain", slot) for slot in range(len(prev))])

    def sums(self, mixed_TR: torch.Tensor, mixer: Mixer) -> torch.Tensor:
        parts = mixed_TR.double().split(mixer.widths, dim=-1)
        return torch.stack([part.sum(-1) for part in parts], dim=-1)

    def normalize(self, mixed_TR: torch.Tensor, sums: torch.Tensor | None, mixer: Mixer) -> torch.Tensor:
        return mixed_TR.float()


class Unmixed(Loud):
    """Without mathematics for its gain."""

    family: Literal["unmixed"] = "unmixed"  # type: ignore[assignment]
    math: ClassVar[str] = "boost.models.latents:Math"


for _family in ("wide", "wide-whole", "mixed", "whole", "bent", "partly", "greedy", "loud", "unmixed"):
    ModelConfig.choices.pop(_family)


@pytest.fixture
def own() -> Iterator[None]:
    with known.registered():
        for family in (Wide, WideWhole, Mixed, Whole, Bent, Partly, Greedy, Loud, Unmixed):
            ModelConfig.choices[family.model_fields["family"].default] = family
        yield


@pytest.mark.parametrize(
    ("family", "layout", "error"),
    [
        ("wide", "vanilla", r"parallel.tp = 2 must divide mlp\.up\.A = 9 and mlp\.up\.B = 9"),
        ("greedy", "btp", r"attn\.q\.index of model\.family = 'greedy' selects 33 inputs; at most 32 are valid"),
        ("wide-whole", "btp", r"attn\.q of model\.family = 'wide-whole' makes 5 outputs, not 32"),
        ("mixed", "btp", r"attn\.q of model\.family = 'mixed': whole weights cannot be mixed with factors"),
        ("whole", "megatron", "has whole weights, so its math = 'gated_bottleneck:Gated' has no effect"),
    ],
)
@pytest.mark.usefixtures("own")
def test_what_a_layout_or_a_block_cannot_hold_is_refused(family: str, layout: str, error: str) -> None:
    rank = {} if family == "whole" else {"rank": 8}
    with pytest.raises(ConfigError, match=error):
        toy.toy_config(model={"family": family, **rank}, parallel={"layout": layout, "tp": 2})


@pytest.mark.usefixtures("own")
def test_an_index_has_distinct_inputs() -> None:
    config = toy.toy_config(model={"family": "greedy", "channels": 4})
    with pytest.raises(ConfigError, match=r"attn\.q\.index .* 0 to 31; it is torch\.int64, 1 of 4 are distinct"):
        toy.toy_decoder(config)


@pytest.mark.usefixtures("own")
def test_every_linear_counts() -> None:
    """Not only the first that is looked at."""
    model = toy.toy_config(model={"family": "partly", "attn_bias": "qkvo"}).model
    assert not is_usual(model) and not is_product(model)
    with pytest.raises(ConfigError, match="model.family = 'partly' has no class PartlyForCausalLM for transformers"):
        modeling(model, form_of(model, merge=True))
    with pytest.raises(ConfigError, match="to which model.family = 'partly' is not invariant"):
        toy.toy_config(model={"family": "partly"}, optim={"name": "loro"})
    with pytest.raises(
        ConfigError, match=r"defines A and B of one rank, but attn.q of model.family = 'partly' has A .\d+., Up"
    ):
        toy.toy_config(model={"family": "partly", "factor_init": "spectral"})
    names = {entry.name for entry in entries(model, "boost")}
    assert {"model.layers.0.self_attn.q_proj.Up.weight", "model.layers.0.self_attn.q_proj.Up.bias"} <= names


@pytest.mark.usefixtures("own")
def test_our_modeling_file_computes_our_mathematics_only() -> None:
    model = toy.toy_config(model={"family": "bent"}).model
    with pytest.raises(ConfigError, match="model.family = 'bent' has no class BentForCausalLM for transformers"):
        modeling(model, form_of(model, merge=True))
    (gate,) = [p for p in block_parameters(model, 0) if p.name == "layers.0.attn.q.gate_A"]
    assert initial_value(gate, model, 0).std() > 4, "a map's own initial value, whatever its name"


@pytest.mark.usefixtures("own")
def test_activations_keep_their_dtype_whatever_mathematics_returns() -> None:
    config = toy.toy_config("bfloat16", model={"family": "loud"})
    decoder, _ = toy.toy_decoder(config)
    tokens, _ = toy.toy_tokens(config)
    (stream,) = decoder._run_blocks(decoder.layout, decoder._parts(tokens, None, (), False))
    assert stream.x.dtype == torch.bfloat16
    group, vanilla = decoder.blocks[1].qkv, object.__new__(Vanilla)  # sharded latents, in its steps
    u = torch.zeros(3, sum(group.mixer.widths), dtype=torch.bfloat16)
    mixed, sums = vanilla._mix(group, u, u)
    assert (mixed.dtype, sums.dtype) == (torch.bfloat16, torch.float64)
    assert {y.dtype for y in vanilla._normalize_and_project(group, mixed, sums)[0]} == {torch.bfloat16}


@pytest.mark.usefixtures("own")
def test_a_block_that_mixes_nothing_sums_nothing() -> None:
    config = toy.toy_config(model={"family": "loud"}, parallel={"layout": "vanilla", "tp": 2})
    summed = {c.layer for c in step_collectives(config) if c.phase == "forward" and c.shape[-1] in (1, 2, 3)}
    assert summed == {1}


@pytest.mark.parametrize(
    ("model", "error"),
    [
        ({"family": "unmixed"}, "Math has no `mix`, but its linears have extra parameters or latents to mix"),
        (
            {"family": "loud", "start": "boost.models.init:twos"},
            r"initial value of layers\.1\.attn\.q\.gain = 'boost\.models\.init:twos' ca",
        ),
        ({"family": "loud", "start": "no_module:ones"}, "cannot be imported .No module named 'no_module'"),
        (
            {"family": "loud", "start": f"{__name__}:short"},
            r"of layers\.1\.attn\.q\.gain must have shape \(8,\), not \(1,\)",
        ),
    ],
)
@pytest.mark.usefixtures("own")
def test_what_mathematics_lacks_is_one_line(model: dict[str, Any], error: str) -> None:
    config = toy.toy_config(model=model)
    with pytest.raises(ConfigError, match=error):
        toy.toy_decoder(config)[0](*toy.toy_tokens(config))


@pytest.mark.usefixtures("own")
def test_mathematics_that_is_not_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Loud, "math", f"{__name__}:Gone")
    with pytest.raises(ConfigError, match=r"math of model\.family = 'loud' = '.*:Gone' cannot be imported"):
        toy.toy_decoder(toy.toy_config(model={"family": "loud", "layers": 3}))


def short(*_: object) -> torch.Tensor:
    """One number."""
    return torch.ones(1)
