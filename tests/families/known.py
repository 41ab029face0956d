"""The families that `tests/families` runs."""

import functools
import importlib
import sys
from pathlib import Path

from boost.config.families import ModelConfig

MODULES = {"gelu": "tests.families.gelu", "gated": "gated_bottleneck"}
"""The module of each: one that fits on a page, and those in examples/families."""


@functools.cache
def _classes() -> dict[str, type[ModelConfig]]:
    for family, module in MODULES.items():
        sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "families" / family))
        importlib.import_module(module)
    return {family: ModelConfig.choices[family] for family in MODULES}


def register() -> None:
    """Registers all of them, in this process."""
    ModelConfig.choices.update(_classes())
