"""Measures generation speed: a low-rank model with grouped, unmerged factors against transformers' dense model of the same shape.

    python -m benchmarks.decode [--rounds 9] [--threads 1 2] [--sizes ...] [--dtypes ...] [--batches ...]

writes benchmarks/decode.json. A result replaces any with the same size, dtype, threads and batch.

In every round, each contender continues the same prompts once with greedy decoding: the low-rank (CoLA) model in the code of
`boost generate`, its export in transformers, and the dense model of the same width, depth and vocabulary in transformers. Prefill
is the time to the first token; decode is the mean time per later token. Ratios are medians of per-round ratios, with a bootstrap
interval. Every round also times a large matrix-vector product (read bandwidth) and a large GEMM (FLOP/s), which set the limits.
Keep the machine idle.
"""

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.commands import LEAST_ROUNDS
from benchmarks.experiments.contest import ratio, spread
from benchmarks.experiments.results import MeasurementError
from boost.api.model import FILE_BYTES, Model
from boost.config import Config, load
from boost.config.architecture import parameter_count
from boost.config.schema import ModelConfig
from boost.convert.export import export
from boost.format import format_bytes, format_seconds
from boost.models.decoder import Decoder
from boost.parallel.mesh import Mesh
from boost.train.checkpoint import load_weights, open_checkpoint
from boost.train.generate import generate_batch, prepare_inference
from boost.train.model import build_decoder
from boost.train.rundir import environment
from boost.train.sampling import Sampling

RESULT = Path(__file__).with_suffix(".json")
VOCABULARY = 32000
SIZES: dict[str, dict[str, Any]] = {
    "d 1024, 12 layers": {"dim": 1024, "ffn_dim": 2736, "heads": 16, "layers": 12},
    "d 2048, 8 layers": {"dim": 2048, "ffn_dim": 5461, "heads": 32, "layers": 8},
}
BATCHES = {1: (128, 17), 16: (32, 9)}
"""Batch -> (tokens of each prompt, tokens to generate)."""
READ_ROWS, GEMM_WIDTH = 16384, 2048
"""Rows of the matrix that measures bandwidth, [READ_ROWS, 4096], and the GEMM's width."""

LOW_RANK, EXPORTED, DENSE = "low-rank, boost", "low-rank, transformers", "dense, transformers"


class Run(NamedTuple):
    """One generation."""

    seconds: list[float]
    """Seconds from the start to each token of all sequences."""
    texts: list[list[int]]

    @property
    def prefill(self) -> float:
        """Seconds to the first token."""
        return self.seconds[0]

    @property
    def decode(self) -> float:
        """Seconds per later step, each of which adds a token to every sequence."""
        return (self.seconds[-1] - self.seconds[0]) / (len(self.seconds) - 1)


Contender = Callable[[list[list[int]], int], Run]
"""(prompts of one length, new tokens) -> run."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="timed rounds (default 9)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], metavar="N", help="default 1 2")
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=SIZES, help="default: all")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], help="default float32 bfloat16")
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES), choices=BATCHES, help="default: all")
    parser.add_argument("--out", type=Path, default=RESULT, metavar="PATH", help=f"default {RESULT.name}")
    args = parser.parse_args()
    if args.rounds < LEAST_ROUNDS:
        parser.error(f"--rounds = {args.rounds} is too small; smallest valid value: {LEAST_ROUNDS}")
    for size in args.sizes:
        for dtype in args.dtypes:
            with tempfile.TemporaryDirectory() as folder:
                for result in measure(size, dtype, args.threads, args.batches, args.rounds, Path(folder)):
                    show(result)
                    save(args.out, result)
            gc.collect()
    return 0


def save(path: Path, result: dict[str, Any]) -> None:
    """Adds a result to a file, replacing an earlier one."""

    def identity(each: dict[str, Any]) -> list[Any]:
        return [each[key] for key in ("size", "dtype", "batch", "threads")]

    others = json.loads(path.read_text(encoding="utf-8"))["results"] if path.exists() else []
    kept = [each for each in others if identity(each) != identity(result)]
    results = sorted([*kept, result], key=identity)
    path.write_text(json.dumps({"results": results}, indent=1) + "\n", encoding="utf-8")


def config_of(size: str, family: str, dtype: str) -> Config:
    """The configuration of a family at this size."""
    sizes = [f"--model.{key}={value}" for key, value in SIZES[size].items()]
    rank = [] if family == "dense" else [f"--model.rank={SIZES[size]['dim'] // 4}"]
    dtypes = [f"--train.{key}_dtype={dtype}" for key in ("param", "compute")]
    model = [f"--model.family={family}", f"--model.vocab_size={VOCABULARY}", *sizes, *rank]
    return load("demo", [*model, *dtypes, "--parallel.tp=1"])


class Models:
    """The models of one size and dtype: checkpoints, and their transformers exports."""

    def __init__(self, size: str, dtype: str, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._checkpoints, self._exported = {}, {}
        for family in ("cola", "dense"):
            config = config_of(size, family, dtype)
            self._checkpoints[family] = open_checkpoint(
                Model.from_config(config, dtype=getattr(torch, dtype)).save(folder / f"{family}.boost")
            )
            export(self._checkpoints[family], folder / family, dtype, False, FILE_BYTES, official=False)
            model = AutoModelForCausalLM.from_pretrained(folder / family, trust_remote_code=True, dtype=dtype)
            self._exported[family] = in_transformers(model.eval())

    def contenders(self, batch: int) -> dict[str, Contender]:
        """What is timed."""
        return {
            LOW_RANK: self.in_boost("cola", batch),
            EXPORTED: self._exported["cola"],
            DENSE: self._exported["dense"],
        }

    def in_boost(self, family: str, batch: int) -> Contender:
        """A model as `boost generate` loads it."""
        checkpoint, mesh = self._checkpoints[family], Mesh(torch.device("cpu"))
        decoder = build_decoder(checkpoint.config, mesh)
        load_weights(checkpoint, decoder, mesh)
        prepare_inference(decoder, batch)
        return in_boost(decoder)

    def equal(self, batch: int) -> dict[str, float]:
        """For each family, the fraction of boost's greedy tokens that match those of its transformers export."""
        found = {}
        for family, exported in self._exported.items():
            prompts = prompts_of(batch, 24)
            pairs = zip(self.in_boost(family, batch)(prompts, 24).texts, exported(prompts, 24).texts, strict=True)
            tokens = [(ours, theirs) for each in pairs for ours, theirs in zip(*each, strict=True)]
            found[family] = sum(ours == theirs for ours, theirs in tokens) / len(tokens)
        return found


def in_boost(decoder: Decoder) -> Contender:
    """What `boost generate` runs."""

    def run(prompts: list[list[int]], new: int) -> Run:
        texts: list[list[int]] = [[] for _ in prompts]
        seconds, begun = [], time.perf_counter()
        for each in generate_batch(decoder, prompts, new, Sampling(0.0), batch=len(prompts)):
            texts[each.prompt].append(each.token)
            if each.prompt == len(prompts) - 1:
                seconds.append(time.perf_counter() - begun)
        return Run(seconds, texts)

    return run


def in_transformers(model: Any) -> Contender:
    """`model.generate`, with its default cache and attention."""

    def run(prompts: list[list[int]], new: int) -> Run:
        seconds: list[float] = []
        begun = time.perf_counter()

        def at_each_token(tokens_BS: Tensor, _: Any, **__: Any) -> Tensor:
            seconds.append(time.perf_counter() - begun)
            return torch.zeros(len(tokens_BS), dtype=torch.bool)

        tokens_BS = torch.tensor(prompts)
        made = model.generate(
            tokens_BS,
            attention_mask=torch.ones_like(tokens_BS),
            max_new_tokens=new,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            stopping_criteria=[at_each_token],
        )
        return Run(seconds, made[:, tokens_BS.shape[1] :].tolist())

    return run


def prompts_of(batch: int, length: int) -> list[list[int]]:
    """Random prompts; speed does not depend on the tokens."""
    generator = torch.Generator().manual_seed(0)
    found: list[list[int]] = torch.randint(VOCABULARY, (batch, length), generator=generator).tolist()
    return found


def measure(
    size: str, dtype: str, threads: Sequence[int], batches: Sequence[int], rounds: int, folder: Path
) -> Iterator[dict[str, Any]]:
    """Yields the result of every batch and number of threads."""
    models, measured_in = Models(size, dtype, folder), environment(load("demo", []))
    for batch in batches:
        length, new = BATCHES[batch]
        equal = models.equal(batch)
        if dtype == "float32" and min(equal.values()) < 1:
            raise MeasurementError(
                f"greedy texts differ at {size}: {equal}; the timings would compare different functions"
            )
        contenders = models.contenders(batch)
        for count in threads:
            torch.set_num_threads(count)
            runs = interleaved(contenders, dtype, rounds, prompts_of(batch, length), new)
            facts = {"size": size, "dtype": dtype, "threads": count, "batch": batch, "prompt": length, "new": new}
            facts |= {"rounds": rounds, "equal_greedy_tokens": equal, "environment": measured_in}
            yield facts | summary(size, dtype, batch, length, new, runs)


def interleaved(
    contenders: dict[str, Contender], dtype: str, rounds: int, prompts: list[list[int]], new: int
) -> dict[str, list[Any]]:
    """Seconds of each contender by round, starting with a different one each time: {name: runs, "read", "gemm": seconds}."""
    found: dict[str, list[Any]] = {name: [] for name in (*contenders, "read", "gemm")}
    names = list(contenders)
    rows = torch.randn(READ_ROWS, 4096).to(getattr(torch, dtype))
    square = torch.randn(GEMM_WIDTH, GEMM_WIDTH).to(getattr(torch, dtype))
    for number in range(-1, rounds):
        first = number % len(names)
        measured: dict[str, Any] = {}
        for name in names[first:] + names[:first]:
            measured[name] = contenders[name](prompts, new)
            gc.collect()
        measured["read"] = best(lambda: torch.mv(rows, rows[0]))
        measured["gemm"] = best(lambda: torch.mm(square, square))
        if number >= 0:  # the first round is a warm-up
            for name, value in measured.items():
                found[name].append(value)
    return found


def best(call: Callable[[], Tensor]) -> float:
    """Time of the fastest of five calls, in seconds."""
    seconds = []
    for _ in range(5):
        begun = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begun)
    return min(seconds)


def summary(size: str, dtype: str, batch: int, length: int, new: int, runs: dict[str, list[Any]]) -> dict[str, Any]:
    """Seconds with quartiles, ratios to the dense model with intervals, and hardware limits."""
    itemsize = getattr(torch, dtype).itemsize
    bandwidth = READ_ROWS * 4096 * itemsize / statistics.median(runs["read"])
    peak = 2 * GEMM_WIDTH**3 / statistics.median(runs["gemm"])
    cached = length + new / 2
    limits = {}
    for family, name in (("cola", LOW_RANK), ("dense", DENSE)):
        model = config_of(size, family, dtype).model
        read = parameter_count(model) - model.vocab_size * model.dim  # weights read per token: all but the embedding
        bytes_ = itemsize * (read + batch * cached * 2 * model.layers * model.kv_heads * model.head_dim)
        flops = prefill_flops(model, batch, length)
        limits[name] = {
            "decode_bytes": int(bytes_),
            "decode_s": bytes_ / bandwidth,
            "prefill_flops": int(flops),
            "prefill_s": flops / peak,
        }
    seconds = {
        phase: {name: [getattr(run, phase) for run in runs[name]] for name in (LOW_RANK, EXPORTED, DENSE)}
        for phase in ("prefill", "decode")
    }
    return {
        "bandwidth_bytes_s": bandwidth,
        "gemm_flops_s": peak,
        "limits": limits,
        "limit_ratio": {
            phase: limits[DENSE][f"{phase}_s"] / limits[LOW_RANK][f"{phase}_s"] for phase in ("prefill", "decode")
        },
        "seconds": seconds,
        "spread": {p: {name: vars(spread(each)) for name, each in s.items()} for p, s in seconds.items()},
        "speedup": {
            phase: {name: vars(ratio(each[DENSE], each[name])) for name in (LOW_RANK, EXPORTED)}
            for phase, each in seconds.items()
        },
    }


def prefill_flops(model: ModelConfig, batch: int, length: int) -> float:
    """Prompt FLOPs: linears and causal attention of all tokens, and the head of each last token."""
    norms = (2 * model.layers + 1) * model.dim
    linears = parameter_count(model) - 2 * model.vocab_size * model.dim - norms
    attention = 2 * length * model.heads * model.head_dim * model.layers
    return batch * (length * (2 * linears + attention) + 2 * model.vocab_size * model.dim)


def show(result: dict[str, Any]) -> None:
    """Prints one result."""
    print(f"\n{result['size']}, {result['dtype']}, threads {result['threads']}, batch {result['batch']}", flush=True)
    for phase in ("prefill", "decode"):
        for name, found in result["spread"][phase].items():
            speedup = result["speedup"][phase].get(name)
            words = (
                "" if speedup is None else f"{speedup['value']:.2f}x ({speedup['low']:.2f} to {speedup['high']:.2f})"
            )
            limit = result["limits"].get(name)
            of_limit = "" if limit is None else f"limit {format_seconds(limit[f'{phase}_s'])}"
            print(f"  {phase:8} {name:24} {format_seconds(found['median']):>9}  {of_limit:16} {words}")
        print(f"  {phase:8} ratio of the limits: {result['limit_ratio'][phase]:.2f}x")
    print(
        f"  read {format_bytes(result['bandwidth_bytes_s'])}/s, GEMM {result['gemm_flops_s'] / 1e9:.0f} GFLOP/s",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
