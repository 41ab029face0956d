"""The layouts: ways to shard a decoder over TP ranks. A file here describes a layout without torch, as the configuration and the
planner need it; the file of the same name in `boost.layouts` implements it.

This file is the layout registry. An installed package adds a layout by calling `register_layout` in a module listed under
the entry-point group `boost.plugins`. `LayoutSpec.config` is the class that `parallel.layout` then selects.
"""

from boost.config.layouts.btp import BTPSpec
from boost.config.layouts.btp_sp import BTPSPSpec
from boost.config.layouts.megatron import MegatronSpec, MegatronSPSpec
from boost.config.layouts.spec import LayoutSpec, Placement, SingleSpec
from boost.config.layouts.spec import local_shape as local_shape
from boost.config.layouts.ulysses import BTPCPSpec, UlyssesSpec
from boost.config.layouts.vanilla import VanillaSpec
from boost.config.schema import ModelConfig, ParallelConfig
from boost.config.section import load_plugins

_specs: dict[str, LayoutSpec] = {}
_single = SingleSpec()


def register_layout(spec: LayoutSpec) -> LayoutSpec:
    """Registers a layout for the configuration, the planner and the runtime. Raises ValueError if the name is taken."""
    if spec.name in _specs:
        raise ValueError(f"layout name '{spec.name}' is already registered to {type(_specs[spec.name]).__name__}")
    _specs[spec.name] = spec
    ParallelConfig.choices.pop(spec.name, None)  # messages and tables list layouts in registry order
    ParallelConfig.choices[spec.name] = spec.config
    return spec


def layout_names() -> tuple[str, ...]:
    """Names of all layouts: the built-in ones, with each family's default before its alternatives, then those of plugins."""
    load_plugins()
    return tuple(_specs)


def layout_spec(name: str) -> LayoutSpec:
    """The layout with this name. Raises KeyError if it does not exist; a validated configuration always names a known layout."""
    if name not in _specs:
        load_plugins()
    if name not in _specs:
        raise KeyError(f"no layout named '{name}'; valid names: {', '.join(_specs)}")
    return _specs[name]


def spec_of(parallel: ParallelConfig) -> LayoutSpec:
    """The layout in effect: `single` if tp = 1, otherwise `parallel.layout`."""
    return _single if parallel.tp == 1 else layout_spec(parallel.layout)


def layouts_of(model: ModelConfig) -> tuple[str, ...]:
    """Names of the layouts that support a model of this family, the default one first."""
    return tuple(name for name in layout_names() if not (spec := _specs[name]).single_process and spec.suits(model))


def placement_of(role: str, model: ModelConfig, parallel: ParallelConfig) -> Placement:
    """Placement of parameters with this role under the layout in effect."""
    return spec_of(parallel).placement(role, model, parallel)


def num_shards(parallel: ParallelConfig) -> int:
    """Number of shards into which the layout in effect divides heads and channels."""
    return spec_of(parallel).num_shards(parallel)


# The planner and messages use this order; a family's default is the first layout that supports it.
_built_in = (
    BTPSpec(),
    BTPSPSpec(),
    BTPCPSpec(),
    VanillaSpec(),
    MegatronSPSpec(),
    MegatronSpec(),
    UlyssesSpec(),
    _single,
)
for _spec in _built_in:
    register_layout(_spec)
