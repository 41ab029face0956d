"""The experiments in the report, in order, and the modules that present them.

`section` and `goals` are in the experiment's module or in `<module>_report`, which is imported only to show a result.
"""

import importlib
import importlib.util
from collections.abc import Callable
from typing import cast

from boost.errors import ConfigError
from boost.measure.document import Goal, Section
from boost.measure.results import Facts

MODULES = {
    "steps": "bench.endtoend",
    "parts": "bench.parts",
    "single": "bench.single",
    "ideal": "bench.ideal",
    "gemms": "bench.gemms",
    "traffic": "bench.traffic",
    "wire": "bench.wire",
    "grouping": "bench.grouping",
    "norms": "bench.norms",
    "recompute": "bench.recompute",
    "fit": "bench.fit",
    "curves": "bench.curves",
    "perplexity": "bench.perplexity",
    "families": "bench.families",
    "validation": "measure.validate",
    "record": "measure.record",
    "modeled": "bench.modeled",
}
"""Modules, below boost, by the name that stands in a result as 'experiment'."""


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
    return list(MODULES).index(name)


def _function(facts: Facts, name: str) -> Callable[[Facts], object]:
    place(facts["experiment"])
    module = MODULES[facts["experiment"]]
    for spelled in (f"boost.{module}_report", f"boost.{module}"):
        if importlib.util.find_spec(spelled) is not None:
            found = getattr(importlib.import_module(spelled), name, None)
            if found is not None:
                return cast(Callable[[Facts], object], found)
    raise ConfigError(
        f"experiment = '{facts['experiment']}': boost.{module} has no `{name}`; remove the result, or write it"
    )
