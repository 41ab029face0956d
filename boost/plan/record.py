"""The public record: training speeds measured and published by others, as data, with a prediction of each.

`record.json` holds facts only: shape, mesh, batch, GPU and software of each run, its tokens per second or FLOP/s per GPU, and where
they were published. A row becomes a configuration by the same rules for every source:

- An ungated MLP of width 4 d has the parameters and FLOPs of a gated MLP of width 8/3 d, which we use instead.
- Activation checkpointing of whole blocks is `full-block`. Selective checkpointing of single operations is modeled as `full-block`
  in every second block, which recomputes as many GEMMs.
- An unpublished micro-batch or degree of interleaving is set to the fastest one according to the performance model.
- The software stack of the source determines what is compiled, the attention kernel and what overlaps (`boost.plan.stack`).
"""

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from boost.config.load import load
from boost.config.schema import Config, Section
from boost.errors import ConfigError
from boost.plan.hardware import Hardware, load_hardware
from boost.plan.peak import peak
from boost.plan.published import MICRO_BATCHES, SEQUENCES, STEPS, TOKENS, Comparison, Way, configuration
from boost.plan.stack import StackName, stacks, with_stack
from boost.plan.timing import Predictor

FILE = Path(__file__).parent / "record.json"

INTERLEAVED = (1, 2, 3, 4, 6)
"""Stages per process to try if none was published, like `boost.plan.published.MICRO_BATCHES`. The runtime rejects some of them."""


class Source(Section):
    """A publication with training speeds."""

    title: str
    url: str
    stack: StackName
    """Software stack of its rows, unless a row overrides it."""
    layout: str
    """TP layout of its rows."""
    shard: Literal["none", "optimizer", "full"]
    param_dtype: Literal["float32", "bfloat16"]
    attention: str = ""
    """Attention kernel, if it differs from the stack's."""
    fusion: float = 1.0
    """Factor by which the element-wise work of its blocks moves fewer bytes than in boost, under its stack."""
    note: str = ""


class Row(Section):
    """A published run."""

    source: str
    model: str
    dim: int
    layers: int
    heads: int
    kv_heads: int | None = None
    """Number of key/value heads; None: as many as `heads`."""
    ffn: int | None = None
    """Width of a gated MLP; None: an ungated MLP of width 4 d."""
    vocab: int
    seq: int
    gpu: str
    """Name of a hardware profile."""
    gpus: int
    tp: int = 1
    pp: int = 1
    micro_batch: int | None = None
    """Micro-batch in sequences; None: not published."""
    global_batch: int
    recompute: Literal["none", "selective", "full"] = "none"
    stack: StackName | None = None
    """Software stack; None: that of the source."""
    tokens_per_s: float | None = None
    """Tokens per second per GPU."""
    tflops: float | None = None
    """Model TFLOP/s per GPU, as the source counts FLOPs. Ungated MLP: 72 B s l d^2 (1 + s/6d + V/12dl), which counts all attention
    scores. Gated MLP: 6 per weight and token, plus the causal half of the scores."""
    way: Way | None = None
    """Method of a BOOST paper row (`boost.plan.published`); None for all other rows, which are dense."""
    peak_gib: float | None = None
    """Peak memory of the GPU that uses the most, in GiB, as reported by torch's allocator."""

    @property
    def dp(self) -> int:
        """Replicas."""
        return self.gpus // (self.tp * self.pp)

    @property
    def seconds(self) -> float:
        """Measured seconds per step."""
        tokens = self.global_batch * self.seq
        if self.tokens_per_s is not None:
            return tokens / (self.tokens_per_s * self.gpus)
        assert self.tflops is not None
        d, layers = self.dim, self.layers
        if self.ffn is None:
            flops = 72 * tokens * layers * d * d * (1 + self.seq / (6 * d) + self.vocab / (12 * d * layers))
        else:
            heads = 2 + 2 * (self.kv_heads or self.heads) / self.heads
            flops = 6 * tokens * (layers * (heads * d * d + 3 * d * self.ffn + d * self.seq) + self.vocab * d)
        return flops / (self.tflops * 1e12 * self.gpus)


class Record(Section):
    """All sources and rows."""

    sources: dict[str, Source]
    rows: tuple[Row, ...]


@functools.cache
def record() -> Record:
    """Returns the packaged record plus the BOOST paper's steps."""
    found = Record.model_validate_json(FILE.read_text(encoding="utf-8"), strict=False)
    return found.model_copy(update={"rows": (*found.rows, *_paper_rows())})


def _paper_rows() -> Iterator[Row]:
    for published in STEPS:
        for way, seconds in published.seconds.items():
            model = configuration(way, published).model
            gpus = published.tp * published.pp
            yield Row(
                source="boost", model=f"{published.size} {way}", dim=model.dim, layers=model.layers, heads=model.heads,
                ffn=model.ffn_dim, vocab=model.vocab_size, seq=TOKENS, gpu="a100-80g", gpus=gpus, tp=published.tp,
                pp=published.pp, global_batch=SEQUENCES, way=way, tokens_per_s=SEQUENCES * TOKENS / (seconds * gpus),
            )  # fmt: skip


@dataclass(frozen=True)
class Scored:
    """A row with its prediction."""

    row: Row
    stack: StackName
    predicted_s: float
    predicted_gib: float | None
    """Predicted peak memory in GiB, if the row has a published one."""


def stack_of(row: Row) -> StackName:
    """Software stack of a row."""
    return row.stack or record().sources[row.source].stack


def score(rows: Sequence[Row]) -> Iterator[Scored]:
    """Yields a prediction for each row, in order."""
    machines: dict[tuple[str, str, StackName], tuple[Hardware, Predictor, Comparison]] = {}
    for row in rows:
        stack = stack_of(row)
        key = row.source, row.gpu, stack
        if key not in machines:
            hardware = hardware_of(row)
            machines[key] = hardware, Predictor(hardware), Comparison(hardware)
        hardware, predictor, paper = machines[key]
        times = [
            (paper.seconds(row.way, config) if row.way else predictor.predict(config).seconds, config)
            for config in configurations(row)
        ]
        seconds, config = min(times, key=lambda each: each[0])
        yield Scored(row, stack, seconds, _peak_gib(config, hardware) if row.peak_gib else None)


def hardware_of(row: Row) -> Hardware:
    """Hardware profile of a row's GPUs with its software stack applied."""
    source = record().sources[row.source]
    found = with_stack(load_hardware(row.gpu), stack_of(row), source.attention)
    return found.model_copy(update={"speeds": found.speeds.model_copy(update={"fusion": source.fusion})})


def _peak_gib(config: Config, hardware: Hardware) -> float:
    return max(peak(config, rank, hardware.is_gpu).total for rank in range(config.parallel.pp)) / 2**30


def configurations(row: Row) -> Iterator[Config]:
    """Yields the possible configurations of a row: one, or one per candidate if micro-batch or interleaving are unpublished."""
    if row.way is not None:
        published = next(each for each in STEPS if row.model == f"{each.size} {row.way}")
        yield from (configuration(row.way, published, micro_batch) for micro_batch in MICRO_BATCHES)
        return
    each = row.global_batch // row.dp
    for micro_batch in [row.micro_batch] if row.micro_batch else [n for n in MICRO_BATCHES if each % n == 0]:
        interleaved = row.pp > 1 and row.micro_batch is None and (each // micro_batch) % row.pp == 0
        for virtual in INTERLEAVED if interleaved else INTERLEAVED[:1]:
            with contextlib.suppress(ConfigError):  # more stages than the runtime supports
                yield _configuration(row, stack_of(row), micro_batch, virtual)


def _configuration(row: Row, stack: StackName, micro_batch: int, virtual: int) -> Config:
    source = record().sources[row.source]
    unit = 8 * row.tp
    words = {
        "model.family": "dense", "model.dim": row.dim, "model.layers": row.layers, "model.heads": row.heads,
        "model.kv_heads": row.kv_heads or row.heads, "model.ffn_dim": row.ffn or unit * round(8 * row.dim / (3 * unit)),
        "model.vocab_size": unit * math.ceil(row.vocab / unit),
        "parallel.layout": source.layout if row.tp > 1 else "single", "parallel.tp": row.tp, "parallel.pp": row.pp,
        "parallel.dp": row.dp, "parallel.shard": source.shard if row.dp > 1 else "none",
        "train.seq_len": row.seq, "train.micro_batch": micro_batch, "train.global_batch": row.global_batch,
        "train.param_dtype": source.param_dtype, "train.compute_dtype": "bfloat16",
        "train.recompute": "none" if row.recompute == "none" else "full-block",
        "train.compile": stacks()[stack].compile,
        "parallel.overlap": stacks()[stack].overlap if row.tp > 1 else "none",
        "train.recompute_every": 2 if row.recompute == "selective" else 1,
    }  # fmt: skip
    if virtual > 1:
        words |= {"parallel.schedule": "interleaved-1f1b", "parallel.virtual": virtual}
    return load(None, [f"--{key}={value}" for key, value in words.items()])
