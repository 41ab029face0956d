"""Run directories with made-up metrics, as `boost train` writes them."""

import dataclasses
import json
from pathlib import Path

from boost.config import load
from boost.train.events import EvalMetrics, StepMetrics
from boost.train.metrics import RunEnd
from boost.train.rundir import RunDirectory


def make_run(path: Path, steps: int = 20, of: int = 20, end: RunEnd | None = None) -> Path:
    """`steps` of `of` steps, an evaluation every 5; the loss falls from 5 towards 3. 64 tokens per step."""
    sizes = ("--train.steps", str(of), "--train.global_batch", "2", "--train.seq_len", "32", "--train.micro_batch", "1")
    config = load(None, ["--run.dir", str(path), "--parallel.tp", "1", *sizes])
    run = RunDirectory.create(config, resume=True)
    lines = []
    for step in range(1, steps + 1):
        loss = 3.0 + 2.0 / step
        step_metrics = StepMetrics(step, loss, 1e-3, 0.5, 1000.0 * step, 0.4, 1 << 20, step * 64, 0.5)
        lines.append({"kind": "step", **dataclasses.asdict(step_metrics)})
        if step % 5 == 0:
            heldout = loss + 0.1 + (0.5 if step == of else 0.0)
            lines.append({"kind": "eval", **dataclasses.asdict(EvalMetrics(step, heldout, 20.0, 1.5, 512, step == of))})
    if end is None and steps == of:
        end = RunEnd(of, "done", "")
    if end:
        lines.append({"kind": "end", **dataclasses.asdict(end)})
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
