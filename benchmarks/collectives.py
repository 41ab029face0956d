"""Times bare collectives over a rate-limited wire with 2, 4 and 8 processes, each in its own network namespace on one bridge.

    python -m benchmarks.collectives [--mbit 300] [--processes 2 4 8]        # root, iproute2

A token bucket (128 kB) limits the send rate of every process. Prints the median of five runs in milliseconds, and the bandwidth
utilization: bytes sent by one process / rate / measured time.
"""

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

import torch

from benchmarks.experiments.traffic import ISSUE
from boost.config import load
from boost.parallel.mesh import close_mesh, open_mesh

MIB = (1, 4, 16)
REPEATS = 5
BRIDGE, NAME, WIRE = "boostbr", "boostns{}", "wire0"


def measure(mbit: float) -> None:
    """Runs every collective on one process."""
    torch.set_num_threads(1)
    processes = int(os.environ["WORLD_SIZE"])
    mesh_of = [f"--parallel.tp={processes}", "--model.heads=8", "--model.kv_heads=8"]
    mesh = open_mesh(load("demo", ["--run.device=cpu", "--parallel.dp=1", *mesh_of]).parallel, "cpu")
    for mib in MIB:
        whole = torch.randn(mib << 18)
        for kind, issue in ISSUE.items():
            sent = whole[: whole.numel() // processes] if kind == "all-gather" else whole
            issue(sent, mesh.tp)
            taken = []
            for _ in range(REPEATS):
                mesh.barrier()
                begun = time.perf_counter()
                issue(sent, mesh.tp)
                mesh.barrier()
                taken.append(time.perf_counter() - begun)
            seconds = statistics.median(taken)
            sent_bytes = (mib << 20) * (processes - 1) / processes * (2 if kind == "all-reduce" else 1)
            if mesh.is_main:
                print(
                    f"{processes:3} {kind:15} {mib:3} MiB {1e3 * seconds:8.1f} ms {8e-6 * sent_bytes / mbit / seconds:6.2f}"
                )
    close_mesh()


@contextlib.contextmanager
def hosts(count: int, mbit: float) -> Iterator[list[str]]:
    """Creates `count` network namespaces and yields their names; host i has the address 10.214.7.(i + 1)."""
    names = [NAME.format(i) for i in range(count)]
    try:
        ip("link", "add", BRIDGE, "type", "bridge")
        ip("link", "set", BRIDGE, "up")
        for i, name in enumerate(names):
            ip("netns", "add", name)
            ip("link", "add", f"boostv{i}", "type", "veth", "peer", "name", WIRE, "netns", name)
            ip("link", "set", f"boostv{i}", "master", BRIDGE, "up")
            ip("-n", name, "addr", "add", f"10.214.7.{i + 1}/24", "dev", WIRE)
            for device in (WIRE, "lo"):
                ip("-n", name, "link", "set", device, "up")
            bucket = ("rate", f"{mbit:.0f}mbit", "burst", "128kb", "latency", "50ms")
            ip("netns", "exec", name, "tc", "qdisc", "add", "dev", WIRE, "root", "tbf", *bucket)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)
        subprocess.run(["ip", "link", "del", BRIDGE], check=False)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, default=300.0, help="send rate per process, Mbit/s (default 300)")
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4, 8], metavar="P", help="default 2 4 8")
    args = parser.parse_args()
    if "RANK" in os.environ:
        measure(args.mbit)
        return 0
    for count in args.processes:
        with hosts(count, args.mbit) as names:
            common = {"WORLD_SIZE": str(count), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
            common |= {"MASTER_ADDR": "10.214.7.1", "MASTER_PORT": "29400", "GLOO_SOCKET_IFNAME": WIRE}
            command = [sys.executable, "-m", "benchmarks.collectives", "--mbit", str(args.mbit)]
            started = [
                subprocess.Popen(["ip", "netns", "exec", name, *command], env=os.environ | common | {"RANK": str(rank)})
                for rank, name in enumerate(names)
            ]
            codes = [process.wait() for process in started]
            if any(codes):
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
