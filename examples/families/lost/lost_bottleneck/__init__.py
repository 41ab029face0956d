"""`lost`: low-rank linears beside a few selected inputs, y = gamma B silu(A x) + (1 - gamma) S x[index] (LOST, arXiv 2508.02668).

A and B start as the truncated SVD of a dense linear's initial weight W. The index is of the columns of largest norm in the rest,
W - B A, and S starts as these columns.
"""

import functools
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

import boost
from boost.config.architecture import Parameter, slot_of
from boost.config.families import LowRankConfig, ModelConfig
from boost.config.linears import Linear, Map, Select, Size
from boost.models.init import factorize, initial_value
from boost.models.latents import Act, Math


@boost.register_family
class LostConfig(LowRankConfig):
    """Low-rank linears beside a few selected inputs: y = gamma B silu(A x) + (1 - gamma) S x[index]."""

    family: Literal["lost"] = "lost"
    recipe: ClassVar = {**LowRankConfig.recipe, "latent_act": "silu", "factor_init": "spectral"}
    math: ClassVar[str] = f"{__name__}:Lost"
    modeling: ClassVar[str] = f"{__name__}:modeling_lost.py"

    channels: Annotated[int, Field(ge=1)] = 16
    """k, inputs that every linear selects."""

    gamma: Annotated[float, Field(ge=0, le=1)] = 0.7
    """Weight of the low-rank part. The selected inputs have the rest."""

    @classmethod
    def smallest(cls, dim: int) -> dict[str, object]:
        return {"rank": dim // 4, "channels": dim // 8}

    def linear(self, layer: int, size: Size) -> Linear:
        """A [r, d_in] and index [k]; B [d_out, r] and S [d_out, k]."""
        pair, initial = super().linear(layer, size), f"{__name__}:initial"
        s = Map("S", self.channels, initial)
        return replace(pair, outer=(*pair.outer, s), select=(Select("index", self.channels, initial),))


def initial(parameter: Parameter, model: ModelConfig, seed: int) -> Tensor:
    """The index, or S."""
    linear, _, name = parameter.name.rpartition(".")
    index, columns = _selected(linear, model, seed)
    return index if name == "index" else columns


@functools.lru_cache(maxsize=8)
def _selected(linear: str, model: ModelConfig, seed: int) -> tuple[Tensor, Tensor]:
    """The index [k] and S [d_out, k] of a linear."""
    slot = slot_of(model, f"{linear}.S")
    dense = Parameter(f"{linear}.W", (slot.d_out, slot.d_in), "enter.weight", model.init_std)
    w = initial_value(dense, model, seed)
    factors = factorize(w, slot.linear.outer[0].width)
    rest = w.double() - factors.b_OR.double() @ factors.a_RI.double()
    index = rest.norm(dim=0).topk(slot.linear.select[0].width).indices.sort().values
    return index, rest[:, index].float()


class Lost(Math):
    """The two parts of u = [A x, x[index]]."""

    def __init__(self, model: ModelConfig) -> None:
        assert isinstance(model, LostConfig)
        self.gamma = model.gamma

    def act_for(self, widths: tuple[int, ...]) -> Act:
        """`widths`: of A x and of x[index]."""
        options = {"widths": widths, "gamma": self.gamma}
        return Act(functools.partial(weighted, **options), functools.partial(weighted_backward, **options))


def weighted(u: Tensor, widths: tuple[int, int], gamma: float) -> Tensor:
    """[T, R + K] -> gamma silu(a) beside (1 - gamma) x."""
    a, x = u.split(widths, dim=-1)
    return torch.cat((gamma * F.silu(a), (1 - gamma) * x), dim=-1)


def weighted_backward(dh: Tensor, u: Tensor, widths: tuple[int, int], gamma: float) -> Tensor:
    """Its gradient, [T, R + K]."""
    a, _ = u.split(widths, dim=-1)
    da, dx = dh.split(widths, dim=-1)
    return torch.cat((torch.ops.aten.silu_backward(gamma * da, a), (1 - gamma) * dx), dim=-1)
