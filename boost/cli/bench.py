"""`boost bench`: experiments, each with its result as JSON and as a picture."""

import argparse
import importlib.util
from pathlib import Path
from typing import Any, get_args

from boost.config import load
from boost.config.rules import check_runnable
from boost.config.schema import Family
from boost.errors import ConfigError

FAMILIES = get_args(Family)


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "bench",
        help="run an experiment: loss curves of all layouts",
        usage="boost bench curves [CONFIG] [--tp N] [--families F ...] [--out PATH] [--section.key value ...]",
        description="curves: trains one model under every layout that carries it, in float64 and float32, from the same seed\n"
        "and data, and compares every step with one process. Exit code 1 if a difference is above its limit.",
        epilog="examples:\n"
        "  boost bench curves                                     the demo's model, 2 processes\n"
        "  boost bench curves demo --tp 4 --train.steps 50 --out /tmp/curves",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("experiment", choices=("curves",), help="which experiment")
    parser.add_argument(
        "config", nargs="?", default="demo", metavar="CONFIG", help="preset or TOML file (default demo)"
    )
    parser.add_argument("--tp", type=int, default=2, metavar="N", help="TP processes, started here (default 2)")
    parser.add_argument(
        "--families",
        nargs="+",
        choices=FAMILIES,
        metavar="F",
        help=f"of {', '.join(FAMILIES)}; default: CONFIG's, and dense",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("benchmarks/results/curves"),
        metavar="PATH",
        help="PATH.json and PATH.svg are written (default benchmarks/results/curves)",
    )
    parser.set_defaults(takes_overrides=True)
    return parser


def run(args: argparse.Namespace) -> int:
    from boost.bench.curves import LIMITS, configuration, contenders, curves_process
    from boost.data.fit import open_fitting_store
    from boost.train.launch import launch, under_torchrun

    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("the plot needs matplotlib, which is not installed: pip install 'boost-llm[plots]'")
    if args.tp < 2:
        raise ConfigError(f"--tp = {args.tp} has no layouts to compare; the smallest legal value is 2")
    config = load(args.config, [*args.overrides, "--parallel.tp", str(args.tp), "--parallel.dp", "1"])
    check_runnable(config)
    families = args.families or sorted({config.model.family, "dense"})
    for family in families:  # mistakes are answered before a process is started
        for contender in contenders(family):
            configuration(config, family, next(iter(LIMITS)), {**contender.parallel, "tp": args.tp})
    open_fitting_store(config)
    if under_torchrun():
        return curves_process(config, families, args.out)
    return launch(curves_process, (config, families, args.out), args.tp, log_dir=None)
