"""A decoder block for all layouts and families: `attention`, then `mlp`, and the order in which two halves of a
micro-batch run through them.

A sublayer projects norm(x) in, does its local work, and projects the result out:

    h = act(A norm(x))        layout.enter: A, and the collective that makes latents complete
    q, k, v = B h             layout.up
    a = attention(q, k, v)
    u = A a                   layout.down
    x = x + B act(u)          layout.leave: the collective, and B

A block's functions are generators. A bare `yield` means that a collective is in flight, so the other half of the micro-batch
can run. Results stay in a `Flow`, because torch.compile does not trace values that pass through a generator. Between yields, the
generators call plain functions (segments), which the backward pass can recompute without communication.

Legend: x is the residual stream in the layout's shape.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from boost.config import architecture
from boost.config.architecture import Parameter
from boost.config.schema import ModelConfig
from boost.models.attention import Context, FusedHeads, KeysValues, KVCache, attend, split_heads
from boost.models.fused import FusedModule
from boost.models.group import FusedDense, FusedLinearGroup, Latents, LinearGroup
from boost.models.interface import Arrived, Flow, Layout, Stream
from boost.models.kernels import gated_product
from boost.models.recompute import RecomputePolicy, call


def attention(
    layout: Layout,
    flow: Flow,
    context: Context,
    gamma: Tensor,
    qkv: LinearGroup,
    o: LinearGroup,
    cache: KVCache | None = None,
) -> Iterator[None]:
    """x + o(attention(q, k, v)), where q, k, v are projections of norm(x). `cache`: this block's cache, during generation."""
    yield from layout.enter(flow, gamma, qkv)  # norm and A; delivers the latents of q, k, v
    prev = flow.take_outputs(qkv) if qkv.takes_outputs else ()
    if context.share is None:
        before = flow.first_half.keys_values.pop(0) if flow.first_half is not None else ()
        partial, latents, keys_values = qkv.policy.attention(
            _attend, layout, context, qkv, o, cache, flow.arrived, before, prev
        )
        flow.keys_values += keys_values
    else:  # sequences are sharded over the context axis, so heads, or keys and values, are exchanged around attention
        *q_k_v, latents = qkv.policy.local(_project_qkv, layout, context, qkv, flow.arrived, prev)
        yield from layout.enter_attention(flow, [y.flatten(2).flatten(0, 1) for y in q_k_v], context)
        q_k_v = split_heads(flow.arrived, qkv.heads.head_dim, context.batch)
        before = flow.first_half.keys_values.pop(0) if flow.first_half is not None else ()
        attended, keys_values = qkv.policy.attention(attend, *q_k_v, context, cache, before)
        flow.keys_values += keys_values
        yield from layout.leave_attention(flow, attended, context)
        partial = layout.down(flow.arrived[0], o)
    flow.latents += latents
    yield from layout.leave(flow, partial, o)  # delivers the sum of A a; then B and the residual update
    if o.adds_bias:
        flow.x = flow.x + o.bias.to(flow.x.dtype)


def _attend(
    layout: Layout,
    context: Context,
    qkv: LinearGroup,
    o: LinearGroup,
    cache: KVCache | None,
    arrived: Arrived,
    before: KeysValues,
    prev: Latents,
) -> tuple[Tensor, Latents, list[tuple[Tensor, Tensor]]]:
    """Segment: latents of q, k, v -> A a for this process's heads, latents or outputs for the next block, and keys and values
    for the second half of the sequence. `prev`: outputs of the previous block."""
    projected, latents = layout.up(arrived, qkv)
    if qkv.finishes:
        projected, latents = qkv.finish(projected, latents, prev)
    attended, keys_values = attend(*qkv.heads.split(projected, context), context, cache, before)
    return layout.down(attended, o), latents, keys_values


def _project_qkv(
    layout: Layout, context: Context, qkv: LinearGroup, arrived: Arrived, prev: Latents
) -> tuple[Tensor, Tensor, Tensor, Latents]:
    """Segment: latents of q, k, v -> rotated q and k, v, as heads [B, S, H, E]; what is for the next block."""
    projected, latents = layout.up(arrived, qkv)
    if qkv.finishes:
        projected, latents = qkv.finish(projected, latents, prev)
    return *qkv.heads.split(projected, context), latents


def mlp(
    layout: Layout, flow: Flow, gamma: Tensor, gate_up: LinearGroup, down: LinearGroup, silu: bool
) -> Iterator[None]:
    """x + down(act(gate) up), where gate and up are projections of norm(x); act is SiLU or the identity."""
    yield from layout.enter(flow, gamma, gate_up)
    prev = flow.take_outputs(gate_up) if gate_up.takes_outputs else ()
    partial, latents = gate_up.policy.local(_gate, layout, gate_up, down, silu, flow.arrived, prev)
    flow.latents += latents
    yield from layout.leave(flow, partial, down)


def _gate(
    layout: Layout, gate_up: LinearGroup, down: LinearGroup, silu: bool, arrived: Arrived, prev: Latents
) -> tuple[Tensor, Latents]:
    """Segment: latents of gate and up -> A (act(gate) up) for this process's channels, and what is for the next block."""
    (gate, up), latents = layout.up(arrived, gate_up)
    if gate_up.finishes:
        (gate, up), latents = gate_up.finish((gate, up), latents, prev)
    return layout.down(gated_product(gate, up, silu), down), latents


class TransformerBlock(FusedModule):
    """Attention and a gated MLP, with their weights."""

    attn_norm: Tensor
    mlp_norm: Tensor

    def __init__(
        self, model: ModelConfig, layer: int, layout: Layout, policy: RecomputePolicy, layer_index: int
    ) -> None:
        """`policy`: recomputation policy for training. `layer_index`: index among this decoder's blocks."""
        super().__init__()
        self.policy, self.layer_index, self.mlp_silu = policy, layer_index, model.mlp_silu
        prefix = f"layers.{layer}"
        for norm in ("attn_norm", "mlp_norm"):
            self.add_fused_param(norm, (Parameter(f"{prefix}.{norm}", (model.dim,), "norm"),), layout)
        kind = FusedLinearGroup if model.low_rank else FusedDense
        self.qkv, self.o, self.gate_up, self.down = (
            layout.group_class(kind, shape)(model, shape, layer, layout, policy)
            for shape in architecture.groups(model, layer)
        )
        self.qkv.heads = FusedHeads(model, layer, layout)
        for bias in architecture.attention_parameters(model, self.o.shape, prefix):
            self.o.add_fused_param("bias", (bias,), layout)

    def recompute(self, policy: RecomputePolicy) -> None:
        """Chooses the recomputation policy for later backward passes."""
        self.policy = policy
        for group in self.groups:
            group.recompute(policy)

    @property
    def groups(self) -> tuple[LinearGroup, LinearGroup, LinearGroup, LinearGroup]:
        """The groups of linears, in forward order."""
        return self.qkv, self.o, self.gate_up, self.down

    def run(self, layout: Layout, flow: Flow, context: Context) -> Iterator[None]:
        """Runs one part of a micro-batch through this block."""
        # If training read the index, each compiled block would need its own graph.
        cache = context.caches[self.layer_index] if context.caches else None
        return itertools.chain(
            attention(layout, flow, context, self.attn_norm, self.qkv, self.o, cache),
            mlp(layout, flow, self.mlp_norm, self.gate_up, self.down, self.mlp_silu),
        )

    def forward(self, layout: Layout, streams: Sequence[Stream], contexts: Sequence[Context]) -> list[Stream]:
        """Runs the parts of a micro-batch through this block, interleaved. Returns their streams."""
        if self.policy.block is call:
            return self._run(layout, streams, contexts)
        return self.policy.block(self._run, layout, streams, contexts)

    def _run(self, layout: Layout, streams: Sequence[Stream], contexts: Sequence[Context]) -> list[Stream]:
        flows = flows_of(streams, contexts)
        interleave([self.run(layout, *each) for each in zip(flows, contexts, strict=True)], layout.lag)
        return [Stream(flow.x, flow.latents) for flow in flows]

    @property
    def is_plain(self) -> bool:
        """Whether `forward` does nothing beyond `run`: the block is neither compiled, recomputed, nor sharded over replicas."""
        is_run = self.policy.block is call or not torch.is_grad_enabled()
        return is_run and not self.is_compiled and not self._forward_pre_hooks and not self._forward_hooks

    @property
    def is_compiled(self) -> bool:
        """Whether `Module.compile` was called."""
        return self._compiled_call_impl is not None


def flows_of(streams: Sequence[Stream], contexts: Sequence[Context]) -> list[Flow]:
    """The parts of a micro-batch, ready to run. The second half of a sequence attends to the first half's keys."""
    flows: list[Flow] = []
    for stream, context in zip(streams, contexts, strict=True):
        flows.append(Flow(stream.x, stream.latents, flows[-1] if context.attends_to_first_half else None))
    return flows


def interleave(runs: Sequence[Iterable[None]], lag: int = 0) -> None:
    """Runs generators in turn, each until its next collective is in flight: a starts one, b starts one, a waits and continues, b
    waits and continues. Each generator trails the previous one by `lag` such steps.

    Autograd runs nodes in the reverse order of their creation, so the backward pass is interleaved too.
    """
    if len(runs) == 1:
        for _ in runs[0]:
            pass
        return
    iterators, running = [iter(run) for run in runs], [True] * len(runs)
    for number in range(len(runs)):
        _advance(iterators, running, number)
    for number in range(len(runs)):
        for _ in range(lag * (len(runs) - 1 - number)):
            _advance(iterators, running, number)
    while any(running):
        for number in range(len(runs)):
            _advance(iterators, running, number)


def _advance(iterators: Sequence[Iterator[None]], running: list[bool], number: int) -> None:
    if running[number]:
        try:
            next(iterators[number])
        except StopIteration:
            running[number] = False
