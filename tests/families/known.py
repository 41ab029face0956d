"""The families that `tests/families` runs: the one on docs/extend.md, and those in examples/families."""

import contextlib
import functools
import importlib
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import torch.nn.functional as F
from torch.nn.functional import silu

from boost.config.families import ModelConfig
from boost.elementwise import ELEMENTWISE
from tests import references
from tests.families import crossed

REPOSITORY = Path(__file__).parents[2]
PACKAGES = {"gated": "gated_bottleneck", "lost": "lost_bottleneck", "cr_net": "cross_layer"}
"""Of examples/families, by family."""
REFERENCES = {
    "gelu": references.bottleneck(F.gelu),
    "gated": references.gated,
    "lost": references.lost(0.7, 0.3, silu),
    "cr_net": references.cr_net,
    "crossed": crossed.crossed,
}
"""Plain PyTorch, by family."""
NIGHTLY = ("crossed", "cr_net")
"""Families that are not run on each commit."""
MORE_BY_NIGHT = ("gelu",)
"""Families whose layouts are run by night only: another activation is nothing new to a layout."""


@functools.cache
def _made() -> tuple[dict[str, type[ModelConfig]], dict[str, bool]]:
    """The families, and what they tell the planner."""
    known = set(ELEMENTWISE)
    page = (REPOSITORY / "docs" / "extend.md").read_text(encoding="utf-8")
    (block,) = (text for text in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S) if "GELUConfig" in text)
    sys.modules["gelu_of_the_page"] = module = types.ModuleType("gelu_of_the_page")
    exec(compile(block, "docs/extend.md", "exec"), module.__dict__)
    for family, package in PACKAGES.items():
        sys.path.insert(0, str(REPOSITORY / "examples" / "families" / family))
        importlib.import_module(package)
    rules = {name: rule for name, rule in ELEMENTWISE.items() if name not in known}
    own = {"crossed": crossed.CrossedConfig}
    return own | {family: ModelConfig.choices[family] for family in REFERENCES.keys() - own.keys()}, rules


def register() -> None:
    """Registers all of them, in this process."""
    families, rules = _made()
    ModelConfig.choices.update(families)
    ELEMENTWISE.update(rules)


@contextlib.contextmanager
def registered() -> Iterator[None]:
    """Forgets them afterwards."""
    before = dict(ModelConfig.choices), dict(ELEMENTWISE)
    register()
    try:
        yield
    finally:
        for table, usual in zip((ModelConfig.choices, ELEMENTWISE), before, strict=True):
            table.clear()
            table.update(usual)
