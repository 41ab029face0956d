"""Verdicts on synthetic machines."""

import pytest

from boost.measure.verify.devices import devices_of, facts, free_memory, reachable, same_software
from boost.text import JsonObject
from tests import toy

GPU: JsonObject = {
    "host": "a", "device": "cuda:0", "software": {"torch": "2.13.0", "NCCL": "2.29"}, "memory": 80e9,
    "name": "NVIDIA H100 80GB HBM3", "free": 79e9,
}  # fmt: skip


def test_this_machine_is_described() -> None:
    result = facts(toy.CPU)
    assert same_software([result, result]).verdict == "ok"
    assert "cpu" in devices_of([result]).detail


def test_another_version_on_one_process_fails() -> None:
    other = GPU | {"software": {"torch": "2.12.0", "NCCL": "2.29"}}
    result = same_software([GPU, other])
    assert (result.verdict, result.detail) == ("failed", "torch is 2.13.0 on rank 0 and 2.12.0 on rank 1")


def test_processes_and_their_gpus_by_node() -> None:
    result = devices_of([GPU, GPU | {"device": "cuda:1"}, GPU | {"host": "b"}])
    assert result.verdict == "ok"
    first, second = result.detail.split("; ")
    assert first.startswith("node 0: ranks 0: cuda:0, 1: cuda:1 (NVIDIA H100") and second.startswith("node 1: ranks 2:")
    assert all("host" not in rank for rank in result.numbers["ranks"]), "reports are shared"
    assert devices_of([GPU, GPU | {"name": "NVIDIA A100"}]).verdict == "note"


def test_memory_that_somebody_else_uses_is_noted() -> None:
    assert free_memory([GPU, GPU]).verdict == "ok"
    result = free_memory([GPU, GPU | {"free": 40e9}])
    assert (result.verdict, result.detail) == ("note", "50% of the GPU memory of rank 1 is in use")


@pytest.mark.parametrize(("chosen", "verdict"), [("", "note"), ("eth0", "ok")])
def test_a_name_that_means_its_own_loopback_is_noted(chosen: str, verdict: str) -> None:
    one = {"GLOO_SOCKET_IFNAME": chosen, "NCCL_SOCKET_IFNAME": "", "address": "127.0.1.1", "present": "lo eth0"}
    assert reachable([one, one | {"address": "10.0.0.2"}]).verdict == verdict
