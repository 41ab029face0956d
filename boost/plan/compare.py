"""Why the best configuration is the best: the best of every other kind beside it, and in words what each loses by.

The words are made of differences: of the parts of a step's time, or of the bytes that are missing.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from boost.config.architecture import parameter_count
from boost.config.layouts import layouts_of
from boost.config.schema import Config, ParallelConfig
from boost.plan.inspection import human_bytes
from boost.plan.search import Plan, Search, Test, Tick, anything
from boost.plan.timing import (
    ATTENTION_TIME,
    BUBBLE,
    GEMMS,
    HOST,
    OPTIMIZER_TIME,
    OTHER,
    PIPELINE,
    RECOMPUTED,
    REPLICAS,
    REST,
    TENSOR,
    StepTime,
)

WORDS = {
    GEMMS: "in matrix products", ATTENTION_TIME: "in attention", OTHER: "in element-wise operations",
    RECOMPUTED: "of recomputation", HOST: "of waiting for the host", TENSOR: "in TP collectives",
    PIPELINE: "of pipeline sends", BUBBLE: "of pipeline bubble", REPLICAS: "in DP collectives",
    OPTIMIZER_TIME: "in the optimizer", REST: "of the rest",
}  # fmt: skip
"""How the parts of a step stand in a sentence: '12 ms more ...'."""

MOST = 0.8
"""Differences are told, the largest first, until they are so much of all."""

CLOSE = 0.05
"""Differences in time up to this are less than predictions err by, as 'boost plan validate' shows."""

LIMIT = 0.05
"""Share of a step from which waiting for the host is worth a sentence."""


@dataclass(frozen=True)
class ConfigKind:
    """A kind of configuration, to be compared."""

    name: str
    of: Callable[[ParallelConfig], bool]
    test: Test = anything


@dataclass(frozen=True)
class Alternative:
    """The best configuration of some kinds."""

    kinds: tuple[str, ...]
    plan: Plan
    """The fastest that fits; where none does, the one that needs least memory."""
    why: str
    """What it loses by."""


def pure_data_parallel(parallel: ParallelConfig) -> bool:
    """Whether every process holds the whole model (or shares it as replicas do)."""
    return parallel.tp == parallel.pp == 1


def kinds(search: Search) -> Iterator[ConfigKind]:
    """What is worth comparing among the candidates of a search."""
    model, gpus = search.request.base.model, search.request.gpus
    fixed = search.request.fixed
    yield ConfigKind("pure data parallelism", pure_data_parallel)
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


def contenders(search: Search, best: Plan, tick: Tick | None = None) -> list[Alternative]:
    """The best of each kind but the best itself, the fastest first; behind them those that do not fit."""
    found: dict[str, tuple[list[str], Plan]] = {}
    listed = list(kinds(search))
    for done, kind in enumerate(listed):
        if tick:
            tick(done, len(listed))
        plan = search.fastest(kind.test, kind.of) or search.smallest(kind.test, kind.of)
        if plan is not None and plan.config != best.config:
            found.setdefault(repr((plan.config.parallel, plan.config.train)), ([], plan))[0].append(kind.name)
    ordered = sorted(found.values(), key=lambda each: (each[1].missing > 0, each[1].time.seconds))
    return [Alternative(tuple(names), plan, why(best, plan)) for names, plan in ordered]


def why(best: Plan, other: Plan) -> str:
    """What `other` loses to `best` by."""
    if other.missing > 0:
        return f"out of memory by {human_bytes(other.missing)}{_at_best(other.config)}"
    return time_difference(best.time, other.time)


def _at_best(config: Config) -> str:
    """What has been tried to make it fit."""
    tried = []
    if config.train.recompute != "none":
        tried.append(f"{config.train.recompute} recomputation")
    if config.parallel.sharded:
        tried.append(f"shard = {config.parallel.shard}")
    tried.append(f"micro-batch {config.train.micro_batch}")
    return f", even with {', '.join(tried)}"


def time_difference(best: StepTime, other: StepTime) -> str:
    """Where the time of `other` goes that `best` does not take: '310 ms more in TP collectives, ...'."""
    delta = {part: other.parts.get(part, 0.0) - best.parts.get(part, 0.0) for part in WORDS}
    more = sorted(((seconds, part) for part, seconds in delta.items() if seconds > 0), reverse=True)
    less = sorted((seconds, part) for part, seconds in delta.items() if seconds < 0)
    wanted, told, words = MOST * sum(seconds for seconds, _ in more), 0.0, []
    for seconds, part in more[:3]:
        if told >= wanted:
            break
        told += seconds
        words.append(f"{human_seconds(seconds)} more {WORDS[part]}")
    saved = [f"{human_seconds(-seconds)} less {WORDS[part]}" for seconds, part in less[:1] if -seconds > told / 4]
    return "; ".join([", ".join(words), *saved]) if words else "no difference in the prediction"


def human_seconds(seconds: float) -> str:
    """Three significant digits: '7.70 s', '412 ms', '88 us'."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= 0.9995 * size:
            value = seconds / size
            return f"{value:,.0f} {unit}" if value >= 999.5 else f"{value:#.3g}".rstrip(".") + f" {unit}"
    return f"{seconds * 1e6:.2g} us" if seconds else "0 s"


def mesh(parallel: ParallelConfig) -> str:
    """'TP 2, PP 4, DP 2'."""
    sizes = {"TP": parallel.tp, "PP": parallel.pp, "DP": parallel.dp}
    return ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one process"


def choices(config: Config) -> str:
    """The rest of a configuration: 'btp-sp, shard = full, 1f1b, micro-batch 2, low-rank recomputation'."""
    parallel, train = config.parallel, config.train
    words: list[str] = [parallel.layout] if parallel.tp > 1 else []
    words += ["sync norm"] * (parallel.norm == "sync" and parallel.tp > 1)
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
    """What a user should know, in sentences. `dense`: the best of the dense model of this shape, or its smallest."""
    yield from _against_data_parallelism(best, others)
    if dense is not None:
        yield _against_dense(best, dense)
    if problem := search.why_no_tp():
        yield f"No TP: {problem}."
    waiting = best.time.parts.get(HOST, 0.0) / best.time.seconds
    if waiting > LIMIT:
        yield (
            f"The host is the limit: {waiting:.0%} of a step its devices wait for it to issue operations, which are too small "
            "for them; larger micro-batches, if they fit, are the way out."
        )
    room = best.memory / best.usable
    if room > 0.9:
        yield (
            f"Memory is tight ({room:.0%} of what is usable) and predicted to some per cent; if the first step ends out of "
            "memory, halve train.micro_batch or take a runner-up that holds less."
        )
    hardware = search.request.hardware
    if not hardware.speeds.kernels and not hardware.node.measured:
        yield (
            f"Speeds are those of published measurements and datasheets ({hardware.title}), not of your machines: "
            "'boost plan calibrate' there makes a profile of them."
        )


def _against_data_parallelism(best: Plan, others: list[Alternative]) -> Iterator[str]:
    if best.time.devices == 1:
        return
    if pure_data_parallel(best.config.parallel):
        tp = next((c for c in others if c.plan.config.parallel.tp > 1 and c.plan.missing <= 0), None)
        if tp is not None:
            slower = tp.plan.time.seconds / best.time.seconds - 1
            parallel = tp.plan.config.parallel
            yield (
                f"Pure data parallelism beats TP here: {_room(best.config.parallel)}, and the fastest with TP ({mesh(parallel)}, "
                f"{parallel.layout}) takes {slower:.1%} longer: {tp.why}.{_close(slower)}"
            )
        return
    pure = next((c for c in others if pure_data_parallel(c.plan.config.parallel)), None)
    if pure is not None and pure.plan.missing > 0:
        yield f"Pure data parallelism does not fit: {pure.why}."
    elif pure is not None:
        slower = pure.plan.time.seconds / best.time.seconds - 1
        yield f"Pure data parallelism fits, and takes {slower:.1%} longer: {pure.why}.{_close(slower)}"


def _room(parallel: ParallelConfig) -> str:
    if parallel.shard == "full" and parallel.sharded:
        return "what replicas share (shard = full) they need not hold"
    return "one device has room for the model"


def _close(slower: float) -> str:
    return " That is less than predictions err by: run both for some steps." if slower < CLOSE else ""


def _against_dense(best: Plan, dense: Plan) -> str:
    billions = parameter_count(dense.config.model) / 1e9
    name = f"The dense model of this shape ({billions:.1f}B parameters)"
    if dense.missing > 0:
        return f"{name} does not fit on these GPUs: {why(best, dense)}. The low-rank one does."
    ratio = dense.time.seconds / best.time.seconds
    parallel = dense.config.parallel
    return (
        f"{name} would take {human_seconds(dense.time.seconds)} a step at its best ({mesh(parallel)}, {choices(dense.config)}): "
        f"{ratio:.2f} x the time of the low-rank one."
    )
