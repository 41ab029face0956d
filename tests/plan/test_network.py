"""How process groups are spread over nodes, and the cost of their collectives."""

import itertools

import pytest

from boost.config.schema import ParallelConfig
from boost.config.traffic import Collective
from boost.errors import ConfigError
from boost.plan.hardware import load_hardware
from boost.plan.network import Span, seconds, span


@pytest.mark.parametrize(
    ("axis", "mesh", "per_node", "expected"),
    [
        ("tp", (4, 1, 1), 4, Span(4, 4)),
        ("tp", (4, 2, 4), 4, Span(4, 4)),
        ("tp", (8, 1, 1), 4, Span(8, 4)),
        ("tp", (3, 1, 1), 4, Span(3, 3)),
        ("tp", (3, 1, 2), 4, Span(3, 1)),  # the second group has one process on the first node
        ("tp", (2, 1, 4), 8, Span(2, 2)),
        ("dp", (4, 1, 4), 4, Span(4, 1)),
        ("dp", (2, 1, 4), 8, Span(4, 4)),
        ("dp", (2, 1, 8), 8, Span(8, 4)),
        ("dp", (8, 1, 2), 8, Span(2, 1)),
        ("dp", (1, 2, 4), 4, Span(4, 4)),
        ("replicas", (2, 1, 4), 8, Span(8, 8)),
        ("replicas", (4, 1, 4), 8, Span(16, 8)),
        ("replicas", (2, 2, 2), 4, Span(4, 4)),
        ("pp", (4, 2, 1), 8, Span(2, 2)),
        ("pp", (4, 2, 1), 4, Span(2, 1)),
        ("pp", (2, 4, 1), 4, Span(2, 1)),  # the second stage's neighbor is on the next node
        ("world", (4, 2, 2), 8, Span(16, 8)),
        ("world", (2, 1, 1), 8, Span(2, 2)),
    ],
)
def test_spans(axis: str, mesh: tuple[int, int, int], per_node: int, expected: Span) -> None:
    tp, pp, dp = mesh
    found = span(axis, ParallelConfig(tp=tp, pp=pp, dp=dp, layout="btp"), per_node)
    assert found == expected
    assert found.inside == (found.per_node == found.processes)


def reduced(elements: int, processes: int, axis: str = "tp", kind: str = "all-reduce") -> Collective:
    return Collective("forward", kind, (elements,), "bfloat16", processes, axis=axis)


@pytest.mark.parametrize("name", ["a100-80g", "h100-80g", "b200-180g"])
@pytest.mark.parametrize("kind", ["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "send"])
@pytest.mark.parametrize("mesh", [(4, 1), (16, 1), (2, 16)])
def test_more_bytes_take_longer(name: str, kind: str, mesh: tuple[int, int]) -> None:
    hardware, parallel = load_hardware(name), ParallelConfig(tp=mesh[0], dp=mesh[1])
    times = [seconds(reduced(2**power, mesh[0], "tp", kind), parallel, hardware) for power in range(4, 31)]
    assert all(a < b for a, b in itertools.pairwise(times))
    assert times[0] >= hardware.node.latency_us * 1e-6


def test_a_node_is_faster_than_the_network() -> None:
    hardware = load_hardware("h100-80g")
    inside = seconds(reduced(2**26, 8), ParallelConfig(tp=8), hardware)
    across = seconds(reduced(2**26, 8, "dp"), ParallelConfig(dp=8, tp=8), hardware)
    assert across > 5 * inside


def test_processes_of_a_node_send_over_all_of_its_ports() -> None:
    """16 processes on two nodes of eight use eight ports of 45 GB/s per node; on 16 nodes they use one each."""
    hardware = load_hardware("h100-80g")
    large = 2**32
    together = seconds(reduced(large, 16), ParallelConfig(tp=16), hardware)
    apart = seconds(reduced(large, 16, "dp"), ParallelConfig(tp=8, dp=16), hardware)
    sent = reduced(large, 16).sent_bytes
    assert sent / together / 1e9 == pytest.approx(8 * 45, rel=0.02)
    assert sent / apart / 1e9 == pytest.approx(45, rel=0.02)


def test_a_port_does_not_outrun_the_node() -> None:
    """However many ports there are, all traffic of a process goes over its own link first."""
    hardware = load_hardware("a100-80g")
    fast = hardware.model_copy(update={"network": hardware.network.model_copy(update={"gb_s": 200.0})})
    large = reduced(2**32, 8)
    assert large.sent_bytes / seconds(large, ParallelConfig(tp=8), fast) / 1e9 < hardware.node.gb_s


def test_more_nodes_take_longer_even_for_a_byte() -> None:
    """A gather is a ring: one hop per additional process, 9.6 us between nodes and 3.4 us within; an all-reduce is a tree."""
    hardware = load_hardware("h100-80g")

    def of(nodes: int, kind: str) -> float:
        return 1e6 * seconds(
            reduced(2**4, 8 * nodes, "dp", kind), ParallelConfig(layout="single", dp=8 * nodes), hardware
        )

    assert of(64, "all-gather") - of(2, "all-gather") == pytest.approx(62 * (9.6 + 7 * 3.4), rel=1e-3)
    assert of(64, "all-reduce") - of(2, "all-reduce") == pytest.approx(2 * 5 * 9.6, rel=1e-3)
    assert of(2, "all-gather") == pytest.approx(45, rel=1e-2)


def test_a_profile_of_one_process_has_no_link_speed() -> None:
    link = load_hardware("a100-80g").node.model_copy(update={"known": False})
    with pytest.raises(ConfigError, match="calibrated with one process and has no link speed for 2 processes"):
        link.seconds("all-reduce", "float32", 1024, 1024, 2)
