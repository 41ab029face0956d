"""Storage of parameters: one tensor may hold several mathematical parameters, stacked along dim 0 for one GEMM."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from boost.config.architecture import Parameter
from boost.config.layouts import Placement, local_shape
from boost.models.interface import Layout


@dataclass(frozen=True)
class Part:
    """The rows `start : start + rows` of a stored tensor that are this process's part of one parameter."""

    parameter: Parameter
    start: int
    rows: int

    def view(self, stored: Tensor) -> Tensor:
        """The part of a stored tensor, or of anything of its shape (gradient, moments), as a view."""
        return stored.narrow(0, self.start, self.rows)


@dataclass(frozen=True)
class Shard:
    """Rows of a stored tensor that this process keeps from step to step, where replicas share it."""

    tensor: nn.Parameter
    """[rows, ...], a plain tensor; none may be left for the last processes."""
    first: int
    """Where they begin in the stored tensor."""
    over: str
    """dp | replicas (dp x tp): the processes that share it."""


@dataclass(frozen=True)
class Storage:
    """One stored tensor of a model with what it holds."""

    parameter: nn.Parameter
    """As the module has it: its gradient arrives here."""
    parts: tuple[Part, ...]
    placement: Placement
    shard: Shard | None = None

    @property
    def tensor(self) -> nn.Parameter:
        """What this process keeps from step to step, and its optimizer changes: all of it, or its shard."""
        return self.shard.tensor if self.shard else self.parameter

    def pieces(self) -> "Iterator[Piece]":
        """What `tensor` (or anything of its shape) holds of each parameter."""
        first = self.shard.first if self.shard else 0
        for part in self.parts:
            begin = max(part.start, first)
            end = min(part.start + part.rows, first + self.tensor.shape[0])
            if begin < end:
                yield Piece(part.parameter, begin - first, end - begin, begin - part.start)


@dataclass(frozen=True)
class Piece:
    """Rows `start : start + rows` of a kept tensor: the rows from `offset` on of this TP process's part of a parameter."""

    parameter: Parameter
    start: int
    rows: int
    offset: int

    def view(self, kept: Tensor) -> Tensor:
        """The piece of a kept tensor, or of anything of its shape (gradient, moments), as a view."""
        return kept.narrow(0, self.start, self.rows)


class Stored(nn.Module):
    """A module that knows which parameters its tensors hold."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: dict[str, tuple[Part, ...]] = {}
        self.placements: dict[str, Placement] = {}
        self.shards: dict[str, Shard] = {}
        self._places: dict[str, int] = {}
        """How many modules inside this one come before a tensor."""

    def store(self, attribute: str, parameters: Sequence[Parameter], layout: Layout) -> None:
        """Makes the tensor `attribute` for parameters that are sharded alike, uninitialised."""
        placement = layout.placement(parameters[0].role)
        assert all(layout.placement(parameter.role) == placement for parameter in parameters), (
            "one stored tensor, one placement"
        )
        shapes = [local_shape(parameter, placement, layout.size) for parameter in parameters]
        parts, start = [], 0
        for parameter, shape in zip(parameters, shapes, strict=True):
            parts.append(Part(parameter, start, shape[0]))
            start += shape[0]
        self.register_parameter(attribute, nn.Parameter(torch.empty(start, *shapes[0][1:])))
        self.parts[attribute], self.placements[attribute] = tuple(parts), placement
        self._places[attribute] = len(self._modules)

    def stored(self, place: int) -> Iterator[Storage]:
        """The tensors stored after the first `place` modules inside this one and before the next."""
        for attribute, parts in self.parts.items():
            if self._places[attribute] == place:
                yield Storage(getattr(self, attribute), parts, self.placements[attribute], self.shards.get(attribute))


def storages(model: nn.Module) -> Iterator[Storage]:
    """Every stored tensor of a model, in the order in which a token meets them: embedding, blocks, final norm, head."""
    children = list(model.children())
    for place in range(len(children) + 1):
        if isinstance(model, Stored):
            yield from model.stored(place)
        if place < len(children):
            yield from storages(children[place])
