"""Two network namespaces as two hosts: separate addresses and loopbacks, and one wire between them that counts bytes.

    with two_nodes() as nodes:
        agents = [node.torchrun(nodes[0], words, nproc=2) for node in nodes]

Each node runs a real torchrun in its own session, which can be killed with all its children. On exit, the context manager kills
all processes and deletes the namespaces. The nodes share the file system, as training requires.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.experiments.hosts import Host, hosts
from boost.train.metrics import read_metrics

PORT = 29400
"""Always free in a new namespace."""
FLOAT64 = {"param_dtype": "float64", "compute_dtype": "float64"}
LIMIT_S = 900
"""Only against hanging for ever: beside other work a start of four processes takes a minute and more."""


@dataclass
class Agent:
    """A torchrun, and the file for its output and that of its processes (a pipe could fill up)."""

    process: subprocess.Popen[bytes]
    output: Path

    def wait(self, timeout: float) -> int:
        """Returns the exit code. Fails with the output if the process does not exit within `timeout` seconds."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"torchrun still runs after {timeout} s:\n{self.said()}") from None

    def said(self) -> str:
        return self.output.read_text(errors="replace")

    def workers(self) -> list[int]:
        """Process IDs of torchrun's workers, by local rank."""
        found = subprocess.run(
            ["pgrep", "-P", str(self.process.pid), "-f", "boost.cli.main"], capture_output=True, text=True
        )
        return [int(line) for line in found.stdout.split()]

    def kill(self) -> None:
        """Kills torchrun and all its children, as the loss of a node does. torchrun starts workers in separate sessions."""
        for pid in (*self.workers(), self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(300)


@dataclass
class Node(Host):
    """One host and its processes."""

    agents: list[Agent] = field(default_factory=list)

    def torchrun(
        self, first: "Node", words: list[str], nproc: int, max_restarts: int = 0, own_store: bool = False
    ) -> Agent:
        """Starts `torchrun ... -m boost.cli.main WORDS` as one of two nodes that meet at `first`.

        `own_store`: as in examples/kubernetes.yaml, processes do not use the store of their torchruns.

        The name of this machine means a loopback address to both namespaces, so that everything which is found by the
        name has to be said: who hosts the meeting, this node's address, and gloo's interface.
        """
        command = [
            *self.command(sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes", "2", "--nproc-per-node", str(nproc), "--max-restarts", str(max_restarts)),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{first.address}:{PORT}", "--rdzv-id", "test"),
            *("--rdzv-conf", f"is_host={int(self is first)},read_timeout=600", "--local-addr", self.address),
            *("-m", "boost.cli.main", *words),
        ]
        environment = os.environ | {"GLOO_SOCKET_IFNAME": self.wire, "OMP_NUM_THREADS": "1"}
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = str(int(own_store))
        return self.started(command, environment)

    def started(self, command: list[str], environment: dict[str, str]) -> Agent:
        """Runs a command on this host until the test ends."""
        with tempfile.NamedTemporaryFile(prefix=f"{self.name}-", delete=False) as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
        self.agents.append(Agent(process, Path(output.name)))
        return self.agents[-1]

    def coordinate(self) -> Agent:
        """Starts `boost coordinate`."""
        return self.started(self.command(sys.executable, "-m", "boost.cli.main", "coordinate"), dict(os.environ))

    def replica(
        self, number: int, coordinator: "Node", words: list[str], nproc: int = 1, max_restarts: int = 0
    ) -> Agent:
        """Starts a torchrun of `nproc` processes as one replica of a run with in-step recovery."""
        command = [
            *self.command(sys.executable, "-m", "torch.distributed.run"),
            *("--nproc-per-node", str(nproc), "--max-restarts", str(max_restarts), "--monitor-interval", "0.2"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{PORT + 20 + number}", "--rdzv-id", str(number)),
            *("--rdzv-conf", "is_host=1", "--local-addr", "127.0.0.1", "-m", "boost.cli.main", *words),
        ]
        environment = os.environ | {"GLOO_SOCKET_IFNAME": self.wire, "OMP_NUM_THREADS": "1"}
        environment |= {"BOOST_REPLICA": str(number), "BOOST_COORDINATOR": f"{coordinator.address}:29410"}
        return self.started(command, environment)

    def connect(self, on: bool) -> None:
        """Connects or disconnects the wire."""
        subprocess.run(self.command("ip", "link", "set", self.wire, "up" if on else "down"), check=True, timeout=300)


@contextlib.contextmanager
def two_nodes() -> Iterator[tuple[Node, Node]]:
    """Creates two hosts; on exit, kills everything that runs on them."""
    with hosts(2) as found:
        nodes = tuple(Node(host.name, host.wire, host.address) for host in found)
        try:
            yield nodes[0], nodes[1]
        finally:
            for agent in (agent for node in nodes for agent in node.agents):
                agent.kill()
                agent.output.unlink()


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(run / "metrics.jsonl") if line["kind"] == "step"]


def wait_for(agents: list[Agent], condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline and all(agent.process.poll() is None for agent in agents):
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError("waited in vain:\n" + "\n".join(agent.said() for agent in agents))


def wait_for_step(agents: list[Agent], run: Path, step: int) -> None:
    """Waits until metrics.jsonl has `step`."""
    metrics = run / "metrics.jsonl"
    wait_for(agents, lambda: metrics.exists() and any(line["step"] >= step for line in read_metrics(metrics)))
