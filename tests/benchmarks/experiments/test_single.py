"""The single-process experiment: goals follow from the numbers."""

import pytest

from benchmarks.experiments.results import Facts
from benchmarks.experiments.single_report import GEMM, goals
from tests import toy

FLOPS = {"dense": 400, "cola": 200, "svd": 200, "lax": 200}


def size(device: str, dtype: str, low_rank: float, plain: float, product: float) -> Facts:
    """A dense step takes 1 s, or 3 s in a slow round."""
    rounds = [1.0] * 5 + [3.0] * 2

    def times(seconds: float) -> list[float]:
        return [seconds * slow for slow in rounds]

    families = {name: times(1.0 if name == "dense" else low_rank) for name in FLOPS} | {GEMM: times(product)}
    pair = {"seconds": {"ours": times(1.0), "plain": times(plain), "plain, compiled": times(1.2 * plain)}}
    config = toy.toy_config()
    return {
        "size": "toy", "device": device, "train": config.train.model_dump(), "tokens": 1000, "flops_per_token": FLOPS,
        "models": dict.fromkeys(FLOPS, config.model.model_dump()), "parameters": dict.fromkeys(FLOPS, 1e6), "left_out": {},
        "gemm": {"width": 10, "flops": 1e6, "dtype": dtype},
        "contests": {"families": {"seconds": families}, "cola": pair, "dense": pair},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("numbers", "met"),
    [
        (("cuda", "bfloat16", 0.55, 1.0, 2.0), (True, True, True, True)),
        (("cuda", "bfloat16", 0.55, 0.9, 1.0), (True, False, False, False)),
        (("cpu", "float32", 0.6, 1.0, 1.0), (False, True, None, None)),
    ],
)
def test_goals(numbers: tuple[str, str, float, float, float], met: tuple[bool | None, ...]) -> None:
    found = goals({"sizes": [size(*numbers)]})
    assert tuple(goal.met for goal in found) == met
    assert all(goal.found or "needs a GPU" in goal.remark for goal in found[2:])
