"""`single`: every weight on one process. No collective and no copy; every other layout becomes `single` at p = 1.

Legend: T tokens, D hidden width, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from boost.models.group import LinearGroup
from boost.models.interface import Latents, Pending, Saved, Stream
from boost.models.linear import linear, lookup
from boost.parallel.collectives import InFlight
from boost.parallel.layouts.base import BaseLayout


class Single(BaseLayout):
    """The whole model on one process."""

    def embed(self, tokens_T: Tensor, table: Tensor, dtype: torch.dtype) -> Pending[Tensor]:
        return Pending(lambda: lookup(tokens_T, table, dtype))

    def in_proj_comm(self, stream: Stream, gamma: Tensor, group: LinearGroup) -> Pending[tuple[Saved, Stream]]:
        """norm(x), then A if the linears are low-rank."""
        if not group.low_rank:
            saved = Saved((self.norm(stream.x, gamma),))
            return Pending(lambda: (saved, stream))

        def down(x: Tensor) -> list[Tensor]:
            return group.down_proj(self.norm(x, gamma), self.grouping)

        latents = self.policy.local(down, stream.x)
        prev, rest = group.take_latents(stream, self.grouping)
        return Pending(lambda: (Saved(tuple(latents), prev), rest))

    def in_proj_local(self, saved: Saved, group: LinearGroup) -> tuple[Sequence[Tensor], Latents]:
        if not group.low_rank:
            return group.dense(saved, self.grouping), ()
        if self.keeps_latents_only(group):
            return group.scale_act_and_project(saved.tensors, None), ()
        return group.activate_and_project(saved.tensors, saved.prev_latents)

    def out_proj_local(self, hidden: Tensor, group: LinearGroup) -> Tensor:
        return group.down_proj(hidden, grouped=True)[0] if group.low_rank else group.dense_out(hidden)

    def out_proj_comm(self, stream: Stream, partial: Tensor, group: LinearGroup) -> Pending[Stream]:
        if not group.low_rank:
            return Pending(lambda: stream.add(partial))
        return self.finish_out_proj(stream, InFlight(lambda: partial), group)

    def head_input(self, x: Tensor, gamma: Tensor) -> Pending[Tensor]:
        return Pending(lambda: self.norm(x, gamma))

    def logits(self, x: Tensor, gamma: Tensor, head: Tensor, tokens_N: Tensor) -> Tensor:
        return linear(self.norm(x[tokens_N], gamma), head)
