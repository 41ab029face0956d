"""The measurements of the BOOST paper (arXiv 2512.12131, MLSys 2026), and our prediction of each.

All rows are configured the same way, and no constant is fitted to a single row:

- `full-rank`: the dense model under `megatron`, ungrouped, with five all-reduces in the backward pass as in the paper's code.
- `vanilla`: `vanilla` in its published form (attention and gated product replicated on every process), ungrouped.
- `BOOST`: `btp`, online norm, grouped. The paper's code sends RMSNorm's statistic in a separate all-reduce, as our sync norm does,
  and needs two full-width all-reduces for the embedding. The prediction adds these collectives, none of which overlap.
- All rows: 4 A100-80GB per node, bf16 weights and activations, four sequences of 4096 tokens per step in micro-batches of one, 1F1B
  in pipelines (gpipe if there are fewer micro-batches than stages), no recomputation.

The paper does not give its micro-batch sizes, so `steps` takes other sizes, and the report shows their effect. Two parts of the
profile a100-80g come from the paper itself: GEMM speed (from the FLOPs utilization of its 7B) and NVLink speed (from its
communication times).

Recomputation, and CoLA's throughput on one GPU (arXiv 2502.10940), are predicted as `boost train` runs them, and again as the
published code runs them.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Literal

from benchmarks.experiments.separate import separate_operations
from boost.config.load import load
from boost.config.schema import Config, Family, RecomputeName
from boost.config.stages import Stage, stages_of
from boost.config.traffic import Collective
from boost.plan.collectives import micro_batch_collectives
from boost.plan.hardware import Hardware, HostTime, collective_seconds, load_hardware
from boost.plan.memory import memory
from boost.plan.timing import Predictor, block_work
from boost.plan.work import ATTENTION, ATTENTION_BACKWARD, GEMM, REDUCE, STREAM, Counted, Work, gemm, moved

Way = Literal["full-rank", "vanilla", "BOOST"]

WAYS: dict[Way, tuple[str, ...]] = {
    "full-rank": ("--parallel.layout=megatron", "--parallel.grouping=false", "--model.family=dense"),
    "vanilla": ("--parallel.layout=vanilla", "--parallel.grouping=false", "--parallel.vanilla=published"),
    "BOOST": ("--parallel.layout=btp", "--parallel.grouping=true"),
}
"""The three systems, as configurations."""

SEQUENCES, TOKENS = 4, 4096
"""Sequences per step, tokens per sequence."""

RATIO_LIMIT = 0.15
"""Maximum error of a predicted ratio of two step times."""

CLOSE_RATIO, SECONDS_LIMIT = 0.10, 0.15
"""Maximum errors of ratios and of seconds at one micro-batch size."""

TIME_LIMIT = 0.05
"""Maximum error of communication and GEMM times, to which the profile is fitted."""

MICRO_BATCHES = (1, 2, 4)
"""Micro-batch sizes in the report."""


@dataclass(frozen=True)
class PublishedRow:
    """Published seconds per training step of one model size."""

    size: str
    tp: int
    pp: int
    seconds: dict[Way, float]


STEPS = (
    PublishedRow("1B", 1, 1, {"full-rank": 0.85, "vanilla": 0.56, "BOOST": 0.59}),
    PublishedRow("3B", 2, 1, {"full-rank": 1.14, "vanilla": 1.41, "BOOST": 0.78}),
    PublishedRow("7B", 4, 1, {"full-rank": 1.06, "vanilla": 1.64, "BOOST": 0.72}),
    PublishedRow("13B", 4, 2, {"full-rank": 2.07, "vanilla": 2.42, "BOOST": 1.30}),
    PublishedRow("30B", 4, 4, {"full-rank": 2.43, "vanilla": 2.58, "BOOST": 1.27}),
)

FAMILIES = {"svd": (0.70, 1.57), "cola": (0.72, 1.64), "lax": (0.75, 1.72)}
"""Seconds per step of the 7B by architecture: (BOOST, vanilla). Full rank: 1.06."""

COMMUNICATION: dict[str, dict[Way, tuple[int, float]]] = {
    "3B": {"full-rank": (192, 1.54), "vanilla": (992, 7.50), "BOOST": (168, 1.45)},
    "7B": {"full-rank": (256, 1.99), "vanilla": (1328, 9.75), "BOOST": (224, 1.86)},
    "13B": {"full-rank": (320, 2.46), "vanilla": (1664, 12.09), "BOOST": (280, 2.28)},
}
"""(MB, ms) of one block's forward all-reduces, TP 4, batch 4. Here, 1 MB is 2^20 bytes of payload, without RMSNorm's statistic."""

GEMM_MS: dict[Way, tuple[float, float]] = {
    "full-rank": (0.566, 1.488),
    "vanilla": (0.358, 0.654),
    "BOOST": (0.303, 0.539),
}
"""7B, TP 4: (attention, MLP) ms. Given the published utilization, they match 4096 tokens, i.e. one sequence of a batch of 4."""

UTILIZATION: dict[Way, tuple[float, float]] = {"vanilla": (0.61, 0.62), "BOOST": (0.72, 0.75)}
"""7B, TP 4, batch 4: (attention, MLP), fraction of peak FLOP/s."""

SAVED_PER_ADDED = {4: (193.5, 113.7), 8: (177.0, 113.6)}
"""MB of activations saved per ms added by checkpointing, by batch: (BOOST's low-rank checkpointing, vanilla)."""

ONE_GPU: tuple[tuple[str, str, int, RecomputeName, float], ...] = (
    ("CoLA 1B", "1b", 64, "none", 1.86),
    ("CoLA 7B", "7b", 16, "none", 1.66),
    ("CoLA-M 7B", "7b", 16, "low-rank", 1.21),
)
"""CoLA's training throughput relative to the dense model: (name, size, sequences of 256 tokens, what it recomputes, ratio)."""

NORM_MS = {1: (0.375, 0.145), 4: (0.542, 0.523)}
"""Milliseconds of RMSNorm by batch: (sync, online). The paper does not say what it timed; `Comparison.norms` tries many."""

NORM_SCOPES: tuple[dict[str, tuple[str, ...]], ...] = (
    {"compiled": (), "separate": ("separate",), "separate, each with its launch": ("separate", "launches")},
    {"attention's norm": ("qkv",), "the MLP's norm": ("gate_up",), "both norms": ("qkv", "gate_up")},
    {"forward": ("forward",), "forward and backward": ("forward", "backward")},
    {"communication of the statistic": (), "the whole collectives": ("latents",)},
)
"""Possible scopes of the norm's time: kernels, places in a block, passes, communication."""

MLP_LINEARS = 4 / 3
"""The published MLP times and utilizations correspond to four linears of d_ff 11008 in all three columns; the model has three.
The reason is unknown, so the tables show both."""


@dataclass(frozen=True)
class Compared:
    """A published number and our prediction."""

    table: str
    what: str
    published: float
    predicted: float
    unit: str
    limit: float | None = None
    """Maximum relative error; None: shown but not checked."""

    @property
    def off(self) -> float:
        """Relative error."""
        return self.predicted / self.published - 1

    @property
    def holds(self) -> bool:
        """Whether the error is within its limit."""
        return self.limit is None or abs(self.off) <= self.limit


@dataclass(frozen=True)
class NormScope:
    """Predicted milliseconds of RMSNorm in a scope."""

    words: str
    ms: dict[int, tuple[float, float]]
    """Like NORM_MS."""

    @property
    def worst(self) -> float:
        """The largest relative error, signed."""
        pairs = (
            (ours, theirs) for batch in NORM_MS for ours, theirs in zip(self.ms[batch], NORM_MS[batch], strict=True)
        )
        return max((ours / theirs - 1 for ours, theirs in pairs), key=abs)


@dataclass(frozen=True)
class PublishedStep:
    """Predicted seconds of a step of one size."""

    row: PublishedRow
    seconds: dict[Way, float]

    def ratios(self) -> Iterator[Compared]:
        """Speed-ups of BOOST."""
        published, predicted = self.row.seconds, self.seconds
        for way in ("full-rank", "vanilla"):
            pair = published[way] / published["BOOST"], predicted[way] / predicted["BOOST"]
            yield Compared("speed-up of BOOST", f"{self.row.size} against {way}", *pair, "x", RATIO_LIMIT)

    def times(self) -> Iterator[Compared]:
        """Seconds per step."""
        for way in WAYS:
            yield Compared("step", f"{self.row.size} {way}", self.row.seconds[way], self.seconds[way], "s")


def configuration(way: Way, row: PublishedRow, micro_batch: int = 1, more: Sequence[str] = ()) -> Config:
    """The configuration of a published run. `more`: overrides."""
    schedule = "1f1b" if micro_batch * row.pp <= SEQUENCES else "gpipe"
    overrides = [
        *WAYS[way],
        f"--parallel.tp={row.tp}",
        f"--parallel.pp={row.pp}",
        f"--parallel.schedule={schedule}",
        "--train.compute_dtype=bfloat16",
        "--train.param_dtype=bfloat16",
        "--train.recompute=none",
        f"--train.seq_len={TOKENS}",
        f"--train.global_batch={SEQUENCES}",
        f"--train.micro_batch={micro_batch}",
    ]
    return load(f"boost-{row.size.lower()}", [*overrides, *more])


EAGER_US = 7.0
"""Host microseconds of one eager operation with autograd on a server CPU, in other software (reports: 5 to 10)."""


def launching(microseconds: float) -> HostTime:
    """The host time of software that needs `microseconds` per operation, whatever it compiles."""
    return HostTime(**dict.fromkeys(HostTime.model_fields, microseconds))


class Comparison:
    """Predictions of all published numbers, on one hardware profile."""

    def __init__(self, hardware: Hardware) -> None:
        self.hardware = hardware
        self.predictor = Predictor(hardware)
        self._of_paper = Predictor(hardware.model_copy(update={"overlap": 0.0, "host_us": launching(EAGER_US)}))
        """Models the paper's code: `separate_operations`, and collectives that do not overlap."""

    def all(self) -> list[Compared]:
        """Every published number with our prediction, by table."""
        steps = self.steps()
        result = [each for step in steps for each in step.ratios()]
        result += [each for step in steps for each in step.times()]
        tables: tuple[Callable[[], Iterator[Compared]], ...] = (
            self.families,
            self.communication,
            self.gemms,
            self.recomputation,
            self.one_gpu,
        )
        return result + [each for table in tables for each in table()]

    def steps(self, micro_batch: int = 1, as_published: bool = True) -> list[PublishedStep]:
        """Step times at a micro-batch size. `as_published`: those of the paper's code, with its extra collectives and with
        separate operations for scale, activation and B."""
        return [
            PublishedStep(
                row, {way: self.seconds(way, configuration(way, row, micro_batch), as_published) for way in WAYS}
            )
            for row in STEPS
        ]

    def families(self) -> Iterator[Compared]:
        """The 7B by architecture: ratios, then seconds."""
        row = STEPS[2]
        full = self.seconds("full-rank", configuration("full-rank", row))
        judged, shown = [], []
        for family, published in FAMILIES.items():
            more = [f"--model.family={family}"]
            ways: tuple[Way, Way] = ("BOOST", "vanilla")
            boost, vanilla = (self.seconds(way, configuration(way, row, more=more)) for way in ways)
            of_full, of_vanilla = row.seconds["full-rank"] / published[0], published[1] / published[0]
            name = "7B by architecture"
            judged.append(Compared(name, f"{family} against full-rank", of_full, full / boost, "x", RATIO_LIMIT))
            judged.append(Compared(name, f"{family} against vanilla", of_vanilla, vanilla / boost, "x", RATIO_LIMIT))
            shown.append(Compared(name, f"{family} BOOST", published[0], boost, "s"))
            shown.append(Compared(name, f"{family} vanilla", published[1], vanilla, "s"))
        yield from (*judged, *shown)

    def communication(self) -> Iterator[Compared]:
        """All-reduces of one block, forward: volume (exact) and time."""
        times = []
        for size, ways in COMMUNICATION.items():
            for way, (mib, ms) in ways.items():
                config = _block(way, size, SEQUENCES, *([_SYNC] if way == "BOOST" else []))
                sums = [each for each in _forward(config) if each.shape[-1] > 1]  # without the statistic
                assert all(each.kind == "all-reduce" for each in sums)
                payload = sum(2 * each.elements for each in sums) / 2**20
                seconds = self._collectives(config, sums)
                yield Compared("communication volume", f"{size} {way}", mib, payload, "MiB", 0.0)
                times.append(Compared("communication time", f"{size} {way}", ms, 1e3 * seconds, "ms", TIME_LIMIT))
        yield from times

    def gemms(self) -> Iterator[Compared]:
        """GEMMs of one 7B block, forward: time of one sequence of four, utilization of all four."""
        for way, published in GEMM_MS.items():
            for half, ms in zip(("attention", "MLP"), published, strict=True):
                seconds, _ = self._products(way, half)
                linears: list[tuple[str, float, float | None]] = [("", 1.0, TIME_LIMIT)]
                if half == "MLP":
                    linears = [(", three linears", 1.0, None), (", four linears", MLP_LINEARS, TIME_LIMIT)]
                for words, times, limit in linears:
                    ours = 1e3 * times * seconds / SEQUENCES
                    yield Compared("GEMM time", f"7B {way} {half}{words}", ms, ours, "ms", limit)
        for way, published in UTILIZATION.items():
            for half, share in zip(("attention", "MLP"), published, strict=True):
                seconds, flops = self._products(way, half)
                ours = flops / seconds / self.hardware.peak_flops("bfloat16")
                yield Compared("GEMM utilization", f"7B {way} {half}", 100 * share, 100 * ours, "%", TIME_LIMIT)

    def recomputation(self) -> Iterator[Compared]:
        """MB saved per ms that recomputation adds to a step of the 7B at TP 4."""
        cases: tuple[tuple[Way, int, RecomputeName, str, bool, list[str]], ...] = (
            ("BOOST", 0, "low-rank", "", False, []),
            ("BOOST", 0, "low-rank", ", sync norm", False, [_SYNC]),
            ("BOOST", 0, "low-rank", ", separate operations", True, []),
            ("vanilla", 1, "full-block", "", False, []),
            ("vanilla", 1, "full-block", ", separate operations", True, []),
        )
        for batch, published in SAVED_PER_ADDED.items():
            for way, column, policy, words, separate, norm in cases:
                more = [f"--train.global_batch={batch}", *norm]
                none = configuration(way, STEPS[2], batch, more)
                saving = configuration(way, STEPS[2], batch, [*more, f"--train.recompute={policy}"])
                saved = memory(none).activations - memory(saving).activations
                added = self.seconds(way, saving, separate) - self.seconds(way, none, separate)
                name, ours = f"batch {batch}, {way}, {policy}{words}", saved / added / 1e9
                yield Compared("memory saved per added time", name, published[column], ours, "MB/ms")

    def one_gpu(self) -> Iterator[Compared]:
        """CoLA's throughput relative to the dense model: as `boost train` runs both, with one change, and with all of CoLA's
        code."""
        h100 = Comparison(load_hardware("h100-80g"))
        for name, size, batch, policy, published in ONE_GPU:
            whole: RecomputeName = "none" if policy == "none" else "full-block"
            cases: dict[str, tuple[Comparison, int, RecomputeName, bool, bool]] = {
                "": (self, batch, policy, False, False),
                ", on an H100": (h100, batch, policy, False, False),
                ", dense with half the batch": (self, batch // 2, policy, False, False),
                ", separate operations": (self, batch, policy, True, False),
                ", unfused attention": (self, batch, policy, False, True),
                ", whole blocks recomputed": (self, batch, whole, False, False),
                ", all of its code": (self, batch, whole, True, True),
                ", all of its code, on an H100": (h100, batch, whole, True, True),
            }
            for words, (of, of_dense, recompute, *code) in cases.items():
                if whole != policy or "recomputed" not in words:
                    dense = of._one_gpu(size, of_dense, "dense", "none", *code) / of_dense
                    ours = of._one_gpu(size, batch, "cola", recompute, *code) / batch
                    yield Compared("on one GPU", f"{name}{words}", published, dense / ours, "x")

    def _one_gpu(
        self, size: str, batch: int, family: Family, recompute: RecomputeName, separate: bool, unfused: bool
    ) -> float:
        """Seconds of a step on one GPU, in bf16. `separate`: every linear and operation runs separately. `unfused`: attention runs
        in fp32 with all scores in memory, without fused kernels, which CoLA's training script disables."""
        sizes = [f"--train.{name}_batch={batch}" for name in ("micro", "global")]
        words = [
            f"--model.family={family}",
            f"--train.recompute={recompute}",
            f"--parallel.grouping={str(not separate).lower()}",
        ]
        one = ["--parallel.layout=single", "--parallel.tp=1", "--train.seq_len=256", "--train.param_dtype=bfloat16"]
        config = load(f"boost-{size}", [*sizes, *words, *one, "--train.compute_dtype=bfloat16"])
        seconds = self.seconds("full-rank", config, separate)
        if not unfused:
            return seconds
        tokens, width, pairs = config.train.seq_len, config.model.head_dim, batch * config.model.heads
        speed, shape = self.hardware.speeds.seconds, (batch, config.model.heads, config.model.heads, tokens, width)
        products = sum(speed(gemm(tokens, n, k, "float32", pairs)) for n, k in ((tokens, width), (width, tokens)))
        scores = speed(moved(STREAM, pairs * tokens * tokens, 1, "float32"))
        casts = 4 * speed(moved(STREAM, pairs * tokens * width, 1.5, "float32"))
        # Forward adds the mask to the scores, then takes the softmax; backward reads two such tensors and writes one.
        forward = products + 4 * scores + casts - speed(Work.of(ATTENTION, shape, "bfloat16"))
        backward = 2 * products + 3 * scores + casts - speed(Work.of(ATTENTION_BACKWARD, shape, "bfloat16"))
        return seconds + config.model.layers * ((1 + (recompute != "none")) * forward + backward)

    def norms(self) -> list[NormScope]:
        """RMSNorm of a 7B block alone in every combination of NORM_SCOPES, starting with the closest to the paper's times."""
        scopes = []
        for parts in itertools.product(*(kind.items() for kind in NORM_SCOPES)):
            words, scope = zip(*parts, strict=True)
            ms = {batch: (self._norm(batch, "sync", scope), self._norm(batch, "online", scope)) for batch in NORM_MS}
            scopes.append(NormScope("; ".join(words), ms))
        return sorted(scopes, key=lambda scope: abs(scope.worst))

    def _norm(self, batch: int, norm: str, scope: Sequence[Collection[str]]) -> float:
        """Milliseconds of one form of the norm in a scope."""
        kernels, places, phases, sends = scope
        config, sync = (_block("BOOST", "7B", batch, f"--parallel.norm={form}") for form in (norm, "sync"))
        works = _block_work(config, places, (REDUCE, STREAM), phases, "separate" in kernels)
        sent, latents = (
            [each for each in _both_passes(of) if each.place in places and each.phase in phases]
            for of in (config, sync)
        )
        latents = [] if "latents" in sends else [each for each in latents if each.shape[-1] > 1]
        seconds = self._device(works) + self._collectives(config, sent) - self._collectives(config, latents)
        launches = works.total() + len(sent) - len(latents) if "launches" in kernels else 0
        return 1e3 * (seconds + launches * EAGER_US * 1e-6)

    def seconds(self, way: Way, config: Config, as_published: bool = True) -> float:
        """Predicted seconds of a step. `as_published`: see `steps`."""
        if not as_published:
            return self.predictor.predict(config).seconds
        with separate_operations():
            seconds = self._of_paper.predict(_uncompiled(config)).seconds
        return seconds + self._only_published(config) if way == "BOOST" else seconds

    def _only_published(self, config: Config) -> float:
        """Seconds per step of the extra collectives in the paper's code: those of the slowest rank in every micro-batch, and those
        of every other rank once."""
        parallel, train = config.parallel, config.train
        if parallel.tp == 1:
            return 0.0
        added = [sum(self._added(config, stage) for stage in stages_of(config, rank)) for rank in range(parallel.pp)]
        count = train.global_batch // (parallel.dp * train.micro_batch)
        return (count - 1) * max(added) + sum(added)

    def _added(self, config: Config, stage: Stage) -> float:
        """The extra collectives of one micro-batch on one stage, in seconds."""
        train = config.train
        sync = config.model_copy(update={"parallel": config.parallel.model_copy(update={"norm": "sync"})})
        # All blocks and their extra collectives are equal here.
        added = self._collectives(sync, _both_passes(sync)) - self._collectives(config, _both_passes(config))
        embedding = Collective(
            "forward",
            "all-reduce",
            (train.micro_batch * train.seq_len, config.model.dim),
            train.compute_dtype,
            config.parallel.tp,
        )
        # Eager code copies a group's latents into the tensor that it all-reduces, and their gradients into one tensor.
        copies = [
            Work.of(STREAM, (each.elements,), each.dtype, 2.0)
            for each in _both_passes(config)
            if each.place in ("qkv", "gate_up")
        ]
        added += self._device(Counter(copies))
        return stage.layers * added + stage.has_embedding * self._collectives(config, [embedding] * 2)

    def _products(self, way: Way, half: str) -> tuple[float, int]:
        """(seconds, FLOPs) of the GEMMs of half a 7B block on one process, forward, batch 4."""
        places = ("qkv", "o") if half == "attention" else ("gate_up", "down")
        config = _block(way, "7B", SEQUENCES)
        works = _block_work(config, places, (GEMM,))
        return self._device(works), sum(times * each.flops for each, times in works.items())

    def _device(self, works: Counted) -> float:
        return sum(times * self.hardware.speeds.seconds(each) for each, times in works.items())

    def _collectives(self, config: Config, collectives: Iterable[Collective]) -> float:
        return sum(collective_seconds(each, config.parallel, self.hardware) for each in collectives)


_SYNC = "--parallel.norm=sync"


def _block(way: Way, size: str, batch: int, *more: str) -> Config:
    """A configuration of `size` under TP 4 with micro-batch `batch`, for inspecting one block."""
    row = next(each for each in STEPS if each.size == size)
    return configuration(way, replace(row, tp=4, pp=1), batch, more)


def _block_work(
    config: Config,
    places: Collection[str],
    kernels: Collection[str],
    phases: Collection[str] = ("forward",),
    separate: bool = True,
) -> Counted:
    """Operations of the first block on a GPU, filtered; with `separate`, as in the paper's code."""
    with separate_operations() if separate else nullcontext():
        found = block_work(_uncompiled(config) if separate else config, 0, "none", on_gpu=True)
    kept = (w for w in found if w.phase in phases and w.place in places and w.kernel in kernels)
    return Counter({work: found[work] for work in kept})


def _uncompiled(config: Config) -> Config:
    return config.model_copy(update={"train": config.train.model_copy(update={"compile": "none"})})


def _both_passes(config: Config) -> list[Collective]:
    """Collectives of one micro-batch in the first block."""
    train = config.train
    first = Stage(1, 3, 0, 1)
    found = micro_batch_collectives(
        config.model, config.parallel, train.micro_batch * train.seq_len, train.compute_dtype, stage=first
    )
    return [each for each in found if each.layer is not None]


def _forward(config: Config) -> list[Collective]:
    return [each for each in _both_passes(config) if each.phase == "forward"]
