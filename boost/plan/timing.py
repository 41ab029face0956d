"""Predicts the time of an optimizer step on given hardware, by part.

The time for a micro-batch is the time for its operations, each from a shape-dependent roofline, plus the time spent waiting
for TP and CP collectives. The trace gives the start and the wait of each collective; with parallel.overlap, other work runs in
between. A step adds the pipeline bubble, the exposed part of DP collectives, and the optimizer.
"""

import functools
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar, cast

from boost.config.architecture import GroupSpec, first_alike, flops_per_token, taken
from boost.config.factors import FactorShape, work_dtype
from boost.config.optimizers import MuonConfig
from boost.config.schema import Config, ModelConfig, ParallelConfig, RecomputeName, TrainConfig
from boost.config.stages import Stage, stages, whole
from boost.config.traffic import ITEMSIZE, Collective
from boost.plan import step_time
from boost.plan.collectives import stage_sends
from boost.plan.hardware import Hardware, Speeds, collective_seconds, span
from boost.plan.optimizer import iterations, optimizer_collectives
from boost.plan.replicas import gathers, gradient_collectives
from boost.plan.step_time import PassTime, Seconds, StepTime
from boost.plan.structure import MAX_CACHED, HeldTensors, altered, held_tensors, traced, without
from boost.plan.tape import Operation, work_of
from boost.plan.trace import TracedPass, trace_block, trace_embedding, trace_loss
from boost.plan.work import ATTENTION, ATTENTION_BACKWARD, GEMM, OPTIMIZER, REDUCE, STREAM, Counted, Work, gemm, moved

PART_OF = {GEMM: step_time.GEMMS, ATTENTION: step_time.ATTENTION_TIME, ATTENTION_BACKWARD: step_time.ATTENTION_TIME}
"""Part of the step time that each kind of operation counts toward; for all others it is `step_time.OTHER`."""

_T = TypeVar("_T")

# Operations on one process in a training step: embedding, blocks, loss, and the work after the last backward pass.


def block_work(config: Config, layer: int, policy: RecomputeName, on_gpu: bool) -> Counted:
    """Operations in one block for one micro-batch, with their phases. `on_gpu`: see `boost.plan.trace.trace_block`."""
    return trace_block(as_stored(config), layer, policy, on_gpu).work


def ends_work(config: Config, has_embedding: bool, has_head: bool, on_gpu: bool) -> Counted:
    """Operations in the embedding and the loss for one micro-batch."""
    stored, total = as_stored(config), Counter[Work]()
    if has_embedding:
        total.update(trace_embedding(stored).work)
    if has_head:
        total.update(trace_loss(stored, on_gpu).work)
    return total


def as_stored(config: Config) -> Config:
    """Returns the configuration without sharding, whose passes do the same work.

    Gathered weights arrive cast, so passes use them like working copies. Without working copies, gathered weights are copied out of
    the receive buffer and their gradients into the send buffer. These copies move about as many bytes as casts at each use, which
    are counted instead.
    """
    return altered(config, parallel=without(config.parallel, "shard")) if config.parallel.sharded else config


@functools.lru_cache(MAX_CACHED)
def kinds_in(model: ModelConfig, train: TrainConfig, stage: Stage) -> Counter[tuple[int, RecomputeName]]:
    """Counts the blocks in a stage by kind and recomputation policy."""
    policies = train.recompute_by_layer(model.layers)
    return Counter((first_alike(model, layer), policies[layer]) for layer in stage.numbers)


def step_work(config: Config, stages: Sequence[Stage], micro_batches: int | None = None) -> Counted:
    """Operations that one process runs once per optimizer step, and gradient accumulation over micro-batches.

    For weights with working copies, this includes the casts of weights and gradients, which otherwise belong to a micro-batch.
    `micro_batches`: their number, if it is not the configuration's.
    """
    parallel, train = config.parallel, config.train
    total: Counted = Counter()
    dtype, of_step = train.param_dtype, _work_of_step
    accumulated = micro_batches or train.global_batch // (parallel.dp * train.micro_batch)
    # Gradients are copied into a bucket for an all-reduce; if the bucket has another dtype, they are also copied out of it.
    copied = 2 if train.sum_dtype == dtype else 2 * (1 + ITEMSIZE[train.sum_dtype] / ITEMSIZE[dtype])
    has_copies, narrow = as_stored(config).has_working_copies, ITEMSIZE[train.compute_dtype] / ITEMSIZE[dtype]
    gathers_each = parallel.sharded and parallel.shard == "full"
    for tensor, count in held_tensors(config, stages).counts.items():
        elements, held = (tensor.elements,), (tensor.shard(parallel),)
        has_copy = has_copies and tensor.may_have_copy
        if has_copy and gathers_each:
            # In each micro-batch: copies out of two gather buffers and into one reduce-scatter buffer.
            total[of_step(STREAM, elements, dtype, 4 * narrow + 1 + narrow, "weights")] += count * accumulated
        elif has_copy:
            # The weight is cast (or gathered) once. The first gradient is cast; each later one is accumulated in a single pass.
            total[of_step(STREAM, elements, dtype, 1 + narrow, "weights")] += 2 * count
        added = 2 + narrow if has_copy and not gathers_each else 3
        total[of_step(STREAM, elements, dtype, added, "weights")] += count * (accumulated - 1)
        if parallel.dp_cp > 1 or (tensor.placement.partial and parallel.tp > 1):
            total[of_step(STREAM, elements, dtype, copied, "weights")] += count
        total[of_step(REDUCE, held, dtype, 1, "optimizer")] += count
        total[of_step(STREAM, held, dtype, 2, "optimizer")] += count * (config.optim.clip > 0)
        # Reads the weight, the gradient and two moments; writes all but the gradient.
        total[of_step(OPTIMIZER, held, dtype, 7, "optimizer")] += count
    if isinstance(config.optim, MuonConfig):
        total.update(_newton_schulz(config, stages))
    return +total


_work_of_step = functools.lru_cache(MAX_CACHED)(functools.partial(Work.of, phase="step"))


def _newton_schulz(config: Config, stages: Sequence[Stage]) -> Counted:
    """Muon orthogonalizes the momentum of every factor through its r x r Gram matrix (`boost.optim.muon`), in fp32 or higher
    precision. Processes with the same weights divide the iterations, and the Gram matrices that need no sum over TP."""
    parallel, optim = config.parallel, config.optim
    assert isinstance(optim, MuonConfig)
    dtype, total = work_dtype(optim, config.train.param_dtype), Counter[Work]()

    def add(work: Work, times: int) -> None:
        total[work._replace(phase="step", place="optimizer")] += times

    units = held_tensors(config, stages).factors
    shapes = Counter(shape for unit in units for shape in unit.shapes)
    for shape, count in shapes.items():
        n, r = shape.rows, shape.rank
        add(gemm(r, r, n, dtype), count * _is_summed(shape, parallel))
        add(gemm(n, r, r, dtype), count)
        add(moved(STREAM, n * r, 8, dtype), count)
    for shape, count in iterations(config, stages).items():
        n, r = shape.rows, shape.rank
        add(gemm(r, r, n, dtype), count * (not _is_summed(shape, parallel)))
        # Each iteration computes g g, p q and, except in the last iteration, q g q.
        add(gemm(r, r, r, dtype), count * (4 * optim.muon_steps - 2))
    return total


def _is_summed(shape: FactorShape, parallel: ParallelConfig) -> bool:
    """Whether the Gram matrix of this factor is a sum over TP processes."""
    return shape.gram > 0 and parallel.tp > 1


# Operation and step times.


def predict(config: Config, hardware: Hardware) -> StepTime:
    """Predicts the time of a regular step. Raises ConfigError if the hardware profile has no speed for a dtype."""
    return Predictor(hardware).predict(config)


class Predictor:
    """Predicts steps for one hardware profile. Caches results that configurations share, such as a block under one layout."""

    def __init__(self, hardware: Hardware) -> None:
        self.hardware = hardware
        self.on_gpu = hardware.is_gpu
        self._micro_batches: dict[tuple[object, ...], _Cache] = {}
        """Results for one micro-batch, shared by configurations with equal model, TP, layout and micro-batch."""
        self._steps: _Cache = {}
        """Results for the work that is done once per step."""
        self._seconds: dict[Speeds, dict[Operation, float]] = defaultdict(dict)
        """Seconds for operations."""
        self._links: dict[tuple[object, ...], float] = {}
        """Seconds for collectives, by payload and mesh."""

    def predict(self, config: Config) -> StepTime:
        """Predicts the time of a regular step. Raises ConfigError like the function `predict`."""
        parallel, train, hardware = config.parallel, config.train, self.hardware
        count = train.global_batch // (parallel.dp * train.micro_batch)
        passes = self.passes(config)
        busiest = max(range(parallel.pp), key=lambda rank: passes[rank].total)
        worst = passes[busiest]
        parts = defaultdict(float, {name: count * value for name, value in worst.parts.items()})
        # With gpipe and 1F1B, the bubble is the time of the other ranks in the first and last micro-batch (arXiv 1811.06965,
        # 2006.09503). With v stages per rank, it is shorter by a factor of v (arXiv 2104.04473).
        parts[step_time.BUBBLE] = (sum(one.total for one in passes) - worst.total) / parallel.virtual
        if hardware.alone is not None and 1 < parallel.pp == parallel.world_size <= hardware.per_node:
            # A stage is faster while the others wait, because CPU cores share bandwidth and clocks.
            large, dtype = (4096, 4096, 4096), train.compute_dtype
            together, alone = (of.gemm_speed(dtype).flops_per_s(*large) for of in (hardware.speeds, hardware.alone))
            parts[step_time.BUBBLE] *= min(together / alone, 1.0)
        held = held_tensors(config, stages(config)[busiest :: parallel.pp])
        exposed, hidden = self._replicas(config, held, worst, count)
        parts[step_time.REPLICAS] += exposed
        parts[step_time.OPTIMIZER_TIME] += self._step_end(config, held)
        parts[step_time.STRAGGLERS] = sum(parts.values()) * self._straggling(parallel)
        parts[step_time.REST] += hardware.step_ms * 1e-3
        tokens = train.global_batch * train.seq_len
        return StepTime(
            seconds=sum(parts.values()),
            parts={name: parts[name] for name in step_time.PARTS if parts[name]},
            tokens=tokens,
            devices=parallel.world_size,
            flops=float(tokens * _flops_per_token(config.model, train.seq_len)),
            peak_flops=hardware.peak_flops(train.compute_dtype),
            hidden=hidden + count * sum(worst.hidden),
            masked_flops=float(tokens * 6 * config.model.heads_dim * train.seq_len * config.model.layers),
        )

    def _straggling(self, parallel: ParallelConfig) -> float:
        """Time spent waiting for the slowest node, as a fraction of the rest of the step: proportional to log2(nodes)."""
        nodes = -(-parallel.world_size // self.hardware.per_node)
        return self.hardware.straggling * math.log2(nodes)

    def passes(self, config: Config) -> Sequence[PassTime]:
        """Times for one micro-batch on each pipeline rank."""
        p, train = config.parallel, config.train
        key = "passes", p.pp, p.virtual, p.split, train.recompute, train.recompute_every, config.captures_passes
        shared = self._of_micro_batch(config.model, p, train)
        return _cached(shared, key, self._passes, config, shared)

    def _passes(self, config: Config, shared: "_Cache") -> Sequence[PassTime]:
        """Times for one micro-batch through all stages of each pipeline rank."""
        times, split = dict[tuple[object, ...], PassTime](), stages(config)
        ranks = [split[rank :: config.parallel.pp] for rank in range(config.parallel.pp)]
        keys = [tuple(_kind(config.model, config.train, stage) for stage in held) for held in ranks]
        for key, held in zip(keys, ranks, strict=True):
            if key not in times:
                times[key] = result = self._blocks_and_ends(config, held, shared)
                self._add_sends(config, held, result)
                # On a GPU, the host launches kernels and collectives ahead of time; the device waits if the host is slower.
                issuing = self.hardware.host_us.in_pass(config, self.hardware.device) * 1e-6 * result.calls
                result.wait(issuing if self.hardware.device == "cpu" else max(issuing - result.total, 0.0))
        return [times[key] for key in keys]

    def lower_bound(self, config: Config) -> float:
        """A cheap lower bound on `predict`.

        With a pipeline, leaves out DP collectives and the optimizer, and assumes equal stages. With overlapped halves, leaves out
        TP and CP collectives, because computing two halves takes at least as long as computing one whole micro-batch, and launches
        each operation of a block twice.
        """
        model, parallel, train, hardware = config.model, config.parallel, config.train, self.hardware
        hides, slower = parallel.overlap != "none", 1 + self._straggling(parallel)
        count = train.global_batch // (parallel.dp * train.micro_batch)
        if parallel.pp == 1 and not hides:
            (worst,) = self.passes(config)
            total = worst.total
        else:
            unsplit = without(parallel, "overlap") if hides else parallel
            shared = self._of_micro_batch(model, unsplit, train)

            def of_all() -> tuple[PassTime, int]:
                """A pass of the whole model without overlap, and the operations that two halves launch."""
                stage, other = whole(model), altered(config, parallel=unsplit)
                result = self._blocks_and_ends(other, [stage], shared)
                ends = _cached(shared, (True, True), self._ends, other, stage)
                return result, 2 * result.calls - ends.calls

            worst, calls = _cached(shared, ("whole model", train.recompute, train.recompute_every), of_all)
            if hides:
                forward, backward = worst.forward - worst.waits[0], worst.backward - worst.waits[1]
                worst = replace(worst, forward=forward, backward=backward, waits=(0.0, 0.0))
            host = hardware.host_us.in_pass(config, hardware.device) * 1e-6 if self.on_gpu else 0.0
            total = max(worst.total, host * (calls if hides else worst.calls))
            if total > worst.total:
                # Each pass takes at most this long, and leaves room for other collectives.
                worst = PassTime(forward=total, backward=total)
        if parallel.pp == 1:
            held = held_tensors(config, stages(config))
            exposed, _ = self._replicas(config, held, worst, count)
            return slower * (count * total + exposed + self._step_end(config, held)) + hardware.step_ms * 1e-3
        total *= slower
        if hardware.alone is not None:
            return count * total / parallel.pp
        return (count - 1 / parallel.virtual) * total / parallel.pp + total / parallel.virtual

    def _blocks_and_ends(self, config: Config, held: Sequence[Stage], shared: "_Cache") -> PassTime:
        """Times for one micro-batch through these stages, without sends."""
        result = PassTime()
        for stage in held:
            for (layer, policy), count in kinds_in(config.model, config.train, stage).items():
                result.add(_cached(shared, (layer, policy), self._block, config, layer, policy), count)
            result.add(_cached(shared, (stage.has_embedding, stage.has_head), self._ends, config, stage), 1)
        return result

    def _speeds(self, config: Config) -> Speeds:
        return self.hardware.speeds_of(min(config.parallel.world_size, self.hardware.per_node))

    def _block(self, config: Config, layer: int, policy: RecomputeName) -> PassTime:
        return self._pass_time(config, [trace_block(as_stored(config), layer, policy, self.on_gpu)])

    def _ends(self, config: Config, stage: Stage) -> PassTime:
        stored = as_stored(config)
        runs: list[TracedPass] = [trace_embedding(stored)] if stage.has_embedding else []
        runs += [trace_loss(stored, self.on_gpu)] if stage.has_head else []
        return self._pass_time(config, runs)

    def _add_sends(self, config: Config, held: Sequence[Stage], result: PassTime) -> None:
        """Adds the sends before the first and after the last block of each stage."""
        model, shared = config.model, self._of_micro_batch(config.model, config.parallel, config.train)
        for stage in (stage for stage in held if stage.count > 1):
            key = "sends", stage.has_embedding, stage.has_head, _exchanged(model, stage)
            sent = _cached(shared, key, self._sends, config, stage)
            # Each pass of a micro-batch waits for one receive and one send.
            waits = 2 * sent["pp forward"], 2 * sent["pp backward"]
            result.add(PassTime(defaultdict(float, {step_time.PIPELINE: sum(waits)}), *waits, waits=waits), 1)

    def _sends(self, config: Config, stage: Stage) -> Seconds:
        tokens = config.train.micro_batch * config.train.seq_len // config.parallel.cp
        made_with = config.model, config.parallel, tokens, config.train.compute_dtype, stage
        return self._sums(config, [c for phase in ("forward", "backward") for c in stage_sends(phase, *made_with)])

    def _pass_time(self, config: Config, runs: Sequence[TracedPass]) -> PassTime:
        """Time for operations in sequence, and for waiting for collectives."""
        log = [operation for run in runs for operation in run.log]
        # Cached device seconds for each operation, multiplied by how often the operation runs.
        speeds = self._speeds(config)
        priced = self._seconds[speeds]
        for operation in log:
            if operation not in priced:
                priced[operation] = sum(n * speeds.seconds(work) for work, n in work_of([operation]).items())
        by_kind: dict[tuple[str, str], float] = defaultdict(float)
        for operation in log:
            by_kind[operation.phase, operation.kernel] += priced[operation]
        seconds: Seconds = defaultdict(float)
        for (phase, kernel), spent in by_kind.items():
            seconds[phase] += spent
            seconds[f"{phase} {PART_OF.get(kernel, step_time.OTHER)}"] += spent
        sent = self._sums(config, (collective for run in runs for collective in run.collectives))
        exposed = self._exposed(config, runs, priced)
        result = PassTime(calls=sum(operation.times for operation in log))
        for part in (step_time.GEMMS, step_time.ATTENTION_TIME, step_time.OTHER):
            result.parts[part] = seconds[f"forward {part}"] + seconds[f"backward {part}"]
        result.parts[step_time.RECOMPUTED] = seconds["recompute"]
        forward, backward = ([exposed[f"{axis} {phase}"] for axis in ("tp", "cp")] for phase in ("forward", "backward"))
        result.waits = sum(forward), sum(backward)
        all_sent = (sum(sent[f"{axis} {phase}"] for axis in ("tp", "cp")) for phase in ("forward", "backward"))
        result.hidden = next(all_sent) - result.waits[0], next(all_sent) - result.waits[1]
        result.parts[step_time.TENSOR], result.parts[step_time.CONTEXT] = map(sum, zip(forward, backward, strict=True))
        result.forward = seconds["forward"] + sum(forward)
        result.backward = seconds["recompute"] + seconds["backward"] + sum(backward)
        return result

    def _sent(self, config: Config, c: Collective) -> float:
        """Seconds for one collective."""
        p = config.parallel
        key = c.kind, c.axis, c.shape, c.dtype, c.processes, p.tp, p.cp, p.dp, p.pp
        if key not in self._links:
            self._links[key] = collective_seconds(c, p, self.hardware)
        return self._links[key]

    def _sums(self, config: Config, collectives: Iterable[Collective]) -> Seconds:
        """Seconds for collectives by axis and phase; those that recomputation repeats count as backward."""
        result: Seconds = defaultdict(float)
        for collective in collectives:
            result[_name(collective)] += self._sent(config, collective)
        return result

    def _exposed(self, config: Config, runs: Sequence[TracedPass], priced: Mapping[Operation, float]) -> Seconds:
        """Seconds by axis and phase in which computation waits for collectives.

        Collectives run one at a time, in the order in which they start. While the device computes, they progress at the fraction
        `hardware.overlap` of their speed.
        """
        result: Seconds = defaultdict(float)
        for run in runs:
            now = busy_until = 0.0  # in seconds of communication time
            computed, arrivals = 0.0, dict[int, float]()
            until = [0.0, *itertools.accumulate(map(priced.__getitem__, run.log))] if run.flights else []
            for flight in run.flights:
                now += self.hardware.overlap * (until[flight.before] - computed)
                computed = until[flight.before]
                if flight.waited:
                    gap = max(arrivals.pop(flight.number) - now, 0.0)
                    now += gap
                    result[_name(run.collectives[flight.number])] += gap
                else:
                    took = self._sent(config, run.collectives[flight.number])
                    arrivals[flight.number] = busy_until = max(now, busy_until) + flight.times * took
        return result

    def _replicas(self, config: Config, held: HeldTensors, worst: PassTime, count: int) -> tuple[float, float]:
        """(exposed, hidden) seconds per step for DP collectives: gradients and sharded weights."""
        parallel, per_node = config.parallel, self.hardware.per_node
        inside = {axis: span(axis, parallel, per_node).inside for axis in ("tp", "cp", "dp")}
        # Collectives within a node and between nodes use different links.
        shared = inside["dp"] or not (inside["tp"] and inside["cp"])
        room = room_in(worst, self.hardware.overlap, shared)
        # FSDP in a pipeline gathers for each micro-batch, but all its gathers have phase 'step'.
        gathered = count if parallel.shard == "full" and parallel.pp > 1 else 0
        sums = _cached(self._steps, ("replicas", gathered, *_step(config, held)), self._replica_sums, config, held)
        # Gradient reductions overlap one backward pass; ZeRO-1's gathers, one forward pass. FSDP in a pipeline overlaps all passes.
        cover = room[1] if parallel.shard == "none" else sum(room)
        if parallel.shard == "full" and parallel.pp > 1:
            cover = sum(room) * count
        exposed = max(sums["step"] - cover, 0.0)
        for phase, hides in zip(("forward", "backward"), room, strict=True):
            exposed += count * max(sums[phase] - hides, 0.0)
        return exposed, sums["step"] + count * (sums["forward"] + sums["backward"]) - exposed

    def _replica_sums(self, config: Config, held: HeldTensors) -> Seconds:
        """Seconds for DP collectives by phase: per micro-batch, or once per step."""
        sums: Seconds = defaultdict(float)
        counts = Counter(gradient_collectives(config, held))
        for collective, times in gathers(config, held):
            counts[collective] += times
        for collective, times in counts.items():
            sums[collective.phase] += times * self._sent(config, collective)
        return sums

    def _step_end(self, config: Config, held: HeldTensors) -> float:
        """Seconds between the last backward pass and the next step. Work is linear in the number of micro-batches."""
        accumulated = config.train.global_batch // (config.parallel.dp * config.train.micro_batch)
        (seconds, calls, sent), (seconds_of_two, calls_of_two, _) = _cached(
            self._steps,
            ("once", *_step(config, held)),
            lambda: [self._once_per_step(config, held.stages, count) for count in (1, 2)],
        )
        seconds += (accumulated - 1) * (seconds_of_two - seconds)
        issuing = self.hardware.host_us.step * 1e-6 * (calls + (accumulated - 1) * (calls_of_two - calls))
        return sent + (seconds + issuing if self.hardware.device == "cpu" else max(seconds, issuing))

    def _once_per_step(self, config: Config, held: Sequence[Stage], micro_batches: int) -> tuple[float, float, float]:
        """(device seconds, operations, seconds of the optimizer's collectives) per step of `micro_batches` micro-batches."""
        speeds, work = self._speeds(config), step_work(config, held, micro_batches)
        whole = optimizer_collectives(config, held[0].index % config.parallel.pp) if config.optim.whole_factors else ()
        sent = sum(self._sent(config, collective) for collective in whole)
        return sum(times * speeds.seconds(operation) for operation, times in work.items()), work.total(), sent

    def _of_micro_batch(self, model: ModelConfig, p: ParallelConfig, train: TrainConfig) -> "_Cache":
        """The results for one micro-batch that this configuration shares. They depend on the model, traced fields, how groups are
        spread over nodes, and how many processes run on each."""
        per_node, per_site = self.hardware.per_node, self.hardware.per_site
        places = (*(span(axis, p, per_node) for axis in ("tp", "cp", "pp")), min(p.world_size, per_node))
        if per_site is not None:
            places += (*(span(axis, p, per_site) for axis in ("tp", "cp", "pp")), p.dp_cp)
        return self._micro_batches.setdefault((model, traced(p), traced(train), places), {})


def room_in(passing: PassTime, overlap: float, shared: bool) -> tuple[float, float]:
    """(forward, backward) seconds in which DP collectives can hide: the fraction `overlap` of the device's compute time.

    If TP or CP collectives use the same link (`shared`), the time in which those hide is subtracted, because collectives on one
    link do not overlap each other.
    """
    hidden = passing.hidden if shared else (0.0, 0.0)
    forward = overlap * (passing.forward - passing.waits[0]) - hidden[0]
    backward = overlap * (passing.backward - passing.waits[1]) - hidden[1]
    return max(forward, 0.0), max(backward, 0.0)


_Cache = dict[tuple[object, ...], object]


def _cached(cache: _Cache, key: tuple[object, ...], function: Callable[..., _T], *arguments: object) -> _T:
    if key not in cache:
        cache[key] = function(*arguments)
    return cast(_T, cache[key])


def _step(config: Config, held: HeldTensors) -> tuple[object, ...]:
    """What the work that is done once per step depends on."""
    p, train = config.parallel, config.train
    dtypes = train.compute_dtype, train.param_dtype, train.working_copies
    return config.model, p.layout, p.tp, p.dp, p.cp, p.pp, p.shard, p.shard_outer, *dtypes, held.kind


@functools.lru_cache(MAX_CACHED)
def _kind(model: ModelConfig, train: TrainConfig, stage: Stage) -> tuple[object, ...]:
    """What the time of a micro-batch in a stage depends on."""
    kinds = tuple(kinds_in(model, train, stage).items())
    return kinds, stage.has_embedding, stage.has_head, _exchanged(model, stage)


def _exchanged(model: ModelConfig, stage: Stage) -> tuple[tuple[GroupSpec, ...], ...]:
    """The groups that carry something to a stage, and those of it that do."""
    return taken(model, stage.numbers[0]), taken(model, stage.numbers[-1] + 1)


_flops_per_token = functools.lru_cache(64)(flops_per_token)


def _name(sent: Collective) -> str:
    """Key '<axis> <pass>' for a collective; recomputation belongs to the backward pass."""
    return f"{sent.axis} {'forward' if sent.phase == 'forward' else 'backward'}"
