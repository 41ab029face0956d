"""One file a layout; `layout_for` chooses."""

from boost.config.schema import ModelConfig, ParallelConfig
from boost.models.interface import Layout
from boost.parallel.layouts.btp import BTP
from boost.parallel.layouts.single import Single
from boost.parallel.mesh import Axis

_LAYOUTS: dict[str, type[Single] | type[BTP]] = {"single": Single, "btp": BTP}


def layout_for(model: ModelConfig, parallel: ParallelConfig, axis: Axis) -> Layout:
    """The configured layout over the processes of `axis`. With one process every layout is `single`."""
    return _LAYOUTS["single" if axis.size == 1 else parallel.layout](model, parallel, axis)
