"""`lax`: svd or cola linears whose latents also feed the next block through a gate (LaX, arXiv 2505.21732).

    u = A x;  u = LayerNorm(u + G(h of the previous block));  h = act(u);  y = B h

Mathematics: `boost.families.lax_gate`.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar, Literal

from boost.config.architecture import linears
from boost.config.families import LowRankConfig, ModelConfig
from boost.config.layouts import layout_spec
from boost.config.linears import Extra, Linear, Size
from boost.config.section import Values, WholeConfig, nearest


class LaXConfig(LowRankConfig):
    """svd or cola linears whose latents also feed the next block through a gate (LaX)."""

    family: Literal["lax"] = "lax"
    math: ClassVar[str] = "boost.families.lax_gate:Gate"
    modeling: ClassVar[str] = "boost.families.lax:modeling_lax.py"
    computed_by: ClassVar[dict[str, str]] = {**LowRankConfig.computed_by, "gate": "math"}

    over: Literal["svd", "cola"] = "cola"
    """Family of the low-rank linears."""

    gate: Literal["identity", "tensor", "dense"] = "identity"
    """Gate applied to the previous block's latents. identity: keeps them unchanged. tensor: two small matrices, a x a and b x b,
    with a b = rank and a as close to b as possible. dense: a rank x rank linear."""

    @classmethod
    def kind(cls, values: Values) -> type["ModelConfig"]:
        """The family of the linears, `over`."""
        return cls.find(values.get("over", cls.model_fields["over"].default)) or cls

    @property
    def title(self) -> str:
        """The family with its main choices, such as 'lax over cola, tensor gate'."""
        return f"lax over {self.over}, {self.gate} gate"

    @property
    def equation(self) -> str:
        """What a linear computes, in a few words."""
        return f"{super().equation}, latents gated with those of the previous block"

    @property
    def mixing(self) -> str:
        """How a block combines its latents with the previous block's."""
        act = "" if self.latent_act == "none" else f"{self.latent_act} "
        return f"{act}LayerNorm(u + {'h' if self.gate == 'identity' else f'{self.gate} gate(h)'})"

    def linear(self, layer: int, size: Size) -> Linear:
        """B act(A x), with a LayerNorm and a gate in every block but the first.

        LayerNorm: `norm_weight` and `norm_bias` [r]. Dense gate: `gate_weight` [r, r] and `gate_bias` [r]. Tensor gate: `gate_rows`
        [a, a] and `gate_columns` [b, b], applied to a latent as an [a, b] matrix.
        """
        pair = replace(super().linear(layer, size), carries="latents")
        if layer == 0:
            return pair
        r = pair.up_width
        a, b = tensor_shape(r)
        norm = (
            Extra("norm_weight", (r,), "boost.models.init:ones", is_joined=True),
            Extra("norm_bias", (r,), "boost.models.init:zeros", is_joined=True),
        )
        as_linear = "boost.models.init:as_linear"
        gates = {
            "identity": (),
            "dense": (Extra("gate_weight", (r, r), as_linear, multiplied=r * r), Extra("gate_bias", (r,), as_linear)),
            "tensor": (
                Extra("gate_rows", (a, a), as_linear, multiplied=r * a),
                Extra("gate_columns", (b, b), as_linear, is_whole=True, multiplied=r * b),
            ),
        }
        return replace(pair, extra=(*norm, *gates[self.gate]), mixes_elements=self.gate != "identity", sums=2)

    def problems(self, config: WholeConfig) -> Iterator[str]:
        """A linear's latents feed the same linear of the next block, so it has one width in all blocks. The rows of a tensor gate
        are sharded along with the rank."""
        for name in self.ranks:
            if name.startswith("layers."):
                yield (
                    f"model.ranks.{name} sets the rank in one block, but with model.family = '{self.family}', it must be the same "
                    f"in all blocks, because latents feed the next block; use ranks.{name.partition('.')[2].partition('.')[2]}"
                )
        yield from super().problems(config)
        widths = {slot.name: (slot.linear.down_width, slot.linear.up_width) for slot in linears(self)}
        for name, (down, up) in widths.items():
            if down != up:
                yield (
                    f"model.family = '{self.family}': the latent gate of {name} needs inner and outer maps of one width, not "
                    f"{down} and {up}"
                )
        layout, tp = config.parallel.layout, config.parallel.tp
        if self.gate == "tensor" and tp > 1 and layout_spec(layout).shards_rank:
            for rank in sorted({up for _, up in widths.values()}):
                if (a := tensor_shape(rank)[0]) % tp:
                    best = nearest(rank, 2 * rank + tp**2, lambda r: tensor_shape(r)[0] % tp == 0)
                    yield (
                        f"model.rank = {rank} makes a tensor gate of {a} x {rank // a}, but parallel.layout = '{layout}' cannot "
                        f"shard {a} rows evenly over parallel.tp = {tp}; nearest valid value: {best}"
                    )


def tensor_shape(rank: int) -> tuple[int, int]:
    """(a, b) with a b = rank, a <= b, and a as large as possible."""
    a = next(a for a in range(math.isqrt(rank), 0, -1) if rank % a == 0)
    return a, rank // a
