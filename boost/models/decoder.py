"""The decoder for all layouts; the math is LLaMA's. The layout determines how the decoder is distributed over processes.

Legend: B sequences, S tokens in each, T = B * S; x is the residual stream in the layout's shape.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from boost.config import architecture
from boost.config.schema import ModelConfig
from boost.config.stages import Stage, whole
from boost.models.attention import Context, KVCache, SequenceShare, make_context
from boost.models.block import TransformerBlock, flows_of, interleave
from boost.models.fused import FusedModule, local_kv_heads
from boost.models.interface import Flow, Layout, Stream, Teaching
from boost.models.recompute import NO_RECOMPUTE, RecomputePolicy


class Decoder(FusedModule):
    """The embedding, blocks, final norm and head under one layout, or one pipeline stage of this decoder.

    A stage holds consecutive blocks; the first stage also has the embedding, the last one the final norm and head. Weights are
    uninitialized until `init.initialize`. `policies`: the recomputation policy for each block of the whole model;
    empty: no recomputation.
    """

    embed: Tensor
    final_norm: Tensor
    head: Tensor
    head_name = "head"
    """The attribute with the weight of the head: `embed` for a tied table. Other stages than the embedding's have a copy of it."""

    def __init__(
        self,
        model: ModelConfig,
        layout: Layout,
        compute_dtype: torch.dtype = torch.float32,
        policies: Sequence[RecomputePolicy] = (),
        stage: Stage | None = None,
    ) -> None:
        super().__init__()
        self.model, self.layout, self.compute_dtype = model, layout, compute_dtype
        self.stage = stage or whole(model)
        if model.tied and self.stage.has_embedding:
            self.head_name = "embed"
        policies = policies or [NO_RECOMPUTE] * model.layers
        if self.stage.has_embedding:
            self.add_fused_param("embed", (architecture.embedding(model),), layout)
        self.blocks = nn.ModuleList(
            TransformerBlock(model, n, layout, policies[n], index) for index, n in enumerate(self.stage.numbers)
        )
        if self.stage.has_head:
            self.add_fused_param("final_norm", (architecture.final_norm(model),), layout)
            if self.head_name == "head":
                self.add_fused_param("head", (architecture.head(model),), layout)

    @property
    def head_weight(self) -> Tensor:
        """The weight of the head, which may be the embedding."""
        weight: Tensor = getattr(self, self.head_name)
        return weight

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next(self.parameters()).device

    def forward(
        self,
        tokens_BS: Tensor,
        targets_BS: Tensor,
        document_ids_BS: Tensor | None = None,
        received: tuple[Tensor, ...] = (),
        teaching: Teaching | None = None,
    ) -> Any:
        """Sum of the cross-entropy (nats) or, with `teaching`, of the distillation loss over targets that are not -100;
        a scalar in fp32 or wider.

        With document ids (int, [B, S]), tokens attend only within their own document, a run of equal ids. With a context axis,
        tokens and targets are the local ones, [B, S / cp], and document ids cover whole sequences. A pipeline stage takes the
        outputs of the previous stage as `received`; every stage but the last returns (residual stream, *latents).
        """
        parts, streams = self._run_parts(tokens_BS, document_ids_BS, received)
        if not self.stage.has_head:
            sent = [(stream.x, *stream.latents) for stream in streams]
            return tuple(torch.cat(halves) for halves in zip(*sent, strict=True)) if len(sent) > 1 else sent[0]
        flows = [Flow(stream.x) for stream in streams]
        targets = targets_BS.reshape(-1).split([part.tokens_BS.numel() for part in parts])
        taught = [None] * len(parts) if teaching is None else teaching.split([len(targets_T) for targets_T in targets])
        interleave([self._loss(*each) for each in zip(flows, targets, taught, strict=True)])
        return flows[0].x if len(flows) == 1 else flows[0].x + flows[1].x

    def _loss(self, flow: Flow, targets_T: Tensor, teaching: Teaching | None) -> Iterator[None]:
        """Turns x into the loss for one part."""
        yield from self.layout.head_input(flow, self.final_norm)
        flow.x = self.layout.loss(flow.x, self.head_weight, targets_T, teaching)

    @torch.no_grad()
    def head_inputs(self, tokens_BS: Tensor, document_ids_BS: Tensor | None = None) -> Tensor:
        """Output of the final norm, [T, d], replicated over TP, for a single-stage model. Arguments as in `forward`."""
        _, streams = self._run_parts(tokens_BS, document_ids_BS, ())
        flows = [Flow(stream.x) for stream in streams]
        interleave([self.layout.head_input(flow, self.final_norm) for flow in flows])
        return torch.cat([flow.x for flow in flows]) if len(flows) > 1 else flows[0].x

    @torch.no_grad()
    def next_logits(self, tokens_BS: Tensor, caches: tuple[KVCache, ...], received: tuple[Tensor, ...] = ()) -> Any:
        """Logits [B, V] for the token after each sequence's last one. `tokens_BS` follow the tokens already in the caches: whole
        prompts of one length if they are empty, or else one token each. Same stage inputs and outputs as `forward`."""
        batch, length = tokens_BS.shape
        layout, stream = self._infer(tokens_BS, caches, received)
        if not self.stage.has_head:
            return stream.x, *stream.latents
        last_B = torch.arange(1, batch + 1, device=stream.x.device) * length - 1
        return layout.logits(stream.x, self.final_norm, self.head_weight, last_B)

    @torch.no_grad()
    def logits_of(self, tokens_BS: Tensor, tokens_N: Tensor) -> Tensor:
        """Logits [N, V] after each of the tokens at indices `tokens_N` (int64, 0 to B S - 1), for a single-stage model."""
        layout, stream = self._infer(tokens_BS, self.make_caches(*tokens_BS.shape))
        return layout.logits(stream.x, self.final_norm, self.head_weight, tokens_N)

    def _infer(
        self, tokens_BS: Tensor, caches: tuple[KVCache, ...], received: tuple[Tensor, ...] = ()
    ) -> tuple[Layout, Stream]:
        """Runs the blocks on tokens that follow those in the caches."""
        layout, length, cached = self.layout.inference, tokens_BS.shape[1], caches[0].length
        assert not cached or length == 1, "a non-empty cache accepts one token at a time"
        context = self._context(tokens_BS, torch.arange(cached, cached + length, device=tokens_BS.device))
        (stream,) = self._run_blocks(layout, [_Part(tokens_BS, replace(context, caches=caches), received)])
        return layout, stream

    def make_caches(self, batch: int, capacity: int) -> tuple[KVCache, ...]:
        """Empty caches, one per block, for the local heads and `batch` sequences of up to `capacity` tokens."""
        shape = self._cache_shape(batch, capacity)

        def empty() -> Tensor:
            return torch.empty(shape, dtype=self.compute_dtype, device=self.device)

        return tuple(KVCache(empty(), empty()) for _ in self.blocks)

    def cache_bytes(self, batch: int, capacity: int) -> int:
        """Bytes that `make_caches` allocates."""
        return 2 * len(self.blocks) * math.prod(self._cache_shape(batch, capacity)) * self.compute_dtype.itemsize

    def _cache_shape(self, batch: int, capacity: int) -> tuple[int, int, int, int]:
        return batch, local_kv_heads(self.model.kv_heads, self.layout), capacity, self.model.head_dim

    def received_shapes(self, layout: Layout, tokens: int) -> list[tuple[int, int]]:
        """Shapes of the tensors received from the previous stage for `tokens` tokens: the residual stream and latents."""
        return self._boundary(layout, tokens, self.stage.numbers[0])

    def sent_shapes(self, layout: Layout, tokens: int) -> list[tuple[int, int]]:
        """Shapes of the tensors that this stage sends to the next one."""
        return self._boundary(layout, tokens, self.stage.numbers[-1] + 1)

    def _boundary(self, layout: Layout, tokens: int, layer: int) -> list[tuple[int, int]]:
        """Shapes of what block `layer` gets from the one before."""
        carried = [layout.carried_shapes(group, tokens) for group in architecture.taken(self.model, layer)]
        return [layout.residual_shape(tokens), *itertools.chain(*carried)]

    def _context(
        self,
        tokens_BS: Tensor,
        positions: Tensor,
        document_ids_BS: Tensor | None = None,
        share: SequenceShare | None = None,
    ) -> Context:
        batch, compiled = tokens_BS.shape[0], any(block.is_compiled for block in self._blocks)
        return make_context(batch, positions, self.model, self.compute_dtype, document_ids_BS, compiled, share)

    def _run_parts(
        self, tokens_BS: Tensor, document_ids_BS: Tensor | None, received: tuple[Tensor, ...]
    ) -> "tuple[list[_Part], list[Stream]]":
        """Runs the blocks on a micro-batch, in halves if the layout overlaps them. Returns (parts, their streams)."""
        batch, length = tokens_BS.shape
        halves = self.layout.halves and (batch > 1 or length % (2 * self.layout.size) == 0)
        parts = self._parts(tokens_BS, document_ids_BS, received, halves)
        return parts, self._run_blocks(self.layout, parts)

    def _parts(
        self, tokens_BS: Tensor, document_ids_BS: Tensor | None, received: tuple[Tensor, ...], halves: bool
    ) -> "list[_Part]":
        """Splits a micro-batch into halves (of its sequences, or of the tokens in its one sequence) or returns it whole."""
        length, share = tokens_BS.shape[1], self.layout.sequence_share()
        device = tokens_BS.device
        positions_S = torch.arange(length, device=device) if share is None else share.positions(length, device)
        context = self._context(tokens_BS, positions_S, document_ids_BS, share)
        if not halves:
            return [_Part(tokens_BS, context, received)]
        tokens = tokens_BS.tensor_split(2, dim=0 if tokens_BS.shape[0] > 1 else 1)
        sizes = [half_BS.numel() for half_BS in tokens]
        parts = (x.split([len(x) * size // sum(sizes) for size in sizes]) for x in received)
        arrived = zip(*parts, strict=True) if received else [()] * 2
        return [_Part(*half) for half in zip(tokens, context.halves(), arrived, strict=True)]

    def _run_blocks(self, layout: Layout, parts: "Sequence[_Part]") -> list[Stream]:
        if self.stage.has_embedding:
            flows = [Flow(part.tokens_BS.reshape(-1)) for part in parts]
            interleave([layout.embed(flow, self.embed, self.compute_dtype) for flow in flows])
            streams = [Stream(flow.x) for flow in flows]
        else:
            streams = [Stream(part.received[0], part.received[1:]) for part in parts]
        contexts = [part.context for part in parts]
        if len(parts) == 1 or not all(block.is_plain for block in self._blocks):
            for block in self.blocks:
                streams = block(layout, streams, contexts)
            return streams
        flows = flows_of(streams, contexts)
        interleave([self._run(layout, *each) for each in zip(flows, contexts, strict=True)], layout.lag)
        return [Stream(flow.x, flow.prev_latents) for flow in flows]

    def _run(self, layout: Layout, flow: Flow, context: Context) -> Iterator[None]:
        """Runs one half through all blocks, so that the other half can compute even while a collective at the end of a block is in
        flight."""
        for block in self._blocks:
            yield from block.run(layout, flow, context)
            flow.prev_latents, flow.latents = flow.latents, ()

    @property
    def _blocks(self) -> Sequence[TransformerBlock]:
        return cast(Sequence[TransformerBlock], self.blocks)


class _Part(NamedTuple):
    """A micro-batch, or half of one."""

    tokens_BS: Tensor
    context: Context
    received: tuple[Tensor, ...]
    """Tensors received from the previous pipeline stage."""
