"""Imported by the server from which test processes are forked: what each of them would otherwise load for itself, in seconds."""

import gc

import torch._dynamo  # by torch's optimizers, when the first one is made
import torch._inductor.pattern_matcher  # by the first graph that is compiled
import torch.utils.tensorboard  # by the first metrics

import boost.cli.main
import boost.train.run  # by `boost train`, before it starts its processes
from boost.data.batches import shuffled_order
from tests import toy, trained
from tests.distributed import end_with_parent

__all__ = ["boost", "torch", "trained"]

end_with_parent()
toy.toy_config()  # looks for plug-ins
shuffled_order(1, 0)  # loads grain
gc.freeze()  # else each process goes through a third of a million objects at its first collection
