"""Key/value caches of generation: where a forward pass stores its keys and values, and what the next tokens attend to.

Every sequence that is being generated has a row of the caches, which it fills from the front. Prompts are stored first
(`PromptRows`), packed one after another without padding; then one token at a time is added to all rows (`NextTokenRows`), whose
lengths may differ.

Legend: B sequences, S new tokens of each, T = B * S; H query heads and K key/value heads on this process, E width of a head;
C cached tokens of the longest sequence.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass
class KVCache:
    """Keys and values of the tokens that one block has processed, [rows, K, capacity, E]; filled in place."""

    keys: Tensor
    values: Tensor
    length: int = 0
    """Cached tokens of each row, if all rows have equally many."""

    def copy(self, source: int, target: int, length: int) -> None:
        """Copies the first `length` tokens of row `source` to row `target`."""
        for x in (self.keys, self.values):
            x[target, :, :length] = x[source, :, :length]


@dataclass(frozen=True)
class PromptRows:
    """Whole prompts, which fill empty rows of the caches."""

    rows: tuple[int, ...]
    """Row of each prompt."""
    lengths: tuple[int, ...]
    """Tokens of each prompt."""

    def positions(self, device: torch.device) -> Tensor:
        """Positions of the packed tokens, [T]: each prompt starts at 0."""
        return torch.cat([torch.arange(length, device=device) for length in self.lengths])

    def document_ids(self) -> Tensor:
        """The number of the prompt of each packed token, [1, T], on the host."""
        return torch.arange(len(self.lengths)).repeat_interleave(torch.tensor(self.lengths))[None]

    def last_tokens(self, device: torch.device) -> Tensor:
        """Index of each prompt's last token among all T, [B]."""
        return torch.tensor(list(itertools.accumulate(self.lengths)), device=device) - 1

    def store(self, cache: KVCache, k_BKSE: Tensor, v_BKSE: Tensor) -> tuple[Tensor, Tensor]:
        """Stores keys and values of the prompts, [B, K, S, E], or packed, [1, K, T, E]. Returns them."""
        for x_BKSE, stored in ((k_BKSE, cache.keys), (v_BKSE, cache.values)):
            whole = x_BKSE.shape[0] == len(self.rows)
            prompts = x_BKSE.unbind() if whole else x_BKSE[0].split(self.lengths, dim=1)
            for row, x_KSE in zip(self.rows, prompts, strict=True):
                stored[row, :, : x_KSE.shape[1]] = x_KSE
        return k_BKSE, v_BKSE


@dataclass(frozen=True)
class NextTokenRows:
    """One more token of each of the first B rows of the caches."""

    lengths: tuple[int, ...]
    """Cached tokens of each row, without the new one."""
    lengths_B: Tensor
    """The same on the device, int64."""
    mask_B11C: Tensor | None
    """Added to the scores: 0 where a token may attend, -inf elsewhere. None: all rows have the same length."""

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device, dtype: torch.dtype) -> "NextTokenRows":
        """Rows of these lengths; `dtype`: of the activations."""
        lengths_B = torch.tensor(lengths, device=device)
        mask = None
        if min(lengths) < max(lengths):
            unused_BC = torch.arange(max(lengths) + 1, device=device) > lengths_B[:, None]
            mask = torch.zeros(unused_BC.shape, dtype=dtype, device=device).masked_fill_(unused_BC, -math.inf)
            mask = mask[:, None, None]
        return cls(tuple(lengths), lengths_B, mask)

    def positions(self, device: torch.device) -> Tensor:
        """Position of each token: [1] if it is the same for all, else [B, 1]."""
        return self.lengths_B[:1] if self.mask_B11C is None else self.lengths_B[:, None]

    def last_tokens(self, device: torch.device) -> Tensor:
        """Index of each sequence's token, [B]."""
        return torch.arange(len(self.lengths), device=device)

    def store(self, cache: KVCache, k_BK1E: Tensor, v_BK1E: Tensor) -> tuple[Tensor, Tensor]:
        """Stores keys and values of the tokens. Returns those of all tokens of these rows, [B, K, C, E], as views."""
        batch, end = len(self.lengths), max(self.lengths) + 1
        for x_BK1E, stored in ((k_BK1E, cache.keys), (v_BK1E, cache.values)):
            if self.mask_B11C is None:
                stored[:batch, :, end - 1 : end] = x_BK1E
            else:
                stored[torch.arange(batch, device=stored.device), :, self.lengths_B] = x_BK1E[:, :, 0]
        return cache.keys[:batch, :, :end], cache.values[:batch, :, :end]

    def attend(self, q_BH1E: Tensor, k_BKCE: Tensor, v_BKCE: Tensor) -> Tensor:
        """softmax(q k^T / sqrt(E)) v, [B, H, 1, E].

        Query heads that share a key/value head become queries of that head, so that its keys are read once.
        """
        q_BKGE = q_BH1E.reshape(q_BH1E.shape[0], k_BKCE.shape[1], -1, q_BH1E.shape[-1])
        a_BKGE = F.scaled_dot_product_attention(q_BKGE, k_BKCE, v_BKCE, attn_mask=self.mask_B11C)
        return a_BKGE.reshape(q_BH1E.shape)


CacheRows = PromptRows | NextTokenRows
"""Where the tokens of a forward pass go."""
