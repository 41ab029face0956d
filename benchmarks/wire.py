"""`python -m benchmarks wire`: times whole steps over a rate-limited wire."""

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.arguments import LEAST_ROUNDS, experiment_parser, require_least
from benchmarks.commands import main
from boost.errors import ConfigError
from boost.measure.drawing import needs_matplotlib

SETS = ("main", "meshes", "sizes", "families", "many")
"""Same as benchmarks.experiments.wire_plan.SETS; repeated here to avoid importing torch."""


def add_parser(experiments: Any) -> argparse.ArgumentParser:
    parser = experiment_parser(
        experiments,
        "wire",
        "time of steps and bare collectives over a rate-limited wire",
        "Creates network namespaces joined by a rate-limited wire (root, iproute2), runs one CPU process in each, and times\n"
        "whole steps of every layout, all interleaved. Measures without a limit and at two rates: those at which communication\n"
        "takes 17% of a btp step, as in the paper's 7B row on A100s, and half of it. The main set takes 51 minutes, all\n"
        "sets 77; keep the machine idle. Every launch is kept: the same command resumes.\n\n"
        "  main      TP 2, d 1024, cola: every layout, with and without overlap; bare collectives; timelines\n"
        "  meshes    TP 2 x PP 2, TP 2 x DP 2, DP 2\n"
        "  sizes     d 512, 2048\n"
        "  families  svd, lax\n"
        "  many      as many tokens per step, relative to d, as 131k at d 4096",
        tp=False,
    )
    parser.add_argument("--set", choices=(*SETS, "all"), default="main", help="what to measure (default main)")
    parser.add_argument(
        "--rates",
        type=float,
        nargs="*",
        default=[1000.0],
        metavar="MBIT",
        help="additional rates of the main set, Mbit/s (default 1000)",
    )
    parser.add_argument(
        "--launches",
        type=int,
        metavar="N",
        help="launches per marked rate (default 5 in the main set, 3 in many, 2 in the others)",
    )
    parser.add_argument("--rounds", type=int, metavar="N", help="rounds per launch, at least 7 (default 15 and 7)")
    parser.add_argument("--restart", action="store_true", help="discard launches and results of the set first")
    return parser


def path_of(out: Path, name: str) -> Path:
    """Path of the result of a set: `out` for the main set, `out`-NAME for another."""
    return out if name == "main" else out.with_name(f"{out.name}-{name}")


def run(args: argparse.Namespace) -> int:
    if args.rounds is not None:
        require_least("--rounds", [args.rounds], LEAST_ROUNDS)
    if args.launches is not None:
        require_least("--launches", [args.launches])
    if any(not rate >= 1 for rate in args.rates):
        raise ConfigError(f"--rates = {min(args.rates):g} is too slow; smallest valid value: 1 (Mbit/s)")
    needs_matplotlib()

    from benchmarks.experiments.wire import wire
    from benchmarks.experiments.wire_plan import SETS as PLANS

    for name in SETS if args.set == "all" else (args.set,):
        plan, out = PLANS[name], path_of(args.out, name)
        launches = args.launches or plan.launches
        plan = replace(plan, launches=launches, free_launches=min(launches, plan.free_launches))
        plan = replace(plan, rounds=args.rounds or plan.rounds)
        if args.restart:
            for suffix in (".json", ".partial"):
                out.with_suffix(suffix).unlink(missing_ok=True)
        if code := wire(plan, args.config, args.overrides, args.rates if name == "main" else [], out):
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main(["wire", *sys.argv[1:]]))
