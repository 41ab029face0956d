"""Compares a timed optimizer step with its prediction: seconds, their breakdown, memory and bytes sent."""

import json
import os
import statistics
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from boost.config import Config, load
from boost.errors import ConfigError
from boost.format import format_bytes, format_rate
from boost.measure.steps import SIZE_1B, SMALL, Stepper, flags, look_at, shape
from boost.measure.timeline import read_step, total
from boost.measure.verify.report import Found, Verifier, worst_of
from boost.parallel.mesh import mesh_of
from boost.plan.hardware import Hardware
from boost.plan.prediction import prediction
from boost.plan.step_time import BUBBLE, CONTEXT, PIPELINE, REPLICAS, TENSOR
from boost.plan.timing import predict

WARM, ROUNDS = 2, 7
TIME_LIMIT, MEMORY_LIMIT = 0.15, 0.10
"""Relative errors of predictions above which a check becomes a note."""

SENT = (TENSOR, CONTEXT, REPLICAS, PIPELINE, BUBBLE)
"""Parts of a predicted step in which a device waits for others."""


def usual(processes: int, device: str) -> Config:
    """Default configuration, whose steps take about a second: BTP over all processes, or one process."""
    tp = next(n for n in (8, 4, 2, 1) if processes % n == 0)
    dp = processes // tp
    sizes = shape(*(SIZE_1B if device == "cuda" else SMALL))
    batch = flags(
        micro_batch=2 if device == "cuda" else 4, global_batch=(2 if device == "cuda" else 4) * dp, tp=tp, dp=dp
    )
    others = flags(vocab_size=32000, seq_len=4096) if device == "cuda" else flags(vocab_size=4096, seq_len=256)
    dtype = ["--train.compute_dtype=bfloat16"] if device == "cuda" else []
    return load("demo", [*sizes, *batch, *others, *dtype])


def measured(config: Config, stepper: Stepper) -> dict[str, float]:
    """Measures a step on this process."""
    for _ in range(WARM):
        stepper.step()
    times = [stepper.seconds() for _ in range(ROUNDS)]
    computing, waiting = _where(stepper)
    seen = look_at(stepper)
    return {
        "seconds": statistics.median(times),
        "computing": computing,
        "waiting": waiting,
        "peak": float(seen.peak_bytes),
        "sent": float(seen.sent_bytes),
    }


def _where(stepper: Stepper) -> tuple[float, float]:
    """(computing, waiting for collectives) of one profiled step, in seconds."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silences its start and stop messages
    on_gpu = stepper.mesh.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as recorded, record_function("step 1"):
        stepper.step()
        if on_gpu:
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory(prefix="boost-verify-") as folder:
        path = Path(folder) / "rank0.json"
        recorded.export_chrome_trace(str(path))
        _, step = read_step(path, stepper.mesh.rank)
    return total(step.computing), total(step.waiting)


def verify(verifier: Verifier, own: Config | None, hardware: Hardware | None) -> None:
    """Checks one step of the user's configuration, or of the default one."""
    verifier.section("A step, measured and predicted")
    mesh = verifier.mesh
    config = own if own is not None and own.parallel.world_size == mesh.size else usual(mesh.size, mesh.device.type)
    name = f"{config.model.family}, {config.parallel.layout if config.parallel.tp > 1 else 'one TP rank'}, d {config.model.dim}"

    def act() -> dict[str, float]:
        of_its_own = mesh_of(config.parallel, mesh.device) if mesh.size > 1 else mesh
        return measured(config, Stepper(config, of_its_own))

    kept: list[dict[str, float]] = []
    verifier.check(name, act, partial(_time, config, hardware, kept))
    if mesh.is_main and kept and hardware is not None:
        predicted = prediction(config, hardware)
        with verifier.report.timed("A step, measured and predicted", "memory") as note:
            note(_memory(kept[0]["peak"], predicted.predicted_peak))
        with verifier.report.timed("A step, measured and predicted", "bytes sent") as note:
            note(_bytes(int(kept[0]["sent"]), predicted.predicted_sent))


def _time(
    config: Config, hardware: Hardware | None, kept: list[dict[str, float]], found: Sequence[dict[str, float]]
) -> Found:
    worst = worst_of(found)
    kept.append(worst)
    seconds, train = worst["seconds"], config.train
    rate = train.global_batch * train.seq_len / seconds / config.parallel.world_size
    busy = worst["computing"] + worst["waiting"]
    computing, waiting = (seconds * worst[part] / busy for part in ("computing", "waiting"))
    text = f"{_ms(seconds)} ms, {format_rate(rate)} per device; computing {_ms(computing)}, waiting {_ms(waiting)}"
    numbers: dict[str, Any] = {"measured": worst, "config": json.loads(config.model_dump_json())}
    if hardware is None:
        return Found("ok", f"{text}; no hardware profile to compare with (--gpu)", numbers=numbers)
    try:
        step = predict(config, hardware)
    except ConfigError as error:
        return Found("note", f"{text}; no prediction", str(error), numbers)
    sent = sum(step.parts.get(part, 0.0) for part in SENT)
    numbers["predicted"] = {"seconds": step.seconds, "parts": dict(step.parts)}
    text += f"; predicted {_ms(step.seconds)} ({_ms(step.seconds - sent)} + {_ms(sent)})"
    if abs(step.seconds / seconds - 1) <= TIME_LIMIT:
        return Found("ok", text, numbers=numbers)
    apart = {"computing": computing - (step.seconds - sent), "waiting for collectives": waiting - sent}
    part, difference = max(apart.items(), key=lambda item: abs(item[1]))
    way = "longer" if difference > 0 else "shorter"
    advice = f"{part} takes {_ms(abs(difference))} ms {way} than predicted; to profile this machine, run boost plan calibrate"
    return Found("note", text, advice, numbers)


def _memory(peak: float, predicted: int) -> Found:
    text = f"peak {format_bytes(peak)}; predicted {format_bytes(predicted)} ({predicted / peak - 1:+.1%})"
    verdict = abs(predicted / peak - 1) <= MEMORY_LIMIT
    return Found("ok" if verdict else "note", text, "" if verdict else "report it with this command's JSON")


def _bytes(counted: int, predicted: int) -> Found:
    if counted == predicted:
        return Found("ok", f"{format_bytes(counted)} per process, as predicted")
    return Found(
        "failed",
        f"{counted:,} bytes per process; predicted {predicted:,}",
        "report it with this command's JSON",
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f}" if seconds >= 0.1 else f"{seconds * 1e3:,.1f}"
