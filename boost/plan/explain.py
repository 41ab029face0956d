"""Breaks one configuration down: GEMMs, attention and collectives of one pipeline rank in a step, with their times."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from boost.config.architecture import first_alike
from boost.config.schema import Config
from boost.config.stages import stages_of
from boost.config.traffic import Collective
from boost.plan.collectives import micro_batch_collectives
from boost.plan.hardware import Hardware
from boost.plan.network import seconds as collective_seconds
from boost.plan.network import span
from boost.plan.replicas import gathers, gradient_collectives
from boost.plan.step import block_work, ends_work, step_work
from boost.plan.timing import Predictor
from boost.plan.work import ATTENTION, ATTENTION_BACKWARD, GEMM, Counted, Work


@dataclass(frozen=True)
class WorkTotal:
    """All GEMMs or attention calls of one shape in a step, on one process."""

    work: Work
    """A single call."""
    calls: int
    seconds: float
    """Total seconds of all calls."""
    peak_flops: float
    """Peak FLOP/s of the device in this dtype."""

    @property
    def flops(self) -> int:
        """Total FLOPs of all calls."""
        return self.calls * self.work.flops

    @property
    def bytes(self) -> int:
        """Total bytes read and written."""
        return self.calls * self.work.bytes

    @property
    def share_of_peak(self) -> float:
        """Achieved FLOP/s as a fraction of peak."""
        return self.flops / self.seconds / self.peak_flops


@dataclass(frozen=True)
class CollectiveTotal:
    """All identical collectives in a step, on one process."""

    collective: Collective
    times: int
    link: str
    """Name of the link in the hardware profile."""
    seconds: float
    """Total seconds, overlapped or not."""

    @property
    def bytes(self) -> int:
        """Total bytes sent by one process."""
        return self.times * self.collective.sent_bytes


PRODUCTS = (GEMM, ATTENTION, ATTENTION_BACKWARD)


def products(config: Config, hardware: Hardware, pp_rank: int) -> list[WorkTotal]:
    """GEMMs and attention of pipeline rank `pp_rank` in a step, longest first."""
    train, parallel = config.train, config.parallel
    count = train.global_batch // (parallel.dp * train.micro_batch)
    policies, on_gpu = train.recompute_by_layer(config.model.layers), hardware.is_gpu
    calls_of: Counter[Work] = Counter()

    def add(works: Counted, times: int) -> None:
        for work, calls in works.items():
            calls_of[work] += times * calls

    held = stages_of(config, pp_rank)
    for stage in held:
        alike = Counter((first_alike(config.model, layer), policies[layer]) for layer in stage.numbers)
        for (layer, policy), blocks in alike.items():
            add(block_work(config, layer, policy, on_gpu), blocks * count)
        add(ends_work(config, stage.has_embedding, stage.has_head, on_gpu), count)
    add(step_work(config, held), 1)
    speeds = hardware.speeds_of(min(parallel.world_size, hardware.per_node))
    peak = {dtype: speed.tflops * 1e12 for dtype, speed in hardware.speeds.gemm.items()}
    totals = [
        WorkTotal(work, calls, calls * speeds.seconds(work), peak[work.dtype])
        for work, calls in calls_of.items()
        if work.kernel in PRODUCTS
    ]
    return sorted(totals, key=lambda total: -total.seconds)


def sent(config: Config, hardware: Hardware, pp_rank: int) -> list[CollectiveTotal]:
    """Collectives of pipeline rank `pp_rank` in a step, in order of first use, TP collectives first."""
    train, parallel = config.train, config.parallel
    count = train.global_batch // (parallel.dp * train.micro_batch)
    held, tokens = stages_of(config, pp_rank), train.micro_batch * train.seq_len // parallel.cp
    policies = train.recompute_by_layer(config.model.layers)
    times_of: Counter[Collective] = Counter()
    for stage in held:
        for sent_once in micro_batch_collectives(
            config.model, parallel, tokens, train.compute_dtype, True, policies, stage
        ):
            times_of[replace(sent_once, layer=None)] += count
    for sent_once in (*gradient_collectives(config, held), *gathers(config, held)):
        times_of[replace(sent_once, layer=None)] += count if sent_once.phase in ("forward", "backward") else 1
    totals = []
    for collective, times in times_of.items():
        inside = span(collective.axis, parallel, hardware.per_node).inside
        link = hardware.node.name if inside else hardware.network.name
        totals.append(
            CollectiveTotal(collective, times, link, times * collective_seconds(collective, parallel, hardware))
        )
    return totals


def busiest(config: Config, predictor: Predictor) -> int:
    """The slowest pipeline rank."""
    passes = predictor.passes(config)
    return max(range(len(passes)), key=lambda rank: passes[rank].total)


def rows_that_matter(totals: Sequence[WorkTotal], share: float = 0.97) -> Iterator[WorkTotal]:
    """Yields the first rows until they cover `share` of the total time."""
    whole, covered = sum(total.seconds for total in totals), 0.0
    for total in totals:
        if covered >= share * whole:
            return
        covered += total.seconds
        yield total
