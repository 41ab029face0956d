"""`LowRankLinear`: a linear layer made of two factors, for use in any model."""

import copy
import functools
from typing import Any

import torch
from torch import Tensor, nn

from boost.config.linears import Linear
from boost.errors import ConfigError
from boost.models.init import factorize
from boost.models.latents import ACTS, Act
from boost.nn.plain import attached, difference

ACTIVATIONS = ("none", "silu")


class FamilyLinear(nn.Module):
    """A linear of a family with other maps than A and B, or another activation. Its maps are plain `nn.Linear` modules, and the
    indices of selected inputs are buffers."""

    def __init__(self, linear: Linear, act: Act | None) -> None:
        """`act`: between its inner maps and the outer ones. The maps are of no size yet."""
        super().__init__()
        self.act = act
        self.inner, self.outer, self.selects = (
            [part.name for part in parts] for parts in (linear.inner, linear.outer, linear.select)
        )
        for name in (*self.inner, *self.outer):
            self.add_module(name, nn.Linear(1, 1, bias=False, device="meta"))

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]."""
        parts = [self.get_submodule(name)(x) for name in self.inner]
        u = torch.cat([*parts, *(x[..., self.get_buffer(name)] for name in self.selects)], dim=-1)
        if not self.outer:
            return u
        outer: Any = [self.get_submodule(name) for name in self.outer]
        h = (u if self.act is None else self.act.forward(u)).split([part.in_features for part in outer], dim=-1)
        y: Tensor = functools.reduce(torch.add, (part(h_r) for part, h_r in zip(outer, h, strict=True)))
        return y


def linear_of(linear: Linear, act: Act | None) -> nn.Module:
    """A module for a family's linear, whose maps are still of no size: a rank may exceed the width of a shard, which
    `LowRankLinear.__init__` would reject."""
    if not linear.is_pair or act not in ACTS.values():
        return FamilyLinear(linear, act)
    return LowRankLinear(1, 1, 1, activation=next(name for name, known in ACTS.items() if known == act), device="meta")


class LowRankLinear(nn.Module):
    """y = B act(A x) + b, with A [rank, in_features], B [out_features, rank]; act is the identity (SVD) or SiLU (CoLA, arXiv
    2502.10940).

    `A` and `B` are plain `nn.Linear` modules, so tools that look for linears (LoRA, quantization) find the factors. Inside
    a sharded `boost.nn` module, they hold this process's shards.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        rank: int,
        *,
        activation: str = "none",
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Raises ConfigError if the rank or the activation is invalid."""
        super().__init__()
        if not 1 <= rank <= min(in_features, out_features):
            raise ConfigError(
                f"rank = {rank} is not valid for a {in_features} x {out_features} linear; nearest valid value: "
                f"{min(max(rank, 1), in_features, out_features)}"
            )
        if activation not in ACTIVATIONS:
            raise ConfigError(f"activation = '{activation}' is unknown; valid values: {', '.join(ACTIVATIONS)}")
        self.activation = activation
        self.A = nn.Linear(in_features, rank, bias=False, device=device, dtype=dtype)
        self.B = nn.Linear(rank, out_features, bias=bias, device=device, dtype=dtype)
        if not self.A.weight.is_meta:  # there, it would draw nothing, slowly
            self.reset_parameters()

    @property
    def act(self) -> Act | None:
        """Between A and B; None: the identity."""
        return ACTS[self.activation]

    @property
    def in_features(self) -> int:
        """Width of the input."""
        return self.A.in_features

    @property
    def out_features(self) -> int:
        """Width of the output."""
        return self.B.out_features

    @property
    def rank(self) -> int:
        """Width of the bottleneck."""
        return self.A.out_features

    @property
    def weight(self) -> Tensor:
        """W = B A, [out_features, in_features], computed on each access, for models that read a linear's weight (T5, Mamba).

        Raises AttributeError if there is an activation, because there is no such weight in that case.
        """
        if self.activation != "none":
            raise AttributeError(f"factors with activation = '{self.activation}' have no weight W")
        return self.B.weight @ self.A.weight

    @property
    def bias(self) -> Tensor | None:
        """[out_features], or None."""
        return self.B.bias

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws normal factors with standard deviation rank^(-1/4) (in + out)^(-1/4), as in CoLA's code, and zeroes the bias."""
        std = self.rank**-0.25 * (self.in_features + self.out_features) ** -0.25
        for factor in (self.A, self.B):
            factor.weight.normal_(std=std)
        if self.B.bias is not None:
            self.B.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]."""
        u = self.A(x)
        act = ACTS[self.activation]
        y: Tensor = self.B(u if act is None else act.forward(u))
        return y

    @classmethod
    @torch.no_grad()
    def from_linear(
        cls, linear: nn.Linear, rank: int, *, init: str = "svd", activation: str = "none"
    ) -> "LowRankLinear":
        """Factorizes a dense linear, with factors on its device and in its dtype; keeps the bias. Factors require gradients if
        the weight does.

        `init`: "svd" is the truncated SVD (Eckart-Young), with the singular values split evenly between the factors; "random" draws
        new factors. With an activation, "svd" approximates the dense linear only where the activation is nearly linear.
        Raises ConfigError if an argument is invalid.
        """
        if init not in ("svd", "random"):
            raise ConfigError(f"init = '{init}' is unknown; valid values: svd, random")
        weight = linear.weight
        made = cls(
            linear.in_features, linear.out_features, rank,
            activation=activation, bias=linear.bias is not None, device=weight.device, dtype=weight.dtype,
        )  # fmt: skip
        if init == "svd" and not weight.is_meta:
            factors = factorize(weight.detach().cpu(), rank)
            made.A.weight.copy_(factors.a_RI)
            made.B.weight.copy_(factors.b_OR)
        for factor in (made.A, made.B):
            factor.weight.requires_grad_(weight.requires_grad)
        made.B.bias = copy.deepcopy(linear.bias)
        return made.train(linear.training)

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """The dense linear W = B A, computed in fp64. It requires gradients if a factor does. Raises ConfigError if there is an
        activation, or if this module or a factor has more than weights, such as an adapter or hooks, or is quantized."""
        if self.activation != "none":
            raise ConfigError(
                f"activation = '{self.activation}': factors with an activation cannot be merged into one linear"
            )
        parts = ("linear", self, LowRankLinear), ("factor A", self.A, nn.Linear), ("factor B", self.B, nn.Linear)
        for name, part, kind in parts:  # tools may have changed them
            what = difference(part, kind)
            if what is None or (name, what) == ("factor B", "has a bias"):
                floating = all(weight.is_floating_point() for weight in part.parameters(recurse=False))
                what = attached(part) or (None if floating else "is quantized")
            if what:
                raise ConfigError(f"{name} {what}; merge the adapter first (merge_and_unload), or remove it")
        a, b = self.A.weight, self.B.weight
        made = nn.Linear(self.in_features, self.out_features, False, device="meta")
        made.weight = nn.Parameter((b.double() @ a.double()).to(a.dtype), a.requires_grad or b.requires_grad)
        made.bias = copy.deepcopy(self.B.bias)
        return made.train(self.training)

    def extra_repr(self) -> str:
        return f"activation={self.activation}"
