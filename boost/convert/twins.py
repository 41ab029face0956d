"""Calibration text through a dense model and through its factorized copy, one block after the other.

Legend: x input of a group in the dense model, x' in the factorized one, [T, I];
s importance of a token (`GroupMoments`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from boost.convert.calibration import Batch, add_moment, observers_of, weigh
from boost.models.attention import make_context
from boost.models.decoder import Decoder, TransformerBlock
from boost.models.group import LinearGroup
from boost.models.interface import Stream


@dataclass(frozen=True)
class InputMoments:
    """Moments of the inputs of a group, [I, I] fp64; divided by the number of all tokens, so that those of parts add up."""

    low: Tensor
    """E[s x' x'^T]."""
    cross: Tensor
    """E[s x x'^T]."""

    def __add__(self, other: "InputMoments") -> "InputMoments":
        return InputMoments(self.low + other.low, self.cross + other.cross)


class Twins:
    """The residual streams of both models at the current block. Weights of the factorized block may change between calls."""

    def __init__(self, dense: Decoder, low: Decoder, batches: Sequence[Batch]) -> None:
        """Both models have an `ObservedLayout` and the same embedding."""
        self.dense, self.low = dense, low
        self._models, self._batches = (dense, low), batches
        self._layer = 0
        self._tokens = sum(batch.tokens.numel() for batch in batches)
        with torch.no_grad():
            embedded = [dense.layout.embed(b.tokens.reshape(-1), dense.embed, dense.compute_dtype) for b in batches]
            self._streams = [(x, x) for x in (pending.wait() for pending in embedded) if isinstance(x, Tensor)]

    def moments(self, index: int, importance: Sequence[Tensor]) -> list[InputMoments]:
        """Of group `index` of the current block, over each half of the tokens of every batch.

        `importance`: s of every token, one [T] per batch.
        """
        width = self._blocks()[0].groups[index].shape.slots[0].d_in
        zeros = torch.zeros(width, width, dtype=torch.double, device=self.dense.device)
        halves = [InputMoments(zeros.clone(), zeros.clone()) for _ in range(2)]
        for (x_TI, low_TI), s_T in zip(self._inputs(index), importance, strict=True):
            x_halves, low_halves = weigh(x_TI, s_T).tensor_split(2), weigh(low_TI, s_T).tensor_split(2)
            for half, x, low in zip(halves, x_halves, low_halves, strict=True):
                add_moment(half.low, low)
                add_moment(half.cross, x, low)
        for half in halves:
            half.low.div_(self._tokens)
            half.cross.div_(self._tokens)
        return halves

    def advance(self) -> None:
        """Moves both streams to the next block."""
        self._streams = [self._run(number) for number in range(len(self._batches))]
        self._layer += 1

    def _blocks(self) -> list[TransformerBlock]:
        blocks = [model.blocks[self._layer] for model in self._models]
        return [block for block in blocks if isinstance(block, TransformerBlock)]

    def _inputs(self, index: int) -> Iterator[tuple[Tensor, Tensor]]:
        """(x, x') of a group, batch by batch."""
        groups = [block.groups[index] for block in self._blocks()]

        def observe(group: LinearGroup, x_TI: Tensor, _: Sequence[Tensor]) -> None:
            if any(group is own for own in groups):
                raise _Found(x_TI)  # the rest of the block is not needed

        for model in self._models:
            observers_of(model).append(observe)
        try:
            for number in range(len(self._batches)):
                yield self._run(number)
        finally:
            for model in self._models:
                observers_of(model).remove(observe)

    @torch.no_grad()
    def _run(self, number: int) -> tuple[Tensor, Tensor]:
        """Both streams of a batch after the current block, or what observers find in it."""
        rows, length = self._batches[number].tokens.shape
        streams = []
        for model, block, x in zip(self._models, self._blocks(), self._streams[number], strict=True):
            positions_S = torch.arange(length, device=model.device)
            context = make_context(rows, positions_S, model.model, model.compute_dtype)
            try:
                streams.append(block(model.layout, [Stream(x)], [context])[0].x)
            except _Found as stopped:
                streams.append(stopped.x)
        return streams[0], streams[1]


class _Found(Exception):
    """Ends a pass through a block at the input that was looked for."""

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.x = x
