"""One process of `python -m benchmarks wire`, on its host: `python -m benchmarks.experiments.wire_process FOLDER`."""

import json
import os
import sys
import threading
import time
from pathlib import Path

import torch

from benchmarks.experiments.contest import take_turns
from benchmarks.experiments.side_by_side import TimingGroup, measure_steppers
from benchmarks.experiments.wire import collective_calls
from boost.config.load import from_tree
from boost.measure.steps import Stepper
from boost.measure.timeline import record
from boost.parallel.mesh import close_mesh, open_mesh

LEAST_S = 0.02
"""Minimum seconds per timed sample of a collective."""


def main(folder: Path) -> None:
    """Measures the group in `folder`/group.json and writes `folder`/measured<RANK>.json."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    asked = json.loads((folder / "group.json").read_text(encoding="utf-8"))
    group = TimingGroup(asked["words"], "wire", {name: from_tree(tree) for name, tree in asked["contenders"].items()})
    run = next(iter(group.contenders.values())).run
    mesh = open_mesh(group.parallel, run.device, run.timeout_s)
    steppers = {name: Stepper(config, mesh) for name, config in group.contenders.items()}
    found = measure_steppers(group, steppers, mesh, asked["rounds"])
    if asked["collectives"]:
        turns = take_turns(collective_calls(mesh), mesh, asked["rounds"], least_s=LEAST_S, words="collectives")
        found["collectives"] = turns.seconds
    found["steps"] = {}
    for name in asked["recorded"]:
        step = record(steppers[name].step, mesh)
        found["steps"][name] = {"timeline": step.as_numbers(), "parts_s": step.seconds()}
    (folder / f"measured{mesh.rank}.json").write_text(json.dumps(found), encoding="utf-8")
    close_mesh()


def _end_with(parent: int) -> None:
    """Ends this process when its parent has died: otherwise it would compete with the next launch for the cores."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
