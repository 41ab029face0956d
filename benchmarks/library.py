"""Overhead of separate modules: `boost.nn.Decoder` against the trainer's decoder, which has fused parameters.

    python benchmarks/library.py [--rounds 15]          writes benchmarks/library.json

Times a forward and backward pass with the same weights and tokens in fp32, interleaved, on one process and on two under btp.
The ratio is the median over rounds of separate / fused, with quartiles. Keep the machine idle.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from boost.config import load
from boost.models.decoder import Decoder as RunDecoder
from boost.models.init import initialize
from boost.nn import Decoder, Spec
from boost.parallel.layouts import layout_for
from boost.train.rundir import environment

RESULT = Path(__file__).parent / "library.json"
SIZES: dict[str, dict[str, Any]] = {
    "d 512": {"dim": 512, "ffn_dim": 1376, "heads": 8, "layers": 4},
    "d 1024": {"dim": 1024, "ffn_dim": 2752, "heads": 16, "layers": 2},
}
BATCH, LENGTH, VOCABULARY = 4, 256, 2048


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, metavar="N", help="passes of each decoder (default 15)")
    args = parser.parse_args()
    found = {"environment": environment(load("demo", [])), "rounds": args.rounds, "ratios": {}}
    for processes in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            multiprocessing.spawn(_process, (processes, folder, args.rounds), nprocs=processes)
            found["ratios"][f"TP {processes}"] = json.loads((Path(folder) / "found.json").read_text(encoding="utf-8"))
    print(json.dumps(found["ratios"], indent=2))
    RESULT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


def _process(rank: int, processes: int, folder: str, rounds: int) -> None:
    torch.set_num_threads(1)
    if processes > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=processes)
    found = {name: measure(sizes, rounds) for name, sizes in SIZES.items()}
    if rank == 0:
        (Path(folder) / "found.json").write_text(json.dumps(found), encoding="utf-8")
    if processes > 1:
        dist.barrier()
        dist.destroy_process_group()


def measure(sizes: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Milliseconds per pass of each decoder, and their ratio."""
    mesh = dist.group.WORLD if dist.is_initialized() else None
    spec = Spec(family="cola", vocab_size=VOCABULARY, layout="btp", mesh=mesh, **sizes)
    separate = Decoder(spec)
    fused = RunDecoder(spec.model, layout_for(spec.model, spec.parallel, spec.mesh))
    initialize(fused, 0)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    passes: dict[str, Callable[[], torch.Tensor]] = {
        "separate": lambda: separate(tokens, tokens),
        "fused": lambda: fused(tokens, tokens) / tokens.numel(),
    }
    seconds: dict[str, list[float]] = {name: [] for name in passes}
    for number in range(rounds + 2):
        for name in sorted(passes, reverse=bool(number % 2)):
            if dist.is_initialized():
                dist.barrier()
            begun = time.perf_counter()
            passes[name]().backward()
            if number > 1:
                seconds[name].append(time.perf_counter() - begun)
    ratios = [a / b for a, b in zip(seconds["separate"], seconds["fused"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {
        "ms": {name: round(1e3 * statistics.median(each), 2) for name, each in seconds.items()},
        "ratio": round(middle, 4),
        "quartiles": [round(low, 4), round(high, 4)],
    }


if __name__ == "__main__":
    sys.exit(main())
