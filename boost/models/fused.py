"""Fused parameters: one `nn.Parameter` may hold several mathematical parameters, stacked along dim 0 for one GEMM."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from boost.config.architecture import GroupSpec, Parameter, Slot
from boost.config.layouts import Placement, local_shape


class Sharding(Protocol):
    """How a layout shards weights and the tensors between blocks: the only part of a layout that a model's weights use."""

    rank: int
    """This process's TP rank."""
    size: int
    """p, the number of TP processes."""
    num_shards: int
    """Number of shards of heads and channels: p, or 1 if every process computes all of them."""

    def placement(self, role: str) -> Placement:
        """The placement of parameters with this role."""

    def group_class(self, kind: type[Any], shape: GroupSpec) -> type[Any]:
        """The class for a group of linears: `kind`, or a subclass of it."""

    def crosses_as_heads(self, slot: Slot) -> bool:
        """Whether this projection computes all heads for this process's tokens, which are then exchanged, instead of
        this process's heads for all tokens."""

    def residual_shape(self, tokens: int) -> tuple[int, int]:
        """Local shape of the residual stream for `tokens` tokens, which pipeline stages exchange."""

    def carried_shapes(self, group: GroupSpec, tokens: int) -> list[tuple[int, int]]:
        """Local shapes of the latents, or of the outputs, that a group carries to the next block."""


def local_slice(parameter: Parameter, layout: Sharding, whole: Tensor) -> Tensor:
    """This process's shard of a whole tensor of the parameter's global shape, as a view."""
    dim = layout.placement(parameter.role).dim
    if dim is None:
        return whole
    length = parameter.shape[dim] // layout.size
    return whole.narrow(dim, layout.rank * length, length)


class Identity(NamedTuple):
    """A process's rows or columns of the identity, as an outer map: how many zeros a latent gains on its left and on its right, or
    how many elements it loses if negative."""

    left: int
    right: int

    @classmethod
    def placed(cls, width: int, dim: int | None, own: tuple[int, int] | None, layout: Sharding) -> "Identity":
        """Sharded along `dim`, or with `own` (first, number of) rows; else whole."""
        shard = width // layout.size
        first, length = own or ((0, width) if dim is None else (layout.rank * shard, shard))
        sign = 1 if dim == 1 else -1
        return cls(sign * first, sign * (width - first - length))


def local_kv_heads(kv_heads: int, layout: Sharding) -> int:
    """Number of key/value heads per process: at least one, because processes share heads if there are fewer heads than shards."""
    return max(kv_heads // layout.num_shards, 1)


@dataclass(frozen=True)
class ParamSlice:
    """Rows `start : start + rows` of a tensor, which hold this TP rank's shard of a parameter from row `offset` on."""

    parameter: Parameter
    start: int
    rows: int
    offset: int = 0

    def view(self, tensor: Tensor) -> Tensor:
        """A view of this slice in a tensor, or in its gradient or optimizer state."""
        return tensor.narrow(0, self.start, self.rows)


@dataclass(frozen=True)
class ParamShard:
    """The rows of a fused parameter that this process owns if replicas shard it."""

    tensor: nn.Parameter
    """[rows, ...], a plain tensor; may be empty on the last ranks."""
    first: int
    """Index of the first row in the fused parameter."""
    over: str
    """The axis over which it is sharded: dp or replicas (dp x tp)."""


@dataclass(frozen=True)
class FusedParam:
    """One `nn.Parameter` of a model and the mathematical parameters stacked in it."""

    parameter: nn.Parameter
    """The parameter as registered on the module; autograd accumulates its gradient here. An index is a buffer."""
    slices: tuple[ParamSlice, ...]
    placement: Placement
    shard: ParamShard | None = None

    @property
    def tensor(self) -> nn.Parameter:
        """The tensor that this process owns and that its optimizer updates: the whole parameter, or its shard."""
        return self.shard.tensor if self.shard else self.parameter

    def local_slices(self) -> Iterator[ParamSlice]:
        """The slice of each parameter in `tensor` (or in a tensor of its shape)."""
        return self.slices_of(0, self.tensor.shape[0])

    def slices_of(self, start: int, rows: int) -> Iterator[ParamSlice]:
        """The slice of each parameter that lies in rows `start : start + rows` of `tensor`."""
        first = start + (self.shard.first if self.shard else 0)
        for whole in self.slices:
            begin = max(whole.start, first)
            end = min(whole.start + whole.rows, first + rows)
            if begin < end:
                yield ParamSlice(whole.parameter, begin - first, end - begin, begin - whole.start)


class FusedModule(nn.Module):
    """A module whose `nn.Parameter`s are fused parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.slices: dict[str, tuple[ParamSlice, ...]] = {}
        self.placements: dict[str, Placement] = {}
        self.shards: dict[str, ParamShard] = {}
        self._child_index: dict[str, int] = {}
        """Number of child modules that precede each fused parameter."""

    def add_fused_param(self, attribute: str, parameters: Sequence[Parameter], layout: Sharding) -> None:
        """Registers an uninitialized `attribute` that stacks parameters along dim 0. They must share one placement. Indices are a
        buffer, because optimizers, FSDP and `requires_grad_` take a module's parameters for weights."""
        placement = layout.placement(parameters[0].role)
        assert all(layout.placement(parameter.role) == placement for parameter in parameters), (
            "the parameters of a fused parameter must share one placement"
        )
        shapes = [local_shape(parameter, placement, layout.size) for parameter in parameters]
        slices, start = [], 0
        for parameter, shape in zip(parameters, shapes, strict=True):
            slices.append(ParamSlice(parameter, start, shape[0]))
            start += shape[0]
        if parameters[0].is_index:
            self.register_buffer(attribute, torch.empty(start, dtype=torch.int64))
        else:
            self.register_parameter(attribute, nn.Parameter(torch.empty(start, *shapes[0][1:])))
        self.slices[attribute], self.placements[attribute] = tuple(slices), placement
        self._child_index[attribute] = len(self._modules)

    def describe_child(self, attribute: str, parameter: Parameter, layout: Sharding) -> None:
        """Declares the weight of a child module, such as "q_proj.A.weight", which holds one parameter, as a fused parameter."""
        placement = layout.placement(parameter.role)
        rows = local_shape(parameter, placement, layout.size)[0]
        self.slices[attribute], self.placements[attribute] = (ParamSlice(parameter, 0, rows),), placement
        self._child_index[attribute] = len(self._modules)

    def fused_params_at(self, child: int) -> Iterator[FusedParam]:
        """The fused parameters registered between the preceding child module and `child`."""
        for attribute, slices in self.slices.items():
            if self._child_index[attribute] == child:
                shard = self.shards.get(attribute)
                owner, _, name = attribute.rpartition(".")
                yield FusedParam(getattr(self.get_submodule(owner), name), slices, self.placements[attribute], shard)


def fused_params(model: nn.Module) -> Iterator[FusedParam]:
    """Every fused parameter in a model, in forward order: embedding, blocks, final norm, head."""
    children = list(model.children())
    for child in range(len(children) + 1):
        if isinstance(model, FusedModule):
            yield from model.fused_params_at(child)
        if child < len(children):
            yield from fused_params(children[child])
