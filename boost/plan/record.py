"""The public record: training speeds that others measured and published, as data, and our prediction of each.

`record.json` holds facts only: shape, mesh, batch, GPU and software of a run, and its tokens per second or FLOP/s a GPU, with where
they were published. How a row becomes a configuration, the same for every row of a source:

- An MLP without a gate of width 4 d has the parameters and the FLOPs of a gated one of width 8/3 d, which is what we run.
- Checkpointing of whole blocks is `full-block`; selective checkpointing of single operations is priced as `full-block` in every
  second block, which recomputes as many matrix products.
- Where the micro-batch or the interleaving was not published, those that are fastest by the model are taken.
- The software stack of the source sets what is compiled, the attention kernel and what hides (`boost.plan.stack`).
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
from boost.plan.stack import Reached, StackName, stacks, with_stack
from boost.plan.timing import Predictor

FILE = Path(__file__).parent / "record.json"

MICRO_BATCHES = (1, 2, 4)
"""Tried where none was published."""


class Source(Section):
    """Where rows were published."""

    title: str
    url: str
    stack: StackName
    """Of its rows, if they do not say otherwise."""
    layout: str
    """Of what TP shards."""
    shard: Literal["none", "optimizer", "full"]
    param_dtype: Literal["float32", "bfloat16"]
    attention: str = ""
    """Attention kernel, where it is not that of the stack."""
    elementwise: float = 1.0
    """How many times fewer bytes the element-wise work of its blocks moves than that of ours, under its stack."""
    note: str = ""


class Row(Section):
    """A run."""

    source: str
    model: str
    dim: int
    layers: int
    heads: int
    kv_heads: int | None = None
    """None: as many as heads."""
    ffn: int | None = None
    """Width of a gated MLP; None: one of 4 d without a gate."""
    vocab: int
    seq: int
    gpu: str
    """A hardware profile."""
    gpus: int
    tp: int = 1
    pp: int = 1
    micro_batch: int | None = None
    """Sequences; None: not published."""
    global_batch: int
    recompute: Literal["none", "selective", "full"] = "none"
    stack: StackName | None = None
    """None: that of the source."""
    tokens_per_s: float | None = None
    """Of one GPU."""
    tflops: float | None = None
    """Model TFLOP/s of one GPU, as the source counts FLOPs: 72 B s l d^2 (1 + s/6d + V/12dl)."""
    peak_gib: float | None = None
    """Of the fullest GPU, as torch's allocator counts it."""

    @property
    def dp(self) -> int:
        """Replicas."""
        return self.gpus // (self.tp * self.pp)

    @property
    def architecture(self) -> str:
        """Of its GPUs: a100, h100."""
        return self.gpu.partition("-")[0]

    @property
    def seconds(self) -> float:
        """Of a step, as measured."""
        tokens = self.global_batch * self.seq
        if self.tokens_per_s is not None:
            return tokens / (self.tokens_per_s * self.gpus)
        assert self.tflops is not None
        d, layers = self.dim, self.layers
        flops = 72 * tokens * layers * d * d * (1 + self.seq / (6 * d) + self.vocab / (12 * d * layers))
        return flops / (self.tflops * 1e12 * self.gpus)


class Record(Section):
    """All of it."""

    sources: dict[str, Source]
    rows: tuple[Row, ...]


@functools.cache
def record() -> Record:
    """What is in the package."""
    return Record.model_validate_json(FILE.read_text(encoding="utf-8"), strict=False)


@dataclass(frozen=True)
class Scored:
    """A row with its prediction."""

    row: Row
    stack: StackName
    predicted_s: float
    predicted_gib: float | None
    """Peak memory, where it was published."""


def score(rows: Sequence[Row]) -> Iterator[Scored]:
    """Predictions of these rows, in order."""
    predictors: dict[tuple[str, str, StackName], Predictor] = {}
    for row in rows:
        stack = row.stack or record().sources[row.source].stack
        if (row.source, row.gpu, stack) not in predictors:
            predictors[row.source, row.gpu, stack] = Predictor(hardware_of(row, stack))
        predictor = predictors[row.source, row.gpu, stack]
        seconds, config = min(
            ((predictor.predict(config).seconds, config) for config in configurations(row, stack)),
            key=lambda each: each[0],
        )
        yield Scored(row, stack, seconds, _peak_gib(config, predictor.hardware) if row.peak_gib else None)


def hardware_of(row: Row, stack: StackName, reached: Reached | None = None) -> Hardware:
    """The profile of a row's GPUs as its software uses it. `reached`: in place of that of the stack, to fit it."""
    source = record().sources[row.source]
    found = with_stack(load_hardware(row.gpu), stack, row.architecture, source.attention, reached)
    speeds = found.speeds.model_copy(update={"memory_fraction": found.speeds.memory_fraction * source.elementwise})
    return found.model_copy(update={"speeds": speeds})


def _peak_gib(config: Config, hardware: Hardware) -> float:
    return max(peak(config, rank, hardware.is_gpu).total for rank in range(config.parallel.pp)) / 2**30


def configurations(row: Row, stack: StackName) -> Iterator[Config]:
    """What a row may have run: one configuration, or those with each micro-batch and interleaving that were not published."""
    each = row.global_batch // row.dp
    for micro_batch in [row.micro_batch] if row.micro_batch else [n for n in MICRO_BATCHES if each % n == 0]:
        per_rank = row.layers // row.pp
        interleaved = row.pp > 1 and row.micro_batch is None and (each // micro_batch) % row.pp == 0
        for virtual in [n for n in (1, 2, 3, 4, 6) if per_rank % n == 0] if interleaved else [1]:
            with contextlib.suppress(ConfigError):  # more stages than the runtime interleaves
                yield _configuration(row, stack, micro_batch, virtual)


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
