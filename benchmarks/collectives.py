"""Times bare collectives over a rate-limited wire with 2, 4 and 8 processes, one per emulated host.

    python -m benchmarks.collectives [--mbit 300] [--processes 2 4 8]        # root, iproute2

A token bucket (128 kB) limits the send rate of every process. Prints the median of five runs in milliseconds, and the bandwidth
utilization: bytes sent by one process / rate / measured time.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time

import torch

from benchmarks.experiments.hosts import hosts
from benchmarks.experiments.wire_report import ISSUE, MIB
from boost.config import load
from boost.parallel.mesh import close_mesh, open_mesh

REPEATS = 5


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, default=300.0, help="send rate per process, Mbit/s (default 300)")
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4, 8], metavar="P", help="default 2 4 8")
    args = parser.parse_args()
    if "RANK" in os.environ:
        measure(args.mbit)
        return 0
    for count in args.processes:
        with hosts(count) as found:
            common = {"WORLD_SIZE": str(count), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
            common |= {"MASTER_ADDR": found[0].address, "MASTER_PORT": "29400"}
            command = [sys.executable, "-m", "benchmarks.collectives", "--mbit", str(args.mbit)]
            started = []
            for rank, host in enumerate(found):
                host.limit(args.mbit)
                own = {"RANK": str(rank), "GLOO_SOCKET_IFNAME": host.wire}
                started.append(subprocess.Popen(host.command(*command), env=os.environ | common | own))
            codes = [process.wait() for process in started]
            if any(codes):
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
