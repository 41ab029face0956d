"""From a configuration and a mesh to a decoder on its device: the one place where training, evaluation and generation make it."""

import torch

from boost.config import Config
from boost.models.decoder import Decoder
from boost.parallel.layouts import layout_for
from boost.parallel.mesh import Mesh


def build_decoder(config: Config, mesh: Mesh) -> Decoder:
    """A decoder in train.param_dtype that computes in train.compute_dtype, its weights not yet set."""
    layout = layout_for(config.model, config.parallel, mesh.tp)
    decoder = Decoder(config.model, layout, getattr(torch, config.train.compute_dtype))
    return decoder.to(mesh.device, getattr(torch, config.train.param_dtype))
