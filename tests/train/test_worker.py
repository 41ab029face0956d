"""Setup of the launcher's worker processes."""

import os
import socket

import pytest

from boost.train.worker import stay_on_loopback

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@pytest.fixture(autouse=True)
def _no_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in INTERFACES:
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)


def test_loopback_is_bound_whatever_the_name_of_the_machine_means(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "eth0"), (2, "lo")])
    stay_on_loopback()
    assert [os.environ[name] for name in INTERFACES] == ["lo", "=lo"]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    stay_on_loopback()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth0", "the user's choice"
