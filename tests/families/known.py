"""The families that `tests/families` runs: the one on docs/extend.md, and those in examples/families."""

import functools
import importlib
import re
import sys
import types
from pathlib import Path

import torch.nn.functional as F

from boost.config.families import ModelConfig
from tests import references

REPOSITORY = Path(__file__).parents[2]
PACKAGES = {"gated": "gated_bottleneck"}
"""Of examples/families, by family."""
REFERENCES = {"gelu": references.bottleneck(F.gelu), "gated": references.gated}
"""Plain PyTorch, by family."""


@functools.cache
def _classes() -> dict[str, type[ModelConfig]]:
    page = (REPOSITORY / "docs" / "extend.md").read_text(encoding="utf-8")
    (block,) = (text for text in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S) if "GELUConfig" in text)
    sys.modules["gelu_of_the_page"] = module = types.ModuleType("gelu_of_the_page")
    exec(compile(block, "docs/extend.md", "exec"), module.__dict__)
    for family, package in PACKAGES.items():
        sys.path.insert(0, str(REPOSITORY / "examples" / "families" / family))
        importlib.import_module(package)
    return {family: ModelConfig.choices[family] for family in REFERENCES}


def register() -> None:
    """Registers all of them, in this process."""
    ModelConfig.choices.update(_classes())
