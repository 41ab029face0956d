"""Calibration text through a dense model and through its factorized copy, one block after the other.

Legend: x input of a group in the dense model, x' in the factorized one, [T, I]; h = silu(A x') its activated latents, [T, r].
"""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from boost.convert.calibration import Batch, add_moment, observers_of
from boost.models.attention import make_context
from boost.models.decoder import Decoder, TransformerBlock
from boost.models.group import LinearGroup
from boost.models.interface import Stream


class Twins:
    """The residual streams of both models at the current block. Weights of the factorized block may change between calls."""

    def __init__(self, dense: Decoder, low: Decoder, batches: Sequence[Batch]) -> None:
        """Both models have an `ObservedLayout` and the same embedding."""
        self._models, self._batches = (dense, low), batches
        self._layer = 0
        self._tokens = sum(batch.tokens.numel() for batch in batches)
        with torch.no_grad():
            embedded = [dense.layout.embed(b.tokens.reshape(-1), dense.embed, dense.compute_dtype) for b in batches]
            self._streams = [(x, x) for x in (each.wait() for each in embedded) if isinstance(x, Tensor)]

    def moments(self, index: int, sequential: bool = True) -> tuple[Tensor, Tensor]:
        """E[x' x'^T] and E[x x'^T] of group `index` of the current block, [I, I] fp64. Not `sequential`: of x in place of x'."""
        dense, _ = self._models
        width = self._blocks()[0].groups[index].shape.slots[0].d_in
        low, cross = (torch.zeros(width, width, dtype=torch.double, device=dense.device) for _ in range(2))
        for x_TI, low_TI in self._inputs(index):
            used_TI = low_TI if sequential else x_TI
            add_moment(low, used_TI)
            add_moment(cross, x_TI, used_TI)
        return low / self._tokens, cross / self._tokens

    def latent_moments(self, index: int, a_RI: Tensor) -> tuple[Tensor, Tensor]:
        """E[h h^T] [r, r] and E[x h^T] [I, r] of h = silu(A x'), fp64."""
        rank, width = a_RI.shape
        low = torch.zeros(rank, rank, dtype=torch.double, device=a_RI.device)
        cross = torch.zeros(width, rank, dtype=torch.double, device=a_RI.device)
        for x_TI, low_TI in self._inputs(index):
            h_TR = F.silu(low_TI.double() @ a_RI.T)
            add_moment(low, h_TR)
            add_moment(cross, x_TI, h_TR)
        return low / self._tokens, cross / self._tokens

    def advance(self) -> None:
        """Moves both streams to the next block."""
        self._streams = [self._run(number) for number in range(len(self._batches))]
        self._layer += 1

    def _blocks(self) -> list[TransformerBlock]:
        found = [model.blocks[self._layer] for model in self._models]
        return [block for block in found if isinstance(block, TransformerBlock)]

    def _inputs(self, index: int) -> Iterator[tuple[Tensor, Tensor]]:
        """(x, x') of a group, batch by batch."""
        groups = [block.groups[index] for block in self._blocks()]

        def observe(group: LinearGroup, x_TI: Tensor, _: Sequence[Tensor]) -> None:
            if any(group is each for each in groups):
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
        found = []
        for model, block, x in zip(self._models, self._blocks(), self._streams[number], strict=True):
            positions_S = torch.arange(length, device=model.device)
            context = make_context(rows, positions_S, model.model, model.compute_dtype)
            try:
                found.append(block(model.layout, [Stream(x)], [context])[0].x)
            except _Found as each:
                found.append(each.x)
        return found[0], found[1]


class _Found(Exception):
    """Ends a pass through a block at the input that was looked for."""

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.x = x
