"""Calibration writes a profile that the planner accepts, and fits recover the parameters of synthetic points."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from boost.config.load import from_tree
from boost.config.schema import Config
from boost.measure import calibrate, speed
from boost.measure.calibrate import calibrate_process, fit_gemm, problems
from boost.measure.speed import Point
from boost.parallel.mesh import Mesh
from boost.plan.hardware import AttentionSpeed, GemmSpeed, HostTime, load_hardware
from boost.plan.timing import predict
from tests import toy
from tests.distributed import run_distributed


def test_the_gemm_fit_recovers_its_parameters() -> None:
    law = GemmSpeed(tflops=2.0, fraction=0.8, half=(40.0, 10.0, 200.0))
    shapes = [(m, n, k) for m in (64, 512, 4096) for n in (64, 512, 4096) for k in (64, 512, 4096)]
    points = [Point("gemm", "float32", shape, 2 * math.prod(shape) / law.flops_per_s(*shape)) for shape in shapes]
    # One outlier, ten times too slow, does not distort the fit.
    points[5] = Point("gemm", "float32", points[5].shape, 10 * points[5].seconds)
    found, error = fit_gemm(points)
    again = GemmSpeed(**found)
    for shape in shapes:
        assert again.flops_per_s(*shape) == pytest.approx(law.flops_per_s(*shape), rel=0.02)
    assert error < 0.15


def test_the_attention_fit_recovers_its_parameters() -> None:
    law = AttentionSpeed(head_dim=64, forward=0.5, backward=0.25, half=100.0)
    points: dict[str, list[Point]] = {"attention float32": [], "attention backward float32": []}
    for length in (128, 256, 512, 1024):
        shape = (2048 // length, 4, length, 64)
        for name, products, rate in (("attention", 2, law.forward), ("attention backward", 5, law.backward)):
            flops = products * math.prod(shape) * length
            seconds = flops / (rate * 1e12 * length / (length + law.half))
            points[f"{name} float32"].append(Point(name, "float32", shape, seconds))
    (found,) = calibrate._attention(points, "float32")
    assert AttentionSpeed(**found) == law  # type: ignore[arg-type]


def run_calibrations(out: Path) -> tuple[list[int], bool]:
    """Exit codes of a calibration with a link of near-zero bandwidth, and of this one, forced. Only the first one measures: the
    other gets its points. And whether the first one has left a profile."""
    points = dict[str, Any]()

    def once(function: Callable[..., Any]) -> Callable[..., Any]:
        def measured(watch: Any, *words: Any) -> Any:
            key = f"{function.__name__} {words}"
            if key not in points:
                points[key] = list(function(watch, *words))
            return points[key]

        return measured

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibrate, "open_mesh", lambda *_: toy.mesh(tp=1, dp=2))
        patch.setattr(calibrate, "world_size", lambda: 2)
        patch.setattr(calibrate, "close_mesh", lambda: None)
        patch.setattr(speed, "LEAST_SECONDS", 2e-4)
        patch.setattr(speed.Probe, "seconds", lambda _: 1e-3)  # otherwise it takes most of the time
        patch.setattr(calibrate, "_sweep", once(calibrate._sweep))
        patch.setattr(calibrate, "collective_points", once(calibrate.collective_points))
        link = calibrate._link
        patch.setattr(calibrate, "_link", lambda *words: link(*words) | {"gb_s": 0.001})
        codes = [calibrate_process(["float32"], "cpu", True, out, False)]
        left = out.exists()
        codes.append(calibrate_process(["float32"], "cpu", True, out, True))
    return codes, left


@pytest.mark.slow
def test_the_planner_accepts_a_calibrated_profile_and_a_useless_one_is_refused(tmp_path: Path) -> None:
    """Refused: nothing is written, and every process exits with 1; and then written by force."""
    out = tmp_path / "made" / "local.toml"
    found = run_distributed(2, run_calibrations, out)
    assert [codes for codes, _ in found] == [[1, 0]] * 2
    assert not found[0][1], "written although it was refused"
    hardware = load_hardware(str(out))
    assert any(source.startswith("warning: ") and "sends only 0.001 GB/s" in source for source in hardware.sources)
    assert (hardware.device, hardware.per_node, hardware.alone is not None) == ("cpu", 2, True)
    kinds = {"all-reduce float32", "all-gather float32", "reduce-scatter float32", "all-to-all float32"}
    assert set(hardware.node.measured) == kinds
    model = {"dim": 64, "ffn_dim": 128, "heads": 2, "layers": 2, "vocab_size": 256, "rank": 16}
    train = {"micro_batch": 2, "global_batch": 2, "seq_len": 64}
    step = predict(from_tree({"model": model, "parallel": {"tp": 2, "layout": "btp"}, "train": train}), hardware)
    assert 0 < step.seconds < 60
    assert step.parts["TP collectives"] > 0


@pytest.mark.parametrize(("name", "modes"), [("h100-80g", ["none", "kernels", "blocks"]), ("cpu", ["none"])])
def test_the_host_is_measured_in_each_mode_of_compilation(
    name: str, modes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On GPUs: the time of a pass per operation; CPUs compile nothing by default."""
    asked: list[str] = []

    def timed(config: Config, device: Any, rounds: int) -> list[float]:
        asked.append(config.train.compile)
        return [{"none": 1.0, "kernels": 4e-3, "blocks": 2e-3}[config.train.compile]]

    monkeypatch.setattr(calibrate, "time_passes", timed)
    known = load_hardware("h100-80g").model_dump(exclude_none=True)
    found = calibrate._host_us(Mesh(torch.device("cpu")), known | ({"device": "cpu"} if name == "cpu" else {}))
    assert asked == modes and set(found) == set(HostTime.model_fields) and found["step"] == found["none"] > 0
    if name == "cpu":
        assert found["blocks"] == found["kernels"] == found["none"]
    else:
        assert found["kernels"] == pytest.approx(2 * found["blocks"], rel=0.01)


# What calibration refuses, and what it warns about.


GEMM = {"float32": {"tflops": 0.05, "fraction": 0.9, "half": [1.0, 2.0, 3.0]}}
SPEEDS: dict[str, Any] = {"memory_gb_s": 10.0, "gemm": GEMM}


def profile(**changes: Any) -> dict[str, Any]:
    return {"speeds": SPEEDS, "node": {"name": "loopback", "gb_s": 1.5, "latency_us": 20.0}, "host_us": 9.0} | changes


def said(changed: dict[str, Any], error: float = 0.05, drift: float = 1.1) -> list[tuple[str, bool]]:
    return list(problems(changed, [("together, float32", error)], drift))


def test_a_machine_that_was_idle() -> None:
    assert said(profile()) == []


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (profile(node={"name": "loopback", "gb_s": 0.001, "latency_us": 20.0}), "loopback sends only 0.001 GB/s"),
        (profile(host_us=float("nan")), "host_us = nan"),
        (profile(host_us=-3.0), "host_us = -3"),
        (profile(speeds=SPEEDS | {"memory_gb_s": 0.0}), "memory bandwidth is only 0 GB/s"),
        (profile(speeds=SPEEDS | {"gemm": {"float32": {"tflops": 1e-6, "fraction": 0.9}}}), "float32 GEMMs reach only"),
        (profile(speeds=SPEEDS | {"kernels": {"sum float32": [[64.0, math.inf]]}}), "speeds.kernels.sum float32"),
    ],
)
def test_implausible_profiles(changed: dict[str, Any], words: str) -> None:
    (found,) = said(changed)
    assert words in found[0] and found[1]


def test_noise_gives_a_warning_or_is_refused() -> None:
    assert said(profile(), error=0.3) == [("the GEMM fit has a mean error of 30% (together, float32)", False)]
    assert [serious for _, serious in said(profile(), error=0.6)] == [True]
    assert [serious for _, serious in said(profile(), error=float("nan"))] == [True]
    assert [serious for _, serious in said(profile(), drift=2.0)] == [False]
    assert [serious for _, serious in said(profile(), drift=5.0)] == [True]


def test_unmeasured_links_are_no_problem() -> None:
    assert said(profile(node={"name": "loopback", "gb_s": 0.0, "known": False})) == []


@pytest.mark.parametrize(("device", "expected"), [("cpu", 0.5), ("cuda", 1.0)])
def test_times_on_a_gpu_are_not_those_of_its_probe(
    device: str, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On shared cores, a probe that takes twice as long says that the machine is half as fast. On a GPU it says nothing."""
    watch = speed.Stopwatch.__new__(speed.Stopwatch)
    watch.mesh, watch.samples = Mesh(torch.device(device)), 3
    watch.reference, watch.probe = 1.0, mock.Mock(seconds=lambda: 2.0)
    monkeypatch.setattr(watch, "_sample", lambda call, repeats: 1.0)
    assert watch.seconds(lambda: None) == expected
