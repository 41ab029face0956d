"""Imported by the server that forks test processes: modules that each process would otherwise spend seconds loading."""

import gc

import torch._dynamo  # loaded by torch's first optimizer
import torch.utils.tensorboard  # loaded by the first metrics

import boost.cli.main
import boost.train.run  # loaded by `boost train` before it starts its processes
from boost.data.batches import ShuffledOrder
from tests import toy, trained
from tests.distributed import end_with_parent

__all__ = ["boost", "torch", "trained"]

if not torch.backends.cuda.is_built():  # it asks for GPUs, and no process that is forked after that can use one
    import torch._inductor.pattern_matcher

end_with_parent()
toy.toy_config()  # looks for plug-ins
ShuffledOrder(1, 0)  # loads grain
gc.freeze()  # otherwise each process scans a third of a million objects at its first collection
