"""One process: do low-rank FLOP savings become time savings, and what does the layout machinery cost?

Each comparison of whole training steps is one interleaved run: first the families and a large GEMM, which sets the machine's
ceiling; then, for each family except lax, BOOST and the same model in plain PyTorch modules, eager and compiled. Comparisons are
separate because not all models fit on one GPU at once. CONFIG 'usual' means d 512 and d 1024 in fp32 on CPUs, or boost-1b in bf16
on a GPU.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial

import torch

from benchmarks.commands import LEAST_ROUNDS, add_config, add_rounds, require_least
from benchmarks.experiments.contest import Call, take_turns
from benchmarks.experiments.peers import HF, HF_COMPILED, attempt, of_family, peers
from benchmarks.experiments.plain import FORMS, plain_step
from benchmarks.experiments.results import Facts, facts_of
from benchmarks.experiments.sections import save
from benchmarks.experiments.single_report import GEMM
from boost.config import Config, load
from boost.config.architecture import flops_per_token, parameter_count
from boost.config.schema import Family
from boost.measure.steps import Stepper
from boost.parallel.mesh import Mesh
from boost.train.rendezvous import choose_device

USUAL = "usual"
FAMILIES: tuple[Family, ...] = ("dense", "cola", "svd", "lax")
PLAIN: tuple[Family, ...] = ("dense", "cola", "svd")
"""Families with plain modules."""
GEMM_WIDTH = {"cpu": 2048, "cuda": 8192}
"""Width of the square GEMM that is the ceiling."""
LEAST_S = 0.02
"""Minimum seconds per timed sample."""

_CPU = ["--run.device=cpu", "--model.vocab_size=4096", "--train.seq_len=256"]
_CPU += ["--train.micro_batch=4", "--train.global_batch=4"]
_SIZES = {
    "cpu": {
        "d 512": ("demo", [*_CPU, "--model.dim=512", "--model.ffn_dim=1376", "--model.layers=4", "--model.heads=8"]),
        "d 1024": ("demo", [*_CPU, "--model.dim=1024", "--model.ffn_dim=2736", "--model.layers=2", "--model.heads=16"]),
    },
    "cuda": {"1B": ("boost-1b", ["--run.device=cuda"])},
}


def sizes(name: str | None, overrides: Sequence[str]) -> dict[str, Config]:
    """The requested configuration, or the defaults for this device type. Raises ConfigError."""
    one = ["--parallel.tp=1", "--parallel.dp=1", "--parallel.pp=1"]
    if name is not None:
        return {name: load(name, [*overrides, *one])}
    device = choose_device(load("demo", [*overrides, *one]).run.device).type
    found = {}
    for size, (preset, flags) in _SIZES[device].items():
        rank = [] if device == "cuda" else [f"--model.rank={int(size.split()[1]) // 4}"]
        found[size] = load(preset, [*flags, *rank, *overrides, *one])
    return found


def _measure(name: str, config: Config, rounds: int) -> Facts:
    mesh = Mesh(choose_device(config.run.device))
    by_family = {family: of_family(config, family) for family in FAMILIES}
    train, width = config.train, GEMM_WIDTH[mesh.device.type]
    calls: dict[str, Call] = {family: Stepper(each, mesh).step for family, each in by_family.items()}
    theirs, reasons = peers(by_family["dense"], mesh, (HF, HF_COMPILED))
    calls |= theirs
    dtype = getattr(torch, train.compute_dtype)
    a, b = (torch.randn(width, width, dtype=dtype, device=mesh.device) for _ in range(2))
    calls[GEMM] = lambda: [torch.mm(a, b)]
    contests = {"families": asdict(take_turns(calls, mesh, rounds, least_s=LEAST_S, words=name))}
    calls.clear()
    theirs.clear()
    for family in PLAIN:
        pair: dict[str, Call] = {"ours": Stepper(by_family[family], mesh).step}
        for form in FORMS:
            step, reason = attempt(partial(plain_step, by_family[family], mesh.device, form), mesh)
            if step is None:
                reasons[f"{family}, {form}"] = reason
            else:
                pair[form] = step
        contests[family] = asdict(take_turns(pair, mesh, rounds, words=f"{name}, {family}"))
        pair.clear()
        torch._dynamo.reset()
    return {
        "size": name,
        "device": mesh.device.type,
        "models": {family: each.model.model_dump() for family, each in by_family.items()},
        "train": train.model_dump(),
        "tokens": train.global_batch * train.seq_len,
        "flops_per_token": {f: flops_per_token(each.model, train.seq_len) for f, each in by_family.items()},
        "parameters": {family: parameter_count(each.model) for family, each in by_family.items()},
        "gemm": {"width": width, "flops": 2 * width**3, "dtype": train.compute_dtype},
        "contests": contests,
        "left_out": reasons,
    }


def arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser, "single", tp=False, config=USUAL)
    add_rounds(parser, 15)


def run(args: argparse.Namespace) -> int:
    require_least("--rounds", [args.rounds], LEAST_ROUNDS)
    configs = sizes(None if args.config == USUAL else args.config, args.overrides)
    for config in configs.values():  # validate before measuring anything
        for family in FAMILIES:
            of_family(config, family)
    measured = [_measure(name, config, args.rounds) for name, config in configs.items()]
    save(args.out, facts_of("single", next(iter(configs.values())), rounds=args.rounds, sizes=measured))
    return 0
