"""Shared fixtures of planner tests: a small model to search for, and boost-7b under every layout."""

from collections.abc import Iterator

from boost.config import Config, load
from boost.config.schema import ParallelConfig
from boost.plan.candidates import Request, legal, micro_batches, policies, structures
from boost.plan.hardware import Hardware, HostTime, load_hardware
from boost.plan.inspection import Inspection, inspect

LAYOUTS: dict[str, list[str]] = {
    "btp": [],
    "btp, sync": ["--parallel.norm=sync"],
    "btp, ungrouped": ["--parallel.grouping=false"],
    "btp-sp": ["--parallel.layout=btp-sp"],
    "vanilla": ["--parallel.layout=vanilla"],
    "vanilla, published": ["--parallel.layout=vanilla", "--parallel.vanilla=published"],
    "megatron": ["--parallel.layout=megatron", "--model.family=dense"],
    "megatron-sp": ["--parallel.layout=megatron-sp", "--model.family=dense"],
}

SHAPE = ("--model.dim=256", "--model.ffn_dim=512", "--model.layers=4", "--model.heads=4", "--model.vocab_size=1024")
TRAIN = ("--train.seq_len=512", "--train.global_batch=4", "--train.compute_dtype=bfloat16")


def base(*overrides: str) -> Config:
    """A small model without parallelism."""
    config = load(None, [*SHAPE, *TRAIN, "--train.micro_batch=1", *overrides])
    return config.model_copy(update={"parallel": ParallelConfig(layout="single")})


def hardware(usable: float = 80e9) -> Hardware:
    """A device with `usable` usable bytes, whose host is fast enough for small models."""
    sizes = {"memory_gb": usable / 1e9, "reserve_gb": 0.0, "communicator_gb": 0.0}
    host = HostTime(none=7.0, kernels=7.0, blocks=7.0, step=7.0)
    return load_hardware("a100-80g").model_copy(update=sizes | {"host_us": host})


def inspected(name: str = "btp", *overrides: str) -> Inspection:
    """boost-7b under a layout."""
    return inspect(load("boost-7b", [*LAYOUTS[name], *overrides]))


def every_candidate(request: Request) -> Iterator[Config]:
    """Yields every legal configuration, the brute-force reference for tests of the search."""
    for parallel in structures(request):
        for micro_batch in micro_batches(request, parallel.dp):
            for policy, every in policies(request, parallel):
                config = request.variant(parallel, micro_batch, policy, every)
                if legal(config):
                    yield config
