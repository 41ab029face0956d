"""The experiments whose results are reported, in the order of the report, and where each has its words.

A module has `section` and `goals` in itself or in `<module>_report`. It is imported where a result is shown and not before.
"""

import importlib
import importlib.util
from collections.abc import Callable
from typing import cast

from boost.errors import ConfigError
from boost.measure.document import Goal, Section
from boost.measure.results import Facts

MODULES = {
    "steps": "endtoend",
    "parts": "parts",
    "single": "single",
    "ideal": "ideal",
    "gemms": "gemms",
    "traffic": "traffic",
    "grouping": "grouping",
    "norms": "norms",
    "recompute": "recompute",
    "fit": "fit",
    "curves": "curves",
    "perplexity": "perplexity",
    "families": "families",
    "validation": "validate",
    "modelled": "modelled",
}
"""Modules of boost.bench, or of boost.measure, by the name that stands in a result as 'experiment'."""


def section(facts: Facts) -> Section:
    """What a result has to say. Raises ConfigError if its experiment is not known."""
    return cast(Section, _function(facts, "section")(facts))


def goals(facts: Facts) -> list[Goal]:
    """What a result says of the project's figures. Raises ConfigError if its experiment is not known."""
    return cast(list[Goal], _function(facts, "goals")(facts))


def place(name: str) -> int:
    """Of an experiment in the report. Raises ConfigError if it is not known."""
    if name not in MODULES:
        raise ConfigError(f"experiment = '{name}' is not known; the experiments are {', '.join(MODULES)}")
    return list(MODULES).index(name)


def _function(facts: Facts, name: str) -> Callable[[Facts], object]:
    place(facts["experiment"])
    module = MODULES[facts["experiment"]]
    for spelled in (f"boost.{room}.{module}{suffix}" for room in ("bench", "measure") for suffix in ("_report", "")):
        if importlib.util.find_spec(spelled) is not None:
            found = getattr(importlib.import_module(spelled), name, None)
            if found is not None:
                return cast(Callable[[Facts], object], found)
    raise ConfigError(
        f"experiment = '{facts['experiment']}': boost/bench/{module}.py has no `{name}`; remove the result, or write it"
    )
