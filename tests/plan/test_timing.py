"""Waiting in a step: pipeline bubbles as in the schedules' papers, overlapped collectives, stragglers, sends; and intervals."""

import pytest

from boost.config.load import from_tree, load
from boost.config.schema import Config
from boost.plan.hardware import Hardware, HostTime, load_hardware
from boost.plan.step_time import BUBBLE, HOST, SPREADS, PassTime, fit_probability, spread_of, unpublished
from boost.plan.timing import Predictor, predict, room_in

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
    assert room_in(one, 1.0, shared=False) == (8.0, 15.0)
    assert room_in(one, 1.0, shared=True) == (7.0, 12.0)
    assert room_in(one, 0.5, shared=True) == (3.0, 4.5)
    assert room_in(one, 0.1, shared=True) == (0.0, 0.0)


def test_replicas_and_tp_share_a_port_between_nodes() -> None:
    """TP 16 over two nodes: TP and DP collectives share the network port, so more of their time is exposed."""
    hardware = load_hardware("h100-80g").model_copy(update={"overlap": 0.3})
    words = ("parallel.layout=btp-sp", "parallel.overlap=halves", "parallel.tp=16", "parallel.dp=16")
    config = seven(*words, "train.global_batch=32", "train.micro_batch=2", "train.compile=blocks")
    (worst,) = (predictor := Predictor(hardware)).passes(config)
    assert worst.hidden[1] > 0
    exposed = predictor.predict(config).parts["DP collectives"]
    elsewhere = hardware.model_copy(update={"per_node": 16})  # TP inside a node
    assert exposed > Predictor(elsewhere).predict(config).parts.get("DP collectives", 0.0)


def test_the_host_needs_its_own_time_in_each_mode_of_compilation() -> None:
    """A pass takes as long as the device or the host, whichever is slower; passes in a CUDA graph never wait for the host."""
    hardware, small = load_hardware("h200-141g"), load("cola-350m", ["--parallel.layout=single", "--parallel.tp=1"])
    config, times = small.changed(train={"global_batch": small.train.micro_batch}), {}
    for name in ("auto", "blocks", "kernels", "none"):
        of_mode = config.changed(train={"compile": name})
        (once,), device = Predictor(hardware).passes(of_mode), Predictor(launching(0)).passes(of_mode)[0].total
        times[name] = once.total
        assert once.total == pytest.approx(max(device, once.calls * 1e-6 * hardware.host_us.in_pass(of_mode, "cuda")))
    assert times["auto"] == times["blocks"] < times["kernels"]
    captured = Predictor(hardware).predict(config.changed(train={"cuda_graphs": "on"}))
    assert HOST not in captured.parts and captured.seconds < predict(config, hardware).seconds
    # The committed run on an H200: 187,127 tokens per second.
    assert predict(small, hardware).tokens_per_second == pytest.approx(187_127, rel=0.05)


def launching(microseconds: float) -> Hardware:
    return load_hardware("h200-141g").model_copy(
        update={"host_us": HostTime(**dict.fromkeys(HostTime.model_fields, microseconds))}
    )


def test_more_nodes_wait_for_the_slowest() -> None:
    hardware = load_hardware("h100-80g")
    times = {dp: predict(seven(f"parallel.dp={dp}", "parallel.layout=single", "parallel.tp=1", "parallel.shard=full",
                               f"train.global_batch={8 * dp}", "train.micro_batch=8"), hardware)
             for dp in (8, 16, 512)}  # fmt: skip
    assert "stragglers" not in times[8].parts
    for dp, doublings in ((16, 1), (512, 6)):
        others = times[dp].seconds - times[dp].parts["stragglers"] - times[dp].parts.get("rest", 0.0)
        assert times[dp].parts["stragglers"] == pytest.approx(hardware.straggling * doublings * others)


@pytest.mark.parametrize(
    ("words", "gpu", "kind", "lacks"),
    [
        ("tp=1 dp=8 layout=single", "h100-80g", "replicas", ""),
        ("tp=2 layout=btp", "h100-80g", "sharded", ""),
        ("tp=1 pp=4 layout=single", "a100-80g", "sharded", ""),
        ("tp=1 cp=2 layout=single", "h100-80g", "unmeasured", "CP"),
        ("tp=2 layout=btp-cp", "h100-80g", "unmeasured", "btp-cp"),
        ("tp=2 layout=btp", "b200-180g", "unmeasured", "this GPU"),
        ("tp=2 layout=btp-sp", "mi300x-192g", "unmeasured", "this GPU, btp-sp"),
        ("tp=2 layout=btp", "local", "calibrated", ""),
    ],
)
def test_the_spread_of_a_configuration(words: str, gpu: str, kind: str, lacks: str) -> None:
    config = seven(*(f"parallel.{word}" for word in words.split()), "train.global_batch=32")
    hardware = (
        load_hardware("h100-80g").model_copy(update={"architecture": ""}) if gpu == "local" else load_hardware(gpu)
    )
    assert spread_of(config, hardware) == SPREADS[kind] and unpublished(config, hardware) == lacks
    long = config.changed(train={"seq_len": 2**20})
    assert unpublished(long, hardware).endswith("1,048,576 tokens per sequence") == (gpu != "local")


def test_a_peak_fits_with_a_probability() -> None:
    assert fit_probability(100, 100) == pytest.approx(0.5)
    assert fit_probability(92, 100) == pytest.approx(0.952, abs=0.001)  # the default margin
    assert fit_probability(50, 100) > 0.999999 and fit_probability(120, 100) < 0.001
