"""What a linear of a family consists of, as data: maps from its input to latents (inner) and from latents to its output (outer).

Layouts, storage, initialization, the planner and optimizers know parameters by this description alone.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from boost.errors import ConfigError

Initial = float | str | Callable[..., Any]
"""A parameter's initial values: the standard deviation of a normal draw, or a function (parameter, model, seed) -> the whole fp32
tensor, or its `module:name`. It depends on these arguments alone, so that all meshes start from the same weights, and is defined
once per module: linears are compared by it."""

FACTORS = "AB"
"""Names of the maps of a linear that just has a bottleneck."""

SPECTRAL = "boost.models.init:spectral"
"""Initial value of A and B: the truncated SVD of the dense linear's own initial weight."""


@dataclass(frozen=True)
class Size:
    """A linear before its family is known: its name (attn.q, ...), input width and output width."""

    name: str
    d_in: int
    d_out: int


@dataclass(frozen=True)
class Map:
    """A matrix of a linear. `width`: of the latent that it makes (inner, [width, d_in]) or reads (outer, [d_out, width]); d_out of
    a whole weight [d_out, d_in]."""

    name: str
    width: int
    initial: Initial


@dataclass(frozen=True)
class Extra:
    """A parameter of a linear beside its maps, which the family's mathematics reads. `shape`: of the whole parameter."""

    name: str
    shape: tuple[int, ...]
    initial: Initial
    is_whole: bool = False
    """Whether every process needs all of it. False: a process that has some elements of each latent has as many of its rows."""
    is_joined: bool = False
    """Whether the linears that share an input store it as one tensor, which mathematics reads at once."""
    multiplied: int = 0
    """Multiplications with its elements per token, for FLOPs."""
    is_output: bool = False
    """Whether it is one number for the linear's outputs, which `Math.finish` reads, and not for its latents."""


@dataclass(frozen=True)
class Select(Map):
    """Inputs of a linear that are used as they are, x[:, index]. `initial`: a function that returns the index, int64 [width],
    distinct inputs in any order. It is stored as weights are, but not trained."""


@dataclass(frozen=True)
class Linear:
    """y = W x (`weight`), or y = B h (`outer`) with h = act(u), where u is the results of the `inner` maps side by side, then the
    selected inputs (`select`). act may change the width, as a gate does from 2 r to r. Several outer maps read h in turn, and their
    results are added. One inner map alone has a linear's full rank: the outer map is the identity, and there is no act. Raises
    ConfigError for anything else.

    If it has `extra` parameters, or the same linear of the previous block `carries` its latents h to this one, act is preceded by
    the family's `Math.mix` and `Math.normalize`. If it carries outputs, or `extra` has one for outputs, `Math.finish` follows.
    """

    inner: tuple[Map, ...] = ()
    outer: tuple[Map, ...] = ()
    weight: tuple[Map, ...] = ()
    select: tuple[Select, ...] = ()
    extra: tuple[Extra, ...] = ()
    carries: Literal["nothing", "latents", "outputs"] = "nothing"
    """What the same linear of the next block gets."""
    mixes_elements: bool = False
    """Whether `Math.mix` needs each latent of the previous block whole."""
    sums: int = 0
    """Numbers per token that `Math.normalize` needs, summed over the shards of a latent in fp64."""

    def __post_init__(self) -> None:
        maps = (*self.inner, *self.outer, *self.weight, *self.select)
        names = [part.name for part in maps] + [part.name for part in self.extra]
        # norm and bias are parameters of q, k, v and o already.
        if len({*names, "norm", "bias"}) < len(names) + 2 or not all(map(str.isidentifier, names)):
            raise ConfigError(
                f"a linear has maps {', '.join(names)}; each needs a name of its own, such as G, not norm or bias"
            )
        if empty := next((part.name for part in self.extra if min(part.shape, default=0) < 1), None):
            raise ConfigError(f"{empty} has no elements or no rows; give it a shape such as (1,)")
        alone = len(self.inner), len(self.weight), len(self.select)
        if alone not in ((1, 0, 0), (0, 1, 0)) if not self.outer else self.weight or not self.inner:
            raise ConfigError(
                f"a linear of maps {', '.join(names)} is not supported; it has inner and outer maps, one inner map, or one weight"
            )
        # Latents of several maps stand map by map, not linear by linear.
        is_mixed = self.carries == "latents" or self.mixes_elements or self.sums
        is_mixed = is_mixed or not all(extra.is_output for extra in self.extra)
        if is_mixed and (len(self.inner), len(self.outer), len(self.select)) != (1, 1, 0):
            raise ConfigError(
                f"a linear of maps {', '.join(part.name for part in maps)} has no latents to mix; extra parameters, carried "
                "latents and sums need one inner and one outer map"
            )
        if wrong := next((extra for extra in self.extra if extra.is_output and extra.shape != (1,)), None):
            raise ConfigError(f"{wrong.name} is for outputs, so its shape is (1,), not {wrong.shape}")
        if drawn := next((part.name for part in self.select if isinstance(part.initial, float)), None):
            raise ConfigError(
                f"{drawn} selects inputs, so its initial values come from a function, not from a normal draw"
            )

    @property
    def is_pair(self) -> bool:
        """Whether it has just factors A and B, of one rank."""
        maps = (*self.inner, *self.outer, *self.select)
        return [part.name for part in maps] == list(FACTORS) and self.down_width == self.up_width

    @property
    def last(self) -> tuple[Map, ...]:
        """The maps that make its outputs; the first one adds a bias where maps are modules."""
        return self.outer or self.inner

    @property
    def alike(self) -> tuple[object, ...]:
        """What linears that share an input have in common."""
        numbers = len(self.inner), len(self.outer), len(self.select)
        joined = ((part.name, part.is_whole, part.is_joined and part.shape[1:]) for part in self.extra)
        return *numbers, self.carries, self.mixes_elements, self.sums, *joined

    @property
    def down_width(self) -> int:
        """Width of u."""
        return sum(part.width for part in (*self.inner, *self.select))

    @property
    def up_width(self) -> int:
        """Width of h."""
        return sum(part.width for part in self.last)
