"""Emulates hosts with network namespaces, which are joined by a switch. Each has its own addresses, loopback and send rate.

Processes on one machine communicate by copying memory on their own cores, so communication cannot overlap with
computation. A rate-limited link takes time without keeping a core busy. Needs root (or CAP_NET_ADMIN), `ip` and `tc` (iproute2).
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
"""Burst size of the token bucket. A burst of 1 MB would exempt small messages from the limit."""

BRIDGE = "switch"
"""Name of the bridge inside its namespace."""

LATENCY = "50ms"
"""Maximum time a packet waits in the token bucket's queue."""


@dataclass
class Host:
    """One emulated host, a network namespace."""

    name: str
    wire: str
    """Name of its network interface."""
    address: str

    def command(self, *words: str) -> list[str]:
        """Wraps a command line so that it runs on this host."""
        return ["ip", "netns", "exec", self.name, *words]

    def limit(self, mbit: float | None) -> None:
        """Limits the host's send rate to `mbit` Mbit/s (None: unlimited)."""
        with contextlib.suppress(subprocess.CalledProcessError):  # no limit was set
            _run(*self.command("tc", "qdisc", "del", "dev", self.wire, "root"))
        if mbit is not None:
            bucket = ("rate", f"{mbit:.0f}mbit", "burst", BURST, "latency", LATENCY)
            _run(*self.command("tc", "qdisc", "add", "dev", self.wire, "root", "tbf", *bucket))

    def received(self) -> int:
        """Bytes received so far."""
        return int(_run(*self.command("cat", f"/sys/class/net/{self.wire}/statistics/rx_bytes")).stdout)


@functools.cache
def why_no_hosts(limited: bool = False) -> str | None:
    """Why this machine cannot create network namespaces (with a rate limit if `limited`), or None if it can."""
    if sys.platform != "linux":
        return f"network namespaces need Linux; this is {sys.platform}"
    for tool in ("ip", "tc") if limited else ("ip",):
        if shutil.which(tool) is None:
            return f"needs `{tool}` (package iproute2)"
    try:
        with hosts(2) as found:
            if limited:
                found[0].limit(1000)
            return None
    except subprocess.CalledProcessError as error:
        return f"`{' '.join(error.cmd)}` is not permitted: {' '.join(error.stderr.split())}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"network namespaces do not work on this machine: {error}"


@contextlib.contextmanager
def hosts(count: int) -> Iterator[tuple[Host, ...]]:
    """Context manager that creates `count` hosts (at most 200), joined by a bridge in a separate namespace, so interfaces and
    addresses cannot conflict with this machine's. On exit, kills all processes on the hosts and deletes the namespaces."""
    run = secrets.token_hex(3)  # interface names have at most 15 characters
    found = tuple(Host(f"boost-{run}-{i}", f"bt{run}v{i}", f"10.213.7.{i + 1}") for i in range(count))
    switch = f"boost-{run}-switch"
    try:
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", BRIDGE, "type", "bridge")
        _run("ip", "-n", switch, "link", "set", BRIDGE, "up")
        for i, host in enumerate(found):
            _run("ip", "netns", "add", host.name)
            ends = ("name", host.wire, "netns", host.name), ("name", f"port{i}", "netns", switch)
            _run("ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1])
            _run("ip", "-n", switch, "link", "set", f"port{i}", "master", BRIDGE, "up")
            _run("ip", "-n", host.name, "address", "add", f"{host.address}/24", "dev", host.wire)
            for device in ("lo", host.wire):
                _run("ip", "-n", host.name, "link", "set", device, "up")
        yield found
    finally:
        for name in (*(host.name for host in found), switch):
            _remove(name)


def _remove(name: str) -> None:
    # Orphaned processes are no longer our children, but they are still in the namespace.
    with contextlib.suppress(subprocess.CalledProcessError):
        for pid in _run("ip", "netns", "pids", name).stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
    with contextlib.suppress(subprocess.CalledProcessError):
        _run("ip", "netns", "delete", name)


def _run(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(words, capture_output=True, text=True, check=True, timeout=300)
