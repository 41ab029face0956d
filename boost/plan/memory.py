"""Predicts the memory on one process: between the passes of a micro-batch, and at the peak of an optimizer step.

A trace (`boost.plan.trace`) gives the memory for each kind of block. This module adds up blocks, micro-batches in flight and
gathered weights with plain arithmetic, because a search calls it thousands of times. Allocator rounding and fragmentation are not
included.
"""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from boost.config.architecture import first_alike
from boost.config.attention import document_form
from boost.config.schema import Config
from boost.config.stages import Stage, stages_of
from boost.config.traffic import ITEMSIZE
from boost.plan import replicas
from boost.plan.categories import BUFFERS, COPIES, GRADIENTS, LATENTS, OPTIMIZER, RESIDUAL, SAVED, WEIGHTS, WORK
from boost.plan.optimizer import state_bytes, work_bytes
from boost.plan.structure import altered, held_tensors
from boost.plan.trace import TracedPass, pass_of_block, trace_embedding, trace_loss


@dataclass(frozen=True)
class Memory:
    """Memory on one process in bytes, by category."""

    states: dict[str, int]
    """Bytes of WEIGHTS, GRADIENTS and OPTIMIZER."""
    saved: Counter[str]
    """Bytes saved between the forward and the backward pass of a micro-batch. Working copies of weights are included; they are
    shared by all micro-batches."""

    @property
    def by_category(self) -> dict[str, int]:
        """Bytes of STATES and SAVED, and of attention masks that are saved on CPUs."""
        return {**self.states, **dict.fromkeys(SAVED, 0), **self.saved}

    @property
    def activations(self) -> int:
        """Total bytes saved for the backward pass."""
        return self.saved.total()


def memory(config: Config, pp_rank: int = 0) -> Memory:
    """Memory on one process: the training state for its stages, and the activations that one micro-batch saves."""
    step = _StepMemory(replicas.with_whole_weights(config), pp_rank, on_gpu=False)
    saved = Counter({COPIES: step.storage.copies})
    for block in step.blocks.values():
        saved.update(block.saved)
    if step.stages[-1].has_head:
        saved.update(step.loss.by_category)
    moments = int(step.states[OPTIMIZER] * replicas.moments_share(config))
    return Memory(step.states | {OPTIMIZER: moments}, saved)


# The order of passes on one pipeline rank, which determines how many micro-batches are in flight. These are the schedules of
# torch.distributed.pipelining (torch 2.13) without sends and waits, which do not change the order on a rank. A test checks this.


@dataclass(frozen=True)
class Action:
    """One pass of one micro-batch through one stage."""

    kind: Literal["forward", "backward"]
    stage: int
    """Index among this rank's stages, in forward order."""
    micro_batch: int


def micro_batches(config: Config) -> int:
    """Number of micro-batches per replica and step."""
    return config.train.global_batch // (config.parallel.dp * config.train.micro_batch)


def actions(config: Config, pp_rank: int) -> list[Action]:
    """Returns the actions of pipeline rank `pp_rank` in a step, in order."""
    parallel, count = config.parallel, micro_batches(config)
    if parallel.pp == 1:
        return [Action(kind, 0, n) for n in range(count) for kind in ("forward", "backward")]
    if parallel.schedule == "gpipe":
        return [Action(kind, 0, n) for kind in ("forward", "backward") for n in range(count)]
    if parallel.schedule == "1f1b":
        # Forward passes warm up the pipeline; then backward and forward passes alternate.
        ahead = min(count, parallel.pp - pp_rank)
        order = [Action("forward", 0, n) for n in range(ahead)]
        for n in range(count):
            order.append(Action("backward", 0, n))
            order += [Action("forward", 0, n + ahead)] * (n + ahead < count)
        return order
    # Interleaved 1F1B (arXiv 2104.04473) runs a round of micro-batches through one stage, then through the next.
    held, a_round = parallel.virtual, count // max(1, count // parallel.pp)
    total = held * count
    ahead = min((held - 1) * a_round + 2 * (parallel.pp - 1 - pp_rank), total)
    numbers: Counter[Action] = Counter()
    order = []
    for step in range(total + ahead):
        passes = [Action("forward", step // a_round % held, 0)] if step < total else []
        if step >= ahead:
            passes.append(Action("backward", held - 1 - (step - ahead) // a_round % held, 0))
        for action in passes:
            order.append(replace(action, micro_batch=numbers[action]))
            numbers[action] += 1
    return order


# The peak.

FORWARD = "forward pass of a block"
BACKWARD = "backward pass of a block"
LOSS = "loss"
LOSS_BACKWARD = "backward pass of the loss"
EMBEDDING = "backward pass of the embedding"
SUM = "sum of gradients"
STEP = "optimizer step"


@dataclass(frozen=True)
class PeakMemory:
    """Memory at the peak, in bytes."""

    by_category: dict[str, int]
    """Bytes by category (`boost.plan.categories.CATEGORIES`)."""
    during: str
    """When the peak occurs: FORWARD, BACKWARD, LOSS, LOSS_BACKWARD, EMBEDDING, SUM or STEP."""

    @property
    def total(self) -> int:
        """Sum over all categories."""
        return sum(self.by_category.values())


def peak(config: Config, pp_rank: int = 0, on_gpu: bool = False, enough: float = math.inf) -> PeakMemory:
    """Peak memory of a step on pipeline rank `pp_rank` (on TP rank 0 of replica 0, whose peak is the highest).

    `on_gpu`: as in `boost.plan.trace.trace_block`. `enough`: stops at the first snapshot with more than this many bytes, and
    returns that snapshot instead of the peak.

    Agrees with `boost.measure.memory` within a few percent; for LORO's exact step and for Muon, to within the size of a
    bucket. With LORO, every step counts as an exact step.
    """
    highest = _StepMemory(replicas.with_whole_weights(config), pp_rank, on_gpu).peak_memory(enough)
    moments = int(highest.by_category[OPTIMIZER] * replicas.moments_share(config))
    return replace(highest, by_category=highest.by_category | {OPTIMIZER: moments})


@dataclass(frozen=True)
class _BlockFacts:
    """Memory for one block and micro-batch."""

    saved: Counter[str]
    """Saved bytes by category, including latents from the previous block."""
    traced: TracedPass


def _blocks(config: Config, numbers: Iterable[int], on_gpu: bool) -> dict[int, _BlockFacts]:
    """Computes the memory facts for these blocks; identical blocks share them."""
    model, of_kind = config.model, dict[Hashable, _BlockFacts]()
    policies, blocks = config.train.recompute_by_layer(model.layers), dict[int, _BlockFacts]()
    for n in numbers:
        # Which latents from the previous block stay alive depends on that block too.
        kind = n if model.has_latent_gates else (first_alike(model, n), policies[n])
        if kind not in of_kind:
            traced = pass_of_block(config, n, on_gpu)
            saved = traced.by_category
            if any(traced.prev_saved):  # latents that only this block keeps alive
                before = pass_of_block(config, n - 1, on_gpu).latents_saved
                own = sum(size for size, already in zip(traced.prev_saved, before, strict=True) if not already)
                saved = saved + Counter({LATENTS: own})
            of_kind[kind] = _BlockFacts(saved, traced)
        blocks[n] = of_kind[kind]
    return blocks


@dataclass(frozen=True)
class _Snapshot:
    """Bytes in addition to the baseline of a pass, at one point in time."""

    name: str
    saved: Counter[str]
    temporary: dict[str, int]
    gathered: dict[str, int] = field(default_factory=dict)


class _Storage:
    """Storage on one process that does not depend on micro-batches or recomputation."""

    def __init__(self, config: Config, stages: Sequence[Stage]) -> None:
        self.held, self.size = held_tensors(config, stages), ITEMSIZE[config.train.param_dtype]
        self.gradient_bytes = [self.size * sum(t.elements for t in tensors) for tensors in self.held.by_stage.values()]
        """Bytes of all gradients, per stage."""
        weights = self.size * self.held.shards(config.parallel)
        sums = 2 if config.run.recovery == "in-step" else 1  # local gradients, in addition to their sums
        self.states = {WEIGHTS: weights, GRADIENTS: sums * weights, OPTIMIZER: state_bytes(config, self.held)}
        """Bytes between steps by category, in this process's shards."""
        copied = sum(t.elements for t in self.held.tensors if t.may_have_copy) if config.has_working_copies else 0
        self.copies = copied * ITEMSIZE[config.train.compute_dtype]
        """Bytes of working copies while passes run."""
        self.shards = replicas.Shards(config, self.held)
        self.buckets = self._bucket_copies(config)

    def _bucket_copies(self, config: Config) -> dict[int | None, int]:
        """Bytes of the flat copies of gradient buckets, by the block whose backward pass fills them; None: filled at the end.

        A bucket with one tensor is copied only into another dtype. Copies in another dtype stay allocated until all are reduced.
        """
        ratio, kept = ITEMSIZE[config.train.sum_dtype] / self.size, 0
        copies: dict[int | None, int] = {}
        buckets = list(replicas.sum_buckets(config, self.held))
        for bucket, following in itertools.zip_longest(buckets, buckets[1:]):
            filled, copied = bucket.filled_by, bucket.elements * self.size
            ends = following is None or following.axis != bucket.axis  # the last one over this axis
            if ratio != 1:
                kept += int(copied * ratio)
                copies[filled] = kept
            elif bucket.length > 1 and (filled is not None or ends):
                copies[filled] = max(copies.get(filled, 0), copied)
        return copies | ({None: kept} if kept else {})


_storage = functools.lru_cache(512)(_Storage)  # a search tries each mesh with many micro-batch sizes


class _StepMemory:
    """Replays one optimizer step on one process."""

    def __init__(self, config: Config, pp_rank: int, on_gpu: bool) -> None:
        self.config, self.on_gpu, parallel = config, on_gpu, config.parallel
        self.stages = stages_of(config, pp_rank)
        self.blocks = _blocks(config, [n for stage in self.stages for n in stage.numbers], on_gpu)
        self.loss, self.embedding = trace_loss(config, on_gpu), trace_embedding(config)
        train = config.train
        usual = altered(train, micro_batch=1, global_batch=1, seq_len=1, recompute="none", recompute_every=1)
        self.storage = _storage(altered(config, train=usual), self.stages)
        self.states, self.shards, self.buckets = self.storage.states, self.storage.shards, self.storage.buckets
        self.actions, self.micro_batches = actions(config, pp_rank), micro_batches(config)
        self.has_pipeline = parallel.pp > 1
        self.holds_sends = self.has_pipeline and parallel.schedule == "interleaved-1f1b"
        """Whether the schedule holds send buffers until the end of the step."""
        self.saved_by_stage: list[Counter[str]] = []
        """Saved bytes for one micro-batch, by stage and category."""
        for stage in self.stages:
            saved: Counter[str] = Counter()
            for n in stage.numbers:
                saved.update(self._block_saved(stage, n))
            if stage.has_head:
                saved.update(self.loss.by_category)
            self.saved_by_stage.append(saved)
        self.in_flight: Counter[int] = Counter()
        """Micro-batches in flight, by stage."""
        self.forward_done = [0 for _ in self.stages]
        """Completed forward passes, per stage."""
        self.backward_done = [0 for _ in self.stages]
        """Completed backward passes, per stage."""
        self._peak: tuple[int, str, dict[str, int]] = (-1, "", {})

    def peak_memory(self, enough: float) -> PeakMemory:
        """Returns the largest snapshot, or the first one with more than `enough` bytes."""
        kinds: set[tuple[object, ...]] = set()
        for action in self.actions:
            stage = action.stage
            # Passes that start in the same state use the same memory.
            seen = action.kind, stage, tuple(self.in_flight.items()), tuple(
                min(n, 1) + (n == self.micro_batches - 1) for n in self.backward_done
            )  # fmt: skip
            if seen not in kinds:
                kinds.add(seen)
                is_forward = action.kind == "forward"
                passing = (
                    self._forward(self.stages[stage]) if is_forward else self._backward(self.stages[stage], action)
                )
                self._record(self._baseline(), passing)
                if self._peak[0] > enough:
                    break
            done = self.forward_done if action.kind == "forward" else self.backward_done
            done[stage] += 1
            self.in_flight[stage] += 1 if action.kind == "forward" else -1
        update = work_bytes(self.config, self.storage.held)
        at_end = (
            _Snapshot(SUM, Counter(), {WORK: self.buckets.get(None, 0)}),
            _Snapshot(STEP, Counter(), {WORK: update}),
        )
        captured = self.config.captures_passes
        self._record(self._with_in_flight(Counter(self.states)), at_end[: 1 if captured else 2])  # all gradients exist
        total, name, held = self._peak
        assert total >= 0
        if captured:  # the graph keeps the memory of the passes, so updates and evaluations need their own
            evaluation = max(x.temporary[WORK] for stage in self.stages for x in self._forward(stage))
            held[WORK] += max(update, evaluation)
        return PeakMemory({category: size for category, size in held.items() if size}, name)

    # Snapshots.

    def _baseline(self) -> Counter[str]:
        """Bytes held throughout a pass."""
        held = Counter({WEIGHTS: self.states[WEIGHTS], OPTIMIZER: self.states[OPTIMIZER]})
        held[COPIES] = self.storage.copies
        for stage, all_of_it, done in zip(self.stages, self.storage.gradient_bytes, self.backward_done, strict=True):
            sharded = self.shards.enabled
            held[GRADIENTS] += self.shards.gradients(stage, done) if sharded else all_of_it * (done > 0)
        held[WORK] = self._context()
        return self._with_in_flight(held)

    def _with_in_flight(self, held: Counter[str]) -> Counter[str]:
        for i, count in self.in_flight.items():
            for category, size in self.saved_by_stage[i].items():
                held[category] += count * size
            sent = self.forward_done[i] if self.holds_sends else count
            held[BUFFERS] += sent * self._sent_bytes(self.stages[i])
            if self.holds_sends and not self.stages[i].has_embedding:
                held[BUFFERS] += self.backward_done[i] * self.blocks[self.stages[i].first_layer].traced.input_bytes
        # Each micro-batch has receive buffers at each stage boundary: for activations, and for gradients of sent activations.
        for stage in self.stages if self.has_pipeline else ():
            received = 0 if stage.has_embedding else self.blocks[stage.numbers[0]].traced.input_bytes
            held[BUFFERS] += self.micro_batches * (received + self._sent_bytes(stage))
        return held

    def _record(self, baseline: Counter[str], snapshots: Iterable[_Snapshot]) -> None:
        baseline_bytes = baseline.total()
        for snapshot in snapshots:
            above = snapshot.saved, snapshot.temporary, snapshot.gathered
            total = baseline_bytes + sum(sum(part.values()) for part in above)
            if total > self._peak[0]:
                held = Counter(baseline)
                for part in above:
                    held.update(part)
                self._peak = total, snapshot.name, dict(held)

    def _forward(self, stage: Stage) -> Iterator[_Snapshot]:
        saved: Counter[str] = Counter()
        gathered = self.shards.forward(stage, self.in_flight, self.backward_done)
        for place, n in enumerate(stage.numbers):
            block = self.blocks[n]
            received = place == 0 and self.has_pipeline and not stage.has_embedding  # the input is in a receive buffer
            arriving = 0 if received else block.traced.input_bytes
            yield _Snapshot(FORWARD, +saved, {WORK: arriving + block.traced.forward}, gathered(n))
            saved += self._block_saved(stage, n)
        if stage.has_head:
            arriving = self.blocks[stage.numbers[-1]].traced.output_bytes
            yield _Snapshot(LOSS, +saved, {WORK: arriving + self.loss.forward}, gathered(None))

    def _backward(self, stage: Stage, action: Action) -> Iterator[_Snapshot]:
        """The baseline includes this micro-batch's saved activations, which are freed block by block."""
        done = self.backward_done[action.stage]
        # Weight gradients are new tensors that stay allocated, or are accumulated into existing ones.
        is_new = done == 0 or self.shards.scatters_each
        last = done == self.micro_batches - 1
        gathered = self.shards.backward(stage, last)
        freed: Counter[str] = Counter()
        new = 0
        waiting_head = 0
        if stage.has_head:
            extra = self.loss.first_backward if is_new else self.loss.backward
            yield _Snapshot(LOSS_BACKWARD, Counter(), {WORK: extra}, gathered(None))
            freed.subtract(self.loss.by_category)
            new += self.shards.new_gradients(stage, None, last, self.loss.new_gradients) * (not done)
            if self.config.model.tied and stage.has_embedding:
                # Autograd holds the head's gradient until it adds the embedding's to it in place.
                train, table = self.config.train, self.config.model.vocab_size * self.config.model.dim
                used = train.compute_dtype if self.config.has_working_copies else train.param_dtype
                in_new = ITEMSIZE[train.param_dtype] if not done and not self.shards.enabled else 0
                waiting_head = table // self.config.parallel.tp * (ITEMSIZE[used] - in_new)
        waiting = 0 if stage.has_head or not self.has_pipeline else self.blocks[stage.numbers[-1]].traced.output_bytes
        for n in reversed(stage.numbers):
            block = self.blocks[n]
            output_grad = 0 if waiting else block.traced.output_bytes
            waiting = 0
            extra = block.traced.first_backward if is_new else block.traced.backward
            temporary = {GRADIENTS: new, WORK: output_grad + extra + waiting_head}
            yield _Snapshot(BACKWARD, Counter(freed), temporary, gathered(n))
            freed.subtract(self._block_saved(stage, n))
            new += self.shards.new_gradients(stage, n, last, block.traced.new_gradients) * (not done)
            if last and self.buckets.get(n):
                temporary = {GRADIENTS: new, WORK: block.traced.input_bytes + self.buckets[n]}
                yield _Snapshot(SUM, Counter(freed), temporary, gathered(n))
        if stage.has_embedding:
            extra = self.embedding.first_backward if is_new else self.embedding.backward
            work = self.blocks[stage.numbers[0]].traced.input_bytes + extra + waiting_head
            temporary = {GRADIENTS: new, WORK: work}
            yield _Snapshot(EMBEDDING, Counter(freed), temporary, gathered(replicas.END))

    # Baseline.

    def _block_saved(self, stage: Stage, n: int) -> Counter[str]:
        """Saved activations in a block. The input to a stage is in a receive buffer, which is counted separately."""
        saved = self.blocks[n].saved
        if self.has_pipeline and n == stage.first_layer and not stage.has_embedding:
            saved = Counter(saved)
            saved[RESIDUAL] -= self.loss.input_bytes
        return saved

    def _sent_bytes(self, stage: Stage) -> int:
        """Bytes of a stage's output, which is held until its gradient arrives."""
        return 0 if stage.has_head or not self.has_pipeline else self.blocks[stage.numbers[-1]].traced.output_bytes

    def _context(self) -> int:
        """Bytes of token ids, positions, rotary angles, and the document mask if attention needs one."""
        model, train = self.config.model, self.config.train
        size = ITEMSIZE[train.compute_dtype]
        length = train.seq_len // self.config.parallel.cp
        total = length * (8 + model.head_dim * size * 3 // 2) + 8 * train.micro_batch * length
        device = "cuda" if self.on_gpu else "cpu"
        form = document_form(device, train.compute_dtype, self.config.compiled_part(device) == "blocks")
        if self.config.data.isolate_documents and form == "mask":
            total += train.micro_batch * train.seq_len**2 * size
        return total
