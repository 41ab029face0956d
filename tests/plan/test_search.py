"""The search against brute force over all candidates."""

import itertools
from dataclasses import replace

import pytest

from boost.config import load
from boost.config.layouts import layout_spec, layouts_of
from boost.config.load import from_tree
from boost.config.schema import ParallelConfig
from boost.errors import ConfigError
from boost.plan.candidates import POLICIES, Request, context_sizes, divisors, legal, micro_batches, structures
from boost.plan.collectives import step_collectives
from boost.plan.explain import alternatives, notes, time_difference
from boost.plan.hardware import load_hardware
from boost.plan.search import TIE, Search, _complexity, max_peak, require_legal, tie_limit
from boost.plan.step_time import GEMMS, HOST
from boost.plan.timing import Predictor
from tests.plan.toys import base, every_candidate, hardware


@pytest.mark.parametrize("family", ["dense", pytest.param("cola", marks=pytest.mark.nightly)])
@pytest.mark.slow
def test_the_search_matches_brute_force(family: str) -> None:
    config = base(f"--model.family={family}", "--model.layers=8")
    fixed = frozenset({"train.recompute_every", "parallel.shard_outer"})  # fewer candidates
    request = Request(config, 4, hardware(), fixed)
    predictor = Predictor(request.hardware)
    every = [
        (predictor.predict(candidate).seconds, max_peak(candidate, request.hardware.is_gpu)[0].total, candidate)
        for candidate in every_candidate(request)
    ]
    assert len(every) > 100
    sizes = sorted(size for _, size, _ in every)
    for usable in (sizes[-1], sizes[len(sizes) // 2], sizes[len(sizes) // 10], sizes[0]):
        search = Search(Request(config, 4, hardware(usable), fixed))
        for test in (lambda c: True, lambda c: c.parallel.tp == 2, lambda c: c.train.recompute == "none"):
            fitting = [
                seconds
                for seconds, size, candidate in every
                if size <= search.request.allowed_in(candidate.parallel) and test(candidate)
            ]
            found = search.fastest(test)
            assert (found is None) == (not fitting)
            if found is not None:
                assert found.time.seconds == pytest.approx(min(fitting), rel=1e-12) and found.shortfall <= 0
        smallest = search.smallest()
        assert smallest is not None and smallest.memory == sizes[0]


def test_candidates_are_exactly_the_valid_configurations() -> None:
    request = Request(base(), 4, hardware())
    every = list(every_candidate(request))
    assert len({(repr(candidate.parallel), repr(candidate.train)) for candidate in every}) == len(every)
    for candidate in every[::7]:
        assert from_tree(candidate.model_dump(exclude_none=True)) == candidate
    parallels = [candidate.parallel for candidate in every]
    assert {p.layout for p in parallels} == {"single", "btp", "btp-sp", "btp-cp"}
    sizes = {(t, p, 4 // t // p) for t in (1, 2, 4) for p in (1, 2, 4) if 4 % (t * p) == 0}
    assert {(p.tp, p.pp, p.dp) for p in parallels} == sizes
    assert {p.schedule for p in parallels} == {"1f1b", "interleaved-1f1b"}
    assert {p.shard for p in parallels} == {"none", "optimizer", "full"}
    assert {p.shard_outer for p in parallels} == {False, True}
    assert not legal(every[0].changed(parallel={"layout": "btp", "tp": 3}))


@pytest.mark.slow
def test_skipped_choices_are_never_better() -> None:
    """Applies to gpipe and ungrouped linears."""
    request, predictor = Request(base(), 4, hardware()), Predictor(hardware())
    compared = 0
    for candidate in list(every_candidate(request))[::31]:
        changes: list[dict[str, object]] = []
        changes += [{"grouping": False}] * (candidate.parallel.tp > 1)
        changes += [{"schedule": "gpipe"}] * (candidate.parallel.schedule == "1f1b" and candidate.parallel.pp > 1)
        for change in changes:
            worse = candidate.changed(parallel=change)
            if legal(worse):
                compared += 1
                seconds = predictor.predict(candidate).seconds
                assert predictor.predict(worse).seconds >= seconds * (1 - 1e-9), (change, candidate)
    assert compared > 20


@pytest.mark.slow
@pytest.mark.parametrize("gpu", [pytest.param("a100-80g", marks=pytest.mark.nightly), "h100-80g"])
def test_skipped_choices_are_never_better_at_real_sizes(gpu: str) -> None:
    """Ungrouped linears (under btp with a sync norm, as in the paper: with an online norm, the sum of one slot's latents hides
    behind the next slot's GEMM, which gains 1% at 30B) and weights cast at each use, for 1B to 30B, TP 2 and a full node."""
    hardware = load_hardware(gpu)
    predictor = Predictor(hardware)
    for size, layout, tp, micro_batch in itertools.product(
        ("1b", "7b", "30b"), ("btp", "btp-sp", "btp-cp"), (2, hardware.per_node), (1, 4)
    ):
        words = [f"--parallel.layout={layout}", f"--parallel.tp={tp}", f"--train.micro_batch={micro_batch}"]
        best = load(f"boost-{size}", [*words, "--train.global_batch=16", "--train.seq_len=4096"])
        seconds = predictor.predict(best).seconds
        ungrouped = {"grouping": False, **({"norm": "sync"} if layout == "btp" else {})}
        for worse in (best.changed(parallel=ungrouped), best.changed(train={"working_copies": False})):
            assert predictor.predict(worse).seconds >= seconds * (1 - 1e-9), (size, layout, tp, worse)


def test_skipped_layouts_send_more() -> None:
    request = Request(base(), 4, hardware())
    model, compared = request.base.model, 0
    outdone = {name: better for name in layouts_of(model) if (better := layout_spec(name).superseded_by(model))}
    assert outdone == {"vanilla": "btp", "ulysses": "btp-cp"}
    for candidate in list(every_candidate(request))[::7]:
        for name in (name for name, better in outdone.items() if candidate.parallel.layout == better):
            other = candidate.changed(parallel={"layout": name})
            if legal(other):
                compared += 1
                sent = [sum(c.sent_bytes for c in step_collectives(config)) for config in (candidate, other)]
                assert sent[0] <= sent[1], (name, candidate)
    assert compared > 20


@pytest.mark.parametrize("gpu", ["", "h100-80g"], ids=["fast host", "slow host"])
def test_lower_bounds_hold(gpu: str) -> None:
    """And with a slow host, they know that two halves launch twice as many operations."""
    profile = load_hardware(gpu) if gpu else hardware()
    request, predictor = Request(base(), 4, profile), Predictor(profile)
    ratios = {}
    for candidate in list(every_candidate(request))[:: 9 if gpu else 23]:
        bound, seconds = predictor.lower_bound(candidate), predictor.predict(candidate).seconds
        assert bound <= seconds * (1 + 1e-9), candidate
        if candidate.parallel.overlap == "halves" and candidate.parallel.pp == 1:
            ratios[candidate.parallel, candidate.train] = bound / seconds
    assert min(ratios.values()) > 0.7


def test_fixed_choices_are_kept() -> None:
    chosen = {"tp": 2, "layout": "btp", "shard": "none", "norm": "sync"}
    config = base().model_copy(update={"parallel": ParallelConfig(**chosen)})  # type: ignore[arg-type]
    fixed = frozenset(f"parallel.{key}" for key in chosen)
    every = [candidate.parallel for candidate in every_candidate(Request(config, 4, hardware(), fixed))]
    assert every and all((p.tp, p.layout, p.shard, p.norm) == (2, "btp", "none", "sync") for p in every)
    assert {p.pp for p in every} == {1, 2}


def test_invalid_mesh_sizes() -> None:
    def refused(gpus: int, *fixed: str, **sizes: int) -> str:
        config = base().model_copy(update={"parallel": ParallelConfig(layout="btp", **sizes)})  # type: ignore[arg-type]
        with pytest.raises(ConfigError) as caught:
            require_legal(Search(Request(config, gpus, hardware(), frozenset(fixed))))
        return str(caught.value)

    assert "nearest valid value: 2" in refused(4, "parallel.tp", tp=3)
    assert "parallel.tp = 3 must divide model." in refused(6, "parallel.tp", tp=3)
    assert "their product, 8, must divide --gpus = 4" in refused(4, "parallel.tp", "parallel.dp", tp=2, dp=4)
    assert "must divide" in refused(7, "parallel.tp", tp=7)
    assert "must be divisible" in refused(7, "parallel.dp", dp=7)


def test_a_margin_stays_free() -> None:
    """A plan that fits in all of the memory may exceed the margin; it reports the shortfall."""
    config = base("--model.layers=8", "--train.global_batch=16")
    whole = Search(Request(config, 4, hardware(2e9))).fastest()
    assert whole is not None
    tight = hardware(whole.memory * 1.01)
    without, with_margin = (Search(Request(config, 4, tight, margin=margin)) for margin in (0.0, 0.08))
    found, other = without.fastest(), with_margin.fastest()
    assert found is not None and found.memory == whole.memory
    assert other is not None and other.memory <= 0.92 * other.usable < whole.memory and other.shortfall <= 0
    assert with_margin.plan(whole.config).shortfall > 0


def test_micro_batches_are_divisors() -> None:
    config = base("--train.global_batch=60")
    request = Request(config, 2, hardware(), frozenset({"parallel.pp"}))
    found = {candidate.train.micro_batch for candidate in every_candidate(request)}
    assert {1, 3, 5, 6, 15, 30} <= found
    assert divisors(60) == [n for n in range(1, 61) if 60 % n == 0] and divisors(49) == [1, 7, 49]


def test_as_many_stages_as_layers() -> None:
    request = Request(base("--model.layers=8", "--train.global_batch=16"), 2, hardware())
    found = {
        candidate.parallel.virtual
        for candidate in every_candidate(request)
        if candidate.parallel.pp == 2 and not candidate.parallel.sharded
    }
    assert found == {1, 2, 3, 4}


def test_few_sequences_use_cp() -> None:
    """Sequences of ordinary length use CP if there are fewer of them than GPUs."""
    few, many = (Request(base("--train.seq_len=4096", f"--train.global_batch={n}"), 8, hardware()) for n in (2, 8))
    assert context_sizes(few, 1) == [1, 2, 4] and context_sizes(few, 4) == [1] and context_sizes(many, 1) == [1]


def test_tp_stays_inside_a_node() -> None:
    request = Request(base("--train.global_batch=16", "--model.heads=8"), 16, hardware())
    assert {parallel.tp for parallel in structures(request)} == {1, 2, 4}  # four per node
    wide = request.base.model_copy(update={"parallel": ParallelConfig(layout="btp", tp=8)})
    fixed = replace(request, base=wide, fixed=frozenset({"parallel.tp"}))
    assert {parallel.tp for parallel in structures(fixed)} == {8}


def test_explanations_name_the_differences() -> None:
    """Pure data parallelism wins for a small model, and is reported as out of memory for a large one."""
    search = Search(Request(base("--train.global_batch=64"), 4, hardware()))
    best = search.fastest()
    assert best is not None and best.config.parallel.dp == 4
    others = alternatives(search, best)
    assert any("TP" in other.why or "host" in other.why for other in others)
    said = " ".join(notes(search, best, others, None))
    assert "Pure data parallelism beats TP here" in said and "boost plan calibrate' measures your machines" in said
    waiting = replace(best, time=replace(best.time, parts={**best.time.parts, HOST: 0.3 * best.time.seconds}))
    assert "GPUs wait for kernel launches for 30% of the step" in " ".join(notes(search, waiting, others, None))
    for other in others:
        assert other.plan.time.seconds >= best.time.seconds or other.plan.shortfall > 0
    slower = replace(best.time, parts={**best.time.parts, GEMMS: best.time.parts[GEMMS] + 0.25})
    assert time_difference(best.time, slower) == "250 ms more in GEMMs"


def test_tp_where_one_device_is_too_small() -> None:
    config = load("boost-30b", ["--train.global_batch=8", "--train.micro_batch=1"])
    config = config.model_copy(update={"parallel": ParallelConfig(layout="single")})
    fixed = frozenset({"parallel.pp", "train.recompute", "parallel.overlap"})
    search = Search(Request(config, 4, load_hardware("a100-80g"), fixed))
    best = search.fastest()
    assert best is not None and best.config.parallel.tp > 1
    pure = search.smallest(of=lambda parallel: parallel.tp == 1)
    assert pure is not None
    assert pure.shortfall > 0
    said = " ".join(notes(search, best, alternatives(search, best), None))
    assert "Pure data parallelism does not fit: out of memory by" in said


def test_a_plan_that_fits_only_without_its_communicators_does_not_fit() -> None:
    parallel = ParallelConfig(layout="single", pp=2, dp=2)
    config = base().model_copy(update={"parallel": parallel})
    tight = hardware(max_peak(config, True)[0].total + 1e6)
    assert Search(Request(base(), 4, tight)).fits(config)
    small = tight.model_copy(update={"communicator_gb": 1e-3})
    search = Search(Request(base(), 4, small))
    assert not search.fits(config) and search.plan(config).shortfall == pytest.approx(1e6, abs=4)


@pytest.mark.nightly  # a command's answer is looked at on every commit (tests/cli/test_plan.py)
def test_of_a_tie_the_simplest_is_chosen() -> None:
    fixed = frozenset({"train.recompute_every", "parallel.pp"})  # fewer candidates
    search = Search(Request(base("--train.global_batch=16", "--train.seq_len=2048"), 4, hardware(), fixed))
    best = search.fastest()
    assert best is not None
    chosen = search.simplest(best)
    assert chosen.time.seconds <= tie_limit(best.time.seconds)
    near = [
        candidate.parallel
        for candidate in every_candidate(search.request)
        if search.predictor.predict(candidate).seconds <= tie_limit(best.time.seconds) and search.fits(candidate)
    ]
    assert _complexity(chosen.config.parallel) == min(map(_complexity, near))
    assert search.simplest(replace(best, time=replace(best.time, seconds=-1.0))).config == best.config
    assert tie_limit(10.0) == pytest.approx(10.1) and tie_limit(0.01) == pytest.approx(0.011)


NEIGHBORHOODS = {
    "131,072 tokens": ("llama3-8b 8 h100-80g", "seq_len=131072 global_batch=4", "tp=4 cp=2 pp=1 layout=ulysses"),
    "7B with TP": ("boost-7b 8 a100-80g", "seq_len=4096 global_batch=64", "tp=4 pp=1 layout=btp-sp"),
    "7B with a pipeline": ("boost-7b 8 a100-80g", "seq_len=4096 global_batch=32", "tp=2 pp=4 layout=btp schedule=1f1b"),
    "dense 13B, sharded": (
        "boost-13b 8 a100-80g",
        "seq_len=4096 global_batch=64",
        "tp=1 pp=1 shard=full layout=single",
    ),
    "1B on small cards": ("boost-1b 4 rtx4090-24g", "seq_len=4096 global_batch=16", "tp=2 pp=1 layout=btp-sp"),
}
"""Neighborhood: preset, GPUs and profile; [train]; fixed choices of [parallel]."""


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("name", NEIGHBORHOODS)
def test_the_search_is_complete_in_a_neighborhood(name: str) -> None:
    """Every micro-batch and sharding, every policy in every n-th block for all n: nothing that fits is over 1 % faster."""
    (preset, gpus, profile), settings, choices = (words.split() for words in NEIGHBORHOODS[name])
    alone = [f"--parallel.{word}" for word in ("layout=single", "tp=1", "pp=1", "dp=1", "cp=1")]
    train = [f"--train.{word}" for word in (*settings, "compute_dtype=bfloat16", "micro_batch=1")]
    family = ["--model.family=dense"] * name.startswith("dense")
    config = load(preset, [*train, *alone, *family])
    sizes = dict(word.split("=") for word in choices)
    parallel = ParallelConfig.model_validate({key: int(v) if v.isdigit() else v for key, v in sizes.items()})
    fixed = frozenset(f"parallel.{key}" for key in sizes)
    request = Request(config.model_copy(update={"parallel": parallel}), int(gpus), load_hardware(profile), fixed, 0.08)
    search = Search(request)
    found = search.fastest()
    assert found is not None
    compared = 0
    for structure in structures(request):
        for micro_batch in micro_batches(request, structure.dp):
            for policy, every in itertools.product(POLICIES, range(1, config.model.layers + 1)):
                candidate = request.variant(structure, micro_batch, policy, every)
                if (policy == "none" and every > 1) or not legal(candidate):
                    continue
                compared += 1
                if search.predictor.predict(candidate).seconds < found.time.seconds / (1 + TIE):
                    assert not search.fits(candidate), (structure, micro_batch, policy, every)
    assert compared > 50
