"""The most memory that one process holds in an optimizer step, and when: arithmetic only, for a search that asks thousands
of times.

What a block holds at each moment of its passes is read off a tape (`boost.plan.tape`), once for each kind of block; this file
adds up blocks, micro-batches in flight, and what replicas gather. The allocator's rounding and fragmentation are not in it.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from boost.config.architecture import SLOTS
from boost.config.schema import Config
from boost.config.stages import Stage, stages_of
from boost.config.traffic import ITEMSIZE, bucket_lengths
from boost.plan.ends import EndPasses
from boost.plan.memory import BUFFERS, GRADIENTS, OPTIMIZER, RESIDUAL, WEIGHTS, WORK, block_keeps, loss_keeps, states_of
from boost.plan.optimizer import work_bytes
from boost.plan.passes import BlockPasses
from boost.plan.replicas import StoredTensor, stored_tensors
from boost.plan.schedules import Action, actions, micro_batches
from boost.plan.shards import END, Shards
from boost.plan.tape import Tape

FORWARD = "forward pass of a block"
BACKWARD = "backward pass of a block"
LOSS = "loss"
LOSS_BACKWARD = "backward pass of the loss"
EMBEDDING = "backward pass of the embedding"
SUM = "sum of gradients"
STEP = "optimizer step"


@dataclass(frozen=True)
class Peak:
    """Bytes at the worst moment."""

    by_category: dict[str, int]
    """Of `boost.plan.memory.CATEGORIES`."""
    moment: str
    """FORWARD, BACKWARD, LOSS, LOSS_BACKWARD, EMBEDDING, SUM or STEP."""

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self.by_category.values())


def peak(config: Config, pp_rank: int = 0) -> Peak:
    """The worst moment of a step on pipeline process `pp_rank` (of TP process and replica 0, which have the most).

    Within a few per cent of what `boost.measure.memory` sees; LORO's exact step and Muon's within their buckets. Every
    step counts as one with an exact step, where there are any.
    """
    return _Step(config, pp_rank).worst()


@dataclass(frozen=True)
class _Kind:
    """What makes two blocks alike; the configuration to compute one by comes along and is not compared."""

    key: tuple[Any, ...]
    config: Config = field(compare=False)
    layer: int = field(compare=False)


@dataclass(frozen=True)
class _BlockFacts:
    """Bytes of one block and one micro-batch."""

    kept: Counter[str]
    """By category."""
    forward: int
    """The most above what is there when it begins, its input included."""
    backward: int
    """The same of its backward pass, when all it kept and the gradients of its results are there."""
    first: int
    """The same where gradients of weights are new, and stay."""
    born: int
    """Those gradients."""
    inputs: int
    """The same as `backward` where gradients of weights are put off."""
    put_off: int
    """What then stays for them, beside what is kept."""
    handed: int
    """What it hands on to the next block, and gets the gradients of."""
    arriving: int
    """What it is handed."""


def _kinds(config: Config, layers: Iterable[int]) -> dict[int, _Kind]:
    """Of some blocks, by number."""
    model, parallel, train = config.model, config.parallel, config.train
    policies = train.recompute_by_layer(model.layers)
    shape = model.family, model.dim, model.ffn_dim, model.heads, model.kv_heads, model.latent_act, model.mlp_silu
    gates = model.crosses, model.over, model.gate
    cut = parallel.layout, parallel.tp, parallel.norm, parallel.grouping, parallel.vanilla, parallel.sharded
    work = train.micro_batch, train.seq_len, train.param_dtype, train.compute_dtype
    alike = shape, gates, cut, work, parallel.pp > 1 and parallel.schedule == "zero-bubble"
    found = {}
    for layer in layers:
        ranks = tuple(model.rank_of(layer, slot) for slot in SLOTS) if model.ranks else model.rank
        crossing = model.crosses and (layer > 0, layer + 1 < model.layers)
        found[layer] = _Kind((alike, ranks, crossing, policies[layer], policies[layer + 1 : layer + 2]), config, layer)
    return found


@lru_cache(maxsize=4096)
def _block(kind: _Kind) -> _BlockFacts:
    config, layer = kind.config, kind.layer
    kept: Counter[str] = Counter()
    for item in block_keeps(config, layer):
        kept[item.category] += item.bytes
    arriving, handed, forward, backward, _ = _passes(config, layer, True, False)
    _, _, _, first, born = _passes(config, layer, False, False)
    zero_bubble = config.parallel.pp > 1 and config.parallel.schedule == "zero-bubble"
    inputs, put_off = _passes(config, layer, True, True)[3:] if zero_bubble else (0, 0)
    return _BlockFacts(kept, forward, backward, first, born, inputs, put_off, handed, arriving)


def _passes(config: Config, layer: int, accumulates: bool, inputs_only: bool) -> tuple[int, int, int, int, int]:
    """(arriving, handed on, forward, backward, what stays of gradients) of a block."""
    tape = Tape(accumulates)
    passes = BlockPasses(config, layer, config.train.recompute_by_layer(config.model.layers)[layer], tape)
    x, carried = passes.arriving()
    arriving = tape.peak = tape.live
    y, carried_on = passes.forward(x, carried)
    forward = tape.peak - arriving
    del x, carried
    results = [y, *carried_on]
    del y, carried_on
    gradients = [tape.new(each.elements, each.dtype) for each in results]
    handed = sum(g.storage.bytes for g in gradients)
    results = [each.bare() for each in results]  # the next block has them
    begun = tape.peak = tape.live
    tape.backward(results, gradients, inputs_only)
    # New gradients of weights come beside those of what arrived.
    left, apart = (tape.put_off, 0) if inputs_only else (tape.gradients, arriving)
    stays = sum(g.storage.bytes for g in left) - apart
    return arriving, handed, forward, tape.peak - begun, stays


@dataclass(frozen=True)
class _EndFacts:
    """Bytes of loss and embedding; each pass above what is there when it begins, as in `_BlockFacts`."""

    loss_kept: Counter[str]
    loss_forward: int
    loss_backward: int
    loss_first: int
    head_born: int
    put_off: int
    embedding: int
    embedding_first: int


def _end_kind(config: Config) -> _Kind:
    (kind,) = _kinds(config, [0]).values()
    return _Kind((*kind.key, config.model.vocab_size), config, 0)


@lru_cache(maxsize=4096)
def _ends(kind: _Kind) -> _EndFacts:
    config = kind.config
    kept: Counter[str] = Counter()
    for item in loss_keeps(config):
        kept[item.category] += item.bytes
    forward, loss_backward, _ = _loss_passes(config, True)
    _, loss_first, born = _loss_passes(config, False)
    normed = EndPasses(config, Tape(True)).residual * ITEMSIZE[config.train.compute_dtype]
    embedding = _embedding_pass(config, True), _embedding_pass(config, False)
    return _EndFacts(kept, forward, loss_backward, loss_first, born, normed, *embedding)


def _loss_passes(config: Config, accumulates: bool) -> tuple[int, int, int]:
    """(forward, backward, gradients that stay) of the loss."""
    tape = Tape(accumulates)
    passes = EndPasses(config, tape)
    x = passes.arriving()
    begun = tape.peak = tape.live
    total = [passes.loss(x)]
    forward = tape.peak - begun
    del x
    begun = tape.peak = tape.live
    tape.backward(total, [tape.new(1, passes.do.statistic)])
    stays = sum(g.storage.bytes for g in tape.gradients)
    return forward, tape.peak - begun, stays - passes.residual * ITEMSIZE[passes.dtype]


def _embedding_pass(config: Config, accumulates: bool) -> int:
    """The backward pass of the embedding."""
    tape = Tape(accumulates)
    rows = [EndPasses(config, tape).embed().bare()]
    gradient = [tape.new(rows[0].elements, rows[0].dtype)]
    begun = tape.peak = tape.live
    tape.backward(rows, gradient)
    return tape.peak - begun


@dataclass(frozen=True)
class _Moment:
    """Bytes above what is there all the time."""

    name: str
    kept: Counter[str]
    more: dict[str, int]
    gathered: dict[str, int] = field(default_factory=dict)


@lru_cache(maxsize=4096)
def _tensors(kind: _Kind) -> tuple[StoredTensor, ...]:
    """Stored tensors of a block."""
    model, parallel = kind.config.model, kind.config.parallel
    return tuple(stored_tensors(model, parallel, Stage(1, 3, kind.layer, 1)))


def _stored(config: Config, stage: Stage, kinds: Mapping[int, _Kind]) -> Iterator[StoredTensor]:
    """As `replicas.stored_tensors`, blocks that are alike computed once."""
    count = stage.count + 1  # a stage of no blocks, which embeds or predicts
    if stage.embeds:
        yield from stored_tensors(config.model, config.parallel, Stage(0, count))
    for n in stage.numbers:
        yield from (replace(tensor, unit=n) for tensor in _tensors(kinds[n]))
    if stage.predicts:
        yield from stored_tensors(config.model, config.parallel, Stage(count - 1, count))


class _Step:
    """One process's step, walked through."""

    def __init__(self, config: Config, pp_rank: int) -> None:
        self.config, parallel = config, config.parallel
        self.stages = stages_of(config, pp_rank)
        kinds = _kinds(config, [n for stage in self.stages for n in stage.numbers])
        self.blocks = {n: _block(kind) for n, kind in kinds.items()}
        self.ends = _ends(_end_kind(config))
        self.stored = {stage.index: list(_stored(config, stage, kinds)) for stage in self.stages}
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

    def worst(self) -> Peak:
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
        return Peak({category: size for category, size in held.items() if size}, name)

    # Moments.

    def _pass(self, action: Action) -> None:
        stage = self.stages[action.stage]
        if action.kind == "forward":
            for moment in self._forward(stage):
                self._look(moment)
            return
        if action.kind == "input" and stage.embeds:
            return  # torch puts off all of it
        own = action.kind == "backward" or stage.embeds
        half = action.kind == "input" or (action.kind == "weight" and not stage.embeds)
        moments = self._weights(stage) if half and action.kind == "weight" else self._backward(stage, action, not own)
        for moment in moments:
            self._look(moment)

    def _count(self, action: Action) -> None:
        stage = action.stage
        first = self.stages[stage].embeds
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
            if self.several and not self.stages[i].embeds:
                held[BUFFERS] += self.returned[i] * self.blocks[self.stages[i].first_layer].arriving
            put_off = sum(self.blocks[n].put_off for n in self.stages[i].numbers)
            held[WORK] += self.half[i] * (put_off + self.stages[i].predicts * self.ends.put_off)
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
            arriving = block.arriving if not (place == 0 and self.piped and not stage.embeds) else 0
            yield _Moment(FORWARD, +kept, {WORK: arriving + block.forward}, gathered(n))
            kept += self._kept_of(stage, n)
        if stage.predicts:
            arriving = self.blocks[stage.numbers[-1]].handed
            yield _Moment(LOSS, +kept, {WORK: arriving + self.ends.loss_forward}, gathered(None))

    def _backward(self, stage: Stage, action: Action, inputs_only: bool) -> Iterator[_Moment]:
        """What is kept of this micro-batch is counted already: it goes bit by bit."""
        done = self.reduced[action.stage]
        fresh = self._fresh(done)
        last = done == self.micro_batches - 1
        gathered = self.shards.backward(stage, last)
        gone: Counter[str] = Counter()
        new = stays = 0
        if stage.predicts:
            yield _Moment(
                LOSS_BACKWARD,
                Counter(),
                {WORK: self.ends.loss_first if fresh else self.ends.loss_backward},
                gathered(None),
            )
            if inputs_only:
                stays = self.ends.put_off
            else:
                gone.subtract(self.ends.loss_kept)
            new += self.shards.born(stage, None, last, self.ends.head_born) * (not done)
        waiting = 0 if stage.predicts or not self.piped else self.blocks[stage.numbers[-1]].handed
        for n in reversed(stage.numbers):
            block = self.blocks[n]
            handed = 0 if waiting else block.handed
            waiting = 0
            extra = block.inputs if inputs_only else block.first if fresh else block.backward
            more = {GRADIENTS: new, WORK: handed + stays + extra}
            yield _Moment(BACKWARD, Counter(gone), more, gathered(n))
            if inputs_only:
                stays += block.put_off
            else:
                gone.subtract(self._kept_of(stage, n))
            new += self.shards.born(stage, n, last, block.born) * (not done)
            if last and self.buckets.get(n):
                more = {GRADIENTS: new, WORK: block.arriving + stays + self.buckets[n]}
                yield _Moment(SUM, Counter(gone), more, gathered(n))
        if stage.embeds:
            extra = self.ends.embedding_first if fresh else self.ends.embedding
            more = {GRADIENTS: new, WORK: self.blocks[stage.numbers[0]].arriving + extra}
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
        if self.piped and n == stage.first_layer and not stage.embeds:
            kept = Counter(kept)
            kept[RESIDUAL] -= self.ends.put_off
        return kept

    def _kept_by(self, stage: Stage) -> Counter[str]:
        kept: Counter[str] = Counter()
        for n in stage.numbers:
            kept.update(self._kept_of(stage, n))
        if stage.predicts:
            kept.update(self.ends.loss_kept)
        return kept

    def _handed_on(self, stage: Stage) -> int:
        """What a stage has handed on is there until its gradient has come."""
        return 0 if stage.predicts or not self.piped else self.blocks[stage.numbers[-1]].handed

    def _buffers(self) -> int:
        """One for each micro-batch and boundary: what arrives, and the gradient of what was handed on."""
        if not self.piped:
            return 0
        each = sum(
            (0 if stage.embeds else self.blocks[stage.numbers[0]].arriving) + self._handed_on(stage)
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
            t for t in stored if parallel.sharded and not t.vector and t.cut.partial and not t.over_replicas(parallel)
        ]
        found: dict[int | None, int] = {}
        for tensors, processes in (
            ([t for t in held if t.cut.partial], parallel.tp * parallel.dp),
            ([t for t in held if not t.cut.partial], parallel.dp),
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
