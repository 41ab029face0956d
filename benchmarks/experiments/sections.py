"""The experiments by report chapter, and the functions that present them.

`section(facts)` and `goals(facts)` are defined in the experiment's module or in `<module>_report`.
"""

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import cast

from benchmarks.experiments.results import Facts, Goal, Section, as_markdown, save_section
from boost.errors import ConfigError

CHAPTERS: dict[str, tuple[str, ...]] = {
    "End to end": ("wire", "steps", "single", "families", "modeled"),
    "Ablation": ("ladder",),
    "Recomputation": ("recompute",),
    "Performance model": ("validation", "record"),
}
"""Chapters of the report, with their experiments."""

SETTLED = {
    "gemms": "time and utilization of a block's GEMMs, by layout and TP",
    "traffic": "bytes and time of a block's collectives, by layout and batch",
    "breakdown": "a step by part over the wire: GEMMs, other computation, exposed communication; modeled for the paper's 7B",
    "ideal": "TP against half the computation plus the time of the collectives alone",
    "grouping": "linears with the same input, grouped against ungrouped",
    "norms": "RMSNorm across shards, sync against online",
    "fit": "longest sequence and largest batch that fit in 80 GB",
    "families-2026-11": "dense, svd, cola, lax, loro, DLR and Spectron at equal tokens and at equal time, five seeds each",
    "healing": "dense models factorized and healed",
    "curves": "loss curves of all layouts: how far each is from that of one process",
    "perplexity": "loss, held-out perplexity and accuracy of all layouts and families, up to five seeds",
    "smollm2": "SmolLM2-135M, factorized and healed: quality, and training speed against transformers' dense model",
}
"""Experiments that are no longer run. Their results are committed, and each result names the commit that has its code."""


def section(facts: Facts) -> Section:
    """The section of a result. Raises ConfigError if its experiment is unknown."""
    function = _function(facts, "section")
    assert function is not None, f"{facts['experiment']} has no section"
    return cast(Section, function(facts))


def goals(facts: Facts) -> list[Goal]:
    """The goals that a result decides, or none if its experiment defines none. Raises ConfigError if it is unknown."""
    function = _function(facts, "goals")
    return cast(list[Goal], function(facts)) if function else []


def save(out: Path, facts: Facts) -> None:
    """Writes a result with its section and figures, and prints the section. Raises StorageError."""
    shown = section(facts)
    save_section(out, facts, shown)
    print(as_markdown(facts, shown))


def place(name: str) -> int:
    """Position of an experiment in the report. Raises ConfigError if it is in no chapter."""
    names = [each for names in CHAPTERS.values() for each in names]
    if name not in names:
        raise ConfigError(f"experiment = '{name}' is unknown; experiments: {', '.join(names)}")
    return names.index(name)


def _function(facts: Facts, name: str) -> Callable[[Facts], object] | None:
    place(facts["experiment"])
    module = f"benchmarks.experiments.{facts['experiment']}"
    for spelled in (f"{module}_report", module):
        if importlib.util.find_spec(spelled) is not None:
            function: Callable[[Facts], object] | None = getattr(importlib.import_module(spelled), name, None)
            if function is not None:
                return function
    return None
