"""Communication of one block, by layout and batch: bytes counted as it runs, and the time of its collectives.

Counts collectives at the dispatcher in a real forward and backward pass, then replays and times them in isolation, in the same
order and with the same sizes. The paper's sizes are modeled.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace

import torch
from torch import Tensor

from benchmarks.experiments.blocks import (
    BTP,
    BTP_SP,
    FIRST_BLOCK,
    MEGATRON,
    MEGATRON_SP,
    PUBLISHED,
    VANILLA,
    BlockRun,
    block_config,
)
from benchmarks.experiments.blocks_report import (
    PROFILE,
    RangeBar,
    as_facts,
    batches_of,
    comparison,
    draw_bars,
    milliseconds,
    ms_bar,
    row_of,
    shape_words,
    times,
    turns_words,
)
from benchmarks.experiments.contest import Call, launches, take_turns
from boost.config import Config
from boost.config.traffic import ITEMSIZE, Collective
from boost.measure.document import Figure, Goal, Section, Table
from boost.measure.results import Facts, facts_of
from boost.parallel import collectives as sent
from boost.parallel.mesh import Axis, Mesh
from boost.plan.collectives import micro_batch_collectives
from boost.plan.hardware import load_hardware
from boost.plan.network import seconds as collective_seconds
from boost.plan.published import COMMUNICATION, SEQUENCES, STEPS, configuration
from boost.plan.replicas import gradient_collectives

CONTENDERS = (MEGATRON, MEGATRON_SP, VANILLA, PUBLISHED, BTP, BTP_SP)
LEAST_S = 0.02
"""Minimum seconds per timed sample."""

PHASES = ("forward", "backward")
ISSUE = {
    "all-reduce": sent.all_reduce,
    "all-gather": sent.all_gather,
    "reduce-scatter": sent.reduce_scatter,
    "all-to-all": sent.all_to_all,
}
"""The runtime function that issues each kind of collective."""

PAPER_TP = 4


def measure(config: Config, mesh: Mesh, batches: Sequence[int], rounds: int) -> Facts:
    """Counts and times the collectives of every layout's block at every batch."""
    rows, calls, payloads = [], dict[str, Call](), Payloads(mesh)
    for contender in CONTENDERS:
        for batch in batches:
            chosen = block_config(config, contender, mesh.tp.size, batch)
            counted = BlockRun(chosen, mesh).collectives()
            # Once per optimizer step, for any number of micro-batches. A block alone issues none, so this comes from the table.
            once = sum(each.sent_bytes for each in gradient_collectives(chosen, [FIRST_BLOCK]))
            for phase in PHASES:
                theirs = [each for each in counted if each.phase == phase]
                name = f"{contender.name}, batch {batch}, {phase}"
                calls[name] = payloads.call(theirs)
                facts = {"layout": contender.name, "batch": batch, "phase": phase, "name": name}
                rows.append({**facts, **volume(theirs), "step_bytes": once, "collectives": _listed(theirs)})
    turns = take_turns(calls, mesh, rounds, least_s=LEAST_S, words="collectives")
    return facts_of(
        "traffic",
        config,
        rounds=rounds,
        tp=mesh.tp.size,
        backend="nccl" if mesh.device.type == "cuda" else "gloo",
        rows=rows,
        turns=asdict(turns),
        published=as_facts(comparison().communication()),
        modeled=list(modeled()),
    )


class Payloads:
    """Random tensors to send, created once per shape and dtype."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._made: dict[tuple[tuple[int, ...], torch.dtype], Tensor] = {}

    def call(self, collectives: Iterable[Collective]) -> Call:
        """Returns a call that issues the collectives in order and waits for each, as a block does."""
        axis = self.mesh.tp
        issued = [(each.kind, self._payload(each, axis)) for each in collectives]
        return lambda: [ISSUE[kind](x, axis) for kind, x in issued]

    def _payload(self, each: Collective, axis: Axis) -> Tensor:
        elements = each.elements // axis.size if each.kind == "all-gather" else each.elements
        # These shard along dim 0, so every process needs a whole row.
        rows = axis.size if each.kind in ("reduce-scatter", "all-to-all") else 1
        key = (rows, elements // rows), getattr(torch, each.dtype)
        if key not in self._made:
            self._made[key] = torch.randn(key[0], dtype=key[1], device=self.mesh.device)
        return self._made[key]


def volume(collectives: Sequence[Collective]) -> Facts:
    """Count, payload bytes, and bytes sent by one process."""
    return {
        "count": len(collectives),
        "payload_bytes": sum(each.elements * ITEMSIZE[each.dtype] for each in collectives),
        "sent_bytes": sum(each.sent_bytes for each in collectives),
    }


def modeled() -> Iterator[Facts]:
    """Our layouts at the paper's sizes, TP, batch and hardware, forward: exact volumes and modeled times."""
    hardware = load_hardware(PROFILE)
    for size in COMMUNICATION:
        row = replace(next(each for each in STEPS if each.size == size), tp=PAPER_TP, pp=1)
        for contender in (MEGATRON, VANILLA, BTP, BTP_SP):
            base = configuration("BOOST", row, SEQUENCES)
            config = block_config(base, contender, PAPER_TP, SEQUENCES)
            train = config.train
            theirs = [
                each
                for each in micro_batch_collectives(
                    config.model, config.parallel, train.micro_batch * train.seq_len, train.compute_dtype,
                    stage=FIRST_BLOCK,
                )
                if each.layer is not None and each.phase == "forward"
            ]  # fmt: skip
            seconds = sum(collective_seconds(each, config.parallel, hardware) for each in theirs)
            yield {"size": size, "layout": contender.name, "seconds": seconds, **volume(theirs)}


def _listed(collectives: Sequence[Collective]) -> list[Facts]:
    keys = ("kind", "shape", "dtype", "processes")
    return [{key: getattr(each, key) for key in keys} for each in collectives]


def goals(facts: Facts) -> list[Goal]:
    """None: the byte goals are about whole steps."""
    return []


def section(facts: Facts) -> Section:
    """Counts and times of our block, the paper's numbers, and the paper's sizes under our layouts."""
    lead = (
        f"{shape_words(facts)}, TP {facts['tp']}, {facts['backend']}. Bytes are counted at the dispatcher as the block runs. "
        f"Times are those of the same collectives in isolation, {turns_words(facts)}. MB = 10^6 bytes sent by one process "
        f"(all-reduce of N bytes: 2N(p-1)/p; all-gather and reduce-scatter: N(p-1)/p)."
    )
    batches = batches_of(facts)
    parts: list[str | Table | Figure] = [lead, *(_batch_table(facts, batch) for batch in batches)]
    parts.append(
        "`once per step` is communication once per optimizer step, for any number of micro-batches: gradients of replicated "
        "weights. It comes from the collective table and is not counted here."
    )
    parts += [_paper_table(facts), _sizes_table(facts)]
    caption = "Time of one block's collectives in isolation (measured; whiskers are quartiles)"
    parts.append(Figure("traffic", caption, lambda path: draw_bars(path, _panels(facts, batches), "ms")))
    return Section("Communication of one block by layout and batch", tuple(parts))


def _layouts(facts: Facts) -> list[str]:
    return list(dict.fromkeys(row["layout"] for row in facts["rows"]))


def _both(facts: Facts, layout: str, batch: int) -> tuple[int, list[float]]:
    """(bytes, seconds of every round) of forward and backward pass."""
    rows = [row_of(facts, layout=layout, batch=batch, phase=phase) for phase in PHASES]
    seconds = [facts["turns"]["seconds"][row["name"]] for row in rows]
    return sum(row["sent_bytes"] for row in rows), launches(seconds[0]) + launches(seconds[1])


def _batch_table(facts: Facts, batch: int) -> Table:
    cells, seconds = [], facts["turns"]["seconds"]
    btp_bytes, btp_seconds = _both(facts, "btp", batch)
    for layout in _layouts(facts):
        cell = [layout]
        for phase in PHASES:
            row = row_of(facts, layout=layout, batch=batch, phase=phase)
            cell += [str(row["count"]), _mb(row["sent_bytes"]), milliseconds(seconds[row["name"]])]
        total, taken = _both(facts, layout, batch)
        once = row_of(facts, layout=layout, batch=batch, phase="forward")["step_bytes"]
        cells.append((*cell, f"{total / btp_bytes:.3f}x", times(taken, btp_seconds), _mb(once)))
    headings = ["layout"]
    for phase in PHASES:
        headings += [f"{phase} collectives:", "MB sent:", "ms:"]
    headings += ["both: bytes / btp:", "time / btp:", "MB once per step:"]
    caption = f"Batch {batch} (bytes counted, times measured)."
    return Table(caption, tuple(headings), tuple(cells))


def _paper_table(facts: Facts) -> Table:
    """The paper's table next to our predictions, as payload volumes, which is how the paper counts."""
    by_kind = {
        kind: [r for r in facts["published"] if r["table"] == f"communication {kind}"] for kind in ("volume", "time")
    }
    cells = tuple(
        (mb["what"], f"{mb['published']:g}", f"{mb['predicted']:g}", f"{ms['published']:g}", f"{ms['predicted']:.2f}")
        for mb, ms in zip(by_kind["volume"], by_kind["time"], strict=True)
    )
    headings = ("size, layout", "paper MiB:", "ours MiB:", "paper ms:", f"modeled ms, {PROFILE}:")
    caption = (
        "The paper's communication for one block (forward, TP 4, batch 4) next to our prediction (modeled; payload in MiB, "
        "without RMSNorm's statistic)."
    )
    return Table(caption, headings, cells)


def _sizes_table(facts: Facts) -> Table:
    cells = []
    for row in facts["modeled"]:
        btp = next(r for r in facts["modeled"] if (r["size"], r["layout"]) == (row["size"], BTP.name))
        cells.append(
            (row["size"], row["layout"], str(row["count"]), _mb(row["payload_bytes"]), _mb(row["sent_bytes"]),
             f"{1e3 * row['seconds']:.2f}", f"{row['sent_bytes'] / btp['sent_bytes']:.2f}x",
             f"{row['seconds'] / btp['seconds']:.2f}x")
        )  # fmt: skip
    headings = ("size", "layout", "collectives:", "payload MB:", "MB sent:", "ms:", "bytes / btp:", "time / btp:")
    caption = f"The same sizes, TP and batch under our layouts, forward (modeled, {PROFILE}; all-reduces count twice)."
    return Table(caption, headings, tuple(cells))


def _mb(size: int) -> str:
    return f"{size / 1e6:.2f}" if size < 10e6 else f"{size / 1e6:.1f}"


def _panels(facts: Facts, batches: Sequence[int]) -> dict[str, dict[str, dict[str, RangeBar]]]:
    def bar(layout: str, batch: int, phase: str) -> RangeBar:
        row = row_of(facts, layout=layout, batch=batch, phase=phase)
        return ms_bar(facts["turns"]["seconds"][row["name"]])

    return {
        f"batch {batch}": {layout: {phase: bar(layout, batch, phase) for phase in PHASES} for layout in _layouts(facts)}
        for batch in batches
    }
