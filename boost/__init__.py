"""BOOST: fast training of low-rank bottleneck LLMs on many GPUs.

    import boost

    model = boost.Model.from_pretrained("runs/demo")          # weights and tokenizer; also Hugging Face folders
    model.generate("def main():")
    boost.lowrank(any_model, rank=0.25, init="svd")           # replace the linears in a model with low-rank factors
    block = boost.nn.Block(dim=512, heads=8, rank=128)         # modules for your own models
    boost.parallelize(decoder, mesh, layout="btp")            # the same function, sharded over TP ranks
    boost.Trainer("run.toml", hooks=[...]).fit()              # a training run, as with `boost train`

Names are imported on first use, so `import boost` is fast.
"""

import importlib
from typing import TYPE_CHECKING

from boost.version import __version__ as __version__

if TYPE_CHECKING:
    from boost import nn as nn
    from boost.api.model import Model as Model
    from boost.api.sharding import parallelize as parallelize
    from boost.api.swap import load_lowrank as load_lowrank
    from boost.api.swap import lowrank as lowrank
    from boost.api.swap import merge_lowrank as merge_lowrank
    from boost.api.trainer import Trainer as Trainer
    from boost.config import Config as Config
    from boost.config.families import register_family as register_family
    from boost.config.layouts import register_layout as register_layout
    from boost.config.load import load as load_config  # noqa: F401
    from boost.elementwise import elementwise_rule as elementwise_rule
    from boost.errors import BoostError as BoostError
    from boost.errors import Stopped as Stopped
    from boost.train.hooks import Hook as Hook

_HOMES = {
    "BoostError": "boost.errors",
    "Config": "boost.config",
    "Hook": "boost.train.hooks",
    "Model": "boost.api.model",
    "Stopped": "boost.errors",
    "Trainer": "boost.api.trainer",
    "elementwise_rule": "boost.elementwise",
    "load_config": "boost.config:load",
    "load_lowrank": "boost.api.swap",
    "lowrank": "boost.api.swap",
    "merge_lowrank": "boost.api.swap",
    "nn": "boost.nn:",
    "parallelize": "boost.api.sharding",
    "register_family": "boost.config.families",
    "register_layout": "boost.config.layouts",
}
"""Where each public name is defined: module, or module:name; an empty name means the module itself."""

__all__ = list(_HOMES)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'boost' has no attribute '{name}'")
    module, separator, attribute = _HOMES[name].partition(":")
    home = importlib.import_module(module)
    value = home if separator and not attribute else getattr(home, attribute or name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
