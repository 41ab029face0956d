"""Imported by the server from which test processes are forked: what each of them would otherwise load for itself, in seconds."""

import torch._dynamo  # by torch's optimizers, when the first one is made

import boost.cli.main
import boost.train.run  # by `boost train`, before it starts its processes
from tests import toy, trained

__all__ = ["boost", "torch", "trained"]

toy.toy_config()  # looks for plug-ins
