"""One process of `python -m benchmarks wire`, on its host: `python -m benchmarks.experiments.wire_process FOLDER`."""

import json
import os
import sys
from pathlib import Path

import torch

from benchmarks.experiments.contest import take_turns
from benchmarks.experiments.side_by_side import TimingGroup, measure_group
from benchmarks.experiments.wire import collective_calls
from boost.config.load import from_tree
from boost.measure.steps import Stepper
from boost.measure.timeline import record
from boost.parallel.mesh import close_mesh, open_mesh

LEAST_S = 0.02
"""Minimum seconds per timed sample of a collective."""


def main(folder: Path) -> None:
    """Measures the group in `folder`/group.json and writes `folder`/measured<RANK>.json."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    said = json.loads((folder / "group.json").read_text(encoding="utf-8"))
    group = TimingGroup("wire", "wire", {name: from_tree(tree) for name, tree in said["contenders"].items()})
    run = next(iter(group.contenders.values())).run
    mesh = open_mesh(group.parallel, run.device, run.timeout_s)
    measured = measure_group(group, mesh, said["rounds"])
    turns = take_turns(collective_calls(mesh), mesh, said["rounds"], least_s=LEAST_S, words="collectives")
    timelines = {
        name: record(Stepper(group.contenders[name], mesh).step, mesh).as_numbers() for name in said["recorded"]
    }
    found = measured | {"collectives": turns.seconds, "timelines": timelines}
    (folder / f"measured{mesh.rank}.json").write_text(json.dumps(found), encoding="utf-8")
    close_mesh()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
