"""Times one of four TP processes in isolation: seconds and MFU of a step of 7B-shaped blocks, with a profiler trace.

Nothing is sent (`benchmarks.experiments.shares`), so this times the work between collectives, eager or compiled.
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.experiments.results import write_numbers
from benchmarks.experiments.shares import share_prediction, without_the_others
from boost.config import load
from boost.config.architecture import flops_per_token
from boost.layouts import layout_spec
from boost.measure.steps import Stepper, synchronize
from boost.plan.hardware import load_hardware
from boost.train.graphs import WARM_UP
from boost.train.hardware import peak_flops

TP, WARM, ROUNDS = 4, WARM_UP + 1, 7
STEPS = 4
"""Steps per round on a GPU."""


def measured(args: argparse.Namespace, layout: str, micro_batch: int, device: torch.device) -> dict[str, Any]:
    """Measures one layout at one micro-batch size."""
    family = "cola" if layout_spec(layout).low_rank else "dense"
    sizes = {"dim": args.dim, "ffn_dim": args.ffn, "heads": args.heads, "layers": args.layers, "family": family}
    words = [f"--model.{name}={value}" for name, value in sizes.items()]
    words += [f"--model.rank={args.dim // 4}"] if family == "cola" else []
    words += [
        f"--train.{name}={value}" for name, value in (("micro_batch", micro_batch), ("global_batch", micro_batch))
    ]
    words += [f"--train.seq_len={args.seq}", f"--train.compile={args.compile}", f"--run.device={args.device}"]
    words += ["--train.cuda_graphs=on"] if args.graphs else []
    words += ["--model.vocab_size=32000" if args.device == "cuda" else "--model.vocab_size=512"]
    words += ["--train.compute_dtype=bfloat16"] if args.device == "cuda" else []
    config = load("demo", [*words, f"--parallel.layout={layout}", f"--parallel.tp={TP}"])
    with without_the_others(config.parallel, device) as mesh:
        stepper = Stepper(config, mesh)
        for _ in range(WARM):
            stepper.step()
        times = []
        for _ in range(ROUNDS):
            times.append(stepper.seconds(STEPS if device.type == "cuda" else 1))
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        with profile(activities=activities) as recorded:
            stepper.step()
            synchronize(device)
        args.traces.mkdir(parents=True, exist_ok=True)
        recorded.export_chrome_trace(str(args.traces / f"{layout}-{micro_batch}.json"))
    seconds = statistics.median(times)
    predicted = share_prediction(config, load_hardware(args.hardware)) if args.hardware else None
    flops = flops_per_token(config.model, config.train.seq_len) * micro_batch * config.train.seq_len / TP
    peak = peak_flops(device, getattr(torch, config.train.compute_dtype))
    memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return {
        "layout": layout,
        "micro_batch": micro_batch,
        "compile": args.compile,
        "graphs": args.graphs,
        "seconds": times,
        "median_s": seconds,
        "mfu": flops / seconds / peak,
        "peak_bytes": memory,
        "predicted_s": predicted and predicted.predicted_s,
        "predicted_peak": predicted and predicted.predicted_peak,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--compile", choices=("none", "kernels", "blocks"), default="kernels")
    parser.add_argument("--graphs", action="store_true", help="capture the passes as CUDA graphs")
    for name in ("dim", "ffn", "heads", "layers", "seq"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--layouts", nargs="+", default=["btp", "btp-sp", "btp-cp", "vanilla", "megatron-sp"])
    parser.add_argument("--hardware", metavar="PROFILE", help="hardware profile to predict each step with")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--traces", type=Path, required=True)
    args = parser.parse_args()
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.init()  # memory statistics need it
    rows = []
    for layout in args.layouts:
        for micro_batch in args.micro_batches:
            torch._dynamo.reset()  # otherwise, the shapes of ten configurations exceed the recompile limit
            if device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats(device)
            rows.append(measured(args, layout, micro_batch, device))
            print(
                f"{layout:<12} micro-batch {micro_batch}: {rows[-1]['median_s'] * 1e3:.1f} ms, MFU {rows[-1]['mfu']:.1%}",
                flush=True,
            )
            write_numbers(args.out, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
