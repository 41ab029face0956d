"""Where the time of a step goes: GEMMs, other computation, exposed communication, and the rest, by layout.

Measured over the wire, from the steps that the main set of the wire experiment records; and modeled for the paper's 7B at TP 4 on
its A100s. The talk on the paper says that vanilla is 40% slower than the dense model there.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from benchmarks.experiments.ladder import main_set
from benchmarks.experiments.side_by_side import shape_of
from benchmarks.experiments.wire_facts import groups_of, launches_of, on_wire, seconds_of, wires
from benchmarks.experiments.wire_plan import MARKED
from boost.config.schema import Config
from boost.measure.results import Facts, save_section
from boost.measure.validate import PAPERS_HARDWARE
from boost.models.kernels import separate_operations
from boost.plan.hardware import Hardware, load_hardware
from boost.plan.published import STEPS, Comparison, Way, configuration
from boost.plan.step_time import (
    ATTENTION_TIME,
    BUBBLE,
    CONTEXT,
    GEMMS,
    HOST,
    OPTIMIZER_TIME,
    OTHER,
    PIPELINE,
    RECOMPUTED,
    REPLICAS,
    REST,
    STRAGGLERS,
    TENSOR,
)
from boost.plan.timing import Predictor

PARTS = {
    "gemms": "GEMMs",
    "other": "other computation",
    "waiting": "exposed communication",
    "rest": "rest",
}
"""Parts of a step by key (`boost.measure.timeline.ProcessStep.seconds`), with their names."""

MODELED_PARTS: Mapping[str, tuple[str, ...]] = {
    "gemms": (GEMMS,),
    "other": (ATTENTION_TIME, OTHER, RECOMPUTED, OPTIMIZER_TIME),
    "waiting": (TENSOR, CONTEXT, PIPELINE, REPLICAS),
    "rest": (HOST, BUBBLE, STRAGGLERS, REST),
}
"""The performance model's parts in each of them."""

SEVEN = STEPS[2]
"""The paper's 7B: TP 4."""

PUBLISHED_NAMES: dict[Way, str] = {
    "full-rank": "full-rank, published",
    "vanilla": "vanilla, published",
    "BOOST": "BOOST, published",
}
"""Rows of the paper's systems, with the operations and collectives of its code."""

OURS: dict[str, tuple[Way, tuple[str, ...]]] = {
    "megatron-sp": ("full-rank", ("--parallel.layout=megatron-sp", "--parallel.grouping=true")),
    "vanilla": ("vanilla", ("--parallel.vanilla=strong", "--parallel.grouping=true")),
    "btp": ("BOOST", ()),
    "btp-sp": ("BOOST", ("--parallel.layout=btp-sp",)),
}
"""Rows of this project's layouts: the paper's system that each is based on, and overrides."""


def breakdown(wire: Path, out: Path) -> int:
    """Writes `out`.json, .md and the figures from the result `wire`. Raises ConfigError if that is not of the main set."""
    from benchmarks.experiments.breakdown_report import section

    facts = facts_from(main_set(wire))
    save_section(out, facts, section(facts))
    print(out.with_suffix(".md").read_text(encoding="utf-8"))
    return 0


def facts_from(wire: Facts) -> Facts:
    """The numbers of the breakdown, with the environment in which the measured ones were measured."""
    (group,) = groups_of(wire)
    hardware = load_hardware(PAPERS_HARDWARE)
    return {
        "experiment": "breakdown",
        "environment": wire["environment"],
        "config": wire["config"],
        "shape": shape_of(launches_of(wire, group)[0]),
        "wires": {each: wires(wire, group)[each] for each in MARKED if on_wire(wire, group, each)},
        "measured": list(measured(wire, group)),
        "modeled_on": hardware.title,
        "modeled": list(modeled(hardware)),
    }


def measured(wire: Facts, group: str) -> Iterator[Facts]:
    """Recorded steps by wire and layout, as means over launches and processes (their parts sum to the step), and the seconds of
    those that were not recorded."""
    for each in MARKED:
        launches = [launch for launch in on_wire(wire, group, each) if launch.get("broken_down")]
        for name in launches[0]["broken_down"] if launches else ():
            steps = [step for launch in launches for step in launch["broken_down"][name]]
            yield {
                "wire": each,
                "name": name,
                "recorded": len(steps),
                "parts_s": {part: fmean(step[part] for step in steps) for part in PARTS},
                "seconds": seconds_of(wire, group, each, name),
            }


def modeled(hardware: Hardware) -> Iterator[Facts]:
    """Predicted steps of the 7B by layout: the paper's systems as in its code, then ours."""
    comparison = Comparison(hardware)
    for way, name in PUBLISHED_NAMES.items():
        config = configuration(way, SEVEN)
        with separate_operations():
            parts = parts_of(Predictor(hardware), config)
        # The paper's BOOST has more collectives than our btp: for RMSNorm's statistic, and for the embedding.
        parts["waiting"] += comparison.seconds(way, config) - sum(parts.values())
        yield {"name": name, "way": way, "published_s": SEVEN.seconds[way], "parts_s": parts}
    for name, (way, overrides) in OURS.items():
        config = configuration(way, SEVEN, more=overrides)
        yield {"name": name, "way": "", "published_s": None, "parts_s": parts_of(Predictor(hardware), config)}


def parts_of(predictor: Predictor, config: Config) -> dict[str, float]:
    """Seconds of a predicted step by part."""
    step = predictor.predict(config)
    return {part: sum(step.parts.get(each, 0.0) for each in of_model) for part, of_model in MODELED_PARTS.items()}


def total(row: Facts) -> float:
    """Seconds of a step."""
    return sum(row["parts_s"].values())


def slower(rows: Sequence[Facts], name: str, baseline: str) -> float:
    """How much longer a step of `name` takes than one of `baseline`, as a fraction."""
    seconds = {row["name"]: total(row) for row in rows}
    return seconds[name] / seconds[baseline] - 1
