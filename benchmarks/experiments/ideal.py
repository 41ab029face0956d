"""How close a tensor-parallel step comes to the ideal: perfectly split compute plus communication.

One interleaved run on p processes times (i) a step under each layout, (ii) a single-process step of the same model and batch,
on all processes at once so that they share the machine equally, and (iii) the collectives of (i) in isolation. The ideal is
(ii) / p + (iii): no redundant compute and no overlap.
"""

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.experiments.contest import Call, take_turns
from benchmarks.experiments.ideal_report import ALONE, LAYOUTS, WIRE, goals, section
from benchmarks.experiments.single import of_family, our_step
from boost.config import Config
from boost.config.load import from_tree
from boost.config.schema import Family
from boost.config.traffic import Collective
from boost.measure.results import Facts, facts_of, save_section
from boost.parallel import collectives as sent
from boost.parallel.counting import CollectiveCounter
from boost.parallel.mesh import Axis, Mesh, close_mesh, open_mesh

__all__ = ["goals", "ideal_process", "section"]


def variants(config: Config) -> dict[str, Config]:
    """`config` under each layout, with a family that the layout supports. Raises ConfigError if the configuration is invalid."""
    return {layout: _under(config, layout, family) for layout, family in families(config).items()}


def families(config: Config) -> dict[str, Family]:
    """The family to run under each layout."""
    return {layout: "dense" if layout.startswith("megatron") else config.model.family for layout in LAYOUTS}


def _under(config: Config, layout: str, family: Family) -> Config:
    tree = of_family(config, family).model_dump()
    tree["parallel"] = {"layout": layout, "tp": config.parallel.tp}
    return from_tree(tree)


def count(call: Call) -> list[Collective]:
    """The collectives of one call, in order."""
    with CollectiveCounter() as counter:
        call()
    return counter.collectives


def replay(collectives: Sequence[Collective], axis: Axis, device: torch.device) -> Call:
    """Returns a call that issues the same collectives in order on random data and returns the last result of each kind."""
    payloads: dict[tuple[str, tuple[int, ...], str], Tensor] = {}
    for each in collectives:
        # The recorded shape of an all-gather is that of its output: (p, *input shape).
        shape = each.shape[1:] if each.kind == "all-gather" else each.shape
        key = (each.kind, each.shape, each.dtype)
        if key not in payloads:
            payloads[key] = torch.randn(shape, device=device).to(getattr(torch, each.dtype))
    functions = {
        "all-reduce": sent.all_reduce,
        "all-gather": sent.all_gather,
        "reduce-scatter": sent.reduce_scatter,
        "all-to-all": sent.all_to_all,
    }
    issued = [
        (each.kind, partial(functions[each.kind], payloads[each.kind, each.shape, each.dtype], axis))
        for each in collectives
    ]

    def call() -> list[Tensor]:
        return list({kind: send() for kind, send in issued}.values())

    return call


def measure(config: Config, mesh: Mesh, rounds: int) -> Facts:
    """Runs the measurement on this process."""
    calls: dict[str, Call] = {}
    counted: dict[str, list[Collective]] = {}
    for layout, each in variants(config).items():
        calls[layout] = our_step(each, mesh)
        counted[layout] = count(calls[layout])
        calls[WIRE + layout] = replay(counted[layout], mesh.tp, mesh.device)
    for family in dict.fromkeys(families(config).values()):
        calls[ALONE + family] = our_step(of_family(config, family), Mesh(mesh.device))
    turns = take_turns(calls, mesh, rounds, words="TP against the ideal")
    return {
        "turns": asdict(turns),
        "families": families(config),
        "collectives": {layout: [asdict(each) for each in issued] for layout, issued in counted.items()},
        "sent_bytes": {layout: sum(each.sent_bytes for each in issued) for layout, issued in counted.items()},
    }


def ideal_process(config: Config, rounds: int, out: Path) -> int:
    """Runs the experiment on this process. The main process writes `out`.json, .md and the figure."""
    mesh = open_mesh(config.parallel, config.run.device, config.run.timeout_s)
    found = measure(config, mesh, rounds)
    if mesh.is_main:
        facts = facts_of("ideal", config, rounds=rounds, tp=mesh.tp.size, device=mesh.device.type, **found)
        save_section(out, facts, section(facts))
    mesh.barrier()
    close_mesh()
    return 0
