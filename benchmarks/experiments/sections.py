"""The experiments by chapter of the report, and the modules that present them.

`section` and `goals` are defined in the experiment's module or in `<module>_report`, which is imported only when needed.
"""

import importlib
import importlib.util
from collections.abc import Callable
from typing import cast

from boost.errors import ConfigError
from boost.measure.document import Goal, Section
from boost.measure.results import Facts

MODULES = {
    "steps": "benchmarks.experiments.endtoend",
    "parts": "benchmarks.experiments.parts",
    "single": "benchmarks.experiments.single",
    "ideal": "benchmarks.experiments.ideal",
    "gemms": "benchmarks.experiments.gemms",
    "traffic": "benchmarks.experiments.traffic",
    "wire": "benchmarks.experiments.wire",
    "ladder": "benchmarks.experiments.ladder",
    "breakdown": "benchmarks.experiments.breakdown",
    "grouping": "benchmarks.experiments.grouping",
    "norms": "benchmarks.experiments.norms",
    "recompute": "benchmarks.experiments.recompute",
    "fit": "benchmarks.experiments.fit",
    "curves": "benchmarks.experiments.curves",
    "perplexity": "benchmarks.experiments.perplexity",
    "families": "benchmarks.experiments.families",
    "healing": "benchmarks.experiments.healing",
    "validation": "boost.measure.validate",
    "record": "boost.measure.record",
    "modeled": "benchmarks.experiments.modeled",
}
"""Modules by the 'experiment' field of a result."""

CHAPTERS: dict[str, tuple[str, ...]] = {
    "End to end": ("wire", "steps", "single", "modeled"),
    "Ablation": ("ladder", "breakdown", "parts", "ideal"),
    "GEMMs": ("gemms",),
    "Communication": ("traffic",),
    "Grouping": ("grouping",),
    "Norms": ("norms",),
    "Recomputation": ("recompute",),
    "Memory": ("fit",),
    "Convergence": ("curves", "perplexity", "families", "healing"),
    "Performance model": ("validation", "record"),
}
"""Chapters of the report in the paper's order, with their experiments."""


def chapter(name: str) -> str:
    """The chapter of an experiment. Raises ConfigError if it is unknown or in none."""
    found = next((title for title, names in CHAPTERS.items() if name in names), None)
    if found is None:
        raise ConfigError(f"experiment = '{name}' is in no chapter; chapters: {', '.join(CHAPTERS)}")
    return found


def section(facts: Facts) -> Section:
    """The section of a result. Raises ConfigError if its experiment is unknown."""
    return cast(Section, _function(facts, "section")(facts))


def goals(facts: Facts) -> list[Goal]:
    """The goals that a result answers. Raises ConfigError if its experiment is unknown."""
    return cast(list[Goal], _function(facts, "goals")(facts))


def place(name: str) -> int:
    """Position of an experiment in the report. Raises ConfigError if it is unknown."""
    if name not in MODULES:
        raise ConfigError(f"experiment = '{name}' is unknown; experiments: {', '.join(MODULES)}")
    chapter(name)
    return [each for names in CHAPTERS.values() for each in names].index(name)


def _function(facts: Facts, name: str) -> Callable[[Facts], object]:
    place(facts["experiment"])
    module = MODULES[facts["experiment"]]
    for spelled in (f"{module}_report", module):
        if importlib.util.find_spec(spelled) is not None:
            found = getattr(importlib.import_module(spelled), name, None)
            if found is not None:
                return cast(Callable[[Facts], object], found)
    raise ConfigError(f"experiment = '{facts['experiment']}': {module} has no `{name}`; define it or remove the result")
