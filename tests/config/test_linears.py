"""What a family may describe, and what is refused in one line."""

import pytest

from boost.config.architecture import GroupSpec, Slot, first_alike, groups
from boost.config.linears import Linear, Map
from boost.errors import ConfigError
from tests import toy
from tests.families import known

A, B, G, W = (Map(name, 4, 0.1) for name in "ABGW")


@pytest.mark.parametrize(
    "maps", [{}, {"inner": (A,)}, {"outer": (B,)}, {"inner": (A,), "outer": (B, G)}, {"outer": (B,), "weight": (W,)}]
)
def test_other_maps_are_refused(maps: dict[str, tuple[Map, ...]]) -> None:
    with pytest.raises(ConfigError, match="is not supported; it has inner maps and one outer map, or one weight"):
        Linear(**maps)


def test_linears_that_share_an_input_have_equally_many_inner_maps() -> None:
    pair, gated = Linear((A,), (B,)), Linear((A, G), (B,))
    slots = Slot("attn.q", 8, 8, pair), Slot("attn.k", 8, 8, gated)
    with pytest.raises(
        ConfigError, match=r"attn\.q, attn\.k share an input, so they must have equally many inner maps"
    ):
        GroupSpec("qkv", "enter", slots)


def test_maps_of_a_group_stand_map_by_map() -> None:
    gated = Linear((A, G), (B,))
    group = GroupSpec("gate_up", "enter", (Slot("mlp.gate", 8, 6, gated), Slot("mlp.up", 8, 6, gated)))
    assert [p.name for p in group.maps("x", "inner")] == ["x.mlp.gate.A", "x.mlp.up.A", "x.mlp.gate.G", "x.mlp.up.G"]
    assert [p.shape for p in group.maps("x", "outer")] == [(6, 4), (6, 4)]
    assert group.down_widths == (8, 8) and group.up_widths == (4, 4)


def test_blocks_are_alike_by_their_linears() -> None:
    ranks = {"layers.2.attn.q": 4, "layers.3.attn.q": 8}
    model = toy.toy_config(model={"family": "svd", "layers": 4, "rank": 8, "ranks": ranks}).model
    assert [first_alike(model, layer) for layer in range(4)] == [0, 0, 2, 0]
    assert groups(model, 0) == groups(model, 3)


def test_what_a_family_does_not_define_is_refused() -> None:
    spectral = "defines A and B, but not G of model.family = 'gated'; use 'cola' or 'xavier'"
    with known.registered():
        for fields, optim, error in (
            ({"factor_init": "spectral"}, {}, spectral),
            ({}, {"name": "loro"}, "to which model.latent_act = 'gate' is not invariant"),
            ({"latent_act": "silu"}, {}, "model.latent_act = 'silu' is not one of gate"),
        ):
            with pytest.raises(ConfigError, match=error):
                toy.toy_config(model={"family": "gated", **fields}, optim=optim)
        assert toy.toy_config(model={"family": "gated"}, optim={"name": "muon"})
