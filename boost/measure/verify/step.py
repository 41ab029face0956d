"""Compares a timed optimizer step with its prediction: seconds, memory and bytes sent."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial

from boost.config import Config, load
from boost.errors import ConfigError
from boost.format import format_bytes, format_rate
from boost.measure.steps import SIZE_1B, SMALL, Stepper, flags, look_at, prediction, shape
from boost.measure.verify.report import Found, Verdict, Verifier, worst_of
from boost.parallel.mesh import Mesh, mesh_of
from boost.plan.hardware import Hardware

WARM, ROUNDS = 2, 7
TIME_LIMIT, MEMORY_LIMIT = 0.15, 0.10
"""Relative errors of predictions above which a check becomes a note."""


def usual(processes: int, device: str) -> Config:
    """Default configuration, whose steps take about a second: BTP over all processes, or one process."""
    tp = next(n for n in (8, 4, 2, 1) if processes % n == 0)
    dp = processes // tp
    sizes = shape(*(SIZE_1B if device == "cuda" else SMALL))
    micro_batch = 2 if device == "cuda" else 4
    batch = flags(micro_batch=micro_batch, global_batch=micro_batch * dp, tp=tp, dp=dp)
    others = flags(vocab_size=32000, seq_len=4096) if device == "cuda" else flags(vocab_size=4096, seq_len=256)
    dtype = ["--train.compute_dtype=bfloat16"] if device == "cuda" else []
    return load("demo", [*sizes, *batch, *others, *dtype])


def verify(verifier: Verifier, own: Config | None, hardware: Hardware | None) -> None:
    """Checks one step of the user's configuration, or of the default one."""
    verifier.section("A step, measured and predicted")
    mesh = verifier.mesh
    config = own if own is not None and own.parallel.world_size == mesh.size else usual(mesh.size, mesh.device.type)
    name = f"{config.model.family}, {config.parallel.layout if config.parallel.tp > 1 else 'one TP rank'}, d {config.model.dim}"
    verifier.check(name, partial(measured, config, mesh), partial(judged, config, hardware))


def measured(config: Config, mesh: Mesh) -> dict[str, float]:
    """Measures a step on this process: its seconds, peak memory and sent bytes."""
    stepper = Stepper(config, mesh_of(config.parallel, mesh.device) if mesh.size > 1 else mesh)
    for _ in range(WARM):
        stepper.step()
    seconds = statistics.median(stepper.seconds() for _ in range(ROUNDS))
    observed = look_at(stepper)
    return {"seconds": seconds, "peak": float(observed.peak_bytes), "sent": float(observed.sent_bytes)}


def judged(config: Config, hardware: Hardware | None, results: Sequence[dict[str, float]]) -> Found:
    """Compares the maxima over processes with the prediction. Fails if the number of bytes sent differs from the prediction."""
    worst = worst_of(results)
    seconds, peak, sent = worst["seconds"], worst["peak"], int(worst["sent"])
    rate = config.train.global_batch * config.train.seq_len / seconds / config.parallel.world_size
    time, memory, bytes_sent = f"{seconds * 1e3:,.1f} ms", f"peak {format_bytes(peak)}", f"{format_bytes(sent)} sent"
    numbers: dict[str, object] = {"measured": worst, "config": json.loads(config.model_dump_json())}
    why, predicted = "no hardware profile to compare with (--gpu)", None
    if hardware is not None:
        try:
            predicted = prediction(config, hardware)
        except ConfigError as error:
            why = f"no prediction: {error}"
    if predicted is None:
        verdict: Verdict = "note" if hardware else "ok"
        text = f"{time}, {format_rate(rate)} per device; {memory}; {bytes_sent}; {why}"
        return Found(verdict, text, numbers=numbers)
    numbers["predicted"] = asdict(predicted)
    errors = predicted.predicted_s / seconds - 1, predicted.predicted_peak / peak - 1
    text = (
        f"{time} (predicted {predicted.predicted_s * 1e3:,.1f}), {format_rate(rate)} per device; "
        f"{memory} (predicted {errors[1]:+.1%}); {bytes_sent}"
    )
    if sent != predicted.predicted_sent:
        detail = f"{text}; each process sent {sent:,} bytes instead of the predicted {predicted.predicted_sent:,}"
        return Found("failed", detail, "report this with the command's JSON report", numbers)
    if abs(errors[0]) > TIME_LIMIT:
        return Found("note", f"{text}, as predicted", "to profile this machine, run boost plan calibrate", numbers)
    if abs(errors[1]) > MEMORY_LIMIT:
        return Found("note", f"{text}, as predicted", "report this with the command's JSON report", numbers)
    return Found("ok", f"{text}, as predicted", numbers=numbers)
