"""The public record: published training speeds, each with a prediction.

`record.json` holds only facts: shape, mesh, batch, GPU and software of each run, its tokens per second or FLOP/s per GPU, and where
they were published. The same rules turn every source's rows into configurations:

- An ungated MLP of width 4 d becomes a gated MLP of width 8/3 d, which has as many parameters and FLOPs.
- Activation checkpointing of whole blocks is `full-block`. Selective checkpointing of single operations is modeled as `full-block`
  in every second block, which recomputes as many GEMMs.
- An unpublished micro-batch size or degree of interleaving is set to the one that the performance model predicts to be fastest.
- The software stack of the source determines what is compiled, the attention kernel, what overlaps, and how fast GEMMs are
  (`stacks.toml`). The loss is never fused (`separate_loss`).

Some stacks have numbers fitted to a random half of the rows of some sources (`Stack.fitted_to`). A row is predicted without those
fitted to its own source, as if its software were new. Numbers that profiles and attention kernels took from a source
(`Source.fitted`) stay, so the headline error and all intervals come from the other sources only, each of which weighs the same.
A source's own rows never count toward its interval. To score another planner, predict each source's seconds per step from the
other sources.

Exits with code 1 if the error, the bias for a kind of GPU, or the fraction of rows within their intervals misses its limit.
"""

import argparse
import contextlib
import functools
import itertools
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from benchmarks.commands import add_out
from benchmarks.experiments.published import (
    EAGER_US,
    MICRO_BATCHES,
    SEQUENCES,
    STEPS,
    TOKENS,
    Comparison,
    Way,
    configuration,
    launching,
)
from benchmarks.experiments.results import Facts, facts_of
from benchmarks.experiments.sections import goals, save
from benchmarks.experiments.separate import separate_loss
from boost.config.load import load
from boost.config.schema import CompileName, Config, Section
from boost.config.stages import Stage
from boost.errors import ConfigError
from boost.plan.datasheet import PORT_SHARE
from boost.plan.hardware import AttentionSpeed, Hardware, Speeds, load_hardware
from boost.plan.memory import peak
from boost.plan.step_time import SPREADS, PassTime, kind_of
from boost.plan.timing import Predictor
from boost.plan.work import ATTENTION, ATTENTION_BACKWARD, GEMM, Work
from boost.text import read_toml
from boost.train.progress import progress

HERE = Path(__file__).parent

INTERLEAVED = (1, 2, 3, 4, 6)
"""Stages per process to try if the source gives none, like MICRO_BATCHES. The runtime rejects some of them."""


class Stack(Section):
    """A software stack."""

    title: str
    year: int
    """When it was used. The speed of GEMMs depends on it, because libraries became faster on the same GPU."""
    source: str = ""
    """Where the numbers of `gemm` come from."""
    compile: CompileName
    """What it compiles, as in train.compile."""
    overlap: Literal["none", "halves"] = "none"
    """Whether TP communication overlaps with computation, as in parallel.overlap."""
    attention: str = ""
    """Attention kernel; '': the profile's."""
    adds_in_gemms: bool = False
    """Whether GEMMs add the gradients of a weight to those of earlier micro-batches."""
    gemm: dict[str, float] = Field(default_factory=dict)
    """Speed of GEMMs as a multiple of the profile's, by `Hardware.architecture`."""
    hides_sends: bool = False
    """Whether sends between pipeline stages overlap with the computation of another micro-batch."""
    fitted_to: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Sources whose rows `gemm` is fitted to."""

    @property
    def unfitted(self) -> "Stack":
        """The same software without fitted numbers."""
        return self.model_copy(update={"gemm": {}})


class StackSpeeds(Speeds):
    """Speeds of a device under a software stack."""

    fusion: float = 1.0
    """Same as `Source.fusion`."""

    def seconds(self, work: Work) -> float:
        if work.kernel not in (GEMM, ATTENTION, ATTENTION_BACKWARD) and work.phase != "step":
            work = work._replace(bytes=round(work.bytes / self.fusion))
        return super().seconds(work)


class StackPredictor(Predictor):
    """Predicts steps of a software stack."""

    def __init__(self, hardware: Hardware, stack: Stack) -> None:
        super().__init__(hardware)
        self.stack = stack

    def _once_per_step(self, config: Config, held: Sequence[Stage], micro_batches: int) -> tuple[float, float, float]:
        return super()._once_per_step(config, held, 1 if self.stack.adds_in_gemms else micro_batches)

    def _add_sends(self, config: Config, held: Sequence[Stage], result: PassTime) -> None:
        if not self.stack.hides_sends:
            super()._add_sends(config, held, result)


class Source(Section):
    """A publication with training speeds."""

    title: str
    url: str
    stack: str
    """Software stack of its rows, unless a row overrides it."""
    layout: str
    """TP layout of its rows."""
    shard: Literal["none", "optimizer", "full"]
    param_dtype: Literal["float32", "bfloat16"]
    attention: str = ""
    """Attention kernel, if it differs from the stack's."""
    fusion: float = 1.0
    """Factor by which its blocks' element-wise work moves fewer bytes than boost's under the same stack."""
    fitted: str = ""
    """What profiles and attention kernels took from its rows; '': nothing."""
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
    per_node: int | None = None
    """GPUs per node, if it differs from the profile."""
    net_gbit: float | None = None
    """Network port of each GPU in Gb/s, if it differs from the profile."""
    stack: str | None = None
    """Software stack; None: the source's."""
    tokens_per_s: float | None = None
    """Tokens per second per GPU."""
    tflops: float | None = None
    """Model TFLOP/s per GPU, as the source counts FLOPs. Ungated MLP: 72 B s l d^2 (1 + s/6d + V/12dl), which counts all attention
    scores. Gated MLP: 6 per weight and token, plus the causal half of the scores."""
    way: Way | None = None
    """Method of a BOOST paper row (`benchmarks.experiments.published`); None for all other rows, which are dense."""
    peak_gib: float | None = None
    """Peak memory of the GPU that uses the most, in GiB, as reported by torch's allocator."""

    @property
    def dp(self) -> int:
        """Number of replicas."""
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
    """Returns the record plus the BOOST paper's steps."""
    record = Record.model_validate_json((HERE / "record.json").read_text(encoding="utf-8"), strict=False)
    return record.model_copy(update={"rows": (*record.rows, *_paper_rows())})


@functools.cache
def _stack_file() -> dict[str, Any]:
    return read_toml(HERE / "stacks.toml")


@functools.cache
def stacks() -> dict[str, Stack]:
    """Returns all stacks by name."""
    return {name: Stack.model_validate(tree) for name, tree in _stack_file().items() if "title" in tree}


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
    predicted_s: float
    """Predicted without anything fitted to the row's own source (`Stack.fitted_to`)."""
    predicted_gib: float | None
    """Predicted peak memory in GiB, if the row has a published one."""


def stack_name(row: Row) -> str:
    """Name of a row's software stack."""
    return row.stack or record().sources[row.source].stack


def stack_of(row: Row) -> Stack:
    """A row's software stack."""
    return stacks()[stack_name(row)]


def score(rows: Sequence[Row]) -> Iterator[Scored]:
    """Yields a prediction for each row, in order."""
    machines: dict[tuple[Any, ...], tuple[StackPredictor, Comparison]] = {}

    def predicted(row: Row, stack: Stack) -> tuple[float, Config]:
        """(seconds, configuration) of the fastest possible configuration of a row."""
        key = row.source, row.gpu, row.per_node, row.net_gbit, stack.title, bool(stack.gemm)
        if key not in machines:
            hardware = hardware_of(row, stack)
            machines[key] = StackPredictor(hardware, stack), Comparison(hardware)
        predictor, paper = machines[key]
        times = (
            (paper.seconds(row.way, config) if row.way else predictor.predict(config).seconds, config)
            for config in configurations(row)
        )
        with separate_loss():
            return min(times, key=lambda pair: pair[0])

    for row in rows:
        stack = stack_of(row)
        seconds, config = predicted(row, stack.unfitted if row.source in stack.fitted_to else stack)
        on_gpu, ranks = load_hardware(row.gpu).is_gpu, range(config.parallel.pp if row.peak_gib else 0)
        peaks = (peak(config, rank, on_gpu).total / 2**30 for rank in ranks)
        yield Scored(row, seconds, max(peaks, default=None))


def hardware_of(row: Row, stack: Stack | None = None) -> Hardware:
    """Hardware profile of a row's GPUs, with the speeds of `stack` (None: the row's)."""
    source, stack, hardware = record().sources[row.source], stack or stack_of(row), load_hardware(row.gpu)
    hardware = hardware.model_copy(update={"per_node": row.per_node or hardware.per_node})
    if row.net_gbit is not None:
        network = hardware.network.model_copy(update={"gb_s": PORT_SHARE * row.net_gbit / 8})
        hardware = hardware.model_copy(update={"network": network})
    own, architecture = hardware.speeds, hardware.architecture
    gemm_speeds = {
        dtype: speed.model_copy(update={"fraction": speed.fraction * stack.gemm.get(architecture, 1.0)})
        for dtype, speed in own.gemm.items()
    }
    kernel = _stack_file().get(source.attention or stack.attention, {}).get(architecture, {})
    table = tuple(AttentionSpeed(head_dim=int(dim), forward=f, backward=b) for dim, (f, b) in kernel.items())
    attention = own.attention | ({"bfloat16": table} if table else {})
    fields = {name: getattr(own, name) for name in Speeds.model_fields}
    speeds = StackSpeeds(**fields | {"gemm": gemm_speeds, "attention": attention, "fusion": source.fusion})
    return hardware.model_copy(update={"speeds": speeds, "host_us": launching(EAGER_US)})


def configurations(row: Row) -> Iterator[Config]:
    """Yields the possible configurations of a row: one, or one per candidate if its micro-batch or interleaving is unpublished."""
    if row.way is not None:
        published = next(step for step in STEPS if row.model == f"{step.size} {row.way}")
        yield from (configuration(row.way, published, micro_batch) for micro_batch in MICRO_BATCHES)
        return
    per_replica = row.global_batch // row.dp
    for micro_batch in [row.micro_batch] if row.micro_batch else [n for n in MICRO_BATCHES if per_replica % n == 0]:
        interleaved = row.pp > 1 and row.micro_batch is None and (per_replica // micro_batch) % row.pp == 0
        for virtual in INTERLEAVED if interleaved else INTERLEAVED[:1]:
            with contextlib.suppress(ConfigError):  # more stages than the runtime supports
                yield _configuration(row, micro_batch, virtual)


def _configuration(row: Row, micro_batch: int, virtual: int) -> Config:
    source, stack = record().sources[row.source], stack_of(row)
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
        "train.compile": stack.compile,
        "parallel.overlap": stack.overlap if row.tp > 1 else "none",
        "train.recompute_every": 2 if row.recompute == "selective" else 1,
    }  # fmt: skip
    if virtual > 1:
        words |= {"parallel.schedule": "interleaved-1f1b", "parallel.virtual": virtual}
    return load(None, [f"--{key}={value}" for key, value in words.items()])


def compare(show: bool = False) -> Facts:
    """Predicts every row and returns the result. `show`: displays a progress bar."""
    predicted = []
    for scored in progress(score(record().rows), "rows", enabled=show):
        row = scored.row
        predicted.append(
            row.model_dump()
            | {"stack": stack_name(row), "measured_s": row.seconds, "predicted_s": scored.predicted_s}
            | ({"predicted_gib": scored.predicted_gib} if scored.predicted_gib is not None else {})
        )
    sources = {name: source.model_dump() for name, source in record().sources.items()}
    return facts_of("record", load(None), sources=sources, rows=predicted)


@dataclass(frozen=True)
class Errors:
    """Prediction errors over some rows."""

    count: int
    median: float
    """Median of predicted / measured."""
    mape: float
    """Mean of |predicted / measured - 1|."""
    bias: float
    """Mean of predicted / measured - 1."""


def errors(rows: Iterable[Facts]) -> Errors:
    """Computes the errors of one or more rows."""
    ratios = [row["predicted_s"] / row["measured_s"] for row in rows]
    off = [ratio - 1 for ratio in ratios]
    return Errors(len(ratios), statistics.median(ratios), statistics.fmean(map(abs, off)), statistics.fmean(off))


TAIL = 0.05
"""Fraction of rows at each end that intervals leave out. With 0.1, only two thirds of the rows of a source left out would lie
inside, because few sources do not show how far the next one may be off."""


def limits(rows: Iterable[Facts]) -> dict[str, tuple[float, float]]:
    """(low, high) measured over predicted seconds by kind of mesh: weighted quantiles, in which every source counts equally. The
    package ships those of all `independent` rows."""
    by_kind: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        of_source = by_kind.setdefault(kind_of(row["tp"], row["pp"]), {}).setdefault(row["source"], [])
        of_source.append(row["measured_s"] / row["predicted_s"])
    return {kind: _limits_of_sources(list(sources.values())) for kind, sources in by_kind.items()}


def _limits_of_sources(sources: Sequence[Sequence[float]]) -> tuple[float, float]:
    weighted = sorted((ratio, 1 / (len(sources) * len(ratios))) for ratios in sources for ratio in ratios)
    summed = list(itertools.accumulate(weight for _, weight in weighted))
    low, high = (
        next(ratio for (ratio, _), total in zip(weighted, summed, strict=True) if total >= share - 1e-12)
        for share in (TAIL, 1 - TAIL)
    )
    return round(low, 3), round(high, 3)


def independent(facts: Facts) -> list[Facts]:
    """The rows of sources from which no number was taken."""
    return [row for row in facts["rows"] if not facts["sources"][row["source"]]["fitted"]]


def intervals_of_others(facts: Facts) -> list[tuple[float, float]]:
    """For each row, the interval from all other independent sources: the one for its kind of mesh, or for an unmeasured GPU if no
    other source has rows on its kind of GPU."""
    of_source: dict[str, tuple[dict[str, tuple[float, float]], set[str]]] = {}
    rows = facts["rows"]
    for source in dict.fromkeys(row["source"] for row in rows):
        known = limits(row for row in independent(facts) if row["source"] != source)
        of_source[source] = known, {gpu_kind(row) for row in rows if row["source"] != source}
    found = []
    for row in rows:
        known, gpus = of_source[row["source"]]
        found.append(known[kind_of(row["tp"], row["pp"])] if gpu_kind(row) in gpus else SPREADS["unmeasured"][:2])
    return found


@dataclass(frozen=True)
class Unseen:
    """Errors for software to which nothing was fitted: means over sources, each of which weighs the same."""

    sources: int
    rows: int
    mape: float
    bias: float
    inside: float
    """Fraction of rows whose measured time lies in the interval from the other sources."""


def unseen(facts: Facts) -> dict[str, Unseen]:
    """Errors over the independent sources, by kind of mesh."""
    found, within = {}, dict(zip(map(id, facts["rows"]), inside(facts), strict=True))
    for kind in ("replicas", "sharded"):
        rows = [row for row in independent(facts) if kind_of(row["tp"], row["pp"]) == kind]
        sources = [
            [row for row in rows if row["source"] == name] for name in dict.fromkeys(row["source"] for row in rows)
        ]
        each = [errors(of_source) for of_source in sources]
        held = statistics.fmean(statistics.fmean(within[id(row)] for row in of_source) for of_source in sources)
        mape, bias = (statistics.fmean(getattr(one, name) for one in each) for name in ("mape", "bias"))
        found[kind] = Unseen(len(each), len(rows), mape, bias, held)
    return found


def gpu_kind(row: Facts) -> str:
    """A row's kind of GPU, such as 'a100', regardless of memory and node."""
    return str(row["gpu"]).partition("-")[0]


def inside(facts: Facts) -> list[bool]:
    """For each row, whether its measured time lies in the interval from the other sources."""
    return [
        low <= row["measured_s"] / row["predicted_s"] <= high
        for row, (low, high) in zip(facts["rows"], intervals_of_others(facts), strict=True)
    ]


def arguments(parser: argparse.ArgumentParser) -> None:
    add_out(parser, "record")


def run(args: argparse.Namespace) -> int:
    """Returns 1 if the error, the bias for a kind of GPU, or the fraction of rows within their intervals misses its limit."""
    facts = compare(show=True)
    save(args.out, facts)
    return int(not all(goal.met for goal in goals(facts)))
