"""The spec of `btp-rsag`: `btp` whose out-projections are summed by a reduce-scatter and an all-gather. No torch here."""

from collections.abc import Iterator
from typing import Literal

from boost.config.layouts.btp import BTPConfig, BTPSpec
from boost.config.layouts.spec import SUM_BACKWARD, Comm, GroupContext, PlannedComm
from boost.config.traffic import ALL_GATHER, REDUCE_SCATTER


class RSAGConfig(BTPConfig):
    """btp whose out-projections are summed by a reduce-scatter and an all-gather."""

    layout: Literal["btp-rsag"] = "btp-rsag"


class RSAGSpec(BTPSpec):
    """btp, except for one sum."""

    config = RSAGConfig
    runtime = "btp_rsag.runtime:RSAG"

    def group_comms(self, context: GroupContext) -> Iterator[PlannedComm]:
        if context.group.side == "enter":
            yield from super().group_comms(context)
            return
        widths = context.group.down_widths
        for kind in (REDUCE_SCATTER, ALL_GATHER):
            yield from context.merged(Comm(kind, None), widths)
        yield from context.merged(SUM_BACKWARD, widths)
