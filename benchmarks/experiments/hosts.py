"""Two network namespaces as two hosts: own addresses, own loopback, and one wire between them, whose rate can be set.

Processes on one machine talk through memory, which the same cores copy: communication looks cheap and can never hide. A wire with
a rate takes time that no core has to spend. Needs root (or CAP_NET_ADMIN) and `ip` and `tc` (iproute2).
"""

import contextlib
import functools
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

BURST = "128kb"
"""Of the token bucket. 1 MB would let small messages pass for free."""

LATENCY = "50ms"
"""Longest time that a packet waits in the bucket's queue."""


@dataclass
class Host:
    """One namespace."""

    name: str
    wire: str
    """Its network interface."""
    address: str

    def command(self, *words: str) -> list[str]:
        """A command line that runs on this host."""
        return ["ip", "netns", "exec", self.name, *words]

    def limit(self, mbit: float | None) -> None:
        """Sets the rate of what it sends, Mbit/s; None: as fast as memory."""
        with contextlib.suppress(subprocess.CalledProcessError):  # there is none
            _run(*self.command("tc", "qdisc", "del", "dev", self.wire, "root"))
        if mbit is not None:
            bucket = ("rate", f"{mbit:.0f}mbit", "burst", BURST, "latency", LATENCY)
            _run(*self.command("tc", "qdisc", "add", "dev", self.wire, "root", "tbf", *bucket))

    def received(self) -> int:
        """Bytes that have come over the wire."""
        return int(_run(*self.command("cat", f"/sys/class/net/{self.wire}/statistics/rx_bytes")).stdout)


@functools.cache
def why_no_hosts(limited: bool = False) -> str | None:
    """Why this machine cannot make network namespaces, `limited` ones with a rate; None if it can."""
    if sys.platform != "linux":
        return f"network namespaces are Linux's; this is {sys.platform}"
    for tool in ("ip", "tc") if limited else ("ip",):
        if shutil.which(tool) is None:
            return f"needs `{tool}` (package iproute2)"
    try:
        with two_hosts() as hosts:
            if limited:
                hosts[0].limit(1000)
            return None
    except subprocess.CalledProcessError as error:
        return f"`{' '.join(error.cmd)}` is not permitted here: {' '.join(error.stderr.split())}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"network namespaces do not work here: {error}"


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts. Their addresses can meet no others: the wire has no end outside of the two namespaces. What still runs on them
    is ended with them."""
    run = secrets.token_hex(3)  # names of interfaces have 15 characters at most
    hosts = tuple(Host(f"boost-{run}-{i}", f"bt{run}v{i}", f"10.213.7.{i + 1}") for i in range(2))
    try:
        for host in hosts:
            _run("ip", "netns", "add", host.name)
            _run("ip", "-n", host.name, "link", "set", "lo", "up")
        ends = [("name", host.wire, "netns", host.name) for host in hosts]
        _run("ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for host in hosts:
            _run("ip", "-n", host.name, "address", "add", f"{host.address}/24", "dev", host.wire)
            _run("ip", "-n", host.name, "link", "set", host.wire, "up")
        yield hosts[0], hosts[1]
    finally:
        for host in hosts:
            _remove(host)


def _remove(host: Host) -> None:
    # A process whose parent was killed is nobody's child any more, but is still in the namespace.
    with contextlib.suppress(subprocess.CalledProcessError):
        for pid in _run("ip", "netns", "pids", host.name).stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
    with contextlib.suppress(subprocess.CalledProcessError):
        _run("ip", "netns", "delete", host.name)


def _run(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(words, capture_output=True, text=True, check=True, timeout=300)
