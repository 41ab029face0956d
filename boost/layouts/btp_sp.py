"""Runtime of `btp-sp`. Shapes: `boost.config.layouts.btp_sp`.

The layout switches from "some tokens, whole width" to "all tokens, some heads" at the bottleneck, so norms and all operations
on latents need only local tokens. The gradients of norms and replicated factors are partial sums over tokens, reduced
once per optimizer step.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from boost.layouts.runtime import TokenSharded
from boost.models.group import LinearGroup, Outputs
from boost.models.interface import Arrived, Flow


class BTPSP(TokenSharded):
    """Token-sharded residual stream with all-gathers and reduce-scatters of width r."""

    def enter(self, flow: Flow, gamma: Tensor, group: LinearGroup) -> Iterator[None]:
        """act(A norm(x)) for this process's tokens, all-gathered. If latents are saved sharded: the local A norm(x), which
        `up` activates and gathers.

        Besides the gathered latents, a block saves the local tokens' latents before act, because act is not invertible, and
        applying it after the all-gather would take p times as much work.
        """
        u_TR = group.policy.local(self.norm_and_down, flow.x, gamma, group)
        prev_TR = flow.take() if group.takes_prev else None
        # Evaluation saves nothing, and its all-gather overlaps the other half's compute.
        if group.policy.sharded_latents and torch.is_grad_enabled():
            flow.arrived = u_TR, prev_TR
            return
        local = group.policy.local
        h_TR, kept = local(group.activate, u_TR, prev_TR) if group.mixes else group.activate(u_TR)
        flow.latents += kept
        gathered = self.start(self.to_shards, h_TR)
        yield
        flow.arrived = (gathered.wait(),)

    def up(self, arrived: Arrived, group: LinearGroup) -> Outputs:
        """B for this process's heads or channels."""
        if not (group.policy.sharded_latents and torch.is_grad_enabled()):
            return self.project(arrived[0], group)
        h_TR, kept = group.activate(*arrived)
        return group.project(self.start(self.to_shards, h_TR).wait()), kept

    def leave(self, flow: Flow, partial: Tensor, group: LinearGroup) -> Iterator[None]:
        """The sum, scattered to this process's tokens, then act and the whole B."""
        latents = self.start(self.from_shards, partial)
        yield
        self.update(flow, latents.wait(), group)
