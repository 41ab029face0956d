"""The two sublayers of a block, independent of how their weights are stored. Each one projects in, does local work, and
projects out.

Legend: T tokens; x is the residual stream in the layout's shape.
"""

from torch import Tensor

from boost.models.attention import Context, KeysValues, attend, rotated
from boost.models.group import LinearGroup
from boost.models.interface import Latents, Layout, Pending, Saved, Stream
from boost.models.kernels import gated_product


class Attention:
    """x + o(attention(q, k, v)), where q, k, v project norm(x)."""

    attn_norm: Tensor
    qkv: LinearGroup
    o: LinearGroup
    head_dim: int
    layer_index: int
    """Index of its key/value cache."""

    def start_attention(self, layout: Layout, stream: Stream, context: Context) -> Pending[Stream]:
        """Runs attention up to its first collective. The result is the stream after attention."""
        entered = layout.in_proj_comm(stream, self.attn_norm, self.qkv)
        return entered.then(lambda arrived: self._run_attention(layout, context, *arrived))

    def _run_attention(self, layout: Layout, context: Context, saved: Saved, stream: Stream) -> Pending[Stream]:
        if context.share is not None:
            return self._run_shared_attention(layout, context, saved, stream)
        arguments = layout, context, saved, context.take()
        partial, latents, keys_values = layout.policy.attention(self._attention, *arguments)
        context.leave(keys_values)
        return layout.out_proj_comm(stream.put(latents), partial, self.o)

    def _run_shared_attention(self, layout: Layout, context: Context, saved: Saved, stream: Stream) -> Pending[Stream]:
        """Attention with sequences sharded over the context axis: a separate segment, after the exchange."""
        q, k, v, latents = layout.policy.local(self._rotated, layout, context, saved)
        entered = layout.enter_attention(q, k, v, context)
        heads: Pending[Tensor] = entered.then(lambda qkv: self._attend_shared(layout, context, qkv))
        stream = stream.put(latents)
        return heads.then(lambda a: layout.out_proj_comm(stream, layout.out_proj_local(a, self.o), self.o))

    def _attend_shared(self, layout: Layout, context: Context, qkv: tuple[Tensor, Tensor, Tensor]) -> Pending[Tensor]:
        arguments = self.head_dim, context, self.layer_index, context.take()
        attended, keys_values = layout.policy.attention(attend, *qkv, *arguments)
        context.leave(keys_values)
        return layout.leave_attention(attended, context)

    def _rotated(self, layout: Layout, context: Context, saved: Saved) -> tuple[Tensor, Tensor, Tensor, Latents]:
        (q, k, v), latents = layout.in_proj_local(saved, self.qkv)
        return *rotated(q, k, self.head_dim, context), v, latents

    def _attention(
        self, layout: Layout, context: Context, saved: Saved, before: KeysValues
    ) -> tuple[Tensor, Latents, KeysValues]:
        q, k, v, latents = self._rotated(layout, context, saved)
        attended, keys_values = attend(q, k, v, self.head_dim, context, self.layer_index, before)
        return layout.out_proj_local(attended, self.o), latents, keys_values


class MLP:
    """x + down(act(gate) * up), where gate and up project norm(x)."""

    mlp_norm: Tensor
    gate_up: LinearGroup
    down: LinearGroup
    mlp_silu: bool

    def start_mlp(self, layout: Layout, stream: Stream) -> Pending[Stream]:
        """Runs the MLP up to its first collective. The result is the stream after the MLP."""
        entered = layout.in_proj_comm(stream, self.mlp_norm, self.gate_up)
        return entered.then(lambda arrived: self._run_mlp(layout, *arrived))

    def _run_mlp(self, layout: Layout, saved: Saved, stream: Stream) -> Pending[Stream]:
        partial, latents = layout.policy.local(self._gated_product, layout, saved)
        return layout.out_proj_comm(stream.put(latents), partial, self.down)

    def _gated_product(self, layout: Layout, saved: Saved) -> tuple[Tensor, Latents]:
        (gate, up), latents = layout.in_proj_local(saved, self.gate_up)
        return layout.out_proj_local(gated_product(gate, up, self.mlp_silu), self.down), latents
