"""Two network namespaces as two hosts: separate addresses and loopbacks, and one wire between them that counts bytes.

    with two_nodes() as nodes:
        agents = [node.torchrun(nodes[0], words, nproc=2) for node in nodes]

Each node runs a real torchrun in its own session, which can be killed with all its children; only its imports are not repeated. On
exit, the context manager kills all processes and deletes the namespaces. The nodes share the file system, as training requires.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.experiments.hosts import Host, hosts
from boost.train.metrics import read_metrics
from tests.train.commands import ForkedPython, boost_command
from tests.train.runs import losses as losses

PORT = 29400
"""Always free in a new namespace."""
CLONE_NEWNET = 0x40000000
FLOAT64 = {"param_dtype": "float64", "compute_dtype": "float64"}
LIMIT_S = 900
"""Only prevents endless hangs: with other work, starting four processes takes more than a minute."""


@dataclass
class Agent:
    """A torchrun or another command, and the files for its output and its processes' output."""

    process: ForkedPython

    def wait(self, timeout: float) -> int:
        """Returns the exit code. Fails with the output if the process does not exit within `timeout` seconds."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"torchrun still runs after {timeout} s:\n{self.said()}") from None

    def said(self) -> str:
        return "".join(self.process.said())

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

        In both namespaces, the name of this machine means a loopback address. So everything that is found by the
        name must be set: the rendezvous host, this node's address, and gloo's interface.
        """
        environment = self.environment() | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": str(int(own_store))}
        options = self.options(first, nproc, max_restarts)
        return self.started(torchrun, [*options, "-m", "boost.cli.main", *words], environment)

    def launch(self, first: "Node", words: list[str], nproc: int, max_restarts: int = 0) -> Agent:
        """Starts `boost launch ... -- WORDS` instead."""
        options = self.options(first, nproc, max_restarts)
        return self.started(boost_command, ["launch", *options, "--", *words], self.environment())

    def options(self, first: "Node", nproc: int, max_restarts: int) -> list[str]:
        return [
            *("--nnodes", "2", "--nproc-per-node", str(nproc), "--max-restarts", str(max_restarts)),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{first.address}:{PORT}", "--rdzv-id", "test"),
            *("--rdzv-conf", f"is_host={int(self is first)},read_timeout=600", "--local-addr", self.address),
        ]

    def environment(self) -> dict[str, str]:
        return os.environ | {"GLOO_SOCKET_IFNAME": self.wire, "OMP_NUM_THREADS": "1"}

    def started(self, function: Callable[[list[str]], int], words: list[str], environment: Mapping[str, str]) -> Agent:
        """Calls `function(words)` in a process on this host, until the test ends."""
        self.agents.append(Agent(ForkedPython(on_host, (self.name, function, words), environment)))
        return self.agents[-1]

    def coordinate(self) -> Agent:
        """Starts `boost coordinate`."""
        return self.started(boost_command, ["coordinate"], os.environ)

    def replica(
        self, number: int, coordinator: "Node", words: list[str], nproc: int = 1, max_restarts: int = 0
    ) -> Agent:
        """Starts `boost launch` of `nproc` processes as one replica of a run with in-step recovery."""
        command = [
            "launch",
            *("--nproc-per-node", str(nproc), "--max-restarts", str(max_restarts), "--monitor-interval", "0.2"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{PORT + 20 + number}", "--rdzv-id", str(number)),
            *("--rdzv-conf", "is_host=1", "--local-addr", "127.0.0.1", "--", *words),
        ]
        environment = os.environ | {"GLOO_SOCKET_IFNAME": self.wire, "OMP_NUM_THREADS": "1"}
        environment |= {"BOOST_REPLICA": str(number), "BOOST_COORDINATOR": f"{coordinator.address}:29410"}
        return self.started(boost_command, command, environment)

    def connect(self, on: bool) -> None:
        """Connects or disconnects the wire."""
        subprocess.run(self.command("ip", "link", "set", self.wire, "up" if on else "down"), check=True, timeout=300)


def on_host(name: str, function: Callable[[list[str]], int], words: list[str]) -> int:
    """Enters the network namespace. Call it in a process with only one thread."""
    with open(f"/run/netns/{name}") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    return function(words)


def torchrun(words: list[str]) -> int:
    from torch.distributed.run import main

    main(words)
    return 0


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
                agent.process.close()


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
