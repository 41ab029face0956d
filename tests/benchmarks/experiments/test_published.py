"""The performance model against what the BOOST paper measured: ratios, volumes, times of communication and products."""

from collections import Counter

import pytest

from benchmarks.experiments.published import GEMM_MS, NORM_MS, STEPS, WAYS, Compared, Comparison
from boost.plan.hardware import Hardware, load_hardware

A100 = load_hardware("a100-80g")


@pytest.fixture(scope="module")
def compared() -> list[Compared]:
    return Comparison(A100).all()


def of(table: str, compared: list[Compared]) -> list[Compared]:
    return [each for each in compared if each.table == table]


def test_seconds_are_near_without_a_pipeline_and_low_with_one(compared: list[Compared]) -> None:
    """Loose limits, because the paper does not state its micro-batches, which determine the bubble."""
    seconds = of("step", compared)
    assert len(seconds) == 3 * len(STEPS)
    for each in seconds:
        least, most = (-0.4, -0.1) if each.what.startswith(("13B", "30B")) else (-0.2, 0.25)
        assert least < each.off < most, each


def test_products(compared: list[Compared]) -> None:
    """The published MLP times correspond to four linears, not three."""
    times = {each.what: each for each in of("GEMM time", compared)}
    assert all(times[f"7B {way} MLP, three linears"].off < -0.2 for way in GEMM_MS)


def test_what_is_judged_holds(compared: list[Compared]) -> None:
    assert [each for each in compared if not each.holds] == []
    judged = Counter((each.table, each.limit) for each in compared if each.limit is not None)
    assert judged == {
        ("speed-up of BOOST", 0.15): 10, ("7B by architecture", 0.15): 6, ("communication volume", 0.0): 9,
        ("communication time", 0.05): 9, ("GEMM time", 0.05): 6, ("GEMM utilization", 0.05): 4,
    }  # fmt: skip


def changed(section: str, **values: object) -> Hardware:
    return A100.model_copy(update={section: getattr(A100, section).model_copy(update=values)})


@pytest.mark.parametrize(
    "wrong",
    [changed("node", gb_s=450.0), changed("speeds", memory_fraction=0.2), changed("speeds", kernel_us=60.0)],
    ids=["fast links", "slow memory", "slow kernels"],
)
def test_other_hardware_is_found_out(wrong: Hardware) -> None:
    assert not all(each.holds for each in Comparison(wrong).all())


def test_the_papers_code_is_slower_than_ours() -> None:
    """The differences are element-wise work, which is one kernel per operation here; BOOST's is largest, partly because of what
    only it sends."""
    compared = Comparison(A100)
    for theirs, ours in zip(compared.steps(), compared.steps(as_published=False), strict=True):
        added = {way: theirs.seconds[way] / ours.seconds[way] - 1 for way in WAYS}
        assert 0.01 < added["full-rank"] < added["vanilla"] < added["BOOST"] < 0.35, added


@pytest.mark.parametrize("micro_batch", [2, 4])
def test_other_micro_batches_change_one_verdict(micro_batch: int) -> None:
    """The paper does not state them. Of the ten ratios, only 13B over vanilla would exceed its limit, by a little."""
    beyond = [each for step in Comparison(A100).steps(micro_batch) for each in step.ratios() if not each.holds]
    assert [each.what for each in beyond] == ["13B against vanilla"]
    assert 0.15 < beyond[0].off < 0.20


def test_memory_saved_per_added_time(compared: list[Compared]) -> None:
    """Low-rank against full-block recomputation within 15 %; what the largest errors come from."""
    off = {each.what: each.off for each in of("memory saved per added time", compared)}
    assert len(off) == 10 and all(abs(off[f"batch {n}, BOOST, low-rank"]) < 0.15 for n in (4, 8))
    for batch in (4, 8):
        vanilla = f"batch {batch}, vanilla, full-block"
        assert 0.05 < off[vanilla] < 0.15 and abs(off[f"{vanilla}, separate operations"]) < 0.03
    assert abs(off["batch 4, BOOST, low-rank, sync norm"]) < 0.02 < -off["batch 4, BOOST, low-rank"]


def test_cola_on_one_gpu(compared: list[Compared]) -> None:
    """What CoLA's code does otherwise explains its 7B, and makes the error of the 1B larger."""
    off = {each.what: each.off for each in of("on one GPU", compared)}
    assert len(off) == 22 and not any("CoLA 1B, whole" in name or "CoLA 7B, whole" in name for name in off)
    assert off["CoLA-M 7B"] > 0.4 > off["CoLA 7B"] > 0.2 and abs(off["CoLA 1B"]) < 0.1
    assert all(abs(off[f"{name} 7B, all of its code, on an H100"]) < 0.05 for name in ("CoLA", "CoLA-M"))
    assert abs(off["CoLA 7B, unfused attention"]) < 0.05 and off["CoLA 1B, all of its code"] < -0.2


def test_no_scope_of_the_norm_is_the_papers() -> None:
    """Of one norm or both, in one pass or both, with either communication and compiled or not, none is within 30 %. The paper's
    figures and compiled kernels favor online norm, separate operations do not."""
    scopes = Comparison(A100).norms()
    assert (
        len({scope.words for scope in scopes}) == 36
        and abs(scopes[0].worst) == min(abs(each.worst) for each in scopes) > 0.3
    )
    assert all(sync > online for sync, online in NORM_MS.values())
    for scope in scopes:
        online_is_faster = [sync > online for sync, online in scope.ms.values()]
        assert online_is_faster == [scope.words.startswith("compiled")] * 2, scope
