"""`python -m benchmarks ideal`: compares tensor-parallel steps against the ideal."""

import argparse
import sys
from typing import Any

from benchmarks.arguments import add_rounds, experiment_parser, require_rounds
from benchmarks.commands import main
from boost.config import load
from boost.errors import ConfigError
from boost.measure.drawing import needs_matplotlib

USUAL = "usual"
CPU = [
    "--run.device=cpu",
    *("--model.dim=1024", "--model.ffn_dim=2736", "--model.layers=2", "--model.heads=16", "--model.rank=256"),
    *("--model.vocab_size=4096", "--train.seq_len=256", "--train.micro_batch=4", "--train.global_batch=4"),
]


def add_parser(experiments: Any) -> argparse.ArgumentParser:
    parser = experiment_parser(
        experiments,
        "ideal",
        "TP steps against the ideal: TP=1 step time / TP plus communication time",
        "Times in one interleaved run: a training step under btp-sp, btp, vanilla and megatron-sp; the same step on one process;\n"
        "and the collectives of each layout in isolation. CONFIG 'usual' is d 1024 in fp32 on CPUs, boost-1b in bf16 on GPUs.",
        config=USUAL,
    )
    add_rounds(parser, 15)
    return parser


def run(args: argparse.Namespace) -> int:
    require_rounds(args)
    if args.tp < 2:
        raise ConfigError(f"--tp = {args.tp} communicates nothing; smallest valid value: 2")
    needs_matplotlib()

    from benchmarks.experiments.ideal import ideal_process, variants
    from boost.train.launch import launch, under_torchrun

    name, flags = args.config, list(args.overrides)
    if name == USUAL:
        name, usual = _usual(args.tp)
        flags = [*usual, *flags]
    config = load(name, [*flags, "--parallel.tp", str(args.tp), "--parallel.dp", "1", "--parallel.pp", "1"])
    if not config.model.low_rank:
        raise ConfigError(
            "model.family = 'dense' has no bottleneck; take cola, svd or lax (dense is always measured too)"
        )
    variants(config)  # validate before starting any process
    work = (config, args.rounds, args.out)
    return ideal_process(*work) if under_torchrun() else launch(ideal_process, work, args.tp, log_dir=None)


def _usual(tp: int) -> tuple[str, list[str]]:
    """The default preset and flags for this machine."""
    import torch

    return ("boost-1b", ["--run.device=cuda"]) if torch.cuda.device_count() >= tp else ("demo", CPU)


if __name__ == "__main__":
    sys.exit(main(["ideal", *sys.argv[1:]]))
