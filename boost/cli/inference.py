"""Shared by `boost eval` and `boost generate`: opens a checkpoint and a mesh, and starts processes."""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from boost.config import Config
from boost.config.layouts import layout_spec, layouts_of
from boost.config.rules import check
from boost.config.schema import ParallelConfig
from boost.errors import CheckpointError, ConfigError
from boost.text import printable
from boost.train.rundir import require_checkpoint_folder

if TYPE_CHECKING:
    from boost.models.decoder import Decoder
    from boost.parallel.mesh import Mesh
    from boost.train.checkpoint import Checkpoint

    OpenModel = tuple[Checkpoint, Config, Mesh, Decoder]


def add_checkpoint_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds CHECKPOINT, --tp and --device."""
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="run directory (latest checkpoint), RUN@best (best checkpoint), or step-... folder",
    )
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="TP size; starts N local processes (default 1)")
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="device (default: a GPU if available)"
    )
    parser.set_defaults(batch=0, seq_len=0)  # only `boost eval` has options for them


def inference_config(saved: Config, args: argparse.Namespace) -> Config:
    """Returns a checkpoint's configuration for a mesh of tp x 1 x 1, and `batch` sequences of `seq_len` tokens per batch (0: as in
    training). Raises ConfigError."""
    tp, device = args.tp, args.device
    if tp < 1:
        raise ConfigError(f"--tp = {tp} is too small; smallest valid value: 1")
    if device == "cuda":
        from boost.train.rendezvous import choose_device

        choose_device(device)
    batch = args.batch or saved.train.micro_batch
    train = {"micro_batch": batch, "global_batch": batch, "seq_len": args.seq_len or saved.train.seq_len}
    run = {"device": device, "recovery": "restart"}
    problem: ConfigError | None = None
    # Tries the checkpoint's layout first, then the others for its family: all load the same weights and compute the same function.
    for layout in sorted(layouts_of(saved.model), key=lambda layout: layout != saved.parallel.layout):
        own = {field: getattr(saved.parallel, field) for field in layout_spec(layout).options}
        parallel = ParallelConfig(layout=layout, tp=tp, grouping=saved.parallel.grouping, **own)
        config = saved.model_copy(update={"parallel": parallel}).changed(train=train, run=run)
        try:
            check(config)
        except ConfigError as error:
            problem = problem or error
        else:
            return config
    assert problem is not None
    raise problem


def run_on_mesh(process: Callable[..., int], args: argparse.Namespace) -> int:
    """Calls `process(args)` in this process, or in args.tp local processes. `process` must be a module-level function."""
    require_checkpoint_folder(args.checkpoint)

    import torch

    from boost.train.checkpoint import open_checkpoint
    from boost.train.launch import can_fork, launch, under_torchrun

    inference_config(open_checkpoint(Path(args.checkpoint)).config, args)  # report errors before starting processes
    if under_torchrun() or args.tp == 1:
        return process(args)
    del args.run  # a function that the processes do not need
    torch.set_num_threads(1)  # because `launch` forks
    return launch(process, (args,), args.tp, log_dir=None, forks=can_fork())


def open_model(args: argparse.Namespace, read_files: "Callable[[Checkpoint], object] | None" = None) -> "OpenModel":
    """Opens the mesh and loads the checkpoint's model on this process. `read_files` reads more of the checkpoint's files, which a
    live run may remove afterwards."""
    from boost.train.agreement import run_on_all
    from boost.train.checkpoint import load_weights, open_checkpoint, read_checkpoint
    from boost.train.model import build_decoder
    from boost.train.rendezvous import open_mesh

    path = Path(args.checkpoint)
    config = inference_config(open_checkpoint(path).config, args)
    mesh = open_mesh(config.parallel, config.run.device, config.run.timeout_s)

    def load(checkpoint: "Checkpoint") -> "OpenModel":
        config = inference_config(checkpoint.config, args)
        decoder = build_decoder(config, mesh)
        load_weights(checkpoint, decoder, mesh)
        if read_files is not None:
            run_on_all(mesh, lambda: read_files(checkpoint), CheckpointError)
        return checkpoint, config, mesh, decoder

    return read_checkpoint(path, load, mesh)


def dump(value: Mapping[str, object], as_json: bool) -> None:
    """Prints a result as JSON or as aligned lines."""
    if as_json:
        import json

        print(json.dumps(value, indent=2))
        return
    width = max(len(key) for key in value) + 2
    for key, item in value.items():
        text = f"{item:.4f}" if isinstance(item, float) else str(item)
        print(printable(f"{key.replace('_', ' '):{width}}{text}"))
