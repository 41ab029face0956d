"""What `boost eval` and `boost generate` share: a checkpoint, the mesh that is to run it, and the processes for it."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from boost.config import Config
from boost.config.cuts import DENSE_LAYOUTS, LOW_RANK_LAYOUTS
from boost.config.rules import check, check_runnable
from boost.config.schema import ParallelConfig
from boost.errors import ConfigError

if TYPE_CHECKING:
    from boost.models.decoder import Decoder
    from boost.parallel.mesh import Mesh
    from boost.train.checkpoint import Checkpoint


def add_checkpoint_arguments(parser: argparse.ArgumentParser) -> None:
    """CHECKPOINT, --tp and --device."""
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="run directory (its newest checkpoint) or step-... folder"
    )
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="TP processes, started here (default 1)")
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: a GPU if there is one"
    )


def inference_config(saved: Config, tp: int, device: str) -> Config:
    """The configuration of a checkpoint on a mesh of tp x 1 x 1. Raises ConfigError."""
    if tp < 1:
        raise ConfigError(f"--tp = {tp} is too small; the smallest legal value is 1")
    parallel = saved.parallel
    layouts = LOW_RANK_LAYOUTS if saved.model.low_rank else DENSE_LAYOUTS
    if parallel.layout not in layouts:  # trained on one process, where every layout is 'single'
        parallel = ParallelConfig(layout=layouts[0])
    if device == "cuda":
        from boost.parallel.mesh import choose_device

        choose_device(device)
    parallel = parallel.model_copy(update={"tp": tp, "pp": 1, "dp": 1})
    config = saved.model_copy(update={"parallel": parallel, "run": saved.run.model_copy(update={"device": device})})
    check(config)
    check_runnable(config)
    return config


def run_on_mesh(process: Callable[..., int], args: argparse.Namespace) -> int:
    """Calls `process(args)` here, or in args.tp local processes; `process` must be a module-level function."""
    from boost.train.checkpoint import open_checkpoint
    from boost.train.launch import launch, under_torchrun

    inference_config(open_checkpoint(Path(args.checkpoint)).config, args.tp, args.device)  # mistakes first
    if under_torchrun() or args.tp == 1:
        return process(args)
    del args.run  # a module's function: looked up again by the process
    return launch(process, (args,), args.tp, log_dir=None)


def open_model(args: argparse.Namespace) -> "tuple[Checkpoint, Config, Mesh, Decoder]":
    """The checkpoint's model with its weights, on this process of the mesh."""
    from boost.parallel.mesh import open_mesh
    from boost.train.checkpoint import load_weights, open_checkpoint
    from boost.train.model import build_decoder

    checkpoint = open_checkpoint(Path(args.checkpoint))
    config = inference_config(checkpoint.config, args.tp, args.device)
    mesh = open_mesh(config.parallel, config.run.device, config.run.timeout_s)
    decoder = build_decoder(config, mesh)
    load_weights(checkpoint, decoder, mesh)
    return checkpoint, config, mesh, decoder


def dump(value: dict[str, Any], as_json: bool) -> None:
    """Prints a result as JSON or as aligned lines."""
    if as_json:
        import json

        print(json.dumps(value, indent=2))
        return
    width = max(len(key) for key in value) + 2
    for key, item in value.items():
        text = f"{item:.4f}" if isinstance(item, float) else str(item)
        print(f"{key.replace('_', ' '):{width}}{text}")
