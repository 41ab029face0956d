"""`boost timeline`: draws a recorded step."""

import argparse
from pathlib import Path
from typing import Any

from boost.cli.terminal import print_table, result_console
from boost.errors import ConfigError

SUFFIXES = (".svg", ".png", ".pdf")


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "timeline",
        help="draw a recorded step: computation and communication",
        description="Draws a step recorded by --train.profile: when each process computes, when its collectives are in flight,\n"
        "and how much of that time overlaps with computation. You can also open the traces themselves in ui.perfetto.dev.",
        epilog="examples:\n"
        "  boost train demo --train.steps 20 --train.profile '[10, 12]'\n"
        "  boost timeline runs/demo\n"
        "  boost timeline runs/demo --step 11 --out step.png",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="run directory")
    parser.add_argument("--step", type=int, metavar="N", help="recorded step to draw (default: the middle one)")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help=".svg, .png or .pdf file (default: RUN/profile/timeline.svg)"
    )
    return parser


def run(args: argparse.Namespace) -> int:
    from rich.table import Table

    from boost.measure.drawing import needs_matplotlib
    from boost.measure.timeline import draw, read_step, recorded, rows

    out = args.out or args.run_dir / "profile" / "timeline.svg"
    if out.suffix not in SUFFIXES:
        raise ConfigError(f"--out = {out} must end in one of {', '.join(SUFFIXES)}")
    needs_matplotlib()
    number, steps = args.step, []
    for rank, path in recorded(args.run_dir).items():
        number, step = read_step(path, rank, number)
        steps.append(step)
    assert number is not None
    out.parent.mkdir(parents=True, exist_ok=True)
    draw(number, steps, out)
    table = Table(title=f"step {number}, milliseconds", box=None, title_justify="left")
    for name in ("rank", "step", "computing", "in flight", "waiting", "overlapped"):
        table.add_column(name, justify="right")
    for row in rows(steps):
        table.add_row(*row)
    print_table(result_console(100), table)
    print(f"\n{out}")
    return 0
