"""Emulated hosts: told apart, limited, joined with each other only, and gone afterwards with their processes."""

import subprocess

import pytest

from benchmarks.experiments import hosts
from benchmarks.experiments.hosts import why_no_hosts


def namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


def test_hosts_reach_each_other_and_end_with_their_processes() -> None:
    if reason := why_no_hosts(limited=True):
        pytest.skip(reason)
    with hosts.hosts(3) as found:
        for host in found:
            host.limit(100)
            host.limit(None)
            assert host.received() >= 0 and host.name in namespaces()
        assert len({host.address for host in found}) == 3
        left = subprocess.Popen(found[1].command("sleep", "600"))
        serve = "import socket; s = socket.create_server(('', 5000)); print('up', flush=True); s.accept()[0].sendall(b'hello')"
        server = subprocess.Popen(found[2].command("python3", "-c", serve), stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None and server.stdout.readline() == "up\n"
        call = f"import socket; print(socket.create_connection(('{found[2].address}', 5000)).recv(9).decode())"
        call_words = found[0].command("python3", "-c", call)
        said = subprocess.run(call_words, capture_output=True, text=True, timeout=60, check=True)
        assert said.stdout == "hello\n" and server.wait(60) == 0
        assert found[2].received() > 0
    server.stdout.close()
    assert left.wait(60) == -9
    assert not any(found[0].name.rpartition("-")[0] in line for line in namespaces().splitlines())
