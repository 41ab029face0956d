"""Explains why the best configuration wins over the best one of every other kind, and breaks a configuration down.

Comparisons name the parts of the step time that differ, or the memory shortfall. A breakdown lists the GEMMs and
attention calls on one pipeline rank in a step, with their times.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from boost.config.architecture import parameter_count
from boost.config.layouts import layouts_of
from boost.config.schema import Config, ParallelConfig
from boost.config.stages import stages_of
from boost.format import format_bytes, format_count, format_seconds
from boost.plan.candidates import context_sizes
from boost.plan.hardware import QUANTITIES, Hardware, origin, provenance_words
from boost.plan.search import Plan, Search, Test, Tick
from boost.plan.step_time import HOST, PARTS, StepTime
from boost.plan.timing import block_work, ends_work, kinds_in, step_work
from boost.plan.work import ATTENTION, ATTENTION_BACKWARD, GEMM, Counted, Work

MOST = 0.8
"""The largest differences (at most three) are listed until they cover this fraction of the total."""

CLOSE = 0.05
"""Time differences below this fraction are within the prediction error (docs/results.md)."""

LIMIT = 0.05
"""Waiting for the host is reported if it takes more than this fraction of a step."""


@dataclass(frozen=True)
class ConfigKind:
    """A kind of configuration to compare with the best one."""

    name: str
    of: Callable[[ParallelConfig], bool]
    test: Test = bool


@dataclass(frozen=True)
class Alternative:
    """The best configuration of one or more kinds."""

    kinds: tuple[str, ...]
    plan: Plan
    """The fastest plan that fits; if none fits, the one with the lowest peak memory."""
    why: str
    """Why it loses to the best one overall."""


def pure_data_parallel(parallel: ParallelConfig) -> bool:
    """Whether the mesh has only DP, with or without sharding."""
    return parallel.tp == parallel.pp == parallel.cp == 1


def kinds(search: Search) -> Iterator[ConfigKind]:
    """Yields the kinds of configurations to compare in a search."""
    model, gpus = search.request.base.model, search.request.gpus
    fixed = search.request.fixed
    yield ConfigKind("pure data parallelism", pure_data_parallel)
    if len(context_sizes(search.request, 1)) > 1:
        yield ConfigKind("context parallelism", lambda parallel: parallel.cp > 1)
    for layout in layouts_of(model):
        yield ConfigKind(layout, lambda parallel, layout=layout: parallel.layout == layout and parallel.tp > 1)  # type: ignore[misc]
    sizes = [n for n in (2, 4, 8, 16) if gpus % n == 0] if "parallel.tp" not in fixed else []
    for tp in sizes:
        yield ConfigKind(f"TP {tp}", lambda parallel, tp=tp: parallel.tp == tp)  # type: ignore[misc]
    yield ConfigKind("with a pipeline", lambda parallel: parallel.pp > 1)
    yield ConfigKind("without a pipeline", lambda parallel: parallel.pp == 1)
    if "parallel.shard" not in fixed:
        yield ConfigKind("nothing sharded", lambda parallel: not parallel.sharded)
        yield ConfigKind("sharded", lambda parallel: parallel.sharded)
    if "train.recompute" not in fixed:
        yield ConfigKind("no recomputation", lambda parallel: True, lambda config: config.train.recompute == "none")


def alternatives(search: Search, best: Plan, tick: Tick | None = None) -> list[Alternative]:
    """Returns the best configuration of each kind except the overall best one, fastest first; those that do not fit come last."""
    names_and_plan: dict[tuple[object, ...], tuple[list[str], Plan]] = {}  # one plan may be the best of several kinds
    compared = list(kinds(search))
    for done, kind in enumerate(compared):
        if tick:
            tick(done, len(compared))
        plan = search.fastest(kind.test, kind.of) or search.smallest(kind.test, kind.of)
        if plan is not None and plan.config != best.config:
            key = plan.config.parallel, plan.config.train
            names_and_plan.setdefault(key, ([], plan))[0].append(kind.name)
    others = [Alternative(tuple(names), plan, why(best, plan)) for names, plan in names_and_plan.values()]
    return sorted(others, key=lambda other: (other.plan.shortfall > 0, other.plan.time.seconds))


def why(best: Plan, other: Plan) -> str:
    """Explains why `other` loses to `best`."""
    if other.shortfall > 0:
        train, parallel = other.config.train, other.config.parallel
        savers = [f"{train.recompute} recomputation"] if train.recompute != "none" else []
        savers += [f"shard = {parallel.shard}"] if parallel.sharded else []
        savers.append(f"micro-batch {train.micro_batch}")
        return f"out of memory by {format_bytes(other.shortfall)}, even with {', '.join(savers)}"
    return time_difference(best.time, other.time)


def time_difference(best: StepTime, other: StepTime) -> str:
    """Names the parts in which `other` spends more time than `best`, and a large saving if any: '310 ms more in GEMMs; ...'."""
    delta = {part: other.parts.get(part, 0.0) - best.parts.get(part, 0.0) for part in PARTS}
    more = sorted(((seconds, part) for part, seconds in delta.items() if seconds > 0), reverse=True)
    less = sorted((seconds, part) for part, seconds in delta.items() if seconds < 0)
    wanted, covered, words = MOST * sum(seconds for seconds, _ in more), 0.0, []
    for seconds, part in more[:3]:
        if covered >= wanted:
            break
        covered += seconds
        words.append(f"{format_seconds(seconds)} more {PARTS[part][1]}")
    saved = [
        f"{format_seconds(-seconds)} less {PARTS[part][1]}" for seconds, part in less[:1] if -seconds > covered / 4
    ]
    return "; ".join([", ".join(words), *saved]) if words else "no difference in the prediction"


def mesh(parallel: ParallelConfig) -> str:
    """Formats the mesh: 'TP 2, PP 4, DP 2'."""
    sizes = {"TP": parallel.tp, "PP": parallel.pp, "DP": parallel.dp, "CP": parallel.cp}
    return ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one process"


def choices(config: Config) -> str:
    """Formats the choices other than the mesh: 'btp-sp, overlapped halves, shard = full, 1f1b, micro-batch 2, low-rank'."""
    parallel, train = config.parallel, config.train
    words: list[str] = [parallel.layout] if parallel.tp > 1 else []
    words += ["sync norm"] * (parallel.norm == "sync" and parallel.tp > 1)
    words += ["overlapped halves"] * (parallel.overlap == "halves" and parallel.tp * parallel.cp > 1)
    if parallel.sharded:
        words.append(f"shard = {parallel.shard}" + (" (outer factors too)" if parallel.shard_outer else ""))
    if parallel.pp > 1:
        words.append(parallel.schedule + (f" x {parallel.virtual}" if parallel.virtual > 1 else ""))
    words.append(f"micro-batch {train.micro_batch}")
    if train.recompute != "none":
        words.append(
            train.recompute + (f" in every {train.recompute_every}nd block" if train.recompute_every == 2 else "")
        )
    return ", ".join(words)


def notes(search: Search, best: Plan, others: list[Alternative], dense: Plan | None) -> Iterator[str]:
    """Yields notes for the user. `dense`: the fastest plan for the dense model of this shape, or the smallest if none fits."""
    yield from _against_data_parallelism(best, others)
    if dense is not None:
        name = f"The dense model of this shape ({format_count(parameter_count(dense.config.model), 2)} parameters)"
        if dense.shortfall > 0:
            yield f"{name} does not fit on these GPUs: {why(best, dense)}. The low-rank model does."
        else:
            yield (
                f"{name} takes {format_seconds(dense.time.seconds)} per step at best ({mesh(dense.config.parallel)}, "
                f"{choices(dense.config)}): {dense.time.seconds / best.time.seconds:.2f} x the step time of the low-rank model."
            )
    if problem := search.why_no_tp():
        yield f"No TP: {problem}."
    waiting = best.time.parts.get(HOST, 0.0) / best.time.seconds
    if waiting > LIMIT:
        yield (
            f"The host is the bottleneck: GPUs wait for kernel launches for {waiting:.0%} of the step because kernels are too "
            "small. Use larger micro-batches if they fit, or try train.cuda_graphs = 'on', which waits for no launches."
        )
    hardware = search.request.hardware
    if any(origin(hardware, field) != "calibrated" for field in QUANTITIES):
        yield f"Speeds: {provenance_words(hardware)}. 'boost plan calibrate' measures your machines."


def _against_data_parallelism(best: Plan, others: list[Alternative]) -> Iterator[str]:
    if best.time.devices == 1:
        return
    pure = [c for c in others if pure_data_parallel(c.plan.config.parallel)]
    if pure_data_parallel(best.config.parallel):
        tp = next((c for c in others if c.plan.config.parallel.tp > 1 and c.plan.shortfall <= 0), None)
        if tp is not None:
            slower = tp.plan.time.seconds / best.time.seconds - 1
            parallel = tp.plan.config.parallel
            fits_whole = any(not c.plan.config.parallel.sharded and c.plan.shortfall <= 0 for c in pure)
            sharded = best.config.parallel.shard == "full" and best.config.parallel.sharded and not fits_whole
            reason = (
                "sharding over replicas (shard = full) makes the model fit" if sharded else "the model fits on one GPU"
            )
            yield (
                f"Pure data parallelism beats TP here: {reason}, and the fastest plan with TP "
                f"({mesh(parallel)}, {parallel.layout}) takes {slower:.1%} longer ({tp.why}).{_caveat(slower)}"
            )
        return
    if pure and pure[0].plan.shortfall > 0:
        yield f"Pure data parallelism does not fit: {pure[0].why}."
    elif pure:
        slower = pure[0].plan.time.seconds / best.time.seconds - 1
        yield f"Pure data parallelism fits, but takes {slower:.1%} longer: {pure[0].why}.{_caveat(slower)}"


def _caveat(slower: float) -> str:
    return " The difference is within the prediction error: run both plans for a few steps." if slower < CLOSE else ""


@dataclass(frozen=True)
class WorkTotal:
    """All GEMMs or attention calls of one shape in a step, on one process."""

    work: Work
    """The work in a single call."""
    calls: int
    seconds: float
    """Total seconds for all calls."""
    peak_flops: float
    """Peak FLOP/s of the device for this dtype."""


PRODUCTS = (GEMM, ATTENTION, ATTENTION_BACKWARD)


def products(config: Config, hardware: Hardware, pp_rank: int) -> list[WorkTotal]:
    """GEMMs and attention calls on pipeline rank `pp_rank` in a step, longest first."""
    train, parallel = config.train, config.parallel
    count = train.global_batch // (parallel.dp * train.micro_batch)
    calls_of: Counter[Work] = Counter()

    def add(works: Counted, times: int) -> None:
        for work, calls in works.items():
            calls_of[work] += times * calls

    held = stages_of(config, pp_rank)
    for stage in held:
        for (layer, policy), blocks in kinds_in(config.model, train, stage).items():
            add(block_work(config, layer, policy, hardware.is_gpu), blocks * count)
        add(ends_work(config, stage.has_embedding, stage.has_head, hardware.is_gpu), count)
    add(step_work(config, held), 1)
    speeds = hardware.speeds_of(min(parallel.world_size, hardware.per_node))
    peak = {dtype: speed.tflops * 1e12 for dtype, speed in hardware.speeds.gemm.items()}
    totals = [
        WorkTotal(work, calls, calls * speeds.seconds(work), peak[work.dtype])
        for work, calls in calls_of.items()
        if work.kernel in PRODUCTS
    ]
    return sorted(totals, key=lambda total: -total.seconds)
