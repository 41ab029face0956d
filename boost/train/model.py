"""From a configuration and a mesh to a decoder on its device: the one place where training, evaluation and generation make it."""

import os
import shutil

import torch

from boost.config import Config
from boost.errors import ConfigError
from boost.models.decoder import Decoder
from boost.parallel.layouts import layout_for
from boost.parallel.mesh import Mesh
from boost.parallel.recompute import POLICIES


def compile_blocks(decoder: Decoder) -> None:
    """Has torch.compile make one graph of each block, for training and evaluation; generation stays as it is.

    Raises ConfigError on a CPU without a C++ compiler, which torch needs there.
    """
    compilers = (os.environ.get("CXX", "g++"), "g++", "clang++", "cl")
    if decoder.embed.device.type == "cpu" and not any(shutil.which(compiler) for compiler in compilers):
        raise ConfigError(
            "train.compile = true needs a C++ compiler on a CPU; install g++, or set train.compile = false"
        )
    for block in decoder.blocks:
        block.compile(fullgraph=True)


def build_decoder(config: Config, mesh: Mesh) -> Decoder:
    """A decoder in train.param_dtype that computes in train.compute_dtype, its weights not yet set."""
    layout = layout_for(config.model, config.parallel, mesh.tp)
    train = config.train
    policies = [POLICIES[name] for name in train.recompute_by_layer(config.model.layers)]
    usual = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, train.param_dtype))
    try:
        with mesh.device:
            return Decoder(config.model, layout, getattr(torch, train.compute_dtype), policies)
    finally:
        torch.set_default_dtype(usual)
