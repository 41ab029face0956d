"""Waiting in a step: pipeline bubbles as in the schedules' papers, overlapped collectives, stragglers, sends; and intervals."""

import pytest

from boost.config.load import from_tree, load
from boost.config.schema import Config, ParallelConfig
from boost.plan.hardware import load_hardware
from boost.plan.step_time import BUBBLE, SPREADS, PassTime, fit_probability, interval, kind_of
from boost.plan.timing import Predictor, predict

FORWARD, BACKWARD = 1.0, 2.0
"""Seconds of one stage and micro-batch."""


@pytest.mark.parametrize(
    ("schedule", "virtual", "waits"),
    [
        ("gpipe", 1, FORWARD + BACKWARD),  # arXiv 1811.06965
        ("1f1b", 1, FORWARD + BACKWARD),  # 2006.09503
        ("interleaved-1f1b", 2, (FORWARD + BACKWARD) / 2),  # 2104.04473
    ],
)
def test_a_pipeline_waits_for_the_first_and_last_micro_batch(
    monkeypatch: pytest.MonkeyPatch, schedule: str, virtual: int, waits: float
) -> None:
    pipeline = {"pp": 4, "schedule": schedule, "virtual": virtual}
    config = from_tree({"model": {"layers": 8}, "parallel": pipeline, "train": {"micro_batch": 1, "global_batch": 8}})
    passes = [PassTime(forward=FORWARD, backward=BACKWARD) for _ in range(4)]
    monkeypatch.setattr(Predictor, "passes", lambda self, config: passes)
    assert predict(config, load_hardware("h100-80g")).parts[BUBBLE] == pytest.approx(3 * waits)


def seven(*words: str) -> Config:
    return load("boost-7b", [f"--{word}" for word in (*words, "train.compute_dtype=bfloat16", "train.seq_len=4096")])


def test_collectives_hide_behind_computation_only() -> None:
    """Only compute time hides collectives, not waiting; on a shared link, time in which TP collectives hide is not available."""
    one = PassTime(forward=10.0, backward=20.0, waits=(2.0, 5.0), hidden=(1.0, 3.0))
    assert one.room(1.0, shared=False) == (8.0, 15.0)
    assert one.room(1.0, shared=True) == (7.0, 12.0)
    assert one.room(0.5, shared=True) == (3.0, 4.5)
    assert one.room(0.1, shared=True) == (0.0, 0.0)


def test_replicas_and_tp_share_a_port_between_nodes() -> None:
    """TP 16 over two nodes: TP and DP collectives share the network port, so more of their time is exposed."""
    hardware = load_hardware("h100-80g").model_copy(update={"overlap": 0.3})
    words = ("parallel.layout=btp-sp", "parallel.overlap=halves", "parallel.tp=16", "parallel.dp=16")
    config = seven(*words, "train.global_batch=32", "train.micro_batch=2")
    (worst,) = (predictor := Predictor(hardware)).passes(config)
    assert worst.hidden[1] > 0
    exposed = predictor.predict(config).parts["DP collectives"]
    elsewhere = hardware.model_copy(update={"per_node": 16})  # TP inside a node
    assert exposed > Predictor(elsewhere).predict(config).parts.get("DP collectives", 0.0)


def test_more_nodes_wait_for_the_slowest() -> None:
    hardware = load_hardware("h100-80g")
    times = {dp: predict(seven(f"parallel.dp={dp}", "parallel.layout=single", "parallel.tp=1", "parallel.shard=full",
                               f"train.global_batch={8 * dp}", "train.micro_batch=8"), hardware)
             for dp in (8, 16, 512)}  # fmt: skip
    assert "stragglers" not in times[8].parts
    for dp, doublings in ((16, 1), (512, 6)):
        others = times[dp].seconds - times[dp].parts["stragglers"] - times[dp].parts.get("rest", 0.0)
        assert times[dp].parts["stragglers"] == pytest.approx(hardware.straggling * doublings * others)


def test_meshes_have_their_own_spread() -> None:
    known, hardware = SPREADS, load_hardware("h100-80g")
    assert kind_of(1, 1) == "replicas"
    assert {kind_of(2, 1), kind_of(1, 4), kind_of(1, 1, 2)} == {"sharded"}
    low, high = interval(10.0, ParallelConfig(layout="single", dp=8), hardware)
    assert (low, high) == pytest.approx((10 * known["replicas"].low, 10 * known["replicas"].high)) and low < 10 < high
    assert interval(10.0, ParallelConfig(tp=2), hardware)[1] > high  # fewer rows with a wider spread
    unmeasured = interval(10.0, ParallelConfig(layout="single", dp=8), load_hardware("h20-96g"))
    assert unmeasured[0] < low and unmeasured[1] > high
    calibrated = hardware.model_copy(update={"architecture": ""})
    assert interval(1.0, ParallelConfig(tp=2), calibrated) == (known["calibrated"].low, known["calibrated"].high)


def test_a_peak_fits_with_a_probability() -> None:
    assert fit_probability(100, 100) == pytest.approx(0.5)
    assert fit_probability(92, 100) == pytest.approx(0.952, abs=0.001)  # the default margin
    assert fit_probability(50, 100) > 0.999999 and fit_probability(120, 100) < 0.001
