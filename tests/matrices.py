"""Combinations shared by test files (layouts, families, norms, grouping, policies), and `pairwise`.

A full product of five options has hundreds of rows and finds little that pairs do not: nearly every defect shows with one option,
or with two in combination. `pairwise` returns the few rows that together contain every legal pair of values.
Test files import from here, never from each other.
"""

import functools
import heapq
import itertools
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import pytest

from boost.config import Config
from boost.config.schema import RecomputeName
from tests import toy

Row = dict[str, Any]


def pairwise(options: Mapping[str, Sequence[Any]], legal: Callable[[Row], bool] = lambda row: True) -> list[Row]:
    """Rows with one value of each option. Every two values that occur together in a legal row occur together in one
    of these. Deterministic.

    Greedy: always takes the first legal row with the most missing pairs, which are bits of an integer. A product of 50,000 rows
    takes seconds.
    """
    count = itertools.count()
    numbered = [[(next(count), name, value) for value in values] for name, values in options.items()]
    total, rows = next(count), list[tuple[int, Row]]()
    for chosen in itertools.product(*numbered):
        row = {name: value for _, name, value in chosen}
        if legal(row):
            pairs = itertools.combinations([number for number, *_ in chosen], 2)
            rows.append((sum(1 << (one * total + other) for one, other in pairs), row))
    missing, found = functools.reduce(operator.or_, (pairs for pairs, _ in rows), 0), []
    most = [(-pairs.bit_count(), number) for number, (pairs, _) in enumerate(rows)]
    heapq.heapify(most)  # by what a row covered at most; that only falls, so a top that is up to date is the best
    while missing:
        before, number = most[0]
        covered, row = rows[number]
        heapq.heapreplace(most, (-(covered & missing).bit_count(), number))
        if most[0] == (before, number):
            missing &= ~covered
            found.append(row)
    return found


LOW_RANK_LAYOUTS: tuple[Row, ...] = (
    {"layout": "btp", "norm": "online"},
    {"layout": "btp", "norm": "sync"},
    {"layout": "btp-sp"},
    {"layout": "btp-cp"},
    {"layout": "vanilla"},
    {"layout": "vanilla", "vanilla": "published"},
    {"layout": "ulysses"},
)
DENSE_LAYOUTS: tuple[Row, ...] = ({"layout": "megatron"}, {"layout": "megatron-sp"}, {"layout": "ulysses"})
"""Each layout with each of its own options."""
LAYOUTS = (*LOW_RANK_LAYOUTS, *DENSE_LAYOUTS[:-1])
"""Each once."""


def suits(family: str, layout: Row) -> bool:
    """Whether a layout supports models of this family."""
    return layout in (DENSE_LAYOUTS if family == "dense" else LOW_RANK_LAYOUTS)


def family_of(layout: Row) -> str:
    """A family that it supports, low-rank if possible."""
    return "cola" if any(layout["layout"] == each["layout"] for each in LOW_RANK_LAYOUTS) else "dense"


GROUPING = (True, False)
LOW_RANK = [{**layout, "grouping": grouping} for grouping in GROUPING for layout in LOW_RANK_LAYOUTS]
DENSE = [{**layout, "grouping": grouping} for grouping in GROUPING for layout in DENSE_LAYOUTS]

ONE_EACH = [({"family": family_of(layout), "kv_heads": 4}, {**layout, "grouping": True}) for layout in LAYOUTS]
"""(model, parallel): every layout once."""

LOCAL: tuple[RecomputeName, ...] = ("low-rank", "low-rank+attention-output")
"""Recomputation policies that send nothing."""


def policies(family: str, parallel: Row) -> list[RecomputeName]:
    """A family's recomputation policies under a layout, except 'none'."""
    sharded: list[RecomputeName] = ["low-rank-sharded"] if parallel.get("layout") == "btp-sp" else []
    return ["full-block"] if family == "dense" else [*LOCAL, *sharded, "full-block"]


def one_in(count: int, rows: Sequence[Any], names: Sequence[str] | None = None) -> list[Any]:
    """Parameters of a test: every `count`-th row on every commit, and the others nightly. `names`: their ids."""
    return _marked(rows, names, lambda number: number % count > 0)


def first(count: int, rows: Sequence[Any], names: Sequence[str] | None = None) -> list[Any]:
    """The same with the first `count` rows of `pairwise`. It takes rows with many new pairs first, so these soon have every value
    of every option; the nightly rows only add pairs."""
    return _marked(rows, names, lambda number: number >= count)


def chosen(daily: Collection[str], rows: Sequence[Any], names: Sequence[str] | None = None) -> list[Any]:
    """The same with the rows of these names. Fails if there is no such row, such as after a change of `pairwise`'s options."""
    names = names or [str(row) for row in rows]
    assert set(daily) <= set(names), f"no row has the name {(set(daily) - set(names)).pop()!r}; choose another one"
    return _marked(rows, names, lambda number: names[number] not in daily)


def each_value(rows: Sequence[Row], names: Sequence[str]) -> list[Any]:
    """The same with about the fewest rows of `pairwise` that have every value of every option."""
    values = [{(name, str(value)) for name, value in row.items()} for row in rows]
    missing, numbers = set().union(*values), []
    while missing:
        numbers.append(max(range(len(rows)), key=lambda number: len(values[number] & missing)))
        missing -= values[numbers[-1]]
    return _marked(rows, names, lambda number: number not in numbers)


def _marked(rows: Sequence[Any], names: Sequence[str] | None, by_night: Callable[[int], bool]) -> list[Any]:
    return [
        pytest.param(
            *(row if isinstance(row, tuple) else (row,)),
            marks=[pytest.mark.nightly] * by_night(number),
            id=names[number] if names else str(row),
        )
        for number, row in enumerate(rows)
    ]


def ids(cells: Sequence[tuple[Any, ...]]) -> list[str]:
    """Names of test cases: the values, without the names of the options."""
    parts = [[str(v) for part in cell for v in _flat(part)] for cell in cells]
    return ["-".join(each) for each in parts]


def _flat(value: Any) -> list[Any]:
    """Values of nested options."""
    return [v for each in value.values() for v in _flat(each)] if isinstance(value, dict) else [value]


def config_of(model: Row, parallel: Row, tp: int, dtype: str, **sections: Any) -> Config:
    """A toy model. RMSNorm's epsilon is large enough that a norm that omits it, or divides by the wrong width, fails."""
    return toy.toy_config(dtype, model={"norm_eps": 1e-2, **model}, parallel={**parallel, "tp": tp}, **sections)


MEMORY_CELLS = [
    (family, parallel, policy, Row())
    for family, variants in (("cola", [{}, *LOW_RANK]), ("svd", [{}, *LOW_RANK_LAYOUTS]), ("dense", [{}, *DENSE]))
    for parallel in variants
    for policy in (*policies(family, parallel), "none")
]
"""(family, parallel, policy, gate) for which a step's saved memory is predicted."""

MEMORY_CROSSING = [
    ("lax", parallel, policy, {"gate": gate, "over": over})
    for gate, over in (("identity", "svd"), ("tensor", "cola"), ("dense", "cola"))
    for parallel in ({}, *LOW_RANK)
    for policy in (*policies("lax", parallel), "none")
    if parallel.get("grouping", True) or policy == "none"
]
"""The same for latent gates."""


def memory_config(family: str, parallel: dict[str, Any], policy: str, dtype: str, **model: Any) -> Config:
    """Pairwise different sizes, so that confusing two tensors is an error."""
    sizes = {"dim": 96, "ffn_dim": 160, "heads": 8, "layers": 1, "vocab_size": 56, **model}
    if family != "dense":
        sizes["rank"] = 20
    parallel = {**parallel, "tp": 4} if parallel else {}
    train = {"seq_len": 12, "micro_batch": 2, "global_batch": 2, "recompute": policy}
    return toy.toy_config(dtype, model={"family": family, **sizes}, parallel=parallel, train=train)
