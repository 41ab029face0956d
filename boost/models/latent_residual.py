"""The duplicated latent residual of a linear (DLR, arXiv 2606.28932): y = B h + alpha / sqrt(K) Expand_K(h).

Expand_K repeats each of the r latents K = ceil(d_out / r) times and keeps the first d_out: output o receives latent o // K. That is
a matrix, so y = B* h with B* = B + alpha / sqrt(K) E, E[o, o // K] = 1. We add it to the weight (one number per row of B, in a copy
of B that the cast to the compute dtype makes anyway), not to the output (tokens x d_out numbers in both passes). It is the same
function, its gradients need no further code, and every layout shards it as it shards B.

Legend: O outputs of a slot on this process, r latents of a slot on this process, of the d_out and the rank of the whole linear.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from boost.config.architecture import Slot, residual_scale, slot_of
from boost.config.schema import ModelConfig
from boost.models.linear import linear


@dataclass(frozen=True)
class LatentResidual:
    """One process's part of alpha / sqrt(K) E."""

    scale: float
    """alpha / sqrt(K)."""
    repeats: int
    """K."""
    first_row: int = 0
    """Index in the whole B of this process's first row."""
    first_column: int = 0
    """Index in the whole B of this process's first column."""

    def add_to(self, b_Or: Tensor) -> Tensor:
        """Adds this part to B (or to a tensor of its shape) in place; outside autograd."""
        for row, column, blocks, rows in self._blocks(*b_Or.shape):
            # [blocks, rows, blocks]; its diagonal is [rows, blocks]: rows of B that receive the same latent, for each latent.
            parts = b_Or.narrow(0, row, blocks * rows).unflatten(0, (blocks, rows)).narrow(2, column, blocks)
            entries = torch.diagonal(parts, 0, 0, 2)
            entries += self.scale
        return b_Or

    def added(self, b_Or: Tensor, dtype: torch.dtype) -> Tensor:
        """B + alpha / sqrt(K) E in `dtype`, a new tensor; outside autograd."""
        return self.add_to(b_Or.clone() if b_Or.dtype == dtype else b_Or.to(dtype))

    def of_latents(self, h_Tr: Tensor, outputs: int) -> Tensor:
        """alpha / sqrt(K) Expand_K(h) [T, O], for an adapted B that cannot be read as a matrix. Differentiable."""
        return linear(h_Tr, self.add_to(h_Tr.new_zeros(outputs, h_Tr.shape[-1])))

    def _blocks(self, rows: int, columns: int) -> Iterator[tuple[int, int, int, int]]:
        """(first row, first column, number of latents n, rows m of each) of stretches in which n consecutive columns have m
        consecutive rows each: whole latents, and at the ends of a shard what it has of one."""
        repeats = self.repeats
        row = max(self.first_row, self.first_column * repeats)
        end = min(self.first_row + rows, (self.first_column + columns) * repeats)
        while row < end:
            latent, skipped = divmod(row, repeats)
            whole = 0 if skipped else (end - row) // repeats
            blocks, length = (whole, repeats) if whole else (1, min(end - row, repeats - skipped))
            yield row - self.first_row, latent - self.first_column, blocks, length
            row += blocks * length


def latent_residual(model: ModelConfig, slot: Slot, first_row: int = 0, first_column: int = 0) -> LatentResidual | None:
    """The residual of a linear, for a part of its B that begins at this row and column; None without DLR."""
    found = residual_scale(model, slot)
    return LatentResidual(*found, first_row, first_column) if found else None


def folded(model: ModelConfig, name: str, weight: Tensor) -> Tensor:
    """A whole weight as a model without DLR has it: B with its residual, at least in fp32; any other weight unchanged."""
    residual = latent_residual(model, slot_of(model, name)) if name.endswith(".B") else None
    return weight if residual is None else residual.added(weight, torch.promote_types(weight.dtype, torch.float32))


class _Added(torch.autograd.Function):
    """forward: B [O, r] -> B + alpha / sqrt(K) E in the compute dtype, [O, r]. dgrad: none. wgrad: dB = dB*. No collective."""

    @staticmethod
    def forward(ctx: Any, b_Or: Tensor, residual: LatentResidual, dtype: torch.dtype) -> Tensor:
        ctx.dtype = b_Or.dtype
        return residual.added(b_Or, dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].to(ctx.dtype), None, None


def with_residual(b_Or: Tensor, residual: LatentResidual | None, dtype: torch.dtype) -> Tensor:
    """Differentiable B + alpha / sqrt(K) E in `dtype`; B itself without a residual."""
    if residual is None:
        return b_Or.to(dtype)
    added: Tensor = _Added.apply(b_Or, residual, dtype)
    return added
