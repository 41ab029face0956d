"""The decoder, written once. It knows the mathematics of LLaMA; how it is cut over processes is the layout's affair.

Legend: B sequences, S tokens of each, T = B * S; x is the residual stream in whatever shape the layout gives it.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from boost.config import architecture
from boost.config.architecture import Parameter
from boost.config.schema import ModelConfig
from boost.config.stages import Stage, whole
from boost.models.attention import Context, KVCache, attend, make_context
from boost.models.group import Group
from boost.models.interface import KEEP, Latents, Layout, Policy, kv_heads_here
from boost.models.stored import Stored


class Block(Stored):
    """Attention and gated MLP, each: enter the wide side, do the local work, leave it again."""

    attn_norm: Tensor
    mlp_norm: Tensor

    def __init__(self, model: ModelConfig, layer: int, layout: Layout, policy: Policy, place: int) -> None:
        super().__init__()
        self.policy = policy
        self.place = place
        """Its number among the blocks of this decoder."""
        self.head_dim, self.mlp_silu = model.head_dim, model.mlp_silu
        prefix = f"layers.{layer}"
        for norm in ("attn_norm", "mlp_norm"):
            self.store(norm, (Parameter(f"{prefix}.{norm}", (model.dim,), "norm"),), layout)
        shapes = architecture.groups(model, layer)
        self.qkv, self.o, self.gate_up, self.down = (Group(model, shape, layer, layout) for shape in shapes)

    def forward(self, layout: Layout, x: Tensor, carried: Latents, context: Context) -> tuple[Tensor, Latents]:
        """The residual stream after this block, and the latents that cross to the next one."""
        policy = self.policy if torch.is_grad_enabled() else KEEP
        layout = layout.with_sharded_latents if policy.sharded else layout
        return policy.block(self._run, policy, layout, x, carried, context)

    def _run(
        self, policy: Policy, layout: Layout, x: Tensor, carried: Latents, context: Context
    ) -> tuple[Tensor, Latents]:
        kept, carried = layout.enter(x, self.attn_norm, self.qkv, carried, policy.local)
        closed, carried = policy.attention(self._attention, layout, context, carried, *kept)
        update, carried = layout.leave(closed, self.o, carried, policy.local)
        x = x + update
        kept, carried = layout.enter(x, self.mlp_norm, self.gate_up, carried, policy.local)
        closed, carried = policy.local(self._product, layout, carried, *kept)
        update, carried = layout.leave(closed, self.down, carried, policy.local)
        return x + update, carried

    @property
    def groups(self) -> tuple[Group, Group, Group, Group]:
        """In the order in which a token meets them."""
        return self.qkv, self.o, self.gate_up, self.down

    def _attention(self, layout: Layout, context: Context, carried: Latents, *kept: Tensor) -> tuple[Tensor, Latents]:
        (q, k, v), carried = layout.open(kept, self.qkv, carried)
        return layout.close(attend(q, k, v, self.head_dim, context, self.place), self.o), carried

    def _product(self, layout: Layout, carried: Latents, *kept: Tensor) -> tuple[Tensor, Latents]:
        (gate, up), carried = layout.open(kept, self.gate_up, carried)
        return layout.close((F.silu(gate) if self.mlp_silu else gate) * up, self.down), carried


class Decoder(Stored):
    """Embedding, blocks, final norm and head under one layout, or one stage of it: consecutive blocks, with the embedding
    before the first ones and norm and head behind the last ones. Weights are uninitialised until `init.initialize`.

    `policies` says of each block of the whole model what it keeps for its backward pass; empty: whatever autograd keeps.
    """

    embed: Tensor
    final_norm: Tensor
    head: Tensor

    def __init__(
        self,
        model: ModelConfig,
        layout: Layout,
        compute_dtype: torch.dtype = torch.float32,
        policies: Sequence[Policy] = (),
        stage: Stage | None = None,
    ) -> None:
        super().__init__()
        self.model, self.layout, self.compute_dtype = model, layout, compute_dtype
        self.stage = stage or whole(model)
        policies = policies or [KEEP] * model.layers
        if self.stage.embeds:
            self.store("embed", (architecture.embedding(model),), layout)
        each = enumerate(self.stage.numbers)
        self.blocks = nn.ModuleList(Block(model, n, layout, policies[n], place) for place, n in each)
        if self.stage.predicts:
            self.store("final_norm", (architecture.final_norm(model),), layout)
            self.store("head", (architecture.head(model),), layout)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device

    def forward(
        self,
        tokens_BS: Tensor,
        targets_BS: Tensor,
        document_ids_BS: Tensor | None = None,
        arrived: tuple[Tensor, ...] = (),
    ) -> Any:
        """Sum of the cross-entropy (nats) over the targets that are not -100; a scalar in fp32 or wider.

        With document ids (int, [B, S]) a token attends to earlier tokens of its own document only. A stage takes what the
        stage before returned as `arrived`, and returns the like, (residual stream, *latents), if it is not the last.
        """
        positions_S = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
        context = self._context(tokens_BS, positions_S, document_ids_BS)
        x, carried = self._residual(self.layout, tokens_BS, context, arrived)
        if not self.stage.predicts:
            return x, *carried
        return self.layout.loss(x, self.final_norm, self.head, targets_BS.reshape(-1))

    @torch.no_grad()
    def next_logits(self, tokens_BS: Tensor, caches: tuple[KVCache, ...], arrived: tuple[Tensor, ...] = ()) -> Any:
        """Logits [B, V] of the token after the last of `tokens_BS`, which follow those already in the caches.

        A stage takes and returns the like of `forward`.
        """
        batch, length = tokens_BS.shape
        layout = self.layout.for_inference
        positions_S = torch.arange(length, device=tokens_BS.device) + caches[0].length
        context = self._context(tokens_BS, positions_S)
        x, carried = self._residual(layout, tokens_BS, Context(batch, context.cos, context.sin, caches=caches), arrived)
        if not self.stage.predicts:
            return x, *carried
        last_B = torch.arange(1, batch + 1, device=x.device) * length - 1
        return layout.logits(x, self.final_norm, self.head, last_B)

    def make_caches(self, batch: int, capacity: int) -> tuple[KVCache, ...]:
        """Empty caches for `batch` sequences of up to `capacity` tokens, one a block, for the heads held here."""
        shape = (batch, kv_heads_here(self.model.kv_heads, self.layout), capacity, self.model.head_dim)

        def empty() -> Tensor:
            return torch.empty(shape, dtype=self.compute_dtype, device=self.device)

        return tuple(KVCache(empty(), empty()) for _ in self.blocks)

    def arriving(self, layout: Layout, tokens: int) -> list[tuple[int, int]]:
        """Shapes of what the stage before hands on for `tokens` tokens: the residual stream, and the latents that cross."""
        return self._boundary(layout, tokens, [group for group in self._groups_of(0) if group.crossing is not None])

    def leaving(self, layout: Layout, tokens: int) -> list[tuple[int, int]]:
        """The same of what this stage hands on."""
        return self._boundary(layout, tokens, [group for group in self._groups_of(-1) if group.carries])

    def _groups_of(self, place: int) -> tuple[Group, ...]:
        block = self.blocks[place]
        assert isinstance(block, Block)
        return block.groups

    def _boundary(self, layout: Layout, tokens: int, groups: Sequence[Group]) -> list[tuple[int, int]]:
        return [layout.residual_shape(tokens), *(s for group in groups for s in group.latent_shapes(layout, tokens))]

    def _context(self, tokens_BS: Tensor, positions_S: Tensor, document_ids_BS: Tensor | None = None) -> Context:
        model = self.model
        return make_context(
            tokens_BS.shape[0], positions_S, model.head_dim, model.rope_theta, self.compute_dtype, document_ids_BS
        )

    def _residual(
        self, layout: Layout, tokens_BS: Tensor, context: Context, arrived: tuple[Tensor, ...]
    ) -> tuple[Tensor, Latents]:
        if self.stage.embeds:
            arrived = (layout.embed(tokens_BS.reshape(-1), self.embed, self.compute_dtype),)
        x, carried = arrived[0], arrived[1:]
        for block in self.blocks:
            x, carried = block(layout, x, carried, context)
        return x, carried
