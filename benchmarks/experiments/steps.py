"""Measures end-to-end step time under every layout and family, with width proportional to TP (weak scaling).

Reproduces the paper's step-time tables: whole optimizer steps, bytes sent and peak memory. All contenders of a table are
interleaved in one run. Larger TP sizes use single-rank emulation, with communication modeled from a hardware profile. The model's
size depends on device and TP, so only CONFIG's optimizer is used, and --section.key applies to every contender.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.commands import LEAST_ROUNDS, add_config, add_rounds, require_least
from benchmarks.experiments import published
from benchmarks.experiments.results import facts_of
from benchmarks.experiments.sections import save
from benchmarks.experiments.side_by_side import TimingGroup, run_groups
from boost.config import Config, load
from boost.config.schema import DType, Family
from boost.errors import ConfigError
from boost.measure.steps import SIZE_1B, flags, shape
from boost.plan.hardware import Hardware, load_hardware, profile_of
from boost.train.hardware import total_memory

WEAK_SCALING, FAMILIES, BOUND, SHARES = "weak scaling", "by architecture", "communication-bound", "share of a process"
"""Purposes of groups."""

BTP, BTP_SYNC, BTP_SP, VANILLA, PUBLISHED = "btp, online", "btp, sync", "btp-sp", "vanilla", "vanilla, published"
MEGATRON, MEGATRON_SP = "megatron", "megatron-sp"
"""Names of contenders."""

PARALLEL: dict[str, dict[str, Any]] = {
    MEGATRON: {"layout": "megatron"},
    MEGATRON_SP: {"layout": "megatron-sp"},
    BTP: {"layout": "btp", "norm": "online"},
    BTP_SYNC: {"layout": "btp", "norm": "sync"},
    BTP_SP: {"layout": "btp-sp"},
    VANILLA: {"layout": "vanilla"},
    PUBLISHED: {"layout": "vanilla", "vanilla": "published"},
}
"""Parallel configurations of the layouts that shard weights; the two of Megatron-LM are dense."""

_SHARED_TP = (4, 8)
"""TP sizes of single-rank emulation on CPUs; GPUs add TP 2."""

SIZE_3B, SIZE_7B = (3072, 4, 8192, 24), (4096, 4, 11008, 32)
"""(d, blocks, f, heads)."""

WIDTH = 512
"""d on CPUs at TP 1."""

_BASE = {
    "cpu": flags(vocab_size=1024, seq_len=256, micro_batch=4, global_batch=4),
    "cuda": flags(vocab_size=4096, seq_len=4096, micro_batch=2, global_batch=4),
}
"""With few blocks, the head is a larger fraction of the model; a proportionally smaller vocabulary compensates. The paper's steps
have 4 sequences of 4096 tokens."""

_BOUND = (*shape(64, 8, 176, 2), *flags(vocab_size=64, seq_len=64, micro_batch=16, global_batch=32))
"""Narrow GEMMs in many blocks: collectives dominate the step time."""


@dataclass(frozen=True)
class Machine:
    """The machine to measure on."""

    device: str
    """cpu | cuda"""
    tp: int
    """Number of TP processes to run here; 1: single-process groups only."""
    hardware: Hardware | None
    """Hardware profile for modeled collectives; None: no single-rank emulation."""
    why_no_shares: str = ""


def machine_of(device: str, tp: int | None, hardware: str | None) -> Machine:
    """Resolves `--device`, `--tp` and `--hardware`. Raises ConfigError."""
    gpus = torch.cuda.device_count() if device != "cpu" and torch.cuda.is_available() else 0
    if device == "cuda" and not gpus:
        raise ConfigError("run.device = 'cuda', but torch sees no GPU; nearest valid value: 'cpu'")
    if gpus and tp is not None and tp > gpus:
        raise ConfigError(f"--tp = {tp} needs {tp} GPUs, but there are {gpus}; nearest valid value: {gpus}")
    processes = tp or gpus or 2
    kind = "cuda" if gpus else "cpu"
    known = profile_of(torch.cuda.get_device_name(0), total_memory(torch.device("cuda", 0))) if gpus else None
    name = hardware or known
    if name is None:
        what = "this GPU has no profile" if gpus else "no hardware profile of this machine was given"
        why = f"{what}: run 'boost plan calibrate --out local.toml', then add --hardware local.toml"
        return Machine(kind, processes, None, why)
    priced = load_hardware(name)
    if priced.device != kind:
        raise ConfigError(
            f"--hardware = '{name}' is a {priced.device} profile, but this is a {kind} machine; use a profile of this machine "
            "from 'boost plan calibrate'"
        )
    return Machine(kind, processes, priced)


def groups(machine: Machine, overrides: Sequence[str] = (), source: str = "demo") -> list[TimingGroup]:
    """All groups to measure on `machine`. `overrides` apply to every configuration. Raises ConfigError."""
    build = _Builder(machine.device, overrides, source)
    dtypes: tuple[DType, ...] = ("float32", "bfloat16") if machine.device == "cpu" else ("bfloat16",)
    found = [build.one_process(dtypes[0])]
    if machine.tp > 1:
        found += [build.weak_scaling(machine.tp, dtype) for dtype in dtypes]
        found += [build.families(machine.tp, dtypes[0]), build.bound(machine.tp, dtypes[0])]
    if machine.hardware is not None:
        sizes = _SHARED_TP if machine.device == "cpu" else (2, *_SHARED_TP)
        found += [build.share(tp, dtypes[0]) for tp in sizes]
    return found


class _Builder:
    """Builds groups whose model sizes scale with TP, with the user's overrides."""

    def __init__(self, device: str, overrides: Sequence[str], source: str) -> None:
        self.device, self.overrides, self.source = device, overrides, source

    def one_process(self, dtype: DType) -> TimingGroup:
        """Every family, unsharded."""
        families: tuple[Family, ...] = ("dense", "cola", "svd", "lax")
        words = cut_flags({"layout": "single"}, 1)
        found: dict[str, Config] = {
            family: self._load([*size_flags(self.device, 1, dtype, family), *words]) for family in families
        }
        return TimingGroup(f"{WEAK_SCALING}, TP 1, {dtype}", WEAK_SCALING, found)

    def weak_scaling(self, tp: int, dtype: DType) -> TimingGroup:
        """Every layout of the dense model and of cola, and other libraries. bf16 on a CPU is up to five times slower, so only the
        four layouts in the goals run; fp32 on a CPU uses two micro-batches."""
        few = self.device == "cpu" and dtype == "bfloat16"
        names = (MEGATRON_SP, VANILLA, BTP, BTP_SP) if few else (MEGATRON, MEGATRON_SP, VANILLA, PUBLISHED, BTP, BTP_SP)
        more = flags(global_batch=8) if self.device == "cpu" and not few else []
        found = {name: self._layout(name, tp, dtype, more=more) for name in names}
        return TimingGroup(f"{WEAK_SCALING}, TP {tp}, {dtype}", WEAK_SCALING, found, peers=not few)

    def families(self, tp: int, dtype: DType) -> TimingGroup:
        """The low-rank families under the paper's two layouts, and the dense model, all at half the width."""
        found = {MEGATRON: self._layout(MEGATRON, tp, dtype, width=256)}
        for family in published.FAMILIES:
            for name in (PUBLISHED, BTP):
                found[f"{family}: {name}"] = self._layout(name, tp, dtype, family, width=256)
        return TimingGroup(f"{FAMILIES}, TP {tp}, {dtype}", FAMILIES, found)

    def bound(self, tp: int, dtype: DType) -> TimingGroup:
        """A communication-bound model."""
        usual = [*_usual(self.device, dtype), *_BOUND]
        found = {name: self._load([*usual, *cut_flags(PARALLEL[name], tp)]) for name in (VANILLA, BTP, BTP_SP)}
        return TimingGroup(f"{BOUND}, TP {tp}, {dtype}", BOUND, found)

    def share(self, tp: int, dtype: DType) -> TimingGroup:
        """Single-rank emulation of TP."""
        found = {name: self._layout(name, tp, dtype) for name in (MEGATRON_SP, VANILLA, BTP, BTP_SP)}
        return TimingGroup(f"share of TP {tp}, {dtype}", SHARES, found, share=True)

    def _layout(
        self, name: str, tp: int, dtype: DType, family: str = "cola", width: int = WIDTH, more: Sequence[str] = ()
    ) -> Config:
        family = "dense" if name in (MEGATRON, MEGATRON_SP) else family
        size = size_flags(self.device, tp, dtype, family, width)
        return self._load([*size, *more, *cut_flags(PARALLEL[name], tp)])

    def _load(self, words: Sequence[str]) -> Config:
        return load(self.source, [*words, *self.overrides])


def size_flags(device: str, tp: int, dtype: DType, family: str, width: int = WIDTH) -> list[str]:
    """Overrides for the model size at `tp`. On CPUs, d = `width` x TP and f = 8/3 d, as in LLaMA."""
    dim = width * tp
    size = (dim, 2, 16 * -(-8 * dim // 48), dim // 64)
    if device == "cuda":
        size = {1: SIZE_1B, 2: SIZE_3B}.get(tp, SIZE_7B)
    return [*_usual(device, dtype), *_BASE[device], *shape(*size, family=family)]


def cut_flags(parallel: Mapping[str, Any], tp: int) -> list[str]:
    """Overrides for a TP-only mesh."""
    fields = {**parallel, "tp": tp, "dp": 1, "pp": 1}
    return [f"--parallel.{field}={str(value).lower()}" for field, value in fields.items()]


def _usual(device: str, dtype: DType) -> list[str]:
    # The learning rate is tiny because thousands of steps on the same tokens must not change the numerics.
    return [f"--run.device={device}", f"--train.compute_dtype={dtype}", "--optim.lr=1e-6"]


def arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser, "steps", tp=False)
    words = "TP processes (default: one per GPU, 2 on CPUs); 1 skips sharded models"
    parser.add_argument("--tp", type=int, metavar="N", help=words)
    words = "profile of this device type to model collectives of emulated TP sizes (default: the GPU's; none on CPUs)"
    parser.add_argument("--hardware", metavar="FILE|NAME", help=words)
    add_rounds(parser, 9)


def run(args: argparse.Namespace) -> int:
    require_least("--rounds", [args.rounds], LEAST_ROUNDS)
    if args.tp is not None:
        require_least("--tp", [args.tp])
    machine = machine_of(load(args.config, args.overrides).run.device, args.tp, args.hardware)
    found = groups(machine, args.overrides, args.config)  # validate before starting any process
    measured = run_groups(found, args.rounds, machine.hardware)
    shared = " and ".join(map(str, _SHARED_TP))
    left_out = [f"emulation of TP {shared}: {machine.why_no_shares}"] if machine.why_no_shares else []
    config = next(iter(found[0].contenders.values()))
    save(args.out, facts_of("steps", config, rounds=args.rounds, groups=measured, left_out=left_out))
    return 0
