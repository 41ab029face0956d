"""What is suggested if nothing fits, and fewer GPUs if they are as fast."""

from dataclasses import replace

import pytest

from boost.config.schema import BF16_WEIGHTS_COST
from boost.plan import ways
from boost.plan.candidates import Request
from boost.plan.hardware import Hardware, SiteLink
from boost.plan.search import Search
from boost.plan.ways import NEARLY, any_fits, fewer_gpus, way_out
from tests.plan.toys import base, hardware

NARROW = "--train.param_dtype=bfloat16"


def long(seq_len: int, *more: str) -> Request:
    """Two sequences on one device of 40 MB."""
    config = base(f"--train.seq_len={seq_len}", "--train.global_batch=2", *more)
    return Request(config, 1, hardware(4e7))


@pytest.mark.parametrize("way", ["param_dtype", "GPUs", "sequences"])
def test_the_first_way_that_fits_is_named_with_its_price(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = long(2048) if way == "param_dtype" else long(4096, NARROW)
    if way == "sequences":
        monkeypatch.setattr(ways, "MOST_GPUS", 1)
    search = Search(asked)
    assert search.fastest() is None
    words = way_out(search)
    assert way in words and "per step" in words
    if way == "param_dtype":
        assert BF16_WEIGHTS_COST in words
        assert Search(long(2048, NARROW)).fastest() is not None
    elif way == "GPUs":
        gpus = int(words.split()[1])
        assert any_fits(replace(asked, gpus=gpus)) and not any_fits(replace(asked, gpus=gpus // 2))
        assert "of GPU time per step" in words
    else:
        length = int(words.partition("--seq ")[2].partition(")")[0])
        assert Search(long(length, NARROW)).fastest() is not None and Search(long(2 * length, NARROW)).fastest() is None


def test_a_fixed_choice_is_dropped_first() -> None:
    """A micro-batch that the user fixed counts: with it nothing fits, on any number of GPUs."""
    fixed = base("--train.seq_len=512", "--train.global_batch=64", "--train.micro_batch=64")
    one = replace(Request(base("--train.global_batch=64"), 1, hardware()))
    smallest = Search(one).smallest()
    assert smallest is not None
    asked = Request(fixed, 1, hardware(1.1 * smallest.memory), frozenset({"train.micro_batch"}))
    search = Search(asked)
    assert search.fastest() is None and not any_fits(asked)
    assert way_out(search).startswith("without --train.micro_batch 64: ")


def two_sites(gb_s: float) -> Hardware:
    """Four devices per node and site."""
    return hardware().model_copy(update={"site": SiteLink(gb_s=gb_s)})


@pytest.mark.slow
def test_fewer_gpus_are_faster_over_a_slow_link(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[int] = []

    class CountedSearch(Search):
        def __post_init__(self) -> None:
            searched.append(self.request.gpus)
            super().__post_init__()

    monkeypatch.setattr(ways, "Search", CountedSearch)
    config = base("--train.global_batch=16", "--train.seq_len=2048")
    search = Search(Request(config, 8, two_sites(0.01)))
    best = search.fastest()
    assert best is not None
    found = fewer_gpus(search, best)
    assert found is not None and found[0].request.gpus == 4
    assert found[1].time.seconds < best.time.seconds and found[1].config.parallel.world_size == 4
    assert found[1] == Search(Request(config, 4, hardware())).fastest()  # within one site, its link does not matter
    search = Search(Request(config, 8, hardware()))
    best = search.fastest()
    assert best is not None and fewer_gpus(search, best) is None
    computed = replace(best, time=replace(best.time, seconds=1e-3, parts={"GEMMs": 0.99e-3}))
    del searched[:]
    assert fewer_gpus(search, computed) is None and searched == []


def test_nearly_as_fast_is_said_too() -> None:
    config = base("--train.global_batch=16", "--train.seq_len=2048")
    four = Search(Request(config, 4, hardware())).fastest()
    search = Search(Request(config, 8, two_sites(0.01)))
    best = search.fastest()
    assert four is not None and best is not None
    for factor, says in ((1 + NEARLY / 2, True), (1 + 2 * NEARLY, False)):
        slower = replace(best, time=replace(best.time, seconds=four.time.seconds / factor))
        assert (fewer_gpus(search, slower, [four]) is not None) == says


def test_six_of_seven_gpus() -> None:
    """Halves come first, also of one sequence; then counts with a larger common divisor, if a batch does not divide over all."""
    asked = Request(base("--train.global_batch=60"), 7, hardware())
    assert ways._numbers(asked) == [3, 6, 4, 1]
    assert ways._numbers(replace(asked, gpus=1)) == []
    one = Request(base("--train.global_batch=1"), 8, hardware())
    assert ways._numbers(one)[:2] == [4, 2]
