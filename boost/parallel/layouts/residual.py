"""What layouts with one kind of residual stream share: embedding, norm, head and loss.

Legend: p TP processes, T tokens, N some of them; D hidden width, V vocabulary rows held by this process.
"""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from boost.config.cuts import Cut, cut_of, wide_parts
from boost.config.schema import ModelConfig, ParallelConfig
from boost.models.group import Group
from boost.models.interface import Layout
from boost.parallel import collectives
from boost.parallel.lookup import lookup
from boost.parallel.loss import cross_entropy
from boost.parallel.mesh import Axis
from boost.parallel.norms import rms_norm


class Base:
    """The facts that every layout has."""

    name = ""

    def __init__(self, model: ModelConfig, parallel: ParallelConfig, axis: Axis) -> None:
        self.rank, self.size, self.axis = axis.rank, axis.size, axis
        self.model, self.parallel = model, parallel
        self.wide = wide_parts(parallel)
        self.grouping = parallel.grouping

    @property
    def for_inference(self) -> Layout:
        return cast(Layout, self)  # every concrete layout is one

    @property
    def with_sharded_latents(self) -> Layout:
        raise AssertionError(f"{self.name} has no latents that are gathered")

    def residual_shape(self, tokens: int) -> tuple[int, int]:
        """Whole rows of all tokens."""
        return tokens, self.model.dim

    def latent_shape(self, group: Group, tokens: int) -> tuple[int, int]:
        """Whole latents of all tokens."""
        return tokens, sum(group.shape.ranks)

    def cut(self, role: str) -> Cut:
        return cut_of(role, self.model, self.parallel)

    def norm(self, x_TD: Tensor, gamma_D: Tensor) -> Tensor:
        """RMSNorm of rows held whole."""
        return rms_norm(x_TD, gamma_D, self.model.norm_eps)

    def cut_logits(self, normed_ND: Tensor, head_VD: Tensor) -> Tensor:
        """Logits over the whole vocabulary, [N, p V], from rows of the head held by each process. One all-gather."""
        rows = collectives.all_gather(F.linear(normed_ND, head_VD.to(normed_ND.dtype)), self.axis)
        return collectives.rows_to_features(rows, self.axis)


class Replicated(Base):
    """Residual stream [T, D] whole on every process. Gradients of it, and of the norms, are complete."""

    def embed(self, tokens_T: Tensor, table: Tensor, dtype: torch.dtype) -> Tensor:
        """Each process looks up its own columns; one all-gather of D forward, nothing backward."""
        rows = collectives.gather_replicated(lookup(tokens_T, table, dtype), self.axis)
        return collectives.rows_to_features(rows, self.axis)

    def loss(self, x: Tensor, gamma: Tensor, head: Tensor, targets_T: Tensor) -> Tensor:
        """This process's part of the vocabulary; one all-reduce of D backward."""
        normed_TD = collectives.sum_backward(self.norm(x, gamma), self.axis)
        return cross_entropy(normed_TD, head.to(x.dtype), targets_T, self.axis)

    def logits(self, x: Tensor, gamma: Tensor, head: Tensor, tokens_N: Tensor) -> Tensor:
        return self.cut_logits(self.norm(x[tokens_N], gamma), head)


class TokenSharded(Base):
    """Residual stream [T/p, D], whole rows of consecutive tokens. Gradients of what acts on it are sums over tokens, partial
    on each process, reduced once per optimizer step."""

    def residual_shape(self, tokens: int) -> tuple[int, int]:
        return tokens // self.size, self.model.dim

    def embed(self, tokens_T: Tensor, table: Tensor, dtype: torch.dtype) -> Tensor:
        """Each process looks up its own columns of all tokens; one all-to-all of T D/p forward, the same backward."""
        columns = collectives.exchange(lookup(tokens_T, table, dtype), self.axis)
        return collectives.rows_to_features(columns, self.axis)

    def loss(self, x: Tensor, gamma: Tensor, head: Tensor, targets_T: Tensor) -> Tensor:
        """All-gather of the normed tokens (reduce-scatter backward), then this process's part of the vocabulary."""
        normed_TD = collectives.gather(self.norm(x, gamma), self.axis)
        return cross_entropy(normed_TD, head.to(x.dtype), targets_T, self.axis)

    def logits(self, x: Tensor, gamma: Tensor, head: Tensor, tokens_N: Tensor) -> Tensor:
        raise AssertionError("generation asks the layout for_inference")
