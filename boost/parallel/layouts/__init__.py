"""Runtimes of the layouts, one file each; their specs are in `boost.config.layouts`. `layout_for` builds the configured one."""

import importlib

from boost.config.layouts import spec_of
from boost.config.schema import ModelConfig, ParallelConfig
from boost.models.interface import Layout
from boost.parallel.mesh import Mesh


def layout_for(model: ModelConfig, parallel: ParallelConfig, mesh: Mesh) -> Layout:
    """Builds the configured layout for this process. With one TP process every layout becomes `single`."""
    spec = spec_of(parallel)
    module, _, name = spec.runtime.partition(":")
    layout: Layout = getattr(importlib.import_module(module), name)(spec, model, parallel, mesh)
    return layout
