"""`boost plan calibrate`: measures a hardware profile of this machine."""

import argparse
from pathlib import Path
from typing import get_args

from boost.config.schema import DType
from boost.errors import ConfigError
from boost.machine import available_cores


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "plan calibrate",
        description="Measures the speed of this machine (GEMM shapes, attention, memory-bound operations, and collectives\n"
        "between its processes) and writes a hardware profile for --gpu. Takes a minute or two. Keep the machine\n"
        "idle. First, all processes measure at the same time, as in training; then one measures alone.",
        epilog="examples:\n"
        "  boost plan calibrate --out local.toml                  one process per GPU or core\n"
        "  boost plan calibrate --nproc 2 --dtypes float32 bfloat16\n"
        "  boost plan --model 1b --gpu local.toml --gpus 2 --global-batch 64",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("local.toml"), metavar="FILE", help="profile to write (default: local.toml)"
    )
    parser.add_argument(
        "--nproc", type=int, metavar="N", help="number of processes (default: one per GPU, or per core up to 8)"
    )
    parser.add_argument(
        "--dtypes",
        nargs="+",
        choices=get_args(DType),
        metavar="D",
        help="compute dtypes (default: float32, and bfloat16 on GPUs)",
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="device (default: auto)")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller shapes: a rough profile in seconds")
    parser.add_argument(
        "--force", action="store_true", help="write the profile even if the fit is too poor to be useful"
    )
    return parser


def run(args: argparse.Namespace) -> int:
    if args.nproc is not None and args.nproc < 1:
        raise ConfigError(f"--nproc = {args.nproc} is too small; smallest valid value: 1")
    if args.out.suffix != ".toml":
        raise ConfigError(f"--out = '{args.out}' must end in .toml, so that --gpu recognizes it as a file")

    import torch

    from boost.measure.calibrate import calibrate_process
    from boost.train.launch import launch, under_torchrun

    cuda = args.device != "cpu" and torch.cuda.is_available()
    nproc = args.nproc or min(torch.cuda.device_count() if cuda else available_cores(), 8)
    dtypes = args.dtypes or (["float32", "bfloat16"] if cuda else ["float32"])
    work = (dtypes, args.device, args.quick, args.out, args.force)
    return calibrate_process(*work) if under_torchrun() else launch(calibrate_process, work, nproc, log_dir=None)
