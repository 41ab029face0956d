"""One file a layout; `layout_for` chooses."""

from boost.config.schema import ModelConfig, ParallelConfig
from boost.models.interface import Layout
from boost.parallel.layouts.btp import BTP
from boost.parallel.layouts.btp_sp import BTPSP
from boost.parallel.layouts.megatron import Megatron
from boost.parallel.layouts.megatron_sp import MegatronSP
from boost.parallel.layouts.single import Single
from boost.parallel.layouts.vanilla import Vanilla
from boost.parallel.mesh import Axis

_LAYOUTS = {layout.name: layout for layout in (Single, Megatron, MegatronSP, Vanilla, BTP, BTPSP)}


def layout_for(model: ModelConfig, parallel: ParallelConfig, axis: Axis) -> Layout:
    """The configured layout over the processes of `axis`. With one process every layout is `single`."""
    return _LAYOUTS["single" if axis.size == 1 else parallel.layout](model, parallel, axis)
