"""Times every element-wise kernel of the model in isolation, eager and compiled: seconds, and GB/s for the bytes it must move."""

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.experiments.results import write_numbers
from boost.measure.speed import synchronize
from boost.models import kernels
from boost.models.kernels import KERNELS
from boost.parallel.loss import logit_gradient, token_logits
from boost.train.hardware import now, seconds_between

ROUNDS, CALLS = 20, 50
HEAD_START = 10_000_000
"""Cycles (a few milliseconds) that a GPU waits before the first call of a round."""


def arguments_of(tokens: int, width: int, dtype: torch.dtype, device: torch.device) -> dict[str, tuple[Any, ...]]:
    """Arguments of each kernel, large enough to fill a GPU."""

    def new(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, dtype=of, device=device)

    wide = torch.float32
    column, rows = new(tokens, 1, of=wide), [new(tokens, width) for _ in range(3)]
    heads = new(4, tokens // 4, 8, width // 8)
    angles = new(tokens // 4, 1, width // 8), new(tokens // 4, 1, width // 16)
    gains = new(width, of=wide)
    logits, sums = new(tokens, 2 * width), new(tokens, of=wide)
    targets, counted = torch.randint(0, 2 * width, (tokens,), device=device), new(tokens) < 1
    return {
        "activated": (rows[0], column, True),
        "activated_backward": (rows[0], rows[1], column, True),
        "gated": (rows[0], rows[1]),
        "gated_backward": tuple(rows),
        "rotated": (heads, *angles, 1),
        "scaled_backward": (rows[0], rows[1], column),
        "row_product": (rows[0], rows[1], wide),
        "normed": (rows[0], gains, 1e-6),
        "normed_backward": (rows[0], rows[1], gains, column),
        token_logits.name: (logits, targets, counted),
        logit_gradient.name: (logits.clone(), sums, targets, counted, counted),
    }


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Median seconds of a call over several rounds. On a GPU, two events around many calls time the kernels, not their
    launches."""
    calls = CALLS if device.type == "cuda" else 1
    for _ in range(3):
        call()
    times = []
    for _ in range(ROUNDS):
        synchronize(device)
        if device.type == "cuda":
            torch.cuda._sleep(HEAD_START)  # the host enqueues calls while the GPU waits
        begun = now(device)
        for _ in range(calls):
            call()
        times.append(seconds_between(begun, now(device)) / calls)
    return statistics.median(times)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    on_gpu = args.device == "cuda"
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    made = arguments_of(args.tokens, args.width, torch.bfloat16 if on_gpu else torch.float32, device)
    missing = KERNELS.keys() - made.keys()
    assert not missing, f"kernels without a measurement: {missing}"
    found = []
    for name, arguments in made.items():
        row: dict[str, Any] = {"kernel": name}
        for backend in ("eager", "inductor"):
            kernels.use(backend)
            with torch.no_grad():
                result = KERNELS[name](*arguments)
                row[f"{backend}_s"] = seconds(partial(KERNELS[name], *arguments), device)
        kernels.use("eager")
        results = result if isinstance(result, tuple) else (result,)
        read = KERNELS[name].reads * sum(x.nbytes for x in arguments if isinstance(x, Tensor))
        moved = read + sum(x.nbytes for x in results)
        row |= {"bytes": moved, "compiled_gb_s": moved / row["inductor_s"] / 1e9}
        found.append(row)
        eager, compiled = (f"{row[key] * 1e6:8.1f} us" for key in ("eager_s", "inductor_s"))
        print(f"{name:<20} eager {eager}, compiled {compiled}, {row['compiled_gb_s']:7.1f} GB/s", flush=True)
        write_numbers(args.out, found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
