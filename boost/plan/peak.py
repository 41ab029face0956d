"""The most memory that one process holds in an optimizer step, and when: arithmetic only, for a search that asks thousands
of times.

What a block holds at each moment of its passes is read off a trace (`boost.plan.trace`), once for each kind of block; this file
adds up blocks, micro-batches in flight, and what replicas gather. The allocator's rounding and fragmentation are not in it.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from boost.config.architecture import first_alike
from boost.config.schema import Config
from boost.config.stages import Stage, stages_of
from boost.config.traffic import ITEMSIZE, bucket_lengths
from boost.plan.categories import BUFFERS, GRADIENTS, LATENTS, OPTIMIZER, RESIDUAL, WEIGHTS, WORK
from boost.plan.memory import prev_latents_kept, states_of
from boost.plan.optimizer import work_bytes
from boost.plan.replicas import StoredTensor, stored_tensors
from boost.plan.schedules import Action, actions, micro_batches
from boost.plan.shards import END, Shards
from boost.plan.trace import TracedPass, pass_of_block, remembered, trace_embedding, trace_loss

FORWARD = "forward pass of a block"
BACKWARD = "backward pass of a block"
LOSS = "loss"
LOSS_BACKWARD = "backward pass of the loss"
EMBEDDING = "backward pass of the embedding"
SUM = "sum of gradients"
STEP = "optimizer step"


@dataclass(frozen=True)
class PeakMemory:
    """Bytes at the worst moment."""

    by_category: dict[str, int]
    """Of `boost.plan.categories.CATEGORIES`."""
    moment: str
    """FORWARD, BACKWARD, LOSS, LOSS_BACKWARD, EMBEDDING, SUM or STEP."""

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self.by_category.values())


def peak(config: Config, pp_rank: int = 0, fused_norm: bool = False) -> PeakMemory:
    """The worst moment of a step on pipeline process `pp_rank` (of TP process and replica 0, which have the most).

    `fused_norm`: on a device where RMSNorm is one kernel.

    Within a few per cent of what `boost.measure.memory` sees; LORO's exact step and Muon's within their buckets. Every
    step counts as one with an exact step, where there are any.
    """
    return _StepMemory(config, pp_rank, fused_norm).worst()


@dataclass(frozen=True)
class _BlockFacts:
    """Bytes of one block and one micro-batch: a `TracedPass`, and what is saved by category (previous latents included)."""

    kept: Counter[str]
    run: TracedPass


def _block(config: Config, layer: int, fused_norm: bool) -> _BlockFacts:
    zero_bubble = config.parallel.pp > 1 and config.parallel.schedule == "zero-bubble"
    run = pass_of_block(config, layer, fused_norm, zero_bubble)
    kept = run.by_category
    if latents := sum(prev_latents_kept(config, layer, fused_norm)):
        kept = kept + Counter({LATENTS: latents})
    return _BlockFacts(kept, run)


@dataclass(frozen=True)
class _Moment:
    """Bytes above what is there all the time."""

    name: str
    kept: Counter[str]
    more: dict[str, int]
    gathered: dict[str, int] = field(default_factory=dict)


def _stored(config: Config, stage: Stage) -> Iterator[StoredTensor]:
    """As `replicas.stored_tensors`, blocks that are alike computed once."""
    count = stage.count + 1  # a stage of no blocks, which has an embedding or a head
    if stage.has_embedding:
        yield from stored_tensors(config.model, config.parallel, Stage(0, count))
    for n in stage.numbers:
        yield from _tensors_of(config, n)
    if stage.has_head:
        yield from stored_tensors(config.model, config.parallel, Stage(count - 1, count))


def _tensors_of(config: Config, layer: int) -> tuple[StoredTensor, ...]:
    """Stored tensors of a block."""
    like = first_alike(config.model, layer)

    def compute(bare: Config, _: bool) -> tuple[StoredTensor, ...]:
        if like != layer:
            return tuple(replace(tensor, unit=layer) for tensor in _tensors_of(config, like))
        return tuple(stored_tensors(bare.model, bare.parallel, Stage(1, 3, layer, 1)))

    found: tuple[StoredTensor, ...] = remembered(config, ("tensors", layer))(compute)
    return found


class _StepMemory:
    """One process's step, walked through."""

    def __init__(self, config: Config, pp_rank: int, fused_norm: bool) -> None:
        self.config, parallel = config, config.parallel
        self.stages = stages_of(config, pp_rank)
        self.blocks = {n: _block(config, n, fused_norm) for stage in self.stages for n in stage.numbers}
        self.loss, self.embedding = trace_loss(config, fused_norm), trace_embedding(config)
        self.stored = {stage.index: list(_stored(config, stage)) for stage in self.stages}
        self.size = ITEMSIZE[config.train.param_dtype]
        self.whole = [self.size * sum(t.elements for t in self.stored[stage.index]) for stage in self.stages]
        """Bytes of all gradients of a stage."""
        every = [tensor for stored in self.stored.values() for tensor in stored]
        self.states = states_of(config, every, self.stages)
        self.shards = Shards(config, self.stages, self.stored)
        self.actions = actions(config, pp_rank)
        self.micro_batches = micro_batches(config)
        self.piped = parallel.pp > 1
        self.several = self.piped and parallel.schedule in ("interleaved-1f1b", "zero-bubble")
        """Whether the schedule waits for what it has sent at the end of the step only, and holds it till then."""
        self.whole_kept = [self._kept_by(stage) for stage in self.stages]
        self.in_flight: Counter[int] = Counter()
        """Micro-batches whose activations are there, by stage."""
        self.half: Counter[int] = Counter()
        """Those of which gradients of weights are still to be made (zero bubble)."""
        self.forwarded = [0 for _ in self.stages]
        """Forward passes done."""
        self.reduced = [0 for _ in self.stages]
        """Backward passes done."""
        self.returned = [0 for _ in self.stages]
        """Those whose gradient of the input is done."""
        self.buckets = self._buckets()
        self._worst: tuple[int, str, dict[str, int]] = (-1, "", {})

    def worst(self) -> PeakMemory:
        """The worst of all moments."""
        kinds: set[Any] = set()
        for action in self.actions:
            stage = action.stage
            # Passes with the same in flight differ in nothing.
            seen = action.kind, stage, tuple(self.in_flight.items()), tuple(self.half.items()), tuple(
                min(n, 1) + (n == self.micro_batches - 1) for n in self.reduced
            )  # fmt: skip
            if seen not in kinds:
                kinds.add(seen)
                self._pass(action)
            self._count(action)
        self._look(_Moment(SUM, Counter(), {WORK: self.buckets.get(None, 0)}), all_gradients=True)
        self._look(_Moment(STEP, Counter(), {WORK: work_bytes(self.config, self.stages)}), all_gradients=True)
        total, name, held = self._worst
        assert total >= 0
        return PeakMemory({category: size for category, size in held.items() if size}, name)

    # Moments.

    def _pass(self, action: Action) -> None:
        stage = self.stages[action.stage]
        if action.kind == "forward":
            for moment in self._forward(stage):
                self._look(moment)
            return
        if action.kind == "input" and stage.has_embedding:
            return  # torch puts off all of it
        own = action.kind == "backward" or stage.has_embedding
        half = action.kind == "input" or (action.kind == "weight" and not stage.has_embedding)
        moments = self._weights(stage) if half and action.kind == "weight" else self._backward(stage, action, not own)
        for moment in moments:
            self._look(moment)

    def _count(self, action: Action) -> None:
        stage = action.stage
        first = self.stages[stage].has_embedding
        if action.kind == "forward":
            self.in_flight[stage] += 1
            self.forwarded[stage] += 1
        elif action.kind == "backward":
            self.in_flight[stage] -= 1
            self.reduced[stage] += 1
            self.returned[stage] += 1
        elif action.kind == "input":
            self.half[stage] += not first
            self.returned[stage] += not first
        else:
            self.in_flight[stage] -= 1
            self.half[stage] -= not first
            self.reduced[stage] += 1

    def _look(self, moment: _Moment, all_gradients: bool = False) -> None:
        held = Counter({WEIGHTS: self.states[WEIGHTS], OPTIMIZER: self.states[OPTIMIZER]})
        if all_gradients:
            held[GRADIENTS] = self.states[GRADIENTS]
        else:
            held[GRADIENTS] = sum(self._gradients(i) for i in range(len(self.stages)))
            held[WORK] += self._context()
        for i, count in self.in_flight.items():
            for category, size in self.whole_kept[i].items():
                held[category] += count * size
            sent = self.forwarded[i] if self.several else count
            held[BUFFERS] += sent * self._handed_on(self.stages[i])
            if self.several and not self.stages[i].has_embedding:
                held[BUFFERS] += self.returned[i] * self.blocks[self.stages[i].first_layer].run.entering
            put_off = sum(self.blocks[n].run.put_off for n in self.stages[i].numbers)
            held[WORK] += self.half[i] * (put_off + self.stages[i].has_head * self.loss.entering)
        held[BUFFERS] += self._buffers()
        for category, size in (*moment.kept.items(), *moment.more.items(), *moment.gathered.items()):
            held[category] += size
        total = sum(held.values())
        if total > self._worst[0]:
            self._worst = total, moment.name, dict(held)

    def _forward(self, stage: Stage) -> Iterator[_Moment]:
        kept: Counter[str] = Counter()
        gathered = self.shards.forward(stage, self.in_flight, self.reduced)
        for place, n in enumerate(stage.numbers):
            block = self.blocks[n]
            arriving = block.run.entering if not (place == 0 and self.piped and not stage.has_embedding) else 0
            yield _Moment(FORWARD, +kept, {WORK: arriving + block.run.forward}, gathered(n))
            kept += self._kept_of(stage, n)
        if stage.has_head:
            arriving = self.blocks[stage.numbers[-1]].run.sent
            yield _Moment(LOSS, +kept, {WORK: arriving + self.loss.forward}, gathered(None))

    def _backward(self, stage: Stage, action: Action, inputs_only: bool) -> Iterator[_Moment]:
        """What is kept of this micro-batch is counted already: it goes bit by bit."""
        done = self.reduced[action.stage]
        fresh = self._fresh(done)
        last = done == self.micro_batches - 1
        gathered = self.shards.backward(stage, last)
        gone: Counter[str] = Counter()
        new = stays = 0
        if stage.has_head:
            yield _Moment(
                LOSS_BACKWARD,
                Counter(),
                {WORK: self.loss.first if fresh else self.loss.backward},
                gathered(None),
            )
            if inputs_only:
                stays = self.loss.entering
            else:
                gone.subtract(self.loss.by_category)
            new += self.shards.born(stage, None, last, self.loss.born) * (not done)
        waiting = 0 if stage.has_head or not self.piped else self.blocks[stage.numbers[-1]].run.sent
        for n in reversed(stage.numbers):
            block = self.blocks[n]
            handed = 0 if waiting else block.run.sent
            waiting = 0
            extra = block.run.inputs if inputs_only else block.run.first if fresh else block.run.backward
            more = {GRADIENTS: new, WORK: handed + stays + extra}
            yield _Moment(BACKWARD, Counter(gone), more, gathered(n))
            if inputs_only:
                stays += block.run.put_off
            else:
                gone.subtract(self._kept_of(stage, n))
            new += self.shards.born(stage, n, last, block.run.born) * (not done)
            if last and self.buckets.get(n):
                more = {GRADIENTS: new, WORK: block.run.entering + stays + self.buckets[n]}
                yield _Moment(SUM, Counter(gone), more, gathered(n))
        if stage.has_embedding:
            extra = self.embedding.first if fresh else self.embedding.backward
            more = {GRADIENTS: new, WORK: self.blocks[stage.numbers[0]].run.entering + extra}
            yield _Moment(EMBEDDING, Counter(gone), more, gathered(END))

    def _weights(self, stage: Stage) -> Iterator[_Moment]:
        """Gradients of weights that were put off, one group after the other."""
        largest = max(t.elements for t in self.stored[stage.index])
        size = self.size + ITEMSIZE[self.config.train.compute_dtype]
        yield _Moment(BACKWARD, Counter(), {WORK: largest * size})

    # What is there all the time.

    def _fresh(self, done: int) -> bool:
        """Whether gradients of weights are new ones that stay for the time being."""
        return done == 0 or self.shards.scatters_each

    def _gradients(self, place: int) -> int:
        if self.shards.any:
            return self.shards.gradients(self.stages[place], self.reduced[place])
        return self.whole[place] if self.reduced[place] else 0

    def _kept_of(self, stage: Stage, n: int) -> Counter[str]:
        """Of a block; what a stage receives lies in a buffer that is there anyway."""
        kept = self.blocks[n].kept
        if self.piped and n == stage.first_layer and not stage.has_embedding:
            kept = Counter(kept)
            kept[RESIDUAL] -= self.loss.entering
        return kept

    def _kept_by(self, stage: Stage) -> Counter[str]:
        kept: Counter[str] = Counter()
        for n in stage.numbers:
            kept.update(self._kept_of(stage, n))
        if stage.has_head:
            kept.update(self.loss.by_category)
        return kept

    def _handed_on(self, stage: Stage) -> int:
        """What a stage has handed on is there until its gradient has come."""
        return 0 if stage.has_head or not self.piped else self.blocks[stage.numbers[-1]].run.sent

    def _buffers(self) -> int:
        """One for each micro-batch and boundary: what arrives, and the gradient of what was handed on."""
        if not self.piped:
            return 0
        each = sum(
            (0 if stage.has_embedding else self.blocks[stage.numbers[0]].run.entering) + self._handed_on(stage)
            for stage in self.stages
        )
        return self.micro_batches * each

    def _context(self) -> int:
        """Tokens, positions, rotary angles, and the mask of documents."""
        model, train = self.config.model, self.config.train
        size = ITEMSIZE[train.compute_dtype]
        each = train.seq_len * (8 + 2 * model.head_dim * size) + 8 * train.micro_batch * train.seq_len
        if self.config.data.isolate_documents:
            each += train.micro_batch * train.seq_len**2 * size
        return each

    def _buckets(self) -> dict[int | None, int]:
        """Bytes of the copy that a bucket of gradients is made into, by the block whose backward pass fills it; None: at the
        end. A tensor alone is not copied."""
        parallel = self.config.parallel
        stored = [tensor for stage in self.stages for tensor in self.stored[stage.index]][::-1]
        held = [t for t in stored if t.vector or not parallel.sharded]
        late = [
            t
            for t in stored
            if parallel.sharded and not t.vector and t.placement.partial and not t.over_replicas(parallel)
        ]
        found: dict[int | None, int] = {}
        for tensors, processes in (
            ([t for t in held if t.placement.partial], parallel.tp * parallel.dp),
            ([t for t in held if not t.placement.partial], parallel.dp),
            (late, parallel.tp),
        ):
            sizes = [t.shard(parallel) * self.size for t in tensors]
            for length in bucket_lengths(sizes) if processes > 1 else ():
                filled, copied = tensors[length - 1].unit, sum(sizes[:length])
                tensors, sizes = tensors[length:], sizes[length:]
                if length > 1 and (filled is not None or not tensors):
                    place = filled if tensors else None
                    found[place] = max(found.get(place, 0), copied)
        return found
