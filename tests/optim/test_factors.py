"""Optimizers of whole factors: with every layout, sharding and pipeline, the step matches one process and communication matches
the table."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from boost.config import Config, factors, load
from boost.config.factors import FactorShape
from boost.config.stages import stages_of
from boost.config.traffic import Collective
from boost.measure.counting import CollectiveCounter
from boost.optim import muon
from boost.optim.muon import newton_schulz
from boost.plan.collectives import step_collectives
from boost.plan.optimizer import iterations, optimizer_collectives
from boost.plan.timing import step_work
from tests import toy
from tests.distributed import run_distributed
from tests.matrices import first, one_in
from tests.trained import Trained, relative_errors

pytestmark = pytest.mark.slow

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "loro": {"name": "loro", "exact_every": 2, "eps": 1e-6, "weight_decay": 0.05},
    "muon": {"name": "muon", "muon_lr": 1e-2},
}
STEPS = 4
"""Includes two exact LORO steps, and the moments being reset and used in between."""

RANKS = {"attn.q": 4, "mlp.down": 12, "layers.1.attn.v": 16}
"""Linears of one input with different ranks, including one whose rank equals its output width (16, of key/value heads)."""


def config_of(optimizer: str, parallel: dict[str, Any], **sections: Any) -> Config:
    train = {"micro_batch": 1, "global_batch": 2, **sections.pop("train", {})}
    model = {"family": "svd", "kv_heads": 4, **sections.pop("model", {})}
    return toy.toy_config(model=model, parallel=parallel, optim=OPTIMIZERS[optimizer], train=train, **sections)


def run(config: Config) -> tuple[dict[str, float], list[Collective], list[Collective], dict[str, torch.Tensor]]:
    """Errors against one process, collectives of the last step's update, the table's collectives, and local whole weights."""
    trained = Trained(config, STEPS - 1)
    usual, counter = trained.optimizer.step, CollectiveCounter()

    def counted(number: int, rate: float) -> None:
        with counter:
            usual(number, rate)

    trained.optimizer.step = counted  # type: ignore[method-assign]
    trained.numbers.append(trained.step(STEPS - 1))
    whole = {
        param_slice.parameter.name: param_slice.view(s.tensor.detach()).clone()
        for s in trained.fused_params
        for param_slice in s.local_slices()
        if s.placement.dim is None and s.shard is None
    }
    table = optimizer_collectives(config, trained.mesh.pp.rank)
    return relative_errors(trained, STEPS), counter.collectives, table, whole


def check(config: Config, function: Any = run) -> None:
    results = run_distributed(config.parallel.world_size, function, config)
    for errors, seen, table, _ in results:
        assert max(errors.values()) <= 1e-9, errors
        assert [c.on_the_wire[1:] for c in seen] == [c.on_the_wire[1:] for c in table]
    for *_, whole in results:
        for *_, other in results:
            for name in whole.keys() & other.keys():
                assert torch.equal(whole[name], other[name]), name


EVERY = [
    {"tp": 4, "layout": "btp"},
    {"tp": 2, "layout": "vanilla"},
    {"pp": 2, "tp": 2, "layout": "btp-sp"},
    {"tp": 2, "dp": 2, "layout": "btp-cp", "shard": "full", "shard_outer": True},
]
LORO: list[dict[str, Any]] = [
    {"tp": 4, "layout": "vanilla"},
    {"tp": 2, "layout": "btp", "grouping": False},
    {"tp": 4, "layout": "btp-sp"},
    {"tp": 2, "dp": 2, "layout": "vanilla", "shard": "optimizer"},
    {"dp": 3, "shard": "optimizer"},
]
MUON: list[dict[str, Any]] = [{"tp": 2, "dp": 2, "layout": "vanilla", "shard": "optimizer"}, {"dp": 3}]
CASES = [
    *one_in(2, [(name, parallel) for name in OPTIMIZERS for parallel in EVERY]),
    *first(1, [("loro", parallel) for parallel in LORO]),
    *first(1, [("muon", parallel) for parallel in MUON]),
]


@pytest.mark.parametrize(("optimizer", "parallel"), CASES, ids=str)
def test_every_sharding_matches_one_process(optimizer: str, parallel: dict[str, Any]) -> None:
    """TP 4 with fewer key/value heads than processes, so they are replicated; with replicas and per-linear ranks."""
    model: dict[str, Any] = {"kv_heads": 2} if parallel.get("tp") == 4 else {}
    if parallel.get("dp"):
        model |= {"ranks": RANKS}
    train = {"global_batch": 3} if parallel.get("dp") == 3 else {}
    check(config_of(optimizer, parallel, model=model, train=train))


@pytest.mark.parametrize("layout", first(1, ["btp-sp", "btp", "vanilla"]))
def test_an_exact_step_of_linears_narrower_than_their_rank_is_one_process(layout: str) -> None:
    """Key/value heads of 8 rows at ranks 12 and 16. Spectral factors leave columns of B at zero there, so factors are
    rank-deficient and have fewer rows than columns on every process."""
    model = {"kv_heads": 2, "ranks": {"attn.k": 12, "attn.v": 16}, "factor_init": "spectral"}
    check(config_of("loro", {"tp": 2, "layout": layout}, model=model))


def run_in_small_buckets(config: Config) -> Any:
    """The same with one bucket per input."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(factors, "BUCKET_BYTES", 1)
        assert len(optimizer_collectives(config)) == 2 * 4 * config.model.layers
        return run(config)


@pytest.mark.parametrize(
    ("optimizer", "tp"), [("loro", 4), *(pytest.param(name, 2, marks=pytest.mark.nightly) for name in ("loro", "muon"))]
)
def test_small_buckets_are_the_same_step(optimizer: str, tp: int) -> None:
    """LORO at TP 4: one pair for four processes, so the solution is all-reduced."""
    config = config_of(optimizer, {"tp": tp, "layout": "btp"})
    check(config, run_in_small_buckets)


def ranks_of(shapes: Counter[FactorShape]) -> Counter[int]:
    ranks: Counter[int] = Counter()
    for shape, count in shapes.items():
        ranks[shape.rank] += count
    return ranks


def ranks_iterated_on(config: Config) -> Counter[int]:
    """Shapes of the Gram matrices of one step on this process."""
    ranks: Counter[int] = Counter()
    trained = Trained(config, 0)

    def counted(gram_RR: torch.Tensor, steps: int) -> torch.Tensor:
        ranks[gram_RR.shape[0]] += 1
        return newton_schulz(gram_RR, steps)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(muon, "newton_schulz", counted)
        trained.step(0)
    return ranks


@pytest.mark.parametrize(
    "parallel", [{"tp": 2, "dp": 2, "layout": "btp"}, {"dp": 3}, {"tp": 2, "layout": "vanilla"}], ids=str
)
def test_each_gram_matrix_is_iterated_on_once(parallel: dict[str, Any]) -> None:
    """Each Gram matrix is iterated by one of the processes that have it, and the busiest process has the load that the planner
    counts."""
    config = config_of("muon", parallel, model={"ranks": RANKS}, train={"global_batch": 6})
    results = run_distributed(config.parallel.world_size, ranks_iterated_on, config)
    alone, planned = (ranks_of(iterations(each, stages_of(each, 0))) for each in (toy.single(config), config))
    assert sum(results, Counter()) == alone and alone.total() == 14 * config.model.layers
    busiest = max(results, key=lambda ranks: sum(count * rank**3 for rank, count in ranks.items()))
    assert planned == busiest


def flops_of_a_step(config: Config) -> int:
    """FLOPs of the update's GEMMs on this process."""
    trained = Trained(config, 0)
    usual, counter = trained.optimizer.step, FlopCounterMode(display=False)

    def counted(number: int, rate: float) -> None:
        with counter:
            usual(number, rate)

    trained.optimizer.step = counted  # type: ignore[method-assign]
    trained.step(0)
    return counter.get_total_flops()


@pytest.mark.parametrize(
    ("optimizer", "parallel"),
    [("muon", {}), ("muon", {"tp": 2, "dp": 2, "layout": "btp"}), ("muon", {"tp": 2, "layout": "vanilla"})],
    ids=str,
)
def test_products_of_a_step_are_the_planners(optimizer: str, parallel: dict[str, Any]) -> None:
    """vanilla deals Gram matrices out too. Processes with equally many of them differ in their number of rows."""
    config = config_of(optimizer, parallel)
    planned = sum(work.flops * count for work, count in step_work(config, stages_of(config, 0)).items())
    assert planned in run_distributed(config.parallel.world_size, flops_of_a_step, config)


def test_what_large_factors_send() -> None:
    """7B: triangles of every factor with a sharded wide side, and results of every pair, dealt out to four processes."""
    words = ["--optim.name", "loro", "--model.family", "svd", "--parallel.layout", "btp", "--parallel.tp", "4"]
    config = load("boost-7b", words)
    table = optimizer_collectives(config)
    layers, r, d, f = config.model.layers, 1024, 4096, 11008
    triangles = 2 * r * (11 * min(d // 4, 2 * r) + 3 * min(f // 4, 2 * r)) * 4 * layers
    assert 2 * layers <= len(table) <= 4 * layers
    assert {(c.kind, c.dtype, c.processes) for c in table[:-1]} == {("all-gather", "float64", 4)}
    assert table[-1].kind == "all-reduce", "one pair is left for four processes"
    assert sum(c.elements for c in table[::2]) == triangles
    results = 7 * layers * 2 * (2 * r) * r
    assert results <= sum(c.elements for c in table[1::2]) <= 1.2 * results, (
        "few processes wait for the one with the most"
    )
    whole = optimizer_collectives(load("boost-7b", [*words[:4], "--parallel.layout", "vanilla", "--parallel.tp", "4"]))
    assert sum(c.elements for c in whole[::2]) == 2 * r * (11 * d + 3 * f) * layers, (
        "factors and directions, cut along the rank"
    )


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_table_of_a_usual_step(optimizer: str) -> None:
    """Muon communicates in every step; LORO in one of exact_every, which a separate table shows."""
    config = config_of(optimizer, {"tp": 2, "layout": "btp"})
    ours = [c for c in step_collectives(config) if c.place == "optimizer"]
    assert optimizer_collectives(config)
    assert ours == ([] if optimizer == "loro" else optimizer_collectives(config))
    assert optimizer_collectives(toy.single(config)) == []
