"""Breaks one configuration down: GEMMs, element-wise work and collectives of one pipeline rank in a step, with their times."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

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


@dataclass(frozen=True)
class ElementwiseTotal:
    """All operations of one kind, in one part of the model and one pass, in a step on one process."""

    place: str
    phase: str
    kernel: str
    """One of `boost.plan.work.KERNELS`."""
    calls: int
    bytes: int
    """Total bytes read and written."""
    seconds: float
    """Total seconds of all calls."""


Row = TypeVar("Row", WorkTotal, ElementwiseTotal)

PRODUCTS = (GEMM, ATTENTION, ATTENTION_BACKWARD)


def products(config: Config, hardware: Hardware, pp_rank: int) -> list[WorkTotal]:
    """GEMMs and attention of pipeline rank `pp_rank` in a step, longest first."""
    speeds = hardware.speeds_of(min(config.parallel.world_size, hardware.per_node))
    peak = {dtype: speed.tflops * 1e12 for dtype, speed in hardware.speeds.gemm.items()}
    listed = [
        WorkTotal(work, calls, calls * speeds.seconds(work), peak[work.dtype])
        for work, calls in _all_work(config, hardware, pp_rank).items()
        if work.kernel in PRODUCTS
    ]
    return sorted(listed, key=lambda each: -each.seconds)


def elementwise(config: Config, hardware: Hardware, pp_rank: int) -> list[ElementwiseTotal]:
    """All other operations of pipeline rank `pp_rank` in a step, by part of the model, pass and kind of kernel, longest first."""
    speeds = hardware.speeds_of(min(config.parallel.world_size, hardware.per_node))
    found: dict[tuple[str, str, str], tuple[int, int, float]] = {}
    for work, times in _all_work(config, hardware, pp_rank).items():
        if work.kernel not in PRODUCTS:
            key = work.place, work.phase, work.kernel
            calls, size, seconds = found.get(key, (0, 0, 0.0))
            found[key] = calls + times, size + times * work.bytes, seconds + times * speeds.seconds(work)
    return sorted((ElementwiseTotal(*key, *total) for key, total in found.items()), key=lambda each: -each.seconds)


def _all_work(config: Config, hardware: Hardware, pp_rank: int) -> Counted:
    """Counts every operation of pipeline rank `pp_rank` in a step."""
    train, parallel = config.train, config.parallel
    count = train.global_batch // (parallel.dp * train.micro_batch)
    policies, on_gpu = train.recompute_by_layer(config.model.layers), hardware.is_gpu
    total: Counted = Counter()
    held = stages_of(config, pp_rank)
    for stage in held:
        alike = Counter((first_alike(config.model, layer), policies[layer]) for layer in stage.numbers)
        for (layer, policy), blocks in alike.items():
            _add(total, block_work(config, layer, policy, on_gpu), blocks * count)
        _add(total, ends_work(config, stage.has_embedding, stage.has_head, on_gpu), count)
    _add(total, step_work(config, held), 1)
    return total


def _add(total: Counted, work: Counted, times: int) -> None:
    for each, count in work.items():
        total[each] += times * count


def sent(config: Config, hardware: Hardware, pp_rank: int) -> list[CollectiveTotal]:
    """Collectives of pipeline rank `pp_rank` in a step, in order of first use, TP collectives first."""
    train, parallel = config.train, config.parallel
    count = train.global_batch // (parallel.dp * train.micro_batch)
    held, tokens = stages_of(config, pp_rank), train.micro_batch * train.seq_len // parallel.cp
    policies = train.recompute_by_layer(config.model.layers)
    found: Counter[Collective] = Counter()
    for stage in held:
        listed = micro_batch_collectives(config.model, parallel, tokens, train.compute_dtype, True, policies, stage)
        found.update({each: times * count for each, times in _count_identical(listed).items()})
    for each, times in _count_identical((*gradient_collectives(config, held), *gathers(config, held))).items():
        found[each] += times * (count if each.phase in ("forward", "backward") else 1)
    return [
        CollectiveTotal(
            each, times, _link(each, config, hardware), times * collective_seconds(each, parallel, hardware)
        )
        for each, times in found.items()
    ]


def _count_identical(collectives: Iterable[Collective]) -> Counter[Collective]:
    """Counts identical collectives over all blocks."""
    return Counter(replace(each, layer=None) for each in collectives)


def _link(collective: Collective, config: Config, hardware: Hardware) -> str:
    inside = span(collective.axis, config.parallel, hardware.per_node).inside
    return hardware.node.name if inside else hardware.network.name


def busiest(config: Config, predictor: Predictor) -> int:
    """The slowest pipeline rank."""
    passes = predictor.passes(config)
    return max(range(len(passes)), key=lambda rank: passes[rank].total)


def rows_that_matter(listed: Sequence[Row], share: float = 0.97) -> Iterator[Row]:
    """Yields the first rows until they cover `share` of the total time."""
    total, covered = sum(each.seconds for each in listed), 0.0
    for each in listed:
        if covered >= share * total:
            return
        covered += each.seconds
        yield each
