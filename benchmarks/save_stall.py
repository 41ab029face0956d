"""Measures how long a checkpoint save stalls training, in the foreground and in the background.

    python -m benchmarks.save_stall FOLDER

Uses a model with about 340 MB of weights and AdamW moments on one CPU process. Reports wall-clock time and, because machines are
shared, CPU time of the training thread. FOLDER should be on the checkpoint file system; its temporary files are removed.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from boost.config import load
from boost.models.fused import fused_params
from boost.optim.build import build_optimizer
from boost.parallel.mesh import Mesh
from boost.train.checkpoint import CheckpointSaver, Position
from boost.train.model import build_model, initialize_model

SAVES = 5
MODEL = {"vocab_size": 16000, "dim": 768, "layers": 4, "ffn_dim": 2048}


def main(folder: Path) -> None:
    config = load(
        "demo", ["--parallel.tp", "1", *(word for k, v in MODEL.items() for word in (f"--model.{k}", str(v)))]
    )
    mesh = Mesh(torch.device("cpu"))
    model = build_model(config, mesh)
    initialize_model(model, seed=0)
    params = list(fused_params(model))
    optimizer = build_optimizer(params, config, mesh)
    megabytes = (sum(p.tensor.nbytes for p in params) + sum(t.nbytes for t in optimizer.state_tensors())) / 1e6
    print(f"{megabytes:.0f} MB of state, {torch.get_num_threads()} threads, medians of {SAVES} saves")
    saver = CheckpointSaver(model, optimizer, config, b"{}", {}, mesh)
    saver.prepare()

    def foreground(step: int) -> None:
        saver.save(folder / "foreground", Position(step, step))

    def background(step: int) -> None:
        saver.start(folder / "background", Position(step, step))

    report("foreground", foreground, lambda: None)
    report("background", background, lambda: saver.finish())


def report(name: str, save: Callable[[int], None], settle: Callable[[], object]) -> None:
    """Times the part of a save that blocks training; `settle` waits, untimed, for the rest."""
    walls, cpus = [], []
    for step in range(1, SAVES + 1):
        wall, cpu = time.perf_counter(), time.thread_time()
        save(step)
        walls.append(time.perf_counter() - wall)
        cpus.append(time.thread_time() - cpu)
        settle()
    print(f"{name}: training stalls {statistics.median(walls):.3f} s, {statistics.median(cpus):.3f} s of CPU time")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as temporary:
        main(Path(temporary))
