"""Checks devices, drivers, versions and network interfaces."""

import contextlib
import os
import platform
import socket
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from boost.format import format_bytes
from boost.machine import cpu_model
from boost.measure.verify.report import Found, Verifier
from boost.text import JsonObject
from boost.train.hardware import total_memory
from boost.train.rundir import git_state
from boost.version import __version__

FREE = 0.9
"""Fraction of a GPU's memory that should be free before a run."""


def facts(device: torch.device) -> JsonObject:
    state = git_state()
    known: JsonObject = {
        "host": socket.gethostname(),
        "device": str(device),
        "software": {
            "boost": __version__ + (f" {str(state['commit'])[:9]}" if state else ""),
            "python": platform.python_version(),
            "torch": str(torch.__version__),
        },
        "memory": total_memory(device),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "none"
        with contextlib.suppress(OSError):
            known["software"]["driver"] = Path("/sys/module/nvidia/version").read_text(encoding="ascii").strip()
        known["software"] |= {"CUDA": str(torch.version.cuda), "NCCL": nccl}
        known |= {"name": properties.name, "free": torch.cuda.mem_get_info(device)[0]}
        known["capability"] = f"{properties.major}.{properties.minor}"
    else:
        known["name"] = cpu_model()
    return known


def interfaces() -> dict[str, str]:
    """Returns the settings that determine this process's network interface."""
    chosen = {name: os.environ.get(name, "") for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        address = ""
    return {**chosen, "address": address, "present": " ".join(name for _, name in socket.if_nameindex())}


def verify(verifier: Verifier) -> None:
    verifier.section("Machines")
    mesh = verifier.mesh
    verifier.check("software", partial(facts, mesh.device), same_software)
    verifier.check("devices", partial(facts, mesh.device), devices_of)
    if mesh.device.type == "cuda":
        verifier.check("GPU memory", partial(facts, mesh.device), free_memory)
    if mesh.size > 1:
        verifier.check("interfaces", interfaces, reachable)


def same_software(machines: Sequence[JsonObject]) -> Found:
    """Checks that versions are the same on all processes."""
    first = machines[0]["software"]
    for rank, machine in enumerate(machines):
        for name, version in machine["software"].items():
            if version != first.get(name):
                detail = f"{name} is {first.get(name)} on rank 0 and {version} on rank {rank}"
                numbers = {"software": [machine["software"] for machine in machines]}
                return Found("failed", detail, "install the same versions on all nodes", numbers)
    return Found("ok", ", ".join(f"{name} {version}" for name, version in first.items()), numbers={"software": first})


def devices_of(machines: Sequence[JsonObject]) -> Found:
    nodes: dict[str, list[int]] = defaultdict(list)
    for rank, machine in enumerate(machines):
        nodes[machine["host"]].append(rank)
    texts = []
    for number, ranks in enumerate(nodes.values()):
        kinds = Counter(f"{machines[rank]['name']}, {format_bytes(machines[rank]['memory'])}" for rank in ranks)
        where = f"node {number}: " if len(nodes) > 1 else ""
        devices = ", ".join(f"{rank}: {machines[rank]['device']}" for rank in ranks)
        texts.append(f"{where}ranks {devices} ({'; '.join(kinds)})")
    names_of = {machine["name"] for machine in machines}
    numbers = {"ranks": [{k: v for k, v in machine.items() if k not in ("host", "software")} for machine in machines]}
    if len(names_of) > 1:
        advice = "all devices run at the speed of the slowest one; use identical devices"
        return Found("note", "; ".join(texts), advice, numbers)
    return Found("ok", "; ".join(texts), numbers=numbers)


def free_memory(machines: Sequence[JsonObject]) -> Found:
    """Checks that no other process uses the GPUs."""
    shares = {rank: machine["free"] / machine["memory"] for rank, machine in enumerate(machines)}
    rank, least = min(shares.items(), key=lambda item: item[1])
    if least < FREE:
        detail = f"{1 - least:.0%} of the GPU memory of rank {rank} is in use"
        return Found("note", detail, "stop other processes on this GPU (nvidia-smi)", {"free": shares})
    return Found("ok", f"at least {least:.0%} of each GPU's memory is free", numbers={"free": shares})


def reachable(processes: Sequence[Mapping[str, str]]) -> Found:
    """Checks that processes on several machines do not connect to their own loopback interfaces."""
    several = len({process["address"] for process in processes}) > 1
    chosen = processes[0]["GLOO_SOCKET_IFNAME"] or processes[0]["NCCL_SOCKET_IFNAME"]
    loop = [rank for rank, process in enumerate(processes) if process["address"].startswith("127.")]
    if several and loop and not chosen:
        return Found(
            "note",
            f"the host name of rank {loop[0]} resolves to {processes[loop[0]]['address']}, its own loopback address",
            "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the name of the network interface to use",
        )
    words = f"{chosen} (GLOO_SOCKET_IFNAME / NCCL_SOCKET_IFNAME)" if chosen else "chosen by gloo and NCCL"
    numbers = {"interfaces": [dict(process) for process in processes]}
    return Found("ok", f"{words}; available: {processes[0]['present']}", numbers=numbers)
