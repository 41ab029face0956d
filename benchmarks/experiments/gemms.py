"""GEMMs of one process's shard of a block, by layout and TP: time and hardware utilization.

Records the GEMMs while the block runs on fake tensors, then replays them on real tensors with the same shapes, strides and
counts, each with its own operands. Runs on one process and times nothing but GEMMs. Utilization is relative to the fastest
large square GEMM of the same run (the ceiling).
"""

import contextlib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.experiments.blocks import (
    BTP,
    BTP_SP,
    MEGATRON,
    VANILLA,
    BlockRun,
    BlockVariant,
    Operand,
    RecordedGemm,
    block_config,
)
from benchmarks.experiments.blocks_report import (
    RangeBar,
    as_facts,
    compared_table,
    comparison,
    draw_bars,
    find_row,
    middle,
    milliseconds,
    percent,
    row_of,
    shape_words,
    times,
    turns_words,
)
from benchmarks.experiments.contest import Call, Ratio, launches, ratio, take_turns
from boost.config import Config
from boost.measure.document import Figure, Goal, Section, Table
from boost.measure.memory import fake_mesh
from boost.measure.results import Facts, facts_of
from boost.parallel.mesh import Mesh
from boost.plan.published import GEMM_MS, UTILIZATION
from boost.train.hardware import peak_flops
from boost.train.rundir import available_cores

SQUARES = {"cpu": (1024, 2048), "cuda": (4096, 8192)}
"""Sizes of the square GEMMs that determine the ceiling, by device type."""

SEQUENCES = {"cpu": 8, "cuda": 4}
"""Default micro-batch by device type: 2048 tokens on CPUs; 4 x 4096 tokens, as in the paper, on GPUs."""

LEAST_S = 5e-3
"""Minimum seconds per timed sample."""

CONTENDERS = (MEGATRON, VANILLA, BTP, BTP_SP)

WHOLE = {True: "dense", False: "low-rank"}
"""Names at TP 1, where all layouts of a model are the same, by `BlockVariant.dense`."""

PAPER_TP = 4


def recorded(config: Config) -> list[RecordedGemm]:
    """The GEMMs of the first block on one TP rank, forward and backward."""
    with FakeTensorMode():
        return BlockRun(config, fake_mesh(config.parallel.tp), weights=False).products()


def measure(config: Config, mesh: Mesh, tps: Sequence[int], batch: int, squares: Sequence[int], rounds: int) -> Facts:
    """Times the GEMMs of every layout at every TP. Raises ConfigError if the configuration is invalid."""
    dtype = getattr(torch, config.train.compute_dtype)
    rows, calls, store = [], dict[str, Call](), Operands(dtype, mesh.device)
    for side in squares:
        calls[f"square {side}"] = store.call([_square(side)])
    for tp in tps:
        for name, contender in at(tp):
            products = recorded(block_config(config, contender, tp, batch))
            for row, theirs in (*_halves(products), *_pair(products)):
                row = {"layout": name, "tp": tp, **row, "name": f"{name}, TP {tp}, {row['what']}, {row['phase']}"}
                calls[row["name"]] = store.call(theirs)
                rows.append(row | {"flops": sum(p.flops for p in theirs), "products": _listed(theirs)})
    with _threads_of_one(mesh, max(tps)):
        turns = take_turns(calls, mesh, rounds, least_s=LEAST_S, words="products")
        peak = peak_flops(mesh.device, dtype) if mesh.device.type == "cuda" else math.nan
        return facts_of(
            "gemms",
            config,
            rounds=rounds,
            tokens=batch * config.train.seq_len,
            batch=batch,
            squares=list(squares),
            peak=None if math.isnan(peak) else peak,
            rows=rows,
            turns=asdict(turns),
            modeled=as_facts(comparison().gemms()),
        )


def at(tp: int) -> list[tuple[str, BlockVariant]]:
    """(name, layout) of the layouts that differ at this TP."""
    if tp > 1:
        return [(each.name, each) for each in CONTENDERS]
    return [(WHOLE[each.dense], each) for each in (MEGATRON, BTP)]


class Operands:
    """Random matrices, created once and shared by contenders: the n-th use of a shape within a contender gets the n-th matrix."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self._made: dict[tuple[Operand, int], Tensor] = {}

    def call(self, products: Sequence[RecordedGemm]) -> Call:
        """Returns a call that runs the GEMMs in order and keeps all outputs, as a block does."""
        uses: Counter[Operand] = Counter()
        pairs: list[tuple[str, Tensor, Tensor]] = []
        for product in products:
            a, b = (self._next(operand, uses) for operand in (product.a, product.b))
            pairs.append((product.name, a, b))
        return lambda: [torch.bmm(a, b) if name == "bmm" else torch.mm(a, b) for name, a, b in pairs]

    def _next(self, operand: Operand, uses: Counter[Operand]) -> Tensor:
        key = operand, uses[operand]
        uses[operand] += 1
        if key not in self._made:
            self._made[key] = operand.filled(self.dtype, self.device)
        return self._made[key]


def _halves(products: Sequence[RecordedGemm]) -> Iterator[tuple[Facts, list[RecordedGemm]]]:
    for phase in ("forward", "backward"):
        for half in ("attention", "MLP"):
            yield {"what": half, "phase": phase}, [p for p in products if (p.phase, p.half) == (phase, half)]


def _pair(products: Sequence[RecordedGemm]) -> Iterator[tuple[Facts, list[RecordedGemm]]]:
    """Each factor of the linear `o`, forward; one GEMM for a dense model."""
    theirs = [p for p in products if p.place == "o"]
    for factor, product in zip("AB" if len(theirs) == 2 else "W", theirs, strict=True):
        yield {"what": f"o, {factor}", "phase": "forward"}, [product]


def _listed(products: Sequence[RecordedGemm]) -> list[Facts]:
    return [asdict(product) | {"count": count} for product, count in Counter(products).items()]


def _square(side: int) -> RecordedGemm:
    square = Operand((side, side), (side, 1))
    return RecordedGemm("mm", square, square, phase="forward", half="", place="")


@contextlib.contextmanager
def _threads_of_one(mesh: Mesh, processes: int) -> Iterator[None]:
    """Sets the number of threads that each of `processes` on this machine would have."""
    usual = torch.get_num_threads()
    if mesh.device.type == "cpu":
        torch.set_num_threads(max(available_cores() // processes, 1))
    try:
        yield
    finally:
        torch.set_num_threads(usual)


def ceiling(facts: Facts) -> tuple[int, np.ndarray]:
    """(size, FLOP/s [launches, rounds]) of the fastest square GEMM."""
    seconds = facts["turns"]["seconds"]
    rates = {side: 2 * side**3 / launches(seconds[f"square {side}"]) for side in facts["squares"]}
    return max(rates.items(), key=lambda item: middle(item[1]))


def utilization(facts: Facts, row: Facts) -> Ratio:
    """FLOP/s relative to the ceiling of the same round."""
    _, rates = ceiling(facts)
    return ratio(row["flops"] / rates, facts["turns"]["seconds"][row["name"]])


def goals(facts: Facts) -> list[Goal]:
    """None: this experiment explains the goals for whole steps."""
    return []


def section(facts: Facts) -> Section:
    """Halves of a block, the factors of one linear, and the paper's ratios and times."""
    side, rates = ceiling(facts)
    dtype, peak = facts["config"]["train"]["compute_dtype"], facts["peak"]
    lead = (
        f"{shape_words(facts)}, {facts['tokens']} tokens. Single-rank emulation of TP: only the GEMMs of one process, with the "
        "block's shapes, strides and counts. Utilization is FLOP/s relative to a square GEMM in the same "
        f"round (the ceiling): size {side}, {middle(rates) / 1e12:.3g} TFLOP/s in {dtype}"
        + (f" ({middle(rates) / peak:.0%} of the datasheet's {peak / 1e12:.0f})." if peak else ".")
        + f" Times are {turns_words(facts)}. At TP 1, all layouts of a model are the same."
    )
    parts: list[str | Table | Figure] = [lead]
    parts += [_halves_table(facts, phase) for phase in ("forward", "backward")]
    parts += [_factors_table(facts), *_against_paper(facts)]
    parts.append(
        compared_table(
            "The paper's times and utilizations (7B, TP 4, forward) next to our predictions; nothing ran here. The paper's MLP "
            "columns correspond to four linears of d_ff, but the model has three; both are shown.",
            facts["modeled"],
        )
    )
    caption = "GEMM utilization of one process, forward, in percent of the ceiling, with 95% intervals (measured)"
    parts.append(Figure("gemms", caption, lambda path: draw_bars(path, _panels(facts), "% of the ceiling")))
    return Section("GEMMs: time and utilization by layout", tuple(parts))


def _layouts(facts: Facts) -> list[tuple[int, str]]:
    return list(dict.fromkeys((row["tp"], row["layout"]) for row in facts["rows"]))


def _halves_table(facts: Facts, phase: str) -> Table:
    peak, seconds, cells = facts["peak"], facts["turns"]["seconds"], []
    for tp, layout in _layouts(facts):
        cell = [str(tp), layout]
        for half in ("attention", "MLP"):
            row = row_of(facts, layout=layout, tp=tp, what=half, phase=phase)
            cell += [f"{row['flops'] / 1e9:.2f}", milliseconds(seconds[row["name"]]), percent(utilization(facts, row))]
            if peak:
                cell.append(f"{100 * row['flops'] / middle(seconds[row['name']]) / peak:.0f}")
        cells.append(tuple(cell))
    of_peak = [f"{half}% of peak:" for half in ("attention", "MLP")] if peak else ["", ""]
    headings = ["TP:", "layout"]
    for half, more in zip(("attention", "MLP"), of_peak, strict=True):
        headings += [f"{half} GFLOP:", f"{half} ms:", f"{half} utilization %:", *([more] if more else [])]
    return Table(f"GEMMs of one process, {phase} pass (measured).", tuple(headings), tuple(cells))


def _factors_table(facts: Facts) -> Table:
    cells = []
    for row in facts["rows"]:
        if not row["what"].startswith("o, "):
            continue
        (product,) = row["products"]
        (m, k), n = product["a"]["shape"], product["b"]["shape"][1]
        seconds = facts["turns"]["seconds"][row["name"]]
        cells.append(
            (str(row["tp"]), row["layout"], row["what"][3:], f"[{m}, {k}] x [{k}, {n}]", milliseconds(seconds),
             percent(utilization(facts, row)))
        )  # fmt: skip
    caption = (
        "The attention output projection `o`, by factor, forward (measured). Sharding along the bottleneck rank (vanilla) leaves "
        "thin factors of rank r/p; sharding along the width keeps rank r. FLOPs per process are the same."
    )
    return Table(caption, ("TP:", "layout", "factor", "product", "ms:", "utilization %:"), tuple(cells))


def _against_paper(facts: Facts) -> Iterator[Table]:
    """Ratios at the paper's TP, if that was measured."""
    if find_row(facts, layout=BTP.name, tp=PAPER_TP, what="MLP", phase="forward") is None:
        return
    cells, seconds = [], facts["turns"]["seconds"]
    for contender in (MEGATRON, VANILLA):
        for place, half in enumerate(("attention", "MLP")):
            theirs, ours = (
                row_of(facts, layout=name, tp=PAPER_TP, what=half, phase="forward") for name in (contender.name, "btp")
            )
            assert contender.way is not None
            paper = GEMM_MS[contender.way][place] / GEMM_MS["BOOST"][place]
            cells.append(
                (
                    f"time, {contender.name} / btp, {half}",
                    times(*(seconds[r["name"]] for r in (theirs, ours))),
                    f"{paper:.2f}x",
                )
            )
    for place, half in enumerate(("attention", "MLP")):
        for contender in (VANILLA, BTP):
            row = row_of(facts, layout=contender.name, tp=PAPER_TP, what=half, phase="forward")
            assert contender.way is not None
            paper_share = f"{100 * UTILIZATION[contender.way][place]:.0f}"
            cells.append((f"utilization %, {contender.name}, {half}", percent(utilization(facts, row)), paper_share))
    caption = (
        f"TP {PAPER_TP}, forward: our block, measured here, next to the paper's 7B on A100s. The paper's utilization is relative "
        "to the datasheet peak, ours to the ceiling. Sizes and hardware differ: compare trends of the ratios, not their values."
    )
    yield Table(caption, ("what", "ours:", "paper, 7B:"), tuple(cells))


def _panels(facts: Facts) -> dict[str, dict[str, dict[str, RangeBar]]]:
    panels: dict[str, dict[str, dict[str, RangeBar]]] = {}
    for half in ("attention", "MLP"):
        series: dict[str, dict[str, RangeBar]] = {}
        for row in facts["rows"]:
            if (row["what"], row["phase"]) == (half, "forward"):
                found = utilization(facts, row)
                bar = RangeBar(100 * found.value, 100 * found.low, 100 * found.high)
                series.setdefault(row["layout"], {})[f"TP {row['tp']}"] = bar
        panels[half] = series
    return panels
