"""Runs the sections of `boost verify` on each process of the mesh."""

from dataclasses import dataclass
from pathlib import Path

import torch

from boost.config import Config, load
from boost.config.schema import ModelConfig, ParallelConfig
from boost.measure.verify import collectives, devices, layouts, step
from boost.measure.verify.report import Found, Report, Unequal, Verifier
from boost.parallel.mesh import Axis, mesh_of
from boost.plan.hardware import load_hardware, profile_of
from boost.train.hardware import total_memory
from boost.train.rendezvous import close_mesh, open_mesh, world_size
from boost.train.rundir import environment

TIMEOUT_S = 300
"""Timeout of a collective. Compilation takes a minute on some processes but less on others."""


@dataclass(frozen=True)
class Request:
    """What to check."""

    sections: tuple[str, ...]
    model: ModelConfig
    """The model; only its family matters."""
    own: Config | None
    """The user's configuration."""
    device: str
    gpu: str | None
    """Name of the hardware profile; None: the GPU's, if there is one."""
    compiled: str
    """Layouts that are also compiled: all | first | none."""
    layouts: tuple[str, ...] = ()
    """Layouts to check; 'dp', 'cp' and 'pp' select the meshes without a TP layout. Empty: all."""
    whole: bool = False
    """Whether no more checks follow. If so, the main process prints the summary, and each process returns the exit code."""


def verify_process(request: Request, out: Path) -> int:
    """Runs one process and returns its exit code. The main process prints the checks and writes the report. Raises BoostError."""
    mesh = open_mesh(ParallelConfig(layout="single", dp=world_size()), request.device, TIMEOUT_S)
    report, facts = Report(), environment(request.own or load(None))
    if mesh.is_main:
        report.changed = lambda: report.write(out, facts, finished=False)
    verifier = Verifier(mesh, report)
    profile = request.gpu
    if profile is None and mesh.device.type == "cuda":
        profile = profile_of(torch.cuda.get_device_name(mesh.device), total_memory(mesh.device))
    hardware = load_hardware(profile) if profile else None
    dtype = torch.bfloat16 if mesh.device.type == "cuda" else torch.float32
    try:
        if "machines" in request.sections:
            devices.verify(verifier)
        axes = _axes(request, mesh.size, mesh.device)
        if axes and "collectives" in request.sections:
            collectives.verify(verifier, axes, mesh.device)
        if axes and "links" in request.sections:
            collectives.verify_links(verifier, axes, dtype, hardware)
        if "layouts" in request.sections:
            layouts.verify(verifier, request.model, request.compiled, request.own, request.layouts)
        if "step" in request.sections:
            step.verify(verifier, request.own, hardware)
    except Unequal as where:
        with report.timed("", "remaining checks") as note:
            note(Found("skipped", f"{where} failed on only some processes: further collectives may deadlock"))
    if mesh.is_main:
        report.write(out, facts)
        if request.whole:
            print(f"\n{report.summary()}; report: {out}", flush=True)
    mesh.barrier()
    close_mesh()
    return report.exit_code if request.whole else 0


def _axes(request: Request, size: int, device: torch.device) -> dict[str, Axis]:
    """Groups to check collectives over: all processes, and the axes of the user's mesh (default: TP x DP)."""
    if size == 1:
        return {}
    if request.own is not None and request.own.parallel.world_size == size:
        parallel = request.own.parallel
    else:
        tp = next(n for n in (8, 4, 2, 1) if size % n == 0)
        parallel = ParallelConfig(tp=tp, dp=size // tp)
    own = mesh_of(parallel, device)
    whole = own.replicas
    if whole.size != size:
        whole = mesh_of(ParallelConfig(layout="single", dp=size), device).dp
    return {"all": whole} | {name: axis for name, axis in own.axes.items() if 1 < axis.size < size}
