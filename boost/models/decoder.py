"""The decoder, written once. It knows the mathematics of LLaMA; how it is spread over processes is up to the layout.

Legend: B sequences, S tokens of each, T = B * S; x is the residual stream in the shape that the layout gives it.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from boost.config import architecture
from boost.config.architecture import Parameter
from boost.config.schema import ModelConfig
from boost.config.stages import Stage, whole
from boost.models.attention import Context, KVCache, attend, make_context
from boost.models.fused import FusedModule
from boost.models.group import LinearGroup
from boost.models.interface import NO_RECOMPUTE, Latents, Layout, RecomputePolicy, Saved, Stream, local_kv_heads


class TransformerBlock(FusedModule):
    """Attention and gated MLP, each: project in, do the local work, project out."""

    attn_norm: Tensor
    mlp_norm: Tensor

    def __init__(
        self, model: ModelConfig, layer: int, layout: Layout, policy: RecomputePolicy, layer_index: int
    ) -> None:
        super().__init__()
        self.policy = policy
        """What it recomputes in training."""
        self.layer_index = layer_index
        """Its number among the blocks of this decoder."""
        self.head_dim, self.mlp_silu = model.head_dim, model.mlp_silu
        prefix = f"layers.{layer}"
        for norm in ("attn_norm", "mlp_norm"):
            self.add_fused_param(norm, (Parameter(f"{prefix}.{norm}", (model.dim,), "norm"),), layout)
        shapes = architecture.groups(model, layer)
        self.qkv, self.o, self.gate_up, self.down = (LinearGroup(model, shape, layer, layout) for shape in shapes)

    def forward(self, layout: Layout, stream: Stream, context: Context) -> Stream:
        """The stream after this block, run under `layout.policy`."""
        after: Stream = layout.policy.block(self._run, layout, stream, context)
        return after

    def _run(self, layout: Layout, stream: Stream, context: Context) -> Stream:
        saved, stream = layout.in_proj_comm(stream, self.attn_norm, self.qkv).wait()
        partial, latents = layout.policy.attention(self._attention, layout, context, saved)
        stream = layout.out_proj_comm(stream.put(latents), partial, self.o).wait()
        saved, stream = layout.in_proj_comm(stream, self.mlp_norm, self.gate_up).wait()
        partial, latents = layout.policy.local(self._gated_product, layout, saved)
        stream = layout.out_proj_comm(stream.put(latents), partial, self.down).wait()
        return stream.next_block()

    @property
    def groups(self) -> tuple[LinearGroup, LinearGroup, LinearGroup, LinearGroup]:
        """In forward order."""
        return self.qkv, self.o, self.gate_up, self.down

    def _attention(self, layout: Layout, context: Context, saved: Saved) -> tuple[Tensor, Latents]:
        (q, k, v), latents = layout.in_proj_local(saved, self.qkv)
        return layout.out_proj_local(attend(q, k, v, self.head_dim, context, self.layer_index), self.o), latents

    def _gated_product(self, layout: Layout, saved: Saved) -> tuple[Tensor, Latents]:
        (gate, up), latents = layout.in_proj_local(saved, self.gate_up)
        return layout.out_proj_local((F.silu(gate) if self.mlp_silu else gate) * up, self.down), latents


class Decoder(FusedModule):
    """Embedding, blocks, final norm and head under one layout, or one stage of it: consecutive blocks, with the embedding
    before the first and norm and head after the last. Weights are uninitialized until `init.initialize`.

    `policies`: the recomputation policy of each block of the whole model; empty: no recomputation.
    """

    embed: Tensor
    final_norm: Tensor
    head: Tensor

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
        policies = policies or [NO_RECOMPUTE] * model.layers
        if self.stage.has_embedding:
            self.add_fused_param("embed", (architecture.embedding(model),), layout)
        each = enumerate(self.stage.numbers)
        self.blocks = nn.ModuleList(TransformerBlock(model, n, layout, policies[n], index) for index, n in each)
        if self.stage.has_head:
            self.add_fused_param("final_norm", (architecture.final_norm(model),), layout)
            self.add_fused_param("head", (architecture.head(model),), layout)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device

    def forward(
        self,
        tokens_BS: Tensor,
        targets_BS: Tensor,
        document_ids_BS: Tensor | None = None,
        received: tuple[Tensor, ...] = (),
    ) -> Any:
        """Sum of the cross-entropy (nats) over the targets that are not -100; a scalar in fp32 or wider.

        With document ids (int, [B, S]) a token attends to earlier tokens of its own document only. A pipeline stage takes the
        outputs of the previous stage as `received`; if it is not the last, it returns (residual stream, *latents).
        """
        positions_S = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
        context = self._context(tokens_BS, positions_S, document_ids_BS)
        stream = self._run_blocks(self.layout, tokens_BS, context, received)
        if not self.stage.has_head:
            return stream.x, *stream.prev_latents
        return self.layout.loss(stream.x, self.final_norm, self.head, targets_BS.reshape(-1))

    @torch.no_grad()
    def next_logits(self, tokens_BS: Tensor, caches: tuple[KVCache, ...], received: tuple[Tensor, ...] = ()) -> Any:
        """Logits [B, V] of the token after the last of `tokens_BS`, which follow those already in the caches.

        Same stage inputs and outputs as `forward`.
        """
        batch, length = tokens_BS.shape
        layout = self.layout.with_options(inference=True)
        positions_S = torch.arange(length, device=tokens_BS.device) + caches[0].length
        context = self._context(tokens_BS, positions_S)
        context = Context(batch, context.cos, context.sin, caches=caches)
        stream = self._run_blocks(layout, tokens_BS, context, received)
        if not self.stage.has_head:
            return stream.x, *stream.prev_latents
        last_B = torch.arange(1, batch + 1, device=stream.x.device) * length - 1
        return layout.logits(stream.x, self.final_norm, self.head, last_B)

    def make_caches(self, batch: int, capacity: int) -> tuple[KVCache, ...]:
        """Empty caches for `batch` sequences of up to `capacity` tokens, one a block, for the heads held here."""
        shape = (batch, local_kv_heads(self.model.kv_heads, self.layout), capacity, self.model.head_dim)

        def empty() -> Tensor:
            return torch.empty(shape, dtype=self.compute_dtype, device=self.device)

        return tuple(KVCache(empty(), empty()) for _ in self.blocks)

    def received_shapes(self, layout: Layout, tokens: int) -> list[tuple[int, int]]:
        """Shapes of what the previous stage sends for `tokens` tokens: the residual stream, and latents that cross."""
        return self._boundary(layout, tokens, [group for group in self._groups_of(0) if group.latent_gate is not None])

    def sent_shapes(self, layout: Layout, tokens: int) -> list[tuple[int, int]]:
        """The same of what this stage sends to the next."""
        return self._boundary(layout, tokens, [group for group in self._groups_of(-1) if group.feeds_next])

    def _groups_of(self, index: int) -> tuple[LinearGroup, ...]:
        block = self.blocks[index]
        assert isinstance(block, TransformerBlock)
        return block.groups

    def _boundary(self, layout: Layout, tokens: int, groups: Sequence[LinearGroup]) -> list[tuple[int, int]]:
        return [layout.residual_shape(tokens), *(s for group in groups for s in group.latent_shapes(layout, tokens))]

    def _context(self, tokens_BS: Tensor, positions_S: Tensor, document_ids_BS: Tensor | None = None) -> Context:
        model = self.model
        return make_context(
            tokens_BS.shape[0], positions_S, model.head_dim, model.rope_theta, self.compute_dtype, document_ids_BS
        )

    def _run_blocks(self, layout: Layout, tokens_BS: Tensor, context: Context, received: tuple[Tensor, ...]) -> Stream:
        if self.stage.has_embedding:
            received = (layout.embed(tokens_BS.reshape(-1), self.embed, self.compute_dtype),)
        stream = Stream(received[0], received[1:])
        for block in self.blocks:
            policy = cast(TransformerBlock, block).policy if torch.is_grad_enabled() else NO_RECOMPUTE
            stream = block(layout.with_options(policy=policy), stream, context)
        return stream
