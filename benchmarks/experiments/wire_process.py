"""One process of `python -m benchmarks wire`, on its host: `python -m benchmarks.experiments.wire_process FOLDER`."""

import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.commands import LEAST_ROUNDS
from benchmarks.experiments.contest import take_turns
from benchmarks.experiments.results import MeasurementError
from benchmarks.experiments.side_by_side import TimingGroup, measure_steppers
from benchmarks.experiments.timeline import as_numbers, record
from benchmarks.experiments.wire import collective_calls
from boost.config.load import from_tree
from boost.measure.steps import Stepper
from boost.train.rendezvous import close_mesh, open_mesh

TOLERANCE = 1e-3
"""Maximum relative difference of the loss of two layouts, in fp32."""

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
    losses = first_losses(steppers)
    found = measure_steppers(group, steppers, mesh, asked["rounds"])
    for row in found["rows"]:
        row["loss"] = losses[row["name"]]
    if asked["collectives"]:
        turns = take_turns(collective_calls(mesh), mesh, LEAST_ROUNDS, least_s=LEAST_S, words="collectives")
        found["collectives"] = turns.seconds
    found["steps"] = {}
    for name in asked["recorded"]:
        found["steps"][name] = as_numbers(record(steppers[name].step, mesh))
    (folder / f"measured{mesh.rank}.json").write_text(json.dumps(found), encoding="utf-8")
    close_mesh()


def first_losses(steppers: Mapping[str, Stepper]) -> dict[str, float]:
    """Loss of the first step by contender. Raises MeasurementError if two layouts of the same model have different losses, because
    times of different functions cannot be compared."""
    found: dict[str, float] = {}
    of_model: dict[str, float] = {}
    for name, stepper in steppers.items():
        mesh, computed = stepper.mesh, stepper.step()
        own = computed[0].double() if mesh.pp.rank == mesh.pp.size - 1 else torch.zeros((), dtype=torch.double)
        if mesh.size > 1:
            dist.all_reduce(own)  # sums the replicas' parts, which are identical on all TP ranks
        found[name] = float(own) / mesh.tp.size
        same = of_model.setdefault(stepper.config.model.model_dump_json(), found[name])
        if abs(found[name] - same) > TOLERANCE * abs(same):
            raise MeasurementError(f"{name} has loss {found[name]:.6f}, other layouts {same:.6f}: a bug in BOOST")
    return found


def _end_with(parent: int) -> None:
    """Ends this process when its parent dies; otherwise, it would compete with the next launch for the cores."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
