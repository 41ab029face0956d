"""`boost train`: trains what a configuration says, under torchrun or with processes of its own."""

import argparse
import os
from pathlib import Path
from typing import Any

from boost.config import Config, load, presets
from boost.errors import ConfigError


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "train",
        help="train a model",
        usage="boost train [CONFIG] [--nproc N] [--resume auto|PATH] [--start-from CHECKPOINT] [--section.key value ...]",
        description="Trains a model. CONFIG is a TOML file or the name of a preset; any of its keys can be overridden after it.\n"
        "Without torchrun, it starts tp x pp x dp local processes.",
        epilog="examples:\n"
        "  boost train demo                                      a few million parameters, btp on 2 processes\n"
        "  boost train demo --parallel.tp 1 --run.dir runs/one   the same model on one process\n"
        "  boost train my.toml --train.steps 500 --optim.lr 1e-3\n"
        "  boost train my.toml --resume auto                     go on where the run in run.dir stopped, on any mesh\n"
        "  boost train --start-from checkpoints/llama --data.store data/mine   train imported or earlier weights on\n"
        "  boost train my.toml --parallel.tp 2 --parallel.pp 2 --parallel.dp 2 --parallel.shard optimizer\n"
        "  torchrun --nproc-per-node 8 -m boost.cli.main train my.toml --parallel.tp 4 --parallel.dp 2\n\n"
        f"presets: {', '.join(presets())}\n"
        "'boost config --fields' explains every key.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "config", nargs="?", metavar="CONFIG", help="preset name or TOML file; with --start-from it may be left out"
    )
    parser.add_argument(
        "--nproc", type=int, metavar="N", help="local processes to start; must equal tp x pp x dp (default)"
    )
    parser.add_argument(
        "--resume",
        metavar="auto|PATH",
        help="auto: resume from the latest complete checkpoint in run.dir, or start if there is none; "
        "PATH: from that checkpoint or run directory",
    )
    parser.add_argument(
        "--start-from",
        metavar="CHECKPOINT",
        help="begin at step 0 with the weights of a checkpoint ('boost import' makes them too) and a fresh optimizer; [model] is "
        "the checkpoint's unless CONFIG has one, which must be the same",
    )
    parser.set_defaults(takes_overrides=True)
    return parser


def run(args: argparse.Namespace) -> int:
    config = _config(args)
    _check_processes(config, args.nproc)

    from boost.data.fit import open_fitting_store
    from boost.train.metrics import tracker_modules
    from boost.train.resume import check_start
    from boost.train.rundir import RunDirectory

    # What the processes would find after their start of several seconds is better said at once.
    run = RunDirectory(config.run.dir)
    if not run.continued_by(args.resume):
        run.require_empty()
    tracker_modules(config)
    store = open_fitting_store(config)
    if args.start_from:
        check_start(args.start_from, config, store)

    from boost.parallel.capabilities import require_torch
    from boost.train.launch import launch, under_torchrun
    from boost.train.run import train_process

    require_torch(config.parallel)

    if under_torchrun() or config.parallel.world_size == 1:
        return train_process(config, args.resume, args.start_from)
    return launch(train_process, (config, args.resume, args.start_from), config.parallel.world_size, log_dir=run.logs)


def _config(args: argparse.Namespace) -> Config:
    """The configuration of the run. Raises ConfigError."""
    if args.start_from is None:
        if args.config is None:
            raise ConfigError(
                "CONFIG is missing; name a preset or a TOML file, or --start-from CHECKPOINT to take its model"
            )
        return load(args.config, args.overrides)
    if args.resume not in (None, "auto"):
        raise ConfigError(
            f"--resume {args.resume} and --start-from {args.start_from} both say where the weights come from; take one "
            "(--resume auto goes with --start-from: it prefers the run's own checkpoints)"
        )

    from boost.train.checkpoint import open_checkpoint

    return load(args.config, args.overrides, model=open_checkpoint(Path(args.start_from)).config.model)


def _check_processes(config: Config, nproc: int | None) -> None:
    """Raises ConfigError if the processes that are to run are not those of the mesh."""
    parallel = config.parallel
    mesh = f"parallel.tp x pp x dp = {parallel.tp} x {parallel.pp} x {parallel.dp} = {parallel.world_size}"
    if nproc is not None and nproc != parallel.world_size:
        raise ConfigError(f"--nproc = {nproc} must equal {mesh}; valid value: {parallel.world_size}")
    started = os.environ.get("WORLD_SIZE", "") if "RANK" in os.environ else str(parallel.world_size)
    if started != str(parallel.world_size):
        raise ConfigError(
            f"{started or 'no'} processes were started (WORLD_SIZE), but {mesh}; start {parallel.world_size}"
        )
