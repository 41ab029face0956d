"""The paper's sizes on 4 to 512 GPUs, modeled: the planner chooses each system's mesh.

Arithmetic only: the same numbers on every machine.
"""

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.experiments.document import Figure, Table
from benchmarks.experiments.results import Facts
from boost import drawing
from boost.config import load
from boost.config.schema import Config
from boost.format import format_count
from boost.plan.candidates import Request
from boost.plan.collectives import step_collectives
from boost.plan.hardware import load_hardware
from boost.plan.search import Plan, Search
from boost.train.rundir import available_cores

SIZES = ("1B", "3B", "7B", "13B", "30B", "40B")
"""The paper's five sizes, and the 40B of its talk: the shape of the 30B with 48 blocks."""

GPUS = (4, 8, 16, 32, 64, 128, 256, 512)

DENSE, VANILLA, LOW_RANK = "dense", "vanilla", "low-rank"
SYSTEMS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    DENSE: (("--model.family=dense", "--parallel.layout=megatron"), ()),
    VANILLA: (("--parallel.layout=vanilla",), ("parallel.layout",)),
    LOW_RANK: ((), ()),
}
"""Overrides and fixed choices of each system. Layouts that are not fixed are the planner's choice."""

FIXED = ("parallel.cp", "parallel.schedule")
"""Fixed in all systems: no context parallelism, 1F1B."""

TOKENS = 4096
LEAST_SEQUENCES, GPUS_PER_SEQUENCE = 4, 4
"""Sequences per step: the paper's 4, and one per 4 GPUs beyond 16, where the paper's runs end."""

BATCH = (
    "Weak scaling: the paper's 4 sequences of 4,096 tokens per step up to its 16 GPUs, then one sequence per 4 GPUs, the load of "
    "its largest run (128 sequences, 524,288 tokens, on 512 GPUs). With 4 sequences, 512 GPUs would mostly wait; with one per GPU, "
    "the planner mostly chooses data parallelism alone, where layouts are the same. Weights, gradients and moments are in bf16, as "
    "in the paper's runs; without context parallelism; 1F1B."
)


@dataclass(frozen=True)
class ScaledRun:
    """The planner's choice for one system."""

    hardware: str
    size: str
    gpus: int
    sequences: int
    system: str
    fits: bool
    """If not, this is the configuration that needs the least memory."""
    layout: str
    """'' at TP 1, where all layouts are the same."""
    tp: int
    pp: int
    dp: int
    shard: str
    overlap: str
    micro_batch: int
    recompute: str
    seconds: float
    tokens_per_second: float
    mfu: float
    peak_bytes: int
    """Per GPU, the maximum over pipeline ranks."""
    usable_bytes: int
    sent_bytes: int
    """Sent by one GPU in a step, the maximum over pipeline ranks."""


def sequences(gpus: int) -> int:
    """Sequences per step."""
    return max(LEAST_SEQUENCES, gpus // GPUS_PER_SEQUENCE)


def configuration(size: str, gpus: int, system: str) -> Config:
    """The configuration from which the planner starts: one process, bf16 weights and activations."""
    own, _ = SYSTEMS[system]
    batch = (f"--train.global_batch={sequences(gpus)}", "--train.micro_batch=1", f"--train.seq_len={TOKENS}")
    dtypes = ("--train.compute_dtype=bfloat16", "--train.param_dtype=bfloat16")
    mesh = (f"--parallel.{axis}=1" for axis in ("tp", "pp", "dp"))
    return load(f"boost-{size.lower()}", [*mesh, *batch, *dtypes, *own])


def planned(hardware: str, size: str, gpus: int, system: str) -> ScaledRun:
    """The fastest configuration that fits, or the smallest one if none does."""
    profile, (_, fixed) = load_hardware(hardware), SYSTEMS[system]
    search = Search(Request(configuration(size, gpus, system), gpus, profile, frozenset((*FIXED, *fixed))))
    plan = search.fastest() or search.smallest()
    assert plan is not None, "some mesh with micro-batch 1 is always legal"
    return _described(hardware, size, system, gpus, plan)


def _described(hardware: str, size: str, system: str, gpus: int, plan: Plan) -> ScaledRun:
    config, time = plan.config, plan.time
    parallel, train = config.parallel, config.train
    return ScaledRun(
        hardware, size, gpus, train.global_batch, system, plan.shortfall <= 0,
        parallel.layout if parallel.tp > 1 else "", parallel.tp, parallel.pp, parallel.dp,
        parallel.shard, parallel.overlap, train.micro_batch, train.recompute,
        time.seconds, time.tokens_per_second, time.mfu, plan.memory, plan.usable, sent_bytes(config),
    )  # fmt: skip


def sent_bytes(config: Config) -> int:
    """Bytes sent by one process in a step, the maximum over pipeline ranks."""
    ranks = range(config.parallel.pp)
    return max(sum(each.sent_bytes for each in step_collectives(config, rank)) for rank in ranks)


def of_size(hardware: str, size: str, counts: Sequence[int] = GPUS) -> list[Facts]:
    """All systems of one size on one machine."""
    return [asdict(planned(hardware, size, gpus, system)) for gpus in counts for system in SYSTEMS]


def compute(hardware: Sequence[str], sizes: Sequence[str] = SIZES, counts: Sequence[int] = GPUS) -> list[Facts]:
    """All configurations, machine by machine, on all cores. Raises ConfigError for an unknown profile."""
    jobs = [(name, size, counts) for name in hardware for size in sizes]
    if (workers := min(available_cores(), len(jobs))) < 2:
        return [row for job in jobs for row in of_size(*job)]
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        return [row for rows in pool.map(of_size, *zip(*jobs, strict=True)) for row in rows]


def parts(rows: Sequence[Facts], titles: dict[str, str]) -> list[str | Table | Figure]:
    """How batches grow, a table per machine, and the figure."""
    hardware = list(dict.fromkeys(row["hardware"] for row in rows))
    tables = [_table([row for row in rows if row["hardware"] == name], titles[name]) for name in hardware]
    return [BATCH, *tables, Figure("modeled-scaling", _CAPTION, lambda path: draw(rows, titles, path))]


_CAPTION = (
    "Tokens per second of the best low-rank layout over those of the dense model and of vanilla, modeled; each has the mesh that "
    "the planner chooses for it. 1 over vanilla: that is data parallelism alone, where layouts are the same. No point: one of the "
    "two does not fit in memory."
)


def _table(rows: Sequence[Facts], title: str) -> Table:
    return Table(
        f"{title}, modeled. Cells: {' / '.join(SYSTEMS)}. Each has the fastest mesh that fits, with TP inside a node; `vanilla` "
        "in its strong form; the layout is named where the planner chooses it and TP > 1. Peak memory, and bytes sent in a step, "
        "are those of the GPU that has the most. Sharding, overlap and recomputation are in the JSON file.",
        (
            "size", "GPUs:", "TP x PP x DP", "step, s:", "tokens/s:", "MFU, %:", "peak, GB:", "sent, GB:",
            "low-rank over dense, vanilla:",
        ),
        tuple(_cells(systems) for systems in by_place(rows)),
    )  # fmt: skip


def by_place(rows: Sequence[Facts]) -> list[dict[str, Facts]]:
    """Rows by system, for each machine, size and number of GPUs."""
    found: dict[tuple[Any, ...], dict[str, Facts]] = {}
    for row in rows:
        found.setdefault((row["hardware"], row["size"], row["gpus"]), {})[row["system"]] = row
    return list(found.values())


def gain(systems: dict[str, Facts], over: str) -> float | None:
    """Throughput of the best low-rank layout over that of a system; None if either does not fit."""
    ours, theirs = systems[LOW_RANK], systems[over]
    return ours["tokens_per_second"] / theirs["tokens_per_second"] if ours["fits"] and theirs["fits"] else None


def _cells(systems: dict[str, Facts]) -> tuple[str, ...]:
    first = systems[DENSE]

    def each(key: str, form: str, scale: float = 1.0) -> str:
        return " / ".join(f"{row[key] * scale:{form}}" if row["fits"] else "-" for row in systems.values())

    rates = (format_count(row["tokens_per_second"]) if row["fits"] else "-" for row in systems.values())
    gains = (gain(systems, over) for over in (DENSE, VANILLA))
    return (
        first["size"], str(first["gpus"]), " / ".join(map(_mesh, systems.values())), each("seconds", ".3g"), " / ".join(rates),
        each("mfu", ".0f", 100), each("peak_bytes", ".0f", 1e-9), each("sent_bytes", ".3g", 1e-9),
        ", ".join("-" if found is None else f"{found:.2f}" for found in gains),
    )  # fmt: skip


def _mesh(row: Facts) -> str:
    if not row["fits"]:
        return f"does not fit ({row['peak_bytes'] / 1e9:.0f} GB)"
    named = f"{row['layout']} " if row["layout"] and row["system"] != VANILLA else ""
    return f"{named}{row['tp']}x{row['pp']}x{row['dp']}"


def draw(rows: Sequence[Facts], titles: dict[str, str], path: Path) -> None:
    """Draws both ratios over the number of GPUs: one line per size, one column per machine."""
    pyplot = drawing.pyplot()
    hardware = list(dict.fromkeys(row["hardware"] for row in rows))
    figure, axes = pyplot.subplots(
        2, len(hardware), figsize=(7.4, 5.2), sharex=True, sharey="row", squeeze=False, layout="constrained"
    )
    for column, name in enumerate(hardware):
        places = by_place([row for row in rows if row["hardware"] == name])
        sizes = list(dict.fromkeys(systems[DENSE]["size"] for systems in places))
        for axis, over in zip(axes[:, column], (DENSE, VANILLA), strict=True):
            for number, size in enumerate(sizes):
                of_size = [systems for systems in places if systems[DENSE]["size"] == size]
                gains = [gain(systems, over) for systems in of_size]
                at = [systems[DENSE]["gpus"] for systems in of_size]
                shown = [float("nan") if found is None else found for found in gains]
                axis.plot(at, shown, "o-", markersize=3, color=drawing.SERIES[number % len(drawing.SERIES)], label=size)
            axis.axhline(1, color=drawing.MUTED, linewidth=0.8)
            axis.set_xscale("log", base=2)
            axis.set_xticks(sorted({systems[DENSE]["gpus"] for systems in places}))
            axis.xaxis.set_major_formatter(lambda value, _: f"{value:.0f}")
            drawing.tidy(axis)
        axes[0][column].set_title(titles[name].partition(",")[0], fontsize=9)
        axes[1][column].set_xlabel("GPUs")
    for axis, over in zip(axes[:, 0], (DENSE, VANILLA), strict=True):
        axis.set_ylabel(f"low-rank over {over}")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels))
    drawing.write(figure, path)
