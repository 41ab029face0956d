"""Predicts the memory on one process: between the passes of a micro-batch, and at the peak of an optimizer step.

A trace (`boost.plan.trace`) gives the memory for each kind of block. This module adds up blocks, micro-batches in flight and
gathered weights with plain arithmetic, because a search calls it thousands of times. Allocator rounding and fragmentation are not
included.
"""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from boost.config.architecture import first_alike, taken
from boost.config.attention import document_form
from boost.config.schema import Config
from boost.config.stages import Stage, stages_of
from boost.config.traffic import ITEMSIZE
from boost.plan import replicas
from boost.plan.categories import BUFFERS, COPIES, GRADIENTS, OPTIMIZER, RESIDUAL, SAVED, WEIGHTS, WORK
from boost.plan.optimizer import state_bytes, work_bytes
from boost.plan.structure import held_tensors
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
        """Bytes of weights, gradients, optimizer state and SAVED, and of attention masks that are saved on CPUs."""
        return {**self.states, **dict.fromkeys(SAVED, 0), **self.saved}

    @property
    def activations(self) -> int:
        """Total bytes saved for the backward pass."""
        return self.saved.total()


def memory(config: Config, pp_rank: int = 0) -> Memory:
    """Memory on one process: the training state for its stages, and the activations that one micro-batch saves."""
    step = _StepMemory(config, pp_rank, on_gpu=False)
    saved = Counter({COPIES: step.copies})
    for of_block in step.saved.values():
        saved.update(of_block)
    if step.stages[-1].has_head:
        saved.update(step.loss.by_category)
    return Memory(step.states, saved)


# The order of passes on one pipeline rank, which determines how many micro-batches are in flight. These are the schedules of
# torch.distributed.pipelining (torch 2.13) without sends and waits, which do not change the order on a rank. A test checks this.


Action = tuple[Literal["forward", "backward"], int]
"""A pass of the next micro-batch through one stage: its kind, and the index of the stage on this rank."""


def micro_batches(config: Config) -> int:
    """Number of micro-batches per replica and step."""
    return config.train.global_batch // (config.parallel.dp * config.train.micro_batch)


def actions(config: Config, pp_rank: int) -> list[Action]:
    """Returns the actions of pipeline rank `pp_rank` in a step, in order."""
    parallel, count = config.parallel, micro_batches(config)
    forward: list[Action] = [("forward", 0)]
    backward: list[Action] = [("backward", 0)]
    if parallel.pp == 1:
        return count * (forward + backward)
    if parallel.schedule == "gpipe":
        return count * forward + count * backward
    if parallel.schedule == "1f1b":
        # Forward passes warm up the pipeline; then backward and forward passes alternate.
        ahead = min(count, parallel.pp - pp_rank)
        return ahead * forward + (count - ahead) * (backward + forward) + ahead * backward
    # Interleaved 1F1B (arXiv 2104.04473) runs a round of micro-batches through one stage, then through the next.
    held, a_round = parallel.virtual, count // max(1, count // parallel.pp)
    ahead = min((held - 1) * a_round + 2 * (parallel.pp - 1 - pp_rank), held * count)
    stage = [n // a_round % held for n in range(held * count)]
    order: list[Action] = [("forward", n) for n in stage[:ahead]]
    for n, done in itertools.zip_longest(stage[ahead:], stage):
        order += [("forward", n)] if n is not None else []
        order.append(("backward", held - 1 - done))
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
    return _StepMemory(config, pp_rank, on_gpu).peak_memory(enough)


_Snapshot = tuple[str, Counter[str], dict[str, int], dict[str, int]]
"""Bytes in addition to the baseline of a pass, at one point in time, by category: when, and what is saved, temporary, gathered."""


class _StepMemory:
    """Replays one optimizer step on one process."""

    def __init__(self, config: Config, pp_rank: int, on_gpu: bool) -> None:
        shared = min(1.0, 2 / config.parallel.dp) if config.divides_moments else 1.0
        self.config = config = replicas.with_whole_weights(config)
        self.on_gpu, parallel, train = on_gpu, config.parallel, config.train
        self.stages = stages_of(config, pp_rank)
        self.loss, self.embedding = trace_loss(config, on_gpu), trace_embedding(config)
        self.traced: dict[int, TracedPass] = {}
        """The pass of each block."""
        self.saved: dict[int, Counter[str]] = {}
        """Bytes that each block saves by category, including latents from the previous block."""
        policies, first_of = train.recompute_by_layer(config.model.layers), dict[Hashable, int]()
        for n in (n for stage in self.stages for n in stage.numbers):
            feeds = bool(taken(config.model, n + 1))
            # Which latents from the previous block stay alive depends on that block too.
            kind = n if taken(config.model, n) else (first_alike(config.model, n), feeds, policies[n])
            if (first := first_of.setdefault(kind, n)) == n:
                traced = self.traced[n] = pass_of_block(config, n, on_gpu)
                self.saved[n] = traced.by_category
                if any(traced.prev_saved):  # what the previous block carries and only this block keeps alive
                    before, own = pass_of_block(config, n - 1, on_gpu), Counter[str]()
                    each = zip(traced.prev_saved, before.latents, before.latents_saved, strict=True)
                    for is_saved, (category, size), already in each:
                        own[category] += size if is_saved and not already else 0
                    self.saved[n] = traced.by_category + own
            self.traced[n], self.saved[n] = self.traced[first], self.saved[first]
        self.held, self.size = held_tensors(config, self.stages), ITEMSIZE[train.param_dtype]
        self.gradient_bytes = [self.size * sum(t.elements for t in tensors) for tensors in self.held.by_stage.values()]
        """Bytes of all gradients, per stage."""
        weights = self.size * self.held.shards(parallel)
        sums = 2 if config.run.recovery == "in-step" else 1  # local gradients, in addition to their sums
        moments = int(state_bytes(config, self.held) * shared)
        self.states = {WEIGHTS: weights + 8 * self.held.indices, GRADIENTS: sums * weights, OPTIMIZER: moments}
        """Bytes between steps by category, in this process's shards."""
        copied = sum(t.elements for t in self.held.tensors if t.may_have_copy) if config.has_working_copies else 0
        self.copies = copied * ITEMSIZE[train.compute_dtype]
        """Bytes of working copies while passes run."""
        self.shards = replicas.shards_of(parallel, self.held, ITEMSIZE[train.compute_dtype], self.size)
        self.buckets = self._bucket_copies()
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
        self.forward_done = [0 for _ in self.stages]
        """Completed forward passes, per stage."""
        self.backward_done = [0 for _ in self.stages]
        """Completed backward passes, per stage."""
        self._peak: tuple[int, str, dict[str, int]] = (-1, "", {})

    def _bucket_copies(self) -> dict[int | None, int]:
        """Bytes of the flat copies of gradient buckets, by the block whose backward pass fills them; None: filled at the end.

        A bucket with one tensor is copied only into another dtype. Copies in another dtype stay allocated until all are reduced.
        """
        ratio, kept = ITEMSIZE[self.config.train.sum_dtype] / self.size, 0
        copies: dict[int | None, int] = {}
        buckets = list(replicas.sum_buckets(self.config, self.held))
        for bucket, following in itertools.zip_longest(buckets, buckets[1:]):
            filled, copied = bucket.filled_by, bucket.elements * self.size
            ends = following is None or following.axis != bucket.axis  # the last one over this axis
            if ratio != 1:
                kept += int(copied * ratio)
                copies[filled] = kept
            elif bucket.length > 1 and (filled is not None or ends):
                copies[filled] = max(copies.get(filled, 0), copied)
        return copies | ({None: kept} if kept else {})

    def peak_memory(self, enough: float) -> PeakMemory:
        """Returns the largest snapshot, or the first one with more than `enough` bytes."""
        kinds: set[tuple[object, ...]] = set()
        for kind, stage in self.actions:
            is_forward = kind == "forward"
            # Passes that start in the same state use the same memory.
            seen = kind, stage, *self._in_flight(), *(
                min(n, 1) + (n == self.micro_batches - 1) for n in self.backward_done
            )  # fmt: skip
            if seen not in kinds:
                kinds.add(seen)
                self._record(
                    self._baseline(), self._forward(self.stages[stage]) if is_forward else self._backward(stage)
                )
                if self._peak[0] > enough:
                    break
            (self.forward_done if is_forward else self.backward_done)[stage] += 1
        update = work_bytes(self.config, self.held)
        at_end: list[_Snapshot] = [
            (SUM, Counter(), {WORK: self.buckets.get(None, 0)}, {}),
            (STEP, Counter(), {WORK: update}, {}),
        ]
        captured = self.config.captures_passes
        self._record(self._with_in_flight(Counter(self.states)), at_end[: 1 if captured else 2])  # all gradients exist
        total, name, held = self._peak
        assert total >= 0
        if captured:  # the graph keeps the memory of the passes, so updates and evaluations need their own
            evaluation = max(temporary[WORK] for stage in self.stages for _, _, temporary, _ in self._forward(stage))
            held[WORK] += max(update, evaluation)
        return PeakMemory({category: size for category, size in held.items() if size}, name)

    # Snapshots.

    def _in_flight(self) -> list[int]:
        """Micro-batches in flight, by stage."""
        return [started - done for started, done in zip(self.forward_done, self.backward_done, strict=True)]

    def _baseline(self) -> Counter[str]:
        """Bytes held throughout a pass."""
        held = Counter({WEIGHTS: self.states[WEIGHTS], OPTIMIZER: self.states[OPTIMIZER]})
        held[COPIES] = self.copies
        for stage, all_of_it, done in zip(self.stages, self.gradient_bytes, self.backward_done, strict=True):
            sharded = self.shards.enabled
            held[GRADIENTS] += self.shards.gradients(stage, done) if sharded else all_of_it * (done > 0)
        held[WORK] = self._context()
        return self._with_in_flight(held)

    def _with_in_flight(self, held: Counter[str]) -> Counter[str]:
        for i, count in enumerate(self._in_flight()):
            stage = self.stages[i]
            for category, size in self.saved_by_stage[i].items():
                held[category] += count * size
            # The output is held until its gradient arrives.
            sends = self.has_pipeline and not stage.has_head
            sent = self.traced[stage.numbers[-1]].output_bytes if sends else 0
            received = 0 if stage.has_embedding else self.traced[stage.first_layer].input_bytes
            held[BUFFERS] += (self.forward_done[i] if self.holds_sends else count) * sent
            if self.holds_sends:
                held[BUFFERS] += self.backward_done[i] * received
            # Each micro-batch has receive buffers at each stage boundary: for activations, and for gradients of sent activations.
            if self.has_pipeline:
                held[BUFFERS] += self.micro_batches * (received + sent)
        return held

    def _record(self, baseline: Counter[str], snapshots: Iterable[_Snapshot]) -> None:
        baseline_bytes = baseline.total()
        for name, *above in snapshots:
            total = baseline_bytes + sum(sum(part.values()) for part in above)
            if total > self._peak[0]:
                held = Counter(baseline)
                for part in above:
                    held.update(part)
                self._peak = total, name, dict(held)

    def _forward(self, stage: Stage) -> Iterator[_Snapshot]:
        saved: Counter[str] = Counter()
        later = any(self.forward_done)
        for place, n in enumerate(stage.numbers):
            received = place == 0 and self.has_pipeline and not stage.has_embedding  # the input is in a receive buffer
            arriving = 0 if received else self.traced[n].input_bytes
            yield FORWARD, +saved, {WORK: arriving + self.traced[n].forward}, self.shards.forward(stage, n, later)
            saved += self._block_saved(stage, n)
        if stage.has_head:
            arriving = self.traced[stage.numbers[-1]].output_bytes
            yield LOSS, +saved, {WORK: arriving + self.loss.forward}, self.shards.forward(stage, None, later)

    def _backward(self, index: int) -> Iterator[_Snapshot]:
        """The baseline includes this micro-batch's saved activations, which are freed block by block."""
        stage, done = self.stages[index], self.backward_done[index]
        # Weight gradients are new tensors that stay allocated, or are accumulated into existing ones.
        is_new = done == 0 or self.shards.scatters_each
        last = done == self.micro_batches - 1
        gathered = functools.partial(self.shards.backward, stage, last=last)
        freed: Counter[str] = Counter()
        new = 0
        waiting_head = 0
        if stage.has_head:
            extra = self.loss.first_backward if is_new else self.loss.backward
            yield LOSS_BACKWARD, Counter(), {WORK: extra}, gathered(None)
            freed.subtract(self.loss.by_category)
            new += self.shards.new_gradients(stage, None, last, self.loss.new_gradients) * (not done)
            if self.config.model.tied and stage.has_embedding:
                # Autograd holds the head's gradient until it adds the embedding's to it in place.
                train, table = self.config.train, self.config.model.vocab_size * self.config.model.dim
                used = train.compute_dtype if self.config.has_working_copies else train.param_dtype
                in_new = ITEMSIZE[train.param_dtype] if not done and not self.shards.enabled else 0
                waiting_head = table // self.config.parallel.tp * (ITEMSIZE[used] - in_new)
        waiting = 0 if stage.has_head or not self.has_pipeline else self.traced[stage.numbers[-1]].output_bytes
        for n in reversed(stage.numbers):
            output_grad = 0 if waiting else self.traced[n].output_bytes
            waiting = 0
            extra = self.traced[n].first_backward if is_new else self.traced[n].backward
            temporary = {GRADIENTS: new, WORK: output_grad + extra + waiting_head}
            yield BACKWARD, Counter(freed), temporary, gathered(n)
            freed.subtract(self._block_saved(stage, n))
            new += self.shards.new_gradients(stage, n, last, self.traced[n].new_gradients) * (not done)
            if last and self.buckets.get(n):
                temporary = {GRADIENTS: new, WORK: self.traced[n].input_bytes + self.buckets[n]}
                yield SUM, Counter(freed), temporary, gathered(n)
        if stage.has_embedding:
            extra = self.embedding.first_backward if is_new else self.embedding.backward
            work = self.traced[stage.first_layer].input_bytes + extra + waiting_head
            yield EMBEDDING, Counter(freed), {GRADIENTS: new, WORK: work}, gathered(replicas.END)

    # Baseline.

    def _block_saved(self, stage: Stage, n: int) -> Counter[str]:
        """Saved activations in a block. The input to a stage is in a receive buffer, which is counted separately."""
        saved = self.saved[n]
        if self.has_pipeline and n == stage.first_layer and not stage.has_embedding:
            saved = Counter(saved)
            saved[RESIDUAL] -= self.loss.input_bytes
        return saved

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
