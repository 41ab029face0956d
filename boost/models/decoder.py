"""The decoder, written once. It knows the mathematics of LLaMA; how it is cut over processes is the layout's affair.

Legend: B sequences, S tokens of each, T = B * S; x is the residual stream in whatever shape the layout gives it.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from boost.config import architecture
from boost.config.architecture import Parameter
from boost.config.schema import ModelConfig
from boost.models.attention import Context, KVCache, attend, make_context
from boost.models.group import Group
from boost.models.interface import KEEP, Latents, Layout, Policy, kv_heads_here
from boost.models.stored import Stored


class Block(Stored):
    """Attention and gated MLP, each: enter the wide side, do the local work, leave it again."""

    attn_norm: Tensor
    mlp_norm: Tensor

    def __init__(self, model: ModelConfig, layer: int, layout: Layout, policy: Policy) -> None:
        super().__init__()
        self.layer, self.policy = layer, policy
        self.head_dim, self.mlp_silu = model.head_dim, model.mlp_silu
        prefix = f"layers.{layer}"
        for norm in ("attn_norm", "mlp_norm"):
            self.store(norm, (Parameter(f"{prefix}.{norm}", (model.dim,), "norm"),), layout)
        shapes = architecture.groups(model)
        self.qkv, self.o, self.gate_up, self.down = (Group(model, shape, prefix, layout) for shape in shapes)

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

    def _attention(self, layout: Layout, context: Context, carried: Latents, *kept: Tensor) -> tuple[Tensor, Latents]:
        (q, k, v), carried = layout.open(kept, self.qkv, carried)
        return layout.close(attend(q, k, v, self.head_dim, context, self.layer), self.o), carried

    def _product(self, layout: Layout, carried: Latents, *kept: Tensor) -> tuple[Tensor, Latents]:
        (gate, up), carried = layout.open(kept, self.gate_up, carried)
        return layout.close((F.silu(gate) if self.mlp_silu else gate) * up, self.down), carried


class Decoder(Stored):
    """Embedding, blocks, final norm and head under one layout. Weights are uninitialised until `init.initialize`.

    `policies` says of each block what it keeps for its backward pass; empty: whatever autograd keeps.
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
    ) -> None:
        super().__init__()
        self.model, self.layout, self.compute_dtype = model, layout, compute_dtype
        self.store("embed", (architecture.embedding(model),), layout)
        each = enumerate(policies or [KEEP] * model.layers)
        self.blocks = nn.ModuleList(Block(model, layer, layout, policy) for layer, policy in each)
        self.store("final_norm", (architecture.final_norm(model),), layout)
        self.store("head", (architecture.head(model),), layout)

    def forward(self, tokens_BS: Tensor, targets_BS: Tensor, document_ids_BS: Tensor | None = None) -> Tensor:
        """Sum of the cross-entropy (nats) over the targets that are not -100; a scalar in fp32 or wider.

        With document ids (int, [B, S]) a token attends to earlier tokens of its own document only.
        """
        positions_S = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
        context = self._context(tokens_BS, positions_S, document_ids_BS)
        x = self._residual(self.layout, tokens_BS, context)
        return self.layout.loss(x, self.final_norm, self.head, targets_BS.reshape(-1))

    @torch.no_grad()
    def next_logits(self, tokens_BS: Tensor, caches: tuple[KVCache, ...]) -> Tensor:
        """Logits [B, V] of the token after the last of `tokens_BS`, which follow those already in the caches."""
        batch, length = tokens_BS.shape
        layout = self.layout.for_inference
        positions_S = torch.arange(length, device=tokens_BS.device) + caches[0].length
        context = self._context(tokens_BS, positions_S)
        x = self._residual(layout, tokens_BS, Context(batch, context.cos, context.sin, caches=caches))
        last_B = torch.arange(1, batch + 1, device=x.device) * length - 1
        return layout.logits(x, self.final_norm, self.head, last_B)

    def make_caches(self, batch: int, capacity: int) -> tuple[KVCache, ...]:
        """Empty caches for `batch` sequences of up to `capacity` tokens, one a block, for the heads held here."""
        shape = (batch, kv_heads_here(self.model.kv_heads, self.layout), capacity, self.model.head_dim)
        device = self.embed.device

        def empty() -> Tensor:
            return torch.empty(shape, dtype=self.compute_dtype, device=device)

        return tuple(KVCache(empty(), empty()) for _ in self.blocks)

    def _context(self, tokens_BS: Tensor, positions_S: Tensor, document_ids_BS: Tensor | None = None) -> Context:
        model = self.model
        return make_context(
            tokens_BS.shape[0], positions_S, model.head_dim, model.rope_theta, self.compute_dtype, document_ids_BS
        )

    def _residual(self, layout: Layout, tokens_BS: Tensor, context: Context) -> Tensor:
        x = layout.embed(tokens_BS.reshape(-1), self.embed, self.compute_dtype)
        carried: Latents = ()
        for block in self.blocks:
            # A compiled block is one of a fixed shape: token by token, behind a cache that grows, it would be compiled anew.
            run = block.forward if context.caches else block
            x, carried = run(layout, x, carried, context)
        return x
