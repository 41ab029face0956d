"""Runs the whole evaluation from one commit, one experiment after another, some with several launches. Resumable.

Each launch is a separate process. Launches of a part that has several write to the work folder; the evaluation then writes the
merged result that the report reads. Other parts write that result directly.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.commands import PAGE, RESULTS, require_least
from benchmarks.experiments import sections
from benchmarks.experiments.hosts import why_no_hosts
from benchmarks.experiments.results import Facts, MeasurementError, read, require_one_machine
from boost.errors import ConfigError
from boost.files import storage_errors
from boost.format import format_duration
from boost.train.rundir import git_state


def merged(results: Sequence[Facts]) -> Facts:
    """Merges the results of several launches: each list of seconds becomes a list of launches.

    Raises MeasurementError if launches differ in experiment, machine, commit, configuration, rounds or contenders.
    """
    first = results[0]
    require_one_machine(results)
    for other in results[1:]:
        for what, ours, theirs in (
            ("experiment", first["experiment"], other["experiment"]),
            ("commit", first["environment"]["git"], other["environment"]["git"]),
            ("config", first["config"], other["config"]),
            ("rounds", first["rounds"], other["rounds"]),
        ):
            if ours != theirs:
                raise MeasurementError(f"launches differ in {what}: {ours} and {theirs}; run all launches again")
    whole: Facts = _merged("", results)
    return {**whole, "launches": len(results)}


def _merged(key: str, values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, dict):
        if any(not isinstance(value, dict) or value.keys() != first.keys() for value in values):
            raise MeasurementError(f"launches differ in the names below {key or 'the result'}; run all launches again")
        return {name: _merged("seconds" if key == "seconds" else name, [v[name] for v in values]) for name in first}
    if isinstance(first, list):
        if any(not isinstance(value, list) or len(value) != len(first) for value in values):
            raise MeasurementError(f"launches differ in the length of {key}; run all launches again")
        if key == "seconds" and all(isinstance(each, int | float) for each in first):
            return list(values)
        return [_merged(key, parts) for parts in zip(*values, strict=True)]
    return first


ROOT = Path(__file__).parents[2]
"""The commands import `benchmarks` from here."""

BENCH, BOOST = ("-m", "benchmarks"), ("-m", "boost.cli.main")

RECOMPUTE = (
    "demo --tp 2 --batches 4 8 --rounds 9 --model.vocab_size 512 --model.dim 512 --model.ffn_dim 1376 --model.rank 128 "
    "--model.heads 8 --model.layers 2 --train.seq_len 256"
)
"""The model is large enough to time GEMMs, not launches; attention takes the same fraction as with 4,096 tokens on a GPU."""

FOUND = 1
"""Exit code of an experiment whose own check failed, for example because layouts differ. Its result reports the failure."""


@dataclass(frozen=True)
class Part:
    """One part of the evaluation: an experiment or its preparation."""

    name: str
    module: tuple[str, ...]
    words: str
    """Arguments, with the placeholders {device}, {work}, {results} and {out} (path of the result without suffix)."""
    minutes: float
    """Estimate for one launch on two cores. A measurement on this machine replaces it."""
    launches: int = 1
    needs_hosts: bool = False
    """Whether it creates network namespaces."""
    cpu_only: bool = False


@dataclass(frozen=True)
class Place:
    """Where the evaluation runs and writes."""

    work: Path
    results: Path
    device: str

    @property
    def page(self) -> Path:
        """Path of the report: the project's page for the project's results, otherwise report.html next to the results."""
        return PAGE if self.results.resolve() == RESULTS.resolve() else self.results / "report.html"


PARTS = (
    Part("wire", BENCH, "wire --set all --out {out}", 103, needs_hosts=True, cpu_only=True),
    Part("ladder", BENCH, "ladder --wire {results}/wire.json --out {out}", 0.1, needs_hosts=True, cpu_only=True),
    # Directly after the calibration, because the speed of a shared machine changes within hours.
    Part("hardware", BOOST, "plan calibrate --device {device} --out {work}/hardware.toml", 1),
    Part("validation", BENCH, "validation --measure --hardware {work}/hardware.toml --out {out}", 3.4),
    Part("steps", BENCH, "steps --hardware {work}/hardware.toml --rounds 7 --run.device {device} --out {out}", 6.1),
    Part("single", BENCH, "single --rounds 15 --run.device {device} --out {out}", 4.5, 3),
    Part("recompute", BENCH, f"recompute {RECOMPUTE} --run.device {{device}} --out {{out}}", 4.3, 3),
    Part("record", BENCH, "record --out {out}", 0.2),
    Part("modeled", BENCH, "modeled --out {out}", 1.4),
)
"""All parts in order, timed ones first."""


def evaluate(parts: Sequence[Part], place: Place, launches: int | None = None) -> int:
    """Runs the missing launches of `parts` and writes the page. `launches` overrides the number of launches of parts that have
    more than one. Raises ConfigError for uncommitted changes or if --work is from another commit, and MeasurementError if an
    experiment fails."""
    git = git_state()
    if git is None or git["dirty"]:
        raise ConfigError("the evaluation needs a checkout without uncommitted changes; commit them first")
    _require_one_commit(place.work, git["commit"])
    todo = [
        (part, number) for part in parts for number in range(_count(part, launches)) if not _done(place, part, number)
    ]
    for place_of, (part, number) in enumerate(todo):
        if reason := _skipped(part, place):
            print(f"{part.name}: skipped: {reason}", flush=True)
            continue
        left = format_duration(sum(_expected(place, each) for each, _ in todo[place_of:]))
        of = f", launch {number + 1} of {_count(part, launches)}" if _count(part, launches) > 1 else ""
        print(f"[{place_of + 1}/{len(todo)}] {part.name}{of}; about {left} to go", flush=True)
        _launch(place, part, number)
    for part in parts:
        if part.launches > 1 and not _skipped(part, place):
            found = [read(_out(place, part, n).with_suffix(".json"), part.name) for n in range(_count(part, launches))]
            sections.save(place.results / part.name, merged(found))
    words = ["-m", "benchmarks", "report", "--results", str(place.results), "--out", str(place.page)]
    return _run(words, place.work / "report.log")


def listed(parts: Sequence[Part], place: Place, launches: int | None = None) -> str:
    """Returns one line per part, with its finished launches and the remaining time."""
    lines = []
    for part in parts:
        count = _count(part, launches)
        done = sum(_done(place, part, number) for number in range(count))
        seconds = _expected(place, part) * (count - done)
        state = f"skipped: {reason}" if (reason := _skipped(part, place)) else f"about {format_duration(seconds)} to go"
        lines.append(f"{part.name:12} {done} of {count} done, {state if done < count else 'finished'}")
    return "\n".join(lines)


def _count(part: Part, launches: int | None) -> int:
    return part.launches if part.launches == 1 or launches is None else launches


def _skipped(part: Part, place: Place) -> str | None:
    """Why a part cannot run here, or None if it can."""
    if part.cpu_only and place.device != "cpu":
        return "it runs on CPUs only"
    return why_no_hosts(limited=True) if part.needs_hosts else None


def _mark(place: Place, part: Part, number: int) -> Path:
    """The file that records how long a finished launch took."""
    return place.work / f"{part.name}-{number}.done"


def _done(place: Place, part: Part, number: int) -> bool:
    return _mark(place, part, number).is_file()


def _expected(place: Place, part: Part) -> float:
    """Seconds of one launch, measured here if possible, otherwise estimated."""
    taken = [float(path.read_text()) for path in sorted(place.work.glob(f"{part.name}-*.done"))]
    return sum(taken) / len(taken) if taken else 60 * part.minutes


def _require_one_commit(work: Path, commit: str) -> None:
    path = work / "commit"
    with storage_errors(work):
        work.mkdir(parents=True, exist_ok=True)
        if not path.is_file():
            path.write_text(commit)
        if (found := path.read_text()) != commit:
            raise ConfigError(
                f"--work = '{work}' has launches of commit {found[:10]}, but this is {commit[:10]}; check out {found[:10]}, or "
                f"remove {work}"
            )


def _out(place: Place, part: Part, number: int) -> Path:
    """Path of one launch's result, without suffix."""
    return place.work / f"{part.name}-{number}" if part.launches > 1 else place.results / part.name


def _launch(place: Place, part: Part, number: int) -> None:
    out = _out(place, part, number)
    words = part.words.format(device=place.device, work=place.work, results=place.results, out=out).split()
    log = place.work / f"{part.name}-{number}.log"
    result, began, begun = out.with_suffix(".json"), time.time(), time.monotonic()
    code = _run([*part.module, *words], log)
    if code == FOUND and result.is_file() and result.stat().st_mtime >= began:
        print(f"{part.name}: a check failed; its result and {log} show which", flush=True)
    elif code:
        raise MeasurementError(f"{part.name} failed with exit code {code}; see {log}; run the same command to resume")
    _mark(place, part, number).write_text(f"{time.monotonic() - begun:.1f}")


def _run(words: Sequence[str], log: Path) -> int:
    """Runs a command. Its standard output goes to the log; progress and errors appear on the terminal."""
    with log.open("w", encoding="utf-8") as written:
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        }
        return subprocess.run([sys.executable, *words], env=environment, stdout=written).returncode


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", default=[], metavar="PART", help="run only these parts (default: all)")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="run.device (default cpu)")
    words = "number of launches of the parts that have several (default: set by the part)"
    parser.add_argument("--launches", type=int, metavar="N", help=words)
    words = "folder of finished launches (default runs/evaluation)"
    parser.add_argument("--work", type=Path, default=Path("runs/evaluation"), metavar="DIR", help=words)
    words = "folder for the results (default benchmarks/results); for any other DIR, the page is DIR/report.html"
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help=words)
    parser.add_argument("--list", action="store_true", help="list the parts and exit")


def run(args: argparse.Namespace) -> int:
    known = [part.name for part in PARTS]
    if unknown := [name for name in args.only if name not in known]:
        raise ConfigError(f"--only = {unknown[0]} is unknown; valid parts: {', '.join(known)}")
    if args.launches is not None:
        require_least("--launches", [args.launches])
    chosen = [part for part in PARTS if not args.only or part.name in args.only]
    place = Place(args.work, args.results, args.device)
    if args.list:
        print(listed(chosen, place, args.launches))
        return 0
    return evaluate(chosen, place, args.launches)
