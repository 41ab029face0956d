"""Linear grouping in one block: linears with the same input share one GEMM and one collective, or run separately.

Grouped and ungrouped forms compute the same function and are interleaved in one run.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.experiments.blocks import BTP, BTP_SP, VANILLA, BlockRun, block_config
from benchmarks.experiments.blocks_report import (
    RangeBar,
    as_facts,
    batches_of,
    compared_table,
    comparison,
    draw_bars,
    milliseconds,
    ms_bar,
    row_of,
    shape_words,
    times,
    turns_words,
)
from benchmarks.experiments.contest import Call, take_turns
from boost.config import Config
from boost.measure.document import Figure, Goal, Section, Table
from boost.measure.results import Facts, facts_of
from boost.parallel.mesh import Mesh
from boost.plan.published import GROUPING_US

CONTENDERS = (BTP, BTP_SP, VANILLA)
FORMS = {True: "grouped", False: "ungrouped"}
PASSES = ("forward", "forward and backward")


def measure(config: Config, mesh: Mesh, batches: Sequence[int], rounds: int) -> Facts:
    """Times both forms of every layout at every batch."""
    rows: list[dict[str, Any]] = []
    calls: dict[str, Call] = {}
    for contender in CONTENDERS:
        for batch in batches:
            for grouped, form in FORMS.items():
                run = BlockRun(block_config(config, contender, mesh.tp.size, batch, grouping=grouped), mesh)
                products, collectives = run.products(), run.collectives()
                for words, call in zip(PASSES, (run.forward, run.both), strict=True):
                    phases = ("forward",) if words == "forward" else ("forward", "backward")
                    name = f"{contender.name}, {form}, batch {batch}, {words}"
                    calls[name] = call
                    rows.append(
                        {
                            "layout": contender.name, "batch": batch, "grouped": grouped, "passes": words, "name": name,
                            "products": sum(each.phase in phases for each in products),
                            "collectives": sum(each.phase in phases for each in collectives),
                            "sent_bytes": sum(each.sent_bytes for each in collectives if each.phase in phases),
                        }
                    )  # fmt: skip
    turns = take_turns(calls, mesh, rounds, words="grouped and not")
    return facts_of(
        "grouping",
        config,
        rounds=rounds,
        tp=mesh.tp.size,
        rows=rows,
        turns=asdict(turns),
        modeled=as_facts(comparison().grouping()),
    )


def goals(facts: Facts) -> list[Goal]:
    """None: this is an ablation."""
    return []


def section(facts: Facts) -> Section:
    """Both forms by layout and batch, and the paper's numbers."""
    lead = (
        f"{shape_words(facts)}, TP {facts['tp']}. One block with same-input linears (q, k, v; gate, up) grouped into one GEMM "
        f"with A and one collective, and ungrouped. Both compute the same function. Times are {turns_words(facts)}. GEMMs and "
        "collectives are counted at the dispatcher. Bytes are equal, except in the backward pass of vanilla, which all-reduces "
        "the input gradient once per ungrouped linear."
    )
    parts: list[str | Table | Figure] = [lead, *(_table(facts, words) for words in PASSES), _against_paper(facts)]
    parts.append(
        compared_table(
            "The paper's 7B block, TP 4, forward, next to our predictions (nothing ran here).",
            facts["modeled"],
        )
    )
    caption = "One block, grouped and ungrouped (measured; whiskers are quartiles)"
    parts.append(Figure("grouping", caption, lambda path: draw_bars(path, _panels(facts), "ms")))
    return Section("Linear layer grouping", tuple(parts))


def _pair(facts: Facts, layout: str, batch: int, words: str) -> tuple[Facts, Facts]:
    """(ungrouped, grouped)"""
    ungrouped, grouped = (
        row_of(facts, layout=layout, batch=batch, passes=words, grouped=grouped) for grouped in (False, True)
    )
    return ungrouped, grouped


def _gain(facts: Facts, layout: str, batch: int, words: str) -> str:
    seconds = facts["turns"]["seconds"]
    return times(*(seconds[row["name"]] for row in _pair(facts, layout, batch, words)))


def _table(facts: Facts, words: str) -> Table:
    cells, seconds = [], facts["turns"]["seconds"]
    for layout in dict.fromkeys(row["layout"] for row in facts["rows"]):
        for batch in batches_of(facts):
            cell = [layout, str(batch)]
            for row in _pair(facts, layout, batch, words):
                sent = f"{row['sent_bytes'] / 1e6:.2f}"
                cell += [str(row["products"]), str(row["collectives"]), sent, milliseconds(seconds[row["name"]])]
            cells.append((*cell, _gain(facts, layout, batch, words)))
    headings = ["layout", "batch:"]
    for form in ("ungrouped", "grouped"):
        headings += [f"{form} GEMMs:", "collectives:", "MB sent:", "ms:"]
    caption = f"{words.capitalize()} pass of one block (GEMMs, collectives and bytes counted; times measured)."
    return Table(caption, (*headings, "ungrouped / grouped:"), tuple(cells))


def _against_paper(facts: Facts) -> Table:
    cells = []
    for batch in batches_of(facts):
        if batch in GROUPING_US:
            ungrouped, grouped = GROUPING_US[batch]
            ours = _gain(facts, "btp", batch, "forward")
            cells.append((str(batch), ours, f"{ungrouped / grouped:.2f}x", f"{ungrouped} / {grouped} us"))
    caption = (
        "btp, forward, ungrouped / grouped: our block, measured here, next to the paper's 7B block at TP 4 on A100s."
    )
    return Table(caption, ("batch:", "ours:", "paper:", "paper, times:"), tuple(cells))


def _panels(facts: Facts) -> dict[str, dict[str, dict[str, RangeBar]]]:
    seconds = facts["turns"]["seconds"]
    panels: dict[str, dict[str, dict[str, RangeBar]]] = {}
    for words in PASSES:
        series: dict[str, dict[str, RangeBar]] = {"ungrouped": {}, "grouped": {}}
        for row in facts["rows"]:
            if row["passes"] == words:
                group = f"{row['layout']}\nbatch {row['batch']}"
                series[FORMS[row["grouped"]]][group] = ms_bar(seconds[row["name"]])
        panels[words] = series
    return panels
