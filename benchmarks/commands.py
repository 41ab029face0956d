"""Command line of the benchmarks: `python -m benchmarks EXPERIMENT`.

An experiment is a module in `benchmarks.experiments` that defines `arguments(parser)` and `run(args) -> exit code`. The module's
docstring is the experiment's help text.
"""

import argparse
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from boost.cli.main import run_command, split_overrides
from boost.config import Config, load
from boost.drawing import needs_matplotlib
from boost.errors import ConfigError

EXPERIMENTS = {
    "steps": "optimizer step time under every layout and family, at widths proportional to TP",
    "single": "one process: low-rank against dense, and BOOST against plain PyTorch modules",
    "families": "any registered families: held-out loss at equal tokens, FLOPs and time; resumable",
    "wire": "time of steps and bare collectives over a rate-limited wire",
    "ladder": "speed-up from each change between published vanilla and the fastest layout, computed from 'wire'",
    "recompute": "memory saved and time added by each recomputation policy, under every layout",
    "validation": "the performance model against steps measured on this machine",
    "record": "the performance model against published training speeds",
    "modeled": "the performance model against the paper's measurements",
    "evaluation": "all experiments in the report, some with several launches; resumable",
    "report": "all results as one page, benchmarks/report.html",
    "timeline": "a step recorded by train.profile: computation and communication of each process",
}

RESULTS, PAGE = Path("benchmarks/results"), Path("benchmarks/report.html")
"""Folder of the project's results, and the page that reports them."""

LEAST_ROUNDS = 7
"""Minimum number of timed rounds."""


def build_parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """Builds the parser for all experiments, with the arguments of the one named first in `words`."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Runs an experiment and writes its results, with tables and figures, to benchmarks/results.",
    )
    subparsers = parser.add_subparsers(dest="command", metavar="EXPERIMENT", required=True)
    for name, summary in EXPERIMENTS.items():
        subparser = subparsers.add_parser(name, help=summary, allow_abbrev=False)
        if words[:1] == [name]:
            module = importlib.import_module(f"benchmarks.experiments.{name}")
            subparser.description, subparser.formatter_class = module.__doc__, argparse.RawDescriptionHelpFormatter
            subparser.add_argument("--debug", action="store_true", help="show the full traceback of an error")
            module.arguments(subparser)
            subparser.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one experiment and returns its exit code, like `boost.cli.main.main`. Without arguments, lists the experiments."""
    words, overrides = split_overrides(sys.argv[1:] if argv is None else argv)
    parser = build_parser(words)
    if not words:
        parser.print_help()
        return 0
    needs_matplotlib()
    return run_command(parser, words, overrides)


def add_config(parser: argparse.ArgumentParser, name: str, tp: bool = True, config: str = "demo") -> None:
    """Adds CONFIG, --tp (if `tp`) and --out, and accepts overrides."""
    parser.epilog = "--section.key VALUE changes a field of the configuration."
    parser.add_argument(
        "config", nargs="?", default=config, metavar="CONFIG", help=f"preset or TOML file (default {config})"
    )
    if tp:
        parser.add_argument("--tp", type=int, default=2, metavar="N", help="TP processes (default 2)")
    parser.set_defaults(takes_overrides=True)
    add_out(parser, name)


def add_out(parser: argparse.ArgumentParser, name: str) -> None:
    """Adds --out."""
    words = f"write PATH.json, PATH.md and figures (default benchmarks/results/{name})"
    parser.add_argument("--out", type=Path, default=RESULTS / name, metavar="PATH", help=words)


def add_rounds(parser: argparse.ArgumentParser, default: int) -> None:
    """Adds --rounds, for experiments that measure time."""
    words = f"interleaved rounds, at least {LEAST_ROUNDS} (default {default})"
    parser.add_argument("--rounds", type=int, default=default, metavar="N", help=words)


def require_least(field: str, values: Sequence[int], least: int = 1) -> None:
    """Raises ConfigError if any value is below `least`."""
    if min(values) < least:
        what = "is not positive" if least == 1 else "is too small"
        raise ConfigError(f"{field} = {min(values)} {what}; smallest valid value: {least}")


def tp_config(args: argparse.Namespace) -> Config:
    """Loads CONFIG with parallel.tp = --tp and no other parallelism. Raises ConfigError."""
    require_least("--tp", [args.tp])
    return load(args.config, [*args.overrides, f"--parallel.tp={args.tp}", "--parallel.dp=1", "--parallel.pp=1"])


def run_processes(function: Callable[..., int], arguments: tuple[Any, ...], processes: int) -> int:
    """Runs `function(*arguments)`: under torchrun in this process, otherwise in new ones. Returns the exit code."""
    from boost.train.launch import launch, under_torchrun

    return function(*arguments) if under_torchrun() else launch(function, arguments, processes, log_dir=None)


def result_of(function: Callable[..., Any], arguments: tuple[Any, ...], processes: int, forks: bool = False) -> Any:
    """Calls `function(*arguments)` in new processes (see `boost.train.launch.launch`). Returns what the main one returns, as JSON
    has it. Raises SystemExit if a process fails."""
    from boost.train.launch import launch

    with tempfile.TemporaryDirectory(prefix="boost-bench-") as folder:
        out = Path(folder) / "result.json"
        if code := launch(_write_result, (function, arguments, out), processes, log_dir=None, forks=forks):
            raise SystemExit(code)
        return json.loads(out.read_text(encoding="utf-8"))


def _write_result(function: Callable[..., Any], arguments: tuple[Any, ...], out: Path) -> int:
    result = function(*arguments)
    if os.environ.get("RANK", "0") == "0":
        out.write_text(json.dumps(result), encoding="utf-8")
    return 0
