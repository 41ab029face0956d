"""`boost train`: trains a model, under torchrun or on local processes that it starts."""

import argparse
from pathlib import Path

from boost.cli.terminal import add_options
from boost.config import Config, for_weights, load, presets
from boost.data.store import read_meta
from boost.errors import ConfigError, StoppedError
from boost.train.faults import KINDS, Fault, parse_fault
from boost.train.rundir import require_checkpoint_folder
from boost.train.signals import StopRequest

OPTIONS = {
    "--resume auto|PATH": "auto: resume from the latest complete checkpoint in run.dir, or start a new run if there is none; "
    "PATH: resume from that checkpoint or run directory (RUN@best: its best checkpoint)",
    "--restart": "with --resume auto: start over at step 0 if the checkpoints of an earlier run are gone (an error by default)",
    "--start-from CHECKPOINT|RUN": "start at step 0 with the weights of a checkpoint, a run or an imported model, and a fresh "
    "optimizer; [model] comes from the checkpoint (a [model] in CONFIG must be the same); train.seq_len defaults to the "
    "checkpoint's, and optim.lr to 3e-4 (1e-4 if latents have an activation)",
    "--distill-from CHECKPOINT": "also learn from the predictions of this model (a run, a checkpoint, or the output of 'boost "
    "import'); sets distill.teacher; [distill] sets the weights and the temperature",
    "--inject-fault KIND@STEP[:RANK]...": "inject a fault on rank RANK (default 0) at step STEP, to test recovery; may be "
    "repeated; kinds are listed below",
}


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    faults = "\n".join(f"  {kind:<11} {what}" for kind, what in KINDS.items())
    parser = subparsers.add_parser(
        "train",
        usage="boost train [CONFIG] [--resume auto|PATH] [--restart] [--start-from CHECKPOINT]\n"
        "                   [--distill-from CHECKPOINT] [--section.key value ...]",
        description="Trains a model. CONFIG is a TOML file or a preset name; flags after it override its keys.\n"
        "Without torchrun, starts tp x pp x dp x cp local processes.",
        epilog="examples:\n"
        "  boost train demo                                      a few million parameters, btp on 2 processes\n"
        "  boost train demo --parallel.tp 1 --run.dir runs/one   the same model on one process\n"
        "  boost train my.toml --train.steps 500 --optim.lr 1e-3\n"
        "  boost train my.toml --resume auto                     resume from the latest checkpoint in run.dir, on any mesh\n"
        "  boost train --start-from checkpoints/llama --data.store data/mine   continue training imported weights\n"
        "  boost train --start-from checkpoints/svd --distill-from runs/dense --data.store data/mine   heal factors\n"
        "  boost train my.toml --parallel.tp 2 --parallel.pp 2 --parallel.dp 2 --parallel.shard optimizer\n"
        "  boost launch --nproc-per-node 8 -- train my.toml --parallel.tp 4 --parallel.dp 2      under torchrun\n\n"
        "signals, to any process of the run:\n"
        "  SIGTERM, SIGUSR1, SIGHUP, SIGINT (Ctrl-C)   save after this step and exit; a second Ctrl-C aborts without saving\n"
        "  SIGUSR2                                     save after this step and continue\n"
        "  SIGQUIT                                     write the stacks of the process (stderr, or logs/rankN.stacks)\n\n"
        "kinds of --inject-fault, each on one process just before STEP:\n"
        f"{faults}\n\n"
        f"presets: {', '.join(presets())}\n"
        "'boost config --fields' explains every key.",
    )
    parser.add_argument(
        "config", nargs="?", metavar="CONFIG", help="preset name or TOML file; optional with --start-from"
    )
    add_options(parser, OPTIONS, inject_fault=[])
    parser.set_defaults(takes_overrides=True, check=check)
    return parser


def run(args: argparse.Namespace) -> int:
    # Handle signals before importing torch, which takes several seconds.
    with StopRequest():
        config, faults = check(args)
        try:
            return _check_and_train(args, config, faults)
        except StoppedError as stop:
            print(f"stopped by {stop} during startup, before the first step; nothing was lost")
            return 0


def check(args: argparse.Namespace) -> tuple[Config, list[Fault]]:
    """Checks what can be checked without torch. Returns the configuration and the faults to inject. Raises BoostError."""
    config = _config(args)
    for store in config.data.sources:
        read_meta(Path(store))
    for path in filter(None, (config.distill.teacher, args.resume if args.resume != "auto" else None)):
        require_checkpoint_folder(path)
    return config, [parse_fault(text, config.train.steps, config.parallel.world_size) for text in args.inject_fault]


def _check_and_train(args: argparse.Namespace, config: Config, faults: list[Fault]) -> int:
    import torch

    from boost.train.launch import Supervise, can_fork, launch, under_torchrun
    from boost.train.progress import progress
    from boost.train.run import check_before_start, train_process
    from boost.train.rundir import RunDirectory, without_links

    config = without_links(config)  # once for all processes
    launches = config.parallel.world_size > 1 and not under_torchrun()
    if launches:
        torch.set_num_threads(1)  # because `launch` forks
    check_before_start(
        config,
        args.resume,
        args.start_from,
        restart=args.restart,
        rejoins=config.run.recovery == "in-step" and not launches,  # the main process of a new run checks instead
        progress=lambda blocks: progress(blocks, "verify token store"),
    )
    work = (config, args.resume, args.start_from, faults, args.restart)
    if not launches:
        return train_process(*work)
    supervise: Supervise | None = None
    if config.run.recovery == "in-step":  # the launcher restarts replicas
        from boost.elastic.supervise import Supervisor

        supervise = Supervisor.of(config).supervise
    forks = can_fork()
    if forks:
        import torch._dynamo  # torch's optimizers import it, which takes a second: once here, not in every process
    size, logs = config.parallel.world_size, RunDirectory(config.run.dir).logs
    return launch(train_process, work, size, log_dir=logs, holds_signals=True, forks=forks, supervise=supervise)


def _config(args: argparse.Namespace) -> Config:
    if args.distill_from is not None:
        args.overrides = [*args.overrides, "--distill.teacher", args.distill_from]
    if args.start_from is None:
        if args.config is None:
            raise ConfigError(
                "CONFIG is missing; pass a preset or a TOML file, or --start-from CHECKPOINT to use its model"
            )
        return load(args.config, args.overrides)
    if args.resume not in (None, "auto"):
        raise ConfigError(
            f"--resume {args.resume} and --start-from {args.start_from} conflict; use one of them "
            "(--resume auto is compatible with --start-from: it prefers the run's own checkpoints)"
        )
    require_checkpoint_folder(args.start_from)

    from boost.train.checkpoint import open_checkpoint

    source = open_checkpoint(Path(args.start_from)).config
    return for_weights(load(args.config, args.overrides, model=source.model), source)
