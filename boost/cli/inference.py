"""Shared by `boost eval` and `boost generate`: opening a checkpoint, its mesh, and starting processes."""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from boost.config import Config
from boost.config.layouts import layout_spec, layouts_of
from boost.config.rules import check
from boost.config.schema import ParallelConfig
from boost.errors import ConfigError

if TYPE_CHECKING:
    from boost.models.decoder import Decoder
    from boost.parallel.mesh import Mesh
    from boost.train.checkpoint import Checkpoint

    OpenModel = tuple[Checkpoint, Config, Mesh, Decoder]


def add_checkpoint_arguments(parser: argparse.ArgumentParser) -> None:
    """CHECKPOINT, --tp and --device."""
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="run directory (its newest checkpoint; RUN@best: its best one) or step-... folder",
    )
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="TP processes, started here (default 1)")
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: a GPU if there is one"
    )


def inference_config(saved: Config, tp: int, device: str, batch: int = 0) -> Config:
    """The configuration of a checkpoint on a mesh of tp x 1 x 1, for `batch` sequences at once (0: train.micro_batch).

    Raises ConfigError.
    """
    if tp < 1:
        raise ConfigError(f"--tp = {tp} is too small; smallest valid value: 1")
    if device == "cuda":
        from boost.parallel.mesh import choose_device

        choose_device(device)
    batch = batch or saved.train.micro_batch
    train = saved.train.model_copy(update={"micro_batch": batch, "global_batch": batch})
    run = saved.run.model_copy(update={"device": device, "recovery": "restart"})
    problem: ConfigError | None = None
    for parallel in _ways(saved, tp):
        config = saved.model_copy(update={"parallel": parallel, "train": train, "run": run})
        try:
            check(config)
        except ConfigError as error:
            problem = problem or error
        else:
            return config
    assert problem is not None
    raise problem


def _ways(saved: Config, tp: int) -> Iterator[ParallelConfig]:
    """The layout of a checkpoint, then the others of its family: any loads the same weights."""
    layouts = layouts_of(saved.model)
    own = saved.parallel.layout  # trained on one process, it may be one of another family
    for layout in sorted(layouts, key=lambda layout: layout != own):
        kept = {field: getattr(saved.parallel, field) for field in layout_spec(layout).options}
        yield ParallelConfig(layout=layout, tp=tp, grouping=saved.parallel.grouping, **kept)


def run_on_mesh(process: Callable[..., int], args: argparse.Namespace) -> int:
    """Calls `process(args)` here, or in args.tp local processes; `process` must be a module-level function."""
    from boost.train.checkpoint import open_checkpoint
    from boost.train.launch import launch, under_torchrun

    _config_for(open_checkpoint(Path(args.checkpoint)), args)  # mistakes first
    if under_torchrun() or args.tp == 1:
        return process(args)
    del args.run  # a module's function: looked up again by the process
    return launch(process, (args,), args.tp, log_dir=None)


def open_model(args: argparse.Namespace) -> "OpenModel":
    """The checkpoint's model with its weights, on this process of the mesh."""
    from boost.parallel.mesh import open_mesh
    from boost.train.checkpoint import load_weights, open_checkpoint
    from boost.train.model import build_decoder

    checkpoint = open_checkpoint(Path(args.checkpoint))
    config = _config_for(checkpoint, args)
    mesh = open_mesh(config.parallel, config.run.device, config.run.timeout_s)
    decoder = build_decoder(config, mesh)
    load_weights(checkpoint, decoder, mesh)
    return checkpoint, config, mesh, decoder


def _config_for(checkpoint: "Checkpoint", args: argparse.Namespace) -> Config:
    return inference_config(checkpoint.config, args.tp, args.device, getattr(args, "batch", 0))


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
