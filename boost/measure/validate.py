"""Compares the performance model with measurements: the paper's runs, steps on this machine, steps on a GPU.

Measurements are stored with their hardware profile. Predictions are recomputed every time, so that changes to the model show.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from boost.config import load
from boost.config.load import from_tree
from boost.errors import ConfigError
from boost.measure.results import Facts, save_section
from boost.plan.hardware import Hardware, load_hardware
from boost.plan.prediction import prediction
from boost.plan.published import MICRO_BATCHES, Compared, Comparison
from boost.train.rundir import environment

TIME_LIMIT, PEAK_LIMIT, BYTES_LIMIT = 0.10, 0.05, 0.0
"""Maximum relative errors of measured steps: seconds, peak bytes, sent bytes."""

CONFIGURATIONS = 12
"""Minimum number of configurations to measure on CPUs."""

PAPERS_HARDWARE = "a100-80g"
RESULTS = Path("benchmarks/results/validation")
CALIBRATE = "boost plan calibrate --out {name}.toml && boost plan validate --measure --hardware {name}.toml"
MACHINE, GPU = "machine", "gpu"
"""Sections of the result, by the device type of the steps."""

TITLES = {MACHINE: "Steps measured on CPUs", GPU: "Steps measured on a GPU"}


@dataclass(frozen=True)
class Verdict:
    """Verdict on a set of predictions, by the worst one."""

    section: str
    what: str
    count: int
    worst: float
    """Signed relative error of the worst prediction."""
    limit: float
    least: int = 1
    """Minimum number of predictions."""

    @property
    def holds(self) -> bool:
        """Whether there are enough predictions and all are within the limit."""
        return abs(self.worst) <= self.limit and self.count >= self.least


def validate(out: Path, hardware: Path | None = None, measure: bool = False, write: bool = False) -> Facts:
    """Returns all sections. The published one is computed; measurements are read from `out`.json, and their predictions recomputed.

    `measure`: first measures steps on this machine, whose profile is `hardware`. They replace earlier measurements on the same
    device type. `write` (or `measure`): writes `out`.json, .md and .svg.

    Raises ConfigError for invalid arguments or an invalid `out`.json, StorageError if files cannot be written.
    """
    if measure and hardware is None:
        raise ConfigError(
            f"--measure needs the profile of this machine (--hardware FILE): {CALIBRATE.format(name='local')}"
        )
    stored = _read(out)
    sections = {name: stored.get(name) for name in (MACHINE, GPU)}
    if measure and hardware is not None:
        profile = load_hardware(str(hardware))
        sections[GPU if profile.device == "cuda" else MACHINE] = _measured(profile)
    facts: Facts = {
        "experiment": "validation",
        "environment": environment(load(None)),
        "published": published_facts(),
        **{name: section and repredicted(section) for name, section in sections.items()},
    }
    facts["verdicts"] = [asdict(verdict) | {"holds": verdict.holds} for verdict in verdicts(facts)]
    if measure or write:
        from boost.measure.validate_report import section

        save_section(out, facts, section(facts))
    return facts


def published_facts() -> Facts:
    """Compares the paper's numbers with predictions, and computes their sensitivity to the unpublished micro-batch."""
    hardware = load_hardware(PAPERS_HARDWARE)
    comparison = Comparison(hardware)
    sensitivity = [
        {
            "micro_batch": micro_batch,
            "ratios": [_compared(each) for step in steps for each in step.ratios()],
            "steps": [_compared(each) for step in steps for each in step.times()],
        }
        for micro_batch, steps in ((n, comparison.steps(n)) for n in MICRO_BATCHES)
    ]
    return {
        "hardware": hardware.model_dump(),
        "compared": [_compared(each) for each in comparison.all()],
        "micro_batches": sensitivity,
    }


def repredicted(section: Facts) -> Facts:
    """Recomputes the predictions of a section of measured steps."""
    hardware = Hardware.model_validate(section["hardware"])
    rows = [row | asdict(prediction(from_tree(row["config"]), hardware, row["share"])) for row in section["rows"]]
    return section | {"rows": rows}


def verdicts(facts: Facts) -> Iterator[Verdict]:
    """Yields a verdict for each kind of prediction that has a limit."""
    judged = [each for each in facts["published"]["compared"] if each["limit"] is not None]
    for table in dict.fromkeys(each["table"] for each in judged):
        of_table = [each for each in judged if each["table"] == table]
        yield Verdict(
            "published", table, len(of_table), _worst([each["off"] for each in of_table]), of_table[0]["limit"]
        )
    for name in (MACHINE, GPU):
        if facts[name]:
            yield from measured_verdicts(name, facts[name]["rows"])


def measured_verdicts(section: str, rows: Sequence[dict[str, Any]]) -> Iterator[Verdict]:
    """Verdicts on measured steps: seconds within 10%, memory within 5%, bytes exact; on CPUs, for at least 12 configurations."""
    least = CONFIGURATIONS if section == MACHINE else 1
    for what, limit in (("time", TIME_LIMIT), ("memory", PEAK_LIMIT), ("bytes sent", BYTES_LIMIT)):
        yield Verdict(section, what, len(rows), _worst([off(row)[what] for row in rows]), limit, least)


def off(row: dict[str, Any]) -> dict[str, float]:
    """Relative errors of one measured step."""
    return {
        "time": row["predicted_s"] / row["measured_s"] - 1,
        "memory": row["predicted_peak"] / row["measured_peak"] - 1,
        "bytes sent": _relative(row["predicted_sent"], row["counted_sent"]),
    }


def _relative(predicted: int, counted: int) -> float:
    if counted == 0:
        return 0.0 if predicted == 0 else 1.0
    return predicted / counted - 1


def _worst(errors: Sequence[float]) -> float:
    return max(errors, key=abs)


def _compared(each: Compared) -> Facts:
    return asdict(each) | {"off": each.off, "holds": each.holds}


def _measured(hardware: Hardware) -> Facts:
    """Measures a section on this machine."""
    from boost.measure.steps import measure

    rows = [asdict(step) for step in measure(hardware)]
    return {"environment": environment(load(None)), "hardware": hardware.model_dump(), "rows": rows}


def _read(out: Path) -> Facts:
    path = out.with_suffix(".json")
    if not path.is_file():
        return {}
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"--out = '{out}': {path.name} is not JSON ({error}); remove it or choose another name"
        ) from None
    if not isinstance(stored, dict) or stored.get("experiment") != "validation":
        raise ConfigError(f"--out = '{out}': {path.name} is not a result of this command; choose another name")
    return stored
