"""Order of passes on one pipeline rank, which determines how many micro-batches are in flight.

These are the schedules of torch.distributed.pipelining (`schedules.py`, torch 2.13) without sends and waits, which do not change
the order on one rank. A test compares both.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from boost.config.schema import Config


@dataclass(frozen=True)
class Action:
    """One pass of one micro-batch through one stage."""

    kind: Literal["forward", "backward", "input", "weight"]
    """backward: the full backward pass; input, weight: its two halves under zero bubble."""
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
        return list(_one_stage(count, min(count, parallel.pp - pp_rank)))
    return list(_several_stages(parallel.pp, parallel.virtual, count, pp_rank, parallel.schedule == "zero-bubble"))


def _one_stage(count: int, ahead: int) -> Iterator[Action]:
    """One stage per process: `ahead` warmup forward passes, then alternating backward and forward passes."""
    yield from (Action("forward", 0, n) for n in range(ahead))
    for n in range(count):
        yield Action("backward", 0, n)
        if n + ahead < count:
            yield Action("forward", 0, n + ahead)


def _several_stages(pp: int, held: int, count: int, rank: int, zero_bubble: bool) -> Iterator[Action]:
    """Several stages per process. Interleaved 1F1B (arXiv 2104.04473) runs rounds of micro-batches through one stage, then through
    the next. Zero bubble (arXiv 2401.10241) also defers weight gradients."""
    a_round = count // max(1, count // pp)
    total = held * count
    ahead = min((held - 1) * a_round + (1 if zero_bubble else 2) * (pp - 1 - rank), total)
    numbers: Counter[tuple[str, int]] = Counter()

    def next_of(kind: Literal["forward", "backward", "input", "weight"], stage: int) -> Action:
        numbers[kind, stage] += 1
        return Action(kind, stage, numbers[kind, stage] - 1)

    def backward_stage(step: int) -> int:
        return held - 1 - (step - ahead) // a_round % held

    waiting: list[int] = []
    for step in range(total + ahead):
        if step < total:
            yield next_of("forward", step // a_round % held)
        if step < ahead:
            continue
        stage = backward_stage(step)
        yield next_of("input" if zero_bubble else "backward", stage)
        if zero_bubble:
            waiting.append(stage)
            if step - ahead >= rank:
                yield next_of("weight", waiting.pop(0))
    yield from (next_of("weight", stage) for stage in waiting)
