"""Shared code of the layouts: common attributes, and embedding, norm, head and loss for each kind of residual stream.

Legend: p TP processes, T tokens, N some of them; D hidden width, V vocabulary rows on this process.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from boost.config.architecture import Slot
from boost.config.attention import crosses_as_heads, local_heads
from boost.config.layouts import LayoutSpec, Placement
from boost.config.layouts.spec import (
    EXCHANGE,
    GATHER,
    GATHER_REPLICATED,
    SCATTER_SUM,
    SUM_BACKWARD,
    SUM_FORWARD,
    Comm,
)
from boost.config.schema import ModelConfig, ParallelConfig
from boost.models.attention import Context, SequenceShare
from boost.models.group import LinearGroup
from boost.models.interface import NO_RECOMPUTE, Done, Latents, Pending, RecomputePolicy, Stream, Teaching, call
from boost.models.linear import StartCollective, linear, lookup
from boost.parallel import collectives
from boost.parallel.collectives import InFlight, features_to_rows, heads_for_each, rows_to_features
from boost.parallel.distill import distill_loss
from boost.parallel.loss import cross_entropy
from boost.parallel.mesh import Axis, Mesh
from boost.parallel.norms import rms_norm

QKV = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values."""

Start = Callable[[Comm, Tensor], InFlight]
"""Starts a differentiable collective over the context axis."""


class ContextAxis:
    """Attention over the context-parallel (CP) axis: exchanges heads, or gathers keys and values (`boost.config.attention`). One
    collective in and, if heads are exchanged, one out.

    Legend: n local tokens of a micro-batch, N = cp n tokens on all CP ranks; H query and K key/value heads of one TP rank, E
    width of a head.
    """

    def __init__(self, model: ModelConfig, parallel: ParallelConfig, axis: Axis) -> None:
        self.axis, self.head_dim = axis, model.head_dim
        self.as_heads = crosses_as_heads(model, parallel)
        self.heads, self.kv_heads = local_heads(model, parallel)

    def share(self) -> SequenceShare:
        """This process's share of each sequence."""
        return SequenceShare(self.axis.rank, self.axis.size, gathers_keys=not self.as_heads)

    def enter(self, start: Start, qkv: QKV, share: SequenceShare, batch: int) -> Pending[QKV]:
        """Redistributes q, k, v before attention: [n, H E], [n, K E], [n, K E] -> (q, k, v).

        Heads exchanged: [N, H E / cp] and twice [N, K E / cp], of whole sequences. Keys and values gathered: q as it is, and
        all keys and values, [N, K E] each.
        """
        q, k, v = qkv
        if not self.as_heads:
            gathering = start(GATHER, torch.cat((k, v), dim=-1))

            def gathered() -> QKV:
                keys, values = share.to_sequences(gathering.wait(), batch).chunk(2, dim=-1)
                return q, keys, values

            return Pending(gathered)
        keys_values = [heads_for_each(x, self.kv_heads, self.axis.size) for x in (k, v)]
        exchange = start(EXCHANGE, features_to_rows([q, *keys_values], self.axis))
        kv = max(self.kv_heads // self.axis.size, 1) * self.head_dim
        widths = [self.heads // self.axis.size * self.head_dim, kv, kv]

        def exchanged() -> QKV:
            own_q, own_k, own_v = share.to_sequences(exchange.wait(), batch).split(widths, dim=-1)
            return own_q, own_k, own_v

        return Pending(exchanged)

    def leave(self, start: Start, attended: Tensor, share: SequenceShare, batch: int) -> Pending[Tensor]:
        """Redistributes attention's output: heads [N, H E / cp] of whole sequences -> [n, H E]. A no-op if keys and values were
        gathered."""
        if not self.as_heads:
            return Done(attended)
        exchange = start(EXCHANGE, share.to_processes(attended, batch))
        return Pending(lambda: rows_to_features(exchange.wait(), self.axis))


class Options(NamedTuple):
    """How a layout runs. No option changes the function that it computes."""

    policy: RecomputePolicy = NO_RECOMPUTE
    inference: bool = False
    """Accepts any number of tokens, without gradients."""
    split: bool = False
    """Start and wait of a collective are separate autograd nodes, so that other work can run in between."""


class BaseLayout:
    """Attributes and defaults of every layout."""

    lag = 0
    """Steps by which the second half trails the first. 0 if one half has enough compute between any two collectives of the
    other."""

    def __init__(self, spec: LayoutSpec, model: ModelConfig, parallel: ParallelConfig, mesh: Mesh) -> None:
        self.spec, self.model, self.parallel, self.mesh = spec, model, parallel, mesh
        self.axis = mesh.tp
        self.rank, self.size = self.axis.rank, self.axis.size
        self.num_shards = spec.num_shards(parallel)
        self.grouping = parallel.grouping
        self.halves = parallel.overlap == "halves" and (self.size > 1 or mesh.cp.size > 1)
        self._context_axis = ContextAxis(model, parallel, mesh.cp) if mesh.cp.size > 1 else None
        self.options = Options()
        self._variants: dict[Options, Any] = {}

    @property
    def policy(self) -> RecomputePolicy:
        return self.options.policy

    def with_options(self, **changes: Any) -> Any:
        """Returns the same layout with other `Options`. Cached."""
        options = self.options._replace(**changes)
        if options == self.options:
            return self
        if options not in self._variants:
            variant = copy.copy(self)
            variant.options, variant._variants = options, {}
            self._variants[options] = variant
        return self._variants[options]

    def start(self, comm: Comm, x: Tensor, backward_started: bool = False) -> InFlight:
        """Starts a collective over the TP processes (`collectives.start`)."""
        return (collectives.start if self.options.split else collectives.run)(comm, x, self.axis, backward_started)

    def sequence_share(self) -> SequenceShare | None:
        return self._context_axis.share() if self._context_axis is not None else None

    def enter_attention(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Pending[QKV]:
        assert self._context_axis is not None
        assert context.share is not None
        return self._context_axis.enter(self._start_on_context_axis, (q, k, v), context.share, context.batch)

    def leave_attention(self, attended: Tensor, context: Context) -> Pending[Tensor]:
        assert self._context_axis is not None
        assert context.share is not None
        return self._context_axis.leave(self._start_on_context_axis, attended, context.share, context.batch)

    def _start_on_context_axis(self, comm: Comm, x: Tensor) -> InFlight:
        return (collectives.start if self.options.split else collectives.run)(comm, x, self.mesh.cp)

    def placement(self, role: str) -> Placement:
        return self.spec.placement(role, self.model, self.parallel)

    def crosses_as_heads(self, slot: Slot) -> bool:
        return False

    def residual_shape(self, tokens: int) -> tuple[int, int]:
        return self.spec.residual_shape(self.model, self.parallel, tokens)

    def latent_shape(self, rank: int, tokens: int) -> tuple[int, int]:
        return self.spec.latent_shape(self.parallel, tokens, rank)

    def norm(self, x_TD: Tensor, gamma_D: Tensor) -> Tensor:
        """RMSNorm of whole rows."""
        return rms_norm(x_TD, gamma_D, self.model.norm_eps)

    def head_input(self, x: Tensor, gamma: Tensor) -> Pending[Tensor]:
        raise NotImplementedError

    def loss(
        self, x: Tensor, gamma: Tensor, head: Tensor, targets_T: Tensor, teaching: Teaching | None = None
    ) -> Pending[Tensor]:
        """Each process computes its own shard of the vocabulary."""

        def finish(normed_TD: Tensor) -> Tensor:
            if teaching is None:
                return cross_entropy(normed_TD, head.to(x.dtype), targets_T, self.axis)
            return distill_loss(normed_TD, head.to(x.dtype), targets_T, teaching, self.axis)

        return self.head_input(x, gamma).then(finish)

    def all_logits(self, x: Tensor, gamma: Tensor, head: Tensor) -> Pending[Tensor]:
        """The collectives of `loss`, and an all-gather of T V/p logits. Nothing more in the backward pass."""

        def finish(normed_TD: Tensor) -> Tensor | Pending[Tensor]:
            logits_TV = linear(normed_TD, head)
            if self.size == 1:
                return logits_TV
            rows = self.start(GATHER_REPLICATED, logits_TV)
            return Pending(lambda: rows_to_features(rows.wait(), self.axis))

        return self.head_input(x, gamma).then(finish)

    def gathered_logits(self, normed_ND: Tensor, head_VD: Tensor) -> Tensor:
        """Logits over the whole vocabulary, [N, p V], from each process's rows of the head. One all-gather."""
        rows = collectives.all_gather(linear(normed_ND, head_VD), self.axis)
        return rows_to_features(rows, self.axis)

    def finish_out_proj(
        self, stream: Stream, latents: InFlight, group: LinearGroup, start_grad_sum: StartCollective | None = None
    ) -> Pending[Stream]:
        """Waits for the latents of an out-projection, then adds its update B act(u) to the residual stream.

        `start_grad_sum`: starts the collective of the latents' gradient, which is deferred to this function (`collectives.start`).
        """

        def finish() -> Stream:
            prev, rest = group.take_latents(stream, grouped=True)
            (update,), new = self.up_segment(group, [latents.wait()], prev, start_grad_sum)
            return rest.put(new).add(update)

        return Pending(finish)

    def keeps_latents_only(self, group: LinearGroup) -> bool:
        """Whether act and B of a group are one autograd node that saves only the latents."""
        return group.has_private_latents and self.has_hand_written_nodes

    @property
    def has_hand_written_nodes(self) -> bool:
        """Whether a custom autograd node may own weights. False if a whole block is recomputed: recomputation stops before the
        last GEMM only if that GEMM is a node of its own."""
        return self.policy.block is call

    def up_segment(
        self,
        group: LinearGroup,
        latents: Sequence[Tensor],
        prev: Latents = (),
        start_grad_sum: StartCollective | None = None,
    ) -> tuple[list[Tensor], Latents]:
        """act and B of latents as one segment: returns (one [T, O] per slot, latents for the next block)."""
        if self.keeps_latents_only(group):
            return group.scale_act_and_project(latents, None, start_grad_sum), ()
        found: tuple[list[Tensor], Latents] = self.policy.local(
            lambda prev, *u: group.activate_and_project(u, prev), prev, *latents
        )
        return found


class Replicated(BaseLayout):
    """Residual stream [T, D], replicated. Its gradients and those of the norms are complete."""

    to_shards: Comm = SUM_BACKWARD
    """Collective from the replicated residual stream to a tensor that feeds a different shard on every process."""
    from_shards: Comm = SUM_FORWARD
    """Collective from partial sums to the residual stream."""

    def embed(self, tokens_T: Tensor, table: Tensor, dtype: torch.dtype) -> Pending[Tensor]:
        """Each process looks up its own columns. Forward: one all-gather of width D; backward: nothing."""
        rows = self.start(GATHER_REPLICATED, lookup(tokens_T, table, dtype))
        return Pending(lambda: rows_to_features(rows.wait(), self.axis))

    def head_input(self, x: Tensor, gamma: Tensor) -> Pending[Tensor]:
        normed = self.start(self.to_shards, self.norm(x, gamma))
        return Pending(normed.wait)

    def logits(self, x: Tensor, gamma: Tensor, head: Tensor, tokens_N: Tensor) -> Tensor:
        return self.gathered_logits(self.norm(x[tokens_N], gamma), head)


class TokenSharded(Replicated):
    """Residual stream [T/p, D]: whole rows of consecutive tokens. Gradients of parameters that act on it are partial sums over
    tokens, reduced once per optimizer step.

    One token cannot be sharded over p processes, so inference replicates the residual stream, with the same weights.
    """

    to_shards = GATHER
    from_shards = SCATTER_SUM

    def start(self, comm: Comm, x: Tensor, backward_started: bool = False) -> InFlight:
        if self.options.inference:
            comm = {GATHER: SUM_BACKWARD, SCATTER_SUM: SUM_FORWARD}.get(comm, comm)
        return super().start(comm, x, backward_started)

    def residual_shape(self, tokens: int) -> tuple[int, int]:
        return (tokens, self.model.dim) if self.options.inference else super().residual_shape(tokens)

    def latent_shape(self, rank: int, tokens: int) -> tuple[int, int]:
        return (tokens, rank) if self.options.inference else super().latent_shape(rank, tokens)

    def embed(self, tokens_T: Tensor, table: Tensor, dtype: torch.dtype) -> Pending[Tensor]:
        """Each process looks up its own columns of all tokens. One all-to-all of T D/p in either pass."""
        if self.options.inference:
            return super().embed(tokens_T, table, dtype)
        columns = self.start(EXCHANGE, lookup(tokens_T, table, dtype))
        return Pending(lambda: rows_to_features(columns.wait(), self.axis))
