"""The performance model against what the BOOST paper measured; `test_modeled.py` holds every prediction."""

from collections import Counter

import pytest

from benchmarks.experiments.published import Comparison
from boost.plan.hardware import Hardware, load_hardware

A100 = load_hardware("a100-80g")


def test_what_is_judged_holds() -> None:
    compared = Comparison(A100).all()
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
