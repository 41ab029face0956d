"""Code that layout runtimes share: attributes and the loss, and the embedding, norm and head for replicated and token-sharded
residual streams. `layout_for` builds the configured layout.

Legend: p TP processes, T tokens, N selected tokens; D hidden width, V vocabulary rows on this process.
"""

import functools
import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from boost.config.architecture import GroupSpec, Slot
from boost.config.attention import crosses_as_heads, local_heads
from boost.config.layouts import LayoutSpec, Placement, spec_of
from boost.config.layouts.spec import EXCHANGE, GATHER, GATHER_REPLICATED, SCATTER_SUM, SUM_BACKWARD, SUM_FORWARD, Comm
from boost.config.schema import ModelConfig, ParallelConfig
from boost.layouts.ungrouped import Ungrouped, start_each
from boost.models.attention import Context, SequenceShare
from boost.models.group import LinearGroup, Outputs
from boost.models.interface import NOTHING_IN_FLIGHT, Arrived, Flow, Layout, Teaching
from boost.models.kernels import StartCollective, UpProject, linear, lookup, rms_norm
from boost.parallel import collectives
from boost.parallel.collectives import InFlight, features_to_rows, heads_for_each, rows_to_features
from boost.parallel.loss import cross_entropy, distill_loss, embed_rows
from boost.parallel.mesh import Axis, Mesh


def layout_for(model: ModelConfig, parallel: ParallelConfig, mesh: Mesh) -> Layout:
    """Builds the configured layout for this process. With one TP process, every layout becomes `single`."""
    spec = spec_of(parallel)
    module, _, name = spec.runtime.partition(":")
    layout: Layout = getattr(importlib.import_module(module), name)(spec, model, parallel, mesh)
    return layout


class ContextAxis:
    """Attention over the context-parallel (CP) axis: exchanges heads, or gathers keys and values
    (`boost.config.attention`). One collective precedes attention and, if heads are exchanged, another follows it.

    Legend: n local tokens in a micro-batch, N = cp n tokens on all CP ranks; H query and K key/value heads on one TP rank, E
    head width.
    """

    def __init__(
        self, model: ModelConfig, parallel: ParallelConfig, axis: Axis, start: Callable[..., InFlight]
    ) -> None:
        self.axis, self.head_dim = axis, model.head_dim
        self.start = functools.partial(start, axis=axis)
        """Starts a differentiable collective over this axis."""
        self.as_heads = crosses_as_heads(model, parallel)
        self.heads, self.kv_heads = local_heads(model, parallel)

    def share(self) -> SequenceShare:
        """This process's share of each sequence."""
        return SequenceShare(self.axis.rank, self.axis.size, gathers_keys=not self.as_heads)

    def enter(self, flow: Flow, qkv: Sequence[Tensor], share: SequenceShare, batch: int) -> Iterator[None]:
        """Redistributes q, k, v before attention: [n, H E], [n, K E], [n, K E] -> (q, k, v).

        If heads are exchanged, the results are [N, H E / cp] and twice [N, K E / cp], for whole sequences. If keys and values
        are gathered, the results are the unchanged q and all keys and values, [N, K E] each.
        """
        q, *keys_values = qkv
        if self.as_heads:
            repeated = [heads_for_each(x, self.kv_heads, self.axis.size) for x in keys_values]
            in_flight = self.start(EXCHANGE, features_to_rows([q, *repeated], self.axis))
            kv = max(self.kv_heads // self.axis.size, 1) * self.head_dim
            widths = [self.heads // self.axis.size * self.head_dim, kv, kv]
            yield
            flow.arrived = share.to_sequences(in_flight.wait(), batch).split(widths, dim=-1)
        else:
            in_flight = self.start(GATHER, torch.cat(keys_values, dim=-1))
            yield
            flow.arrived = q, *share.to_sequences(in_flight.wait(), batch).chunk(2, dim=-1)

    def leave(self, flow: Flow, attended: Tensor, share: SequenceShare, batch: int) -> Iterator[None]:
        """Redistributes attention's output: heads [N, H E / cp] for whole sequences -> [n, H E]. A no-op if keys and
        values were gathered."""
        if self.as_heads:
            in_flight = self.start(EXCHANGE, share.to_processes(attended, batch))
            yield
            attended = rows_to_features(in_flight.wait(), self.axis)
        flow.arrived = (attended,)


class BaseLayout:
    """Attributes and defaults for every layout. The constructor derives settings from the configuration and the mesh."""

    lag = 0
    """Steps by which the second half trails the first. 0 if each half has enough compute between any two of its collectives
    to hide one of the other half's."""

    def __init__(
        self, spec: LayoutSpec, model: ModelConfig, parallel: ParallelConfig, mesh: Mesh, is_inference: bool = False
    ) -> None:
        """`is_inference`: the layout accepts any number of tokens and computes no gradients."""
        self.spec, self.model, self.parallel, self.mesh = spec, model, parallel, mesh
        self.axis = mesh.tp
        self.rank, self.size = self.axis.rank, self.axis.size
        self.num_shards = spec.num_shards(parallel)
        self.grouping = parallel.grouping
        self.is_inference = is_inference
        self.halves = parallel.overlap == "halves" and (self.size > 1 or mesh.cp.size > 1)
        self.splits = self.halves and not is_inference
        """Whether a collective's start and wait are separate autograd nodes, so that other work can run in between."""
        start = functools.partial(collectives.start if self.grouping else start_each, split=self.splits)
        self.start = functools.partial(start, axis=self.axis)
        """Starts a collective over the TP processes (`collectives.start`)."""
        self.context_axis = ContextAxis(model, parallel, mesh.cp, start) if mesh.cp.size > 1 else None
        has_own = not is_inference and (self.splits or spec.residual == "tokens")
        own: Any = type(self)(spec, model, parallel, mesh, is_inference=True) if has_own else self
        self.inference: Layout = own
        if model.tied and self.size > 1:  # the table is sharded by rows, not by columns
            residual = "replicated" if is_inference and spec.residual == "tokens" else spec.residual
            cast(Any, self).embed = functools.partial(embed_rows, residual, self.start, self.axis)

    def sequence_share(self) -> SequenceShare | None:
        return self.context_axis.share() if self.context_axis is not None else None

    def enter_attention(self, flow: Flow, qkv: Sequence[Tensor], context: Context) -> Iterable[None]:
        assert self.context_axis is not None
        assert context.share is not None
        return self.context_axis.enter(flow, qkv, context.share, context.batch)

    def leave_attention(self, flow: Flow, attended: Tensor, context: Context) -> Iterable[None]:
        assert self.context_axis is not None
        assert context.share is not None
        return self.context_axis.leave(flow, attended, context.share, context.batch)

    def copies(self, x: Tensor, group: LinearGroup) -> Any:
        """x, or without grouping one x per slot, each of which has its own gradient."""
        return x if self.grouping else (x,) * len(group.shape.slots)

    def placement(self, role: str) -> Placement:
        return self.spec.placement(role, self.model, self.parallel)

    def group_class(self, kind: type[Any], shape: GroupSpec) -> type[Any]:
        if self.grouping or len(shape.slots) == 1:
            return kind
        return type(f"Ungrouped{kind.__name__}", (Ungrouped, kind), {})

    def crosses_as_heads(self, slot: Slot) -> bool:
        return False

    def residual_shape(self, tokens: int) -> tuple[int, int]:
        return self.spec.residual_shape(self.model, self.parallel, tokens)

    def carried_shapes(self, group: GroupSpec, tokens: int) -> list[tuple[int, int]]:
        shapes = self.spec.carried_shapes(group, self.model, self.parallel, tokens)
        return [(tokens, width) for _, width in shapes] if self.is_inference else shapes

    def norm(self, x_TD: Tensor, gamma_D: Tensor) -> Tensor:
        """RMSNorm of whole rows."""
        return rms_norm(x_TD, gamma_D, self.model.norm_eps)

    def norm_and_down(self, x_TD: Tensor, gamma_D: Tensor, group: LinearGroup) -> Tensor:
        """Segment: A norm(x) for whole rows."""
        return group.down(rms_norm(x_TD, gamma_D, self.model.norm_eps))

    def up(self, arrived: Arrived, group: LinearGroup) -> Outputs:
        """The linears' second half, for this process's heads or channels."""
        return group.up(*arrived)

    def down(self, hidden: Tensor, group: LinearGroup) -> Tensor:
        """The linears' first half, for this process's heads or channels: a partial sum, if they are sharded."""
        return group.down(hidden)

    def update(
        self, flow: Flow, u_TR: Tensor, group: LinearGroup, start_grad_sum: StartCollective | None = None
    ) -> tuple[None, ...]:
        """act and B for complete latents of a group that projects out, and the update of the residual stream."""
        prev_TR = flow.take() if group.takes_prev else None
        (update,), kept = group.up_runner(group.up, u_TR, prev_TR, None, start_grad_sum)
        flow.latents += kept
        flow.add(update, group)
        return NOTHING_IN_FLIGHT

    def loss(self, normed_TD: Tensor, head: Tensor, targets_T: Tensor, teaching: Teaching | None = None) -> Tensor:
        """Each process computes the logits for its own shard of the vocabulary."""
        weight = head.to(normed_TD.dtype)
        if teaching is None:
            return cross_entropy(normed_TD, weight, targets_T, self.axis)
        return distill_loss(normed_TD, weight, targets_T, teaching, self.axis)

    def all_logits(self, normed_TD: Tensor, head: Tensor) -> Tensor:
        """One all-gather of this process's T V logits. Its backward pass has no collective."""
        logits_TV = linear(normed_TD, head)
        if self.size == 1:
            return logits_TV
        return rows_to_features(self.start(GATHER_REPLICATED, logits_TV).wait(), self.axis)

    def gathered_logits(self, normed_ND: Tensor, head_VD: Tensor) -> Tensor:
        """Logits over the whole vocabulary, [N, p V], from each process's rows of the head. One all-gather."""
        rows = collectives.all_gather(linear(normed_ND, head_VD), self.axis)
        return rows_to_features(rows, self.axis)


class Replicated(BaseLayout):
    """Residual stream [T, D], replicated. The gradients of the residual stream and of the norms are complete."""

    to_shards: Comm = SUM_BACKWARD
    """Collective from the replicated residual stream to a tensor that feeds a different shard on every process."""
    from_shards: Comm = SUM_FORWARD
    """Collective from partial sums to the residual stream."""

    def embed(self, flow: Flow, table: Tensor, dtype: torch.dtype) -> Iterator[None]:
        """Each process looks up its own columns. Forward: one all-gather of width D; backward: no collective."""
        rows = self.start(GATHER_REPLICATED, lookup(flow.x, table, dtype))
        yield
        flow.x = rows_to_features(rows.wait(), self.axis)

    def head_input(self, flow: Flow, gamma: Tensor) -> Iterator[None]:
        normed = self.start(self.to_shards, self.norm(flow.x, gamma))
        yield
        flow.x = normed.wait()

    def logits(self, x: Tensor, gamma: Tensor, head: Tensor, tokens_N: Tensor) -> Tensor:
        return self.gathered_logits(self.norm(x[tokens_N], gamma), head)


class TokenSharded(Replicated):
    """Residual stream [T/p, D]: whole rows of consecutive tokens. Gradients of parameters that act on it are partial sums over
    tokens, reduced once per optimizer step.

    One token cannot be sharded over p processes, so inference replicates the residual stream, with the same weights.
    """

    def __init__(
        self, spec: LayoutSpec, model: ModelConfig, parallel: ParallelConfig, mesh: Mesh, is_inference: bool = False
    ) -> None:
        super().__init__(spec, model, parallel, mesh, is_inference)
        if not is_inference:
            self.to_shards, self.from_shards = GATHER, SCATTER_SUM

    def residual_shape(self, tokens: int) -> tuple[int, int]:
        return (tokens, self.model.dim) if self.is_inference else super().residual_shape(tokens)

    def embed(self, flow: Flow, table: Tensor, dtype: torch.dtype) -> Iterator[None]:
        """Each process looks up its own columns for all tokens. One all-to-all of T D/p elements in each pass."""
        if self.is_inference:
            yield from super().embed(flow, table, dtype)
            return
        columns = self.start(EXCHANGE, lookup(flow.x, table, dtype))
        yield
        flow.x = rows_to_features(columns.wait(), self.axis)

    def project(self, h_TR: Any, group: LinearGroup) -> Outputs:
        """B for gathered latents, if possible as one autograd node, which writes the slots' gradients side by side."""
        if self.grouping and group.is_hand_written and torch.is_grad_enabled():
            return UpProject.apply(h_TR, None, None, None, len(group.shape.slots), *group.weights()), ()
        return group.project(h_TR), ()
