"""Hardware profiles: all load, cite their sources, are ordered plausibly, and match measurements."""

import itertools
import math
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import tomli_w
import torch
import torch.distributed as dist

from boost.config.schema import ParallelConfig
from boost.config.traffic import Collective
from boost.errors import ConfigError
from boost.parallel import mesh
from boost.parallel.mesh import mesh_of, temporary_groups
from boost.plan.hardware import (
    QUANTITIES,
    GemmSpeed,
    Hardware,
    Link,
    SiteLink,
    Span,
    Speeds,
    collective_seconds,
    communicators,
    link_of,
    load_hardware,
    names,
    origin,
    profile_of,
    provenance_words,
    seconds_at,
    span,
)
from boost.plan.work import ATTENTION, ATTENTION_BACKWARD, STREAM, Work, gemm, moved
from tests.distributed import run_distributed

MIB = 2**20

GEMMS: dict[str, Any] = {  # (m, n, k): TFLOP/s. Sources are those of the profiles.
    "a100-80g": {
        (8192, 8192, 8192): 254, (4096, 4096, 4096): 228, (2048, 2048, 2048): 221.8, (1024, 1024, 1024): 119.4,
        (802816, 192, 768): 157.8, (1024, 2145, 1024): 132.8, (6144, 12288, 12288): 250.8, (16384, 16384, 16384): 256.5,
        (1024, 10240, 5120): 271.2,
    },
    "h100-80g": {
        (4096, 4096, 4096): 808, (256, 4096, 4096): 412, (512, 4096, 4096): 644, (1024, 4096, 4096): 738,
        (2048, 4096, 4096): 779, (4096, 256, 4096): 376, (4096, 512, 4096): 650, (4096, 1024, 4096): 738,
        (4096, 2048, 4096): 758, (4096, 4096, 512): 543, (4096, 4096, 1024): 677, (4096, 4096, 2048): 739,
        (256, 4096, 1024): 225, (1024, 4096, 1024): 490, (2048, 4096, 1024): 594, (256, 4096, 256): 78,
        (1024, 4096, 256): 210, (2048, 1024, 2048): 523, (2048, 2048, 1024): 494, (1024, 1024, 4096): 470,
    },
    "b200-180g": {
        (4096, 4096, 4096): 1417, (8192, 8192, 8192): 1610, (256, 4096, 4096): 651, (4096, 256, 4096): 645,
        (4096, 512, 4096): 991, (4096, 1024, 4096): 1205, (4096, 2048, 4096): 1344, (4096, 4096, 256): 515,
        (4096, 4096, 512): 805, (4096, 4096, 1024): 1076, (4096, 4096, 2048): 1278, (256, 4096, 1024): 292,
        (4096, 256, 1024): 284, (4096, 512, 1024): 491, (4096, 1024, 1024): 716, (4096, 2048, 1024): 914,
        (256, 2048, 4096): 394, (4096, 2048, 2048): 1170, (2048, 2048, 2048): 1006,
    },
    "rtx4090-24g": {
        (1024, 1024, 1024): 126.8, (2048, 2048, 2048): 164.8, (4096, 4096, 4096): 151.5, (8192, 8192, 8192): 160.2,
        (10240, 10240, 10240): 158.5,
    },
}  # fmt: skip

ALONE = {"a100-80g": (0.87, 0.12), "h100-80g": (0.94, 0.09), "b200-180g": (0.74, 0.09), "rtx4090-24g": (0.97, 0.06)}
"""(fraction of peak of a GEMM that is timed in isolation, below the power limit; allowed mean error). For H100 it differs from the
profile, which describes sustained training."""

# (processes, {MiB: GB/s sent by one process, nccl-tests' bus bandwidth}, allowed mean error)
ALL_REDUCES: dict[str, Any] = {
    "a100-80g": (4, {1: 42, 64: 169, 1024: 205}, 0.12),
    "a100-80g-8": (8, {1: 36, 4: 71, 8: 90, 16: 109, 32: 133, 64: 167, 128: 174, 256: 214, 1024: 228}, 0.06),
    "h100-80g": (8, {1: 44, 8: 172, 16: 234, 64: 362, 256: 423, 1024: 466}, 0.05),
    "h200-141g": (8, {1: 40, 4: 107, 8: 155.5, 16: 220, 32: 276, 64: 346.5, 128: 402, 256: 436, 1024: 464}, 0.08),
    "b200-180g": (8, {64: 420, 16384: 839}, 0.05),
}

MEMORY_GIB = {"a100-80g": 79.25, "h100-80g": 79.18, "h200-141g": 139.80, "b200-180g": 178.35}


@pytest.mark.parametrize("name", names())
def test_profiles_load_and_say_where_they_come_from(name: str) -> None:
    hardware = load_hardware(name)
    assert len(hardware.sources) >= 3
    assert hardware.title
    for dtype in ("bfloat16", "float32", "float64"):
        speeds = hardware.speeds
        assert 0 < speeds.seconds(gemm(4096, 4096, 4096, dtype)) < 1
        for kernel in (ATTENTION, ATTENTION_BACKWARD):
            assert 0 < speeds.seconds(Work(kernel, dtype, (1, 8, 8, 4096, 128), 10**12, 10**8)) < 10
    assert Hardware.model_validate_json(hardware.model_dump_json()) == hardware


LINKS = {"PCIe 4": 32, "PCIe 5": 63, "NVLink 3": 300, "NVLink 4": 450, "NVLink 5": 900, "Infinity Fabric": 448}
"""One-way GB/s of all of a GPU's links within a node, from datasheets."""


@pytest.mark.parametrize("name", names())
def test_no_profile_exceeds_its_datasheet(name: str) -> None:
    hardware = load_hardware(name)
    speeds, large = hardware.speeds, 10**12
    for dtype, gemm_speed in speeds.gemm.items():
        assert gemm_speed.flops_per_s(large, large, large) <= gemm_speed.tflops * 1e12
        for attention in speeds.attention[dtype]:
            assert max(attention.forward, attention.backward) <= gemm_speed.tflops
    assert large / speeds.seconds(moved(STREAM, large // 2, 1, "bfloat16")) <= speeds.memory_gb_s * 1e9
    words = {
        "NVLink": {"a100": "NVLink 3", "b200": "NVLink 5", "gb200": "NVLink 5"}.get(hardware.architecture, "NVLink 4")
    }
    words["PCIe"] = "PCIe 5" if hardware.architecture == "h100-pcie" else "PCIe 4"
    link = LINKS[words.get(hardware.node.name, hardware.node.name)]
    port = re.search(r"one (\d+) Gb/s", hardware.title)
    assert port and hardware.node.gb_s <= link and hardware.network.gb_s <= float(port[1]) / 8
    # A switch that performs the reduction receives a sum once, which counts as 2 (n - 1) / n of its bytes.
    assert all(gb_s <= link * 2 * (n - 1) / n for n, gb_s in hardware.node.all_reduce)


@pytest.mark.parametrize("name", list(MEMORY_GIB))
def test_memory_is_what_cuda_reports(name: str) -> None:
    hardware = load_hardware(name)
    assert hardware.memory_gb * 1e9 == pytest.approx(MEMORY_GIB[name] * 2**30, rel=0.002)
    assert 0.9 * hardware.memory_gb * 1e9 < hardware.usable_bytes < hardware.memory_gb * 1e9


@pytest.mark.parametrize("name", list(GEMMS))
def test_gemms_meet_measured_ones(name: str) -> None:
    fraction, allowed = ALONE[name]
    speeds = load_hardware(name).speeds
    alone = speeds.gemm["bfloat16"].model_copy(update={"fraction": fraction})
    speeds = speeds.model_copy(update={"gemm": {"bfloat16": alone}})
    errors = [
        math.log(2 * m * n * k / speeds.seconds(gemm(m, n, k, "bfloat16")) / (tflops * 1e12))
        for (m, n, k), tflops in GEMMS[name].items()
    ]
    assert sum(map(abs, errors)) / len(errors) < allowed
    assert max(map(abs, errors)) < 0.33  # worst for the thinnest shape, which is one or two tiles


@pytest.mark.parametrize(
    ("name", "least", "most"), [("a100-80g", 0.80, 0.85), ("h100-80g", 0.57, 0.62), ("b200-180g", 0.69, 0.72)]
)
def test_large_gemms_sustain_what_training_does(name: str, least: float, most: float) -> None:
    speeds = load_hardware(name).speeds
    work = gemm(8192, 8192, 8192, "bfloat16")
    assert least < work.flops / speeds.seconds(work) / (speeds.gemm["bfloat16"].tflops * 1e12) < most


@pytest.mark.parametrize("name", list(ALL_REDUCES))
def test_all_reduces_meet_measured_ones(name: str) -> None:
    processes, table, allowed = ALL_REDUCES[name]
    link = load_hardware(name).node
    errors = []
    for mib, gb_s in table.items():
        sent = 2 * (processes - 1) * mib * MIB // processes
        seconds = link.seconds("all-reduce", "bfloat16", mib * MIB, sent, processes)
        errors.append(abs(math.log(seconds / (sent / (gb_s * 1e9)))))
    assert sum(errors) / len(errors) < allowed
    assert max(errors) < 0.3


def test_switches_add_up_for_all_reduces_only() -> None:
    link = load_hardware("h100-80g").node
    large = 10**10
    for kind, processes, gb_s in (("all-gather", 8, 363), ("all-reduce", 4, 363), ("all-reduce", 8, 479)):
        assert large / link.seconds(kind, "bfloat16", large, large, processes) / 1e9 == pytest.approx(gb_s, rel=0.01)


def test_a_gemm_is_no_faster_than_its_bytes() -> None:
    one = {"float32": GemmSpeed(tflops=1, fraction=1)}
    speeds = Speeds(memory_gb_s=100, memory_fraction=0.5, kernel_us=3, gemm=one, attention={})
    thin = gemm(1000, 1, 1000, "float32")
    assert speeds.seconds(thin) == pytest.approx(thin.bytes / 50e9 + 3e-6)
    thick = gemm(1000, 1000, 1000, "float32")
    assert speeds.seconds(thick) == pytest.approx(2e9 / 1e12 + 3e-6)
    assert speeds.seconds(moved(STREAM, 1000, 3, "float32")) == pytest.approx(12000 / 50e9 + 3e-6)


def test_interpolation_of_measured_points() -> None:
    points = [(1000.0, 10.0), (16000.0, 40.0)]
    assert seconds_at(points, 1000) == pytest.approx(10e-6)
    assert seconds_at(points, 16000) == pytest.approx(40e-6)
    assert seconds_at(points, 4000) == pytest.approx(20e-6)  # halfway in logarithms
    assert seconds_at(points, 1) == pytest.approx(10e-6)
    assert seconds_at(points, 32000) == pytest.approx(80e-6)


@pytest.mark.parametrize("kind", ["all-reduce", "all-gather"])
def test_a_measured_link_is_scaled_to_other_numbers_of_processes(kind: str) -> None:
    link = Link(name="loopback", latency_us=5, gb_s=1, measured={kind: ((100.0, 50.0), (1000.0, 100.0))}, processes=2)
    of_two = link.seconds(kind, "float32", 1000, 500, 2)
    assert of_two == pytest.approx(100e-6)
    assert link.seconds(kind, "float32", 1000, 750, 4) == pytest.approx(1.5 * of_two)
    assert link.seconds("reduce-scatter", "float32", 1000, 500, 2) == pytest.approx(5e-6 + 500 / 1e9)


def test_the_first_word_is_enough_and_unknown_names_suggest_the_nearest(tmp_path: Path) -> None:
    assert load_hardware("A100") == load_hardware("a100-80g")
    assert load_hardware("h100-pcie") == load_hardware("h100-pcie-80g")
    with pytest.raises(ConfigError, match="did you mean 'h100-80g'"):
        load_hardware("h100_80g")
    with pytest.raises(ConfigError, match="profiles: a100-40g-8, a100-80g"):
        load_hardware("zzzz")
    with pytest.raises(ConfigError, match="no such file; create it with: boost plan calibrate --out '.*/my gpu.toml'$"):
        load_hardware(str(tmp_path / "my gpu.toml"))
    with pytest.raises(ConfigError, match="float16"):
        load_hardware("a100-80g").speeds.seconds(Work("gemm", "float16", (1, 8, 8, 8), 1024, 384))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("title = ", "is not valid TOML"),
        ('like = "a100"', "like = 'a100' must be a built-in profile"),
        ('like = "a100-80g"\nper_nodes = 2', "per_nodes"),
        ('like = "a100-80g"\nper_node = 0', "per_node"),
        ('like = "a100-80g"\n[title]\nx = 1', "title"),
    ],
)
def test_profiles_that_cannot_be_read(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=says):
        load_hardware(str(path))


MEASURED = ("a100", "h100", "b200")


@pytest.mark.parametrize("name", [name for name in names() if load_hardware(name).architecture not in MEASURED])
def test_what_is_estimated_says_so(name: str) -> None:
    hardware = load_hardware(name)
    assert hardware.title.endswith("(estimate)")
    origins = [origin(hardware, field) for field in ("speeds.attention.bfloat16", "speeds.memory_gb_s")]
    assert origins == ["estimate", "datasheet"]


def test_every_number_has_an_origin(tmp_path: Path) -> None:
    """The longest matching prefix wins; numbers in a user's file are 'yours'."""
    known = load_hardware("h100-80g")
    assert [origin(known, field) for field in ("speeds.gemm.bfloat16", "speeds.gemm.float32", "speeds.memory_gb_s", "host_us")] == [
        "published", "estimate", "datasheet", "estimate"
    ]  # fmt: skip
    assert origin(known, "network.gb_s") == "published" and origin(known, "network.half_mb") == "estimate"
    path = tmp_path / "mine.toml"
    path.write_text('like = "h100-80g"\nhost_us = 3.0\n[network]\ngb_s = 12.0\n', encoding="utf-8")
    mine = load_hardware(str(path))
    origins = [origin(mine, field) for field in ("host_us", "network.gb_s", "node.gb_s")]
    assert origins == ["yours", "yours", "published"]
    assert "network, launches from your file" in provenance_words(mine)
    whole = known.model_dump(exclude={"provenance"}, exclude_none=True)
    path.write_text(tomli_w.dumps(whole), encoding="utf-8")
    assert {origin(load_hardware(str(path)), field) for field in QUANTITIES} == {"yours"}


@pytest.mark.parametrize(
    ("name", "gigabytes", "profile"),
    [
        ("NVIDIA H100 80GB HBM3", 85, "h100-80g"),
        ("NVIDIA A100-SXM4-80GB", 85, "a100-80g"),
        ("NVIDIA A100-SXM4-40GB", 42, "a100-40g-8"),
        ("NVIDIA GeForce RTX 4090", 25, None),
        ("NVIDIA H200", 150, "h200-141g"),
        ("NVIDIA H100 PCIe", 85, "h100-pcie-80g"),
        ("NVIDIA GB200", 198, "gb200-186g"),
        ("NVIDIA L40S", 48, "l40s-48g"),
    ],
)
def test_the_profile_of_a_gpu(name: str, gigabytes: int, profile: str | None) -> None:
    assert profile_of(name, int(gigabytes * 1e9)) == profile


@pytest.mark.parametrize("name", names())
def test_peaks_of_profiles_and_of_training_are_one_table(name: str) -> None:
    """No profile sets its own peak; it gets the one used for MFU in training."""
    from boost.config.gpus import gpu_peaks
    from boost.plan.hardware import PROFILES

    assert "tflops" not in (PROFILES / f"{name}.toml").read_text()
    gemm = load_hardware(name).speeds.gemm
    peaks = [(peak.bf16, peak.fp32, peak.fp64) for peak in gpu_peaks()]
    assert tuple(gemm[dtype].tflops for dtype in ("bfloat16", "float32", "float64")) in peaks


@pytest.mark.parametrize(
    ("axis", "mesh", "per_node", "expected"),
    [
        ("tp", (4, 1, 1), 4, Span(4, 4)),
        ("tp", (4, 2, 4), 4, Span(4, 4)),
        ("tp", (8, 1, 1), 4, Span(8, 4)),
        ("tp", (3, 1, 1), 4, Span(3, 3)),
        ("tp", (3, 1, 2), 4, Span(3, 1)),  # the second group has one process on the first node
        ("dp", (4, 1, 4), 4, Span(4, 1)),
        ("dp", (2, 1, 4), 8, Span(4, 4)),
        ("dp", (2, 1, 8), 8, Span(8, 4)),
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
    actual = span(axis, ParallelConfig(tp=tp, pp=pp, dp=dp, layout="btp"), per_node)
    assert actual == expected
    assert actual.inside == (actual.per_node == actual.processes)


def reduced(elements: int, processes: int, axis: str = "tp", kind: str = "all-reduce") -> Collective:
    return Collective("forward", kind, (elements,), "bfloat16", processes, axis=axis)


@pytest.mark.parametrize("name", ["a100-80g", "h100-80g", "b200-180g"])
@pytest.mark.parametrize("kind", ["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "send"])
@pytest.mark.parametrize("mesh", [(4, 1), (16, 1), (2, 16)])
def test_more_bytes_take_longer(name: str, kind: str, mesh: tuple[int, int]) -> None:
    hardware, parallel = load_hardware(name), ParallelConfig(tp=mesh[0], dp=mesh[1])
    times = [collective_seconds(reduced(2**power, mesh[0], "tp", kind), parallel, hardware) for power in range(4, 31)]
    assert all(a < b for a, b in itertools.pairwise(times))
    assert times[0] >= hardware.node.latency_us * 1e-6


def test_processes_of_a_node_send_over_all_of_its_ports() -> None:
    """16 processes on two nodes of eight use eight ports of 45 GB/s per node; on 16 nodes they use one each."""
    hardware = load_hardware("h100-80g")
    large = 2**32
    together = collective_seconds(reduced(large, 16), ParallelConfig(tp=16), hardware)
    apart = collective_seconds(reduced(large, 16, "dp"), ParallelConfig(tp=8, dp=16), hardware)
    sent = reduced(large, 16).sent_bytes
    assert sent / together / 1e9 == pytest.approx(8 * 45, rel=0.02)
    assert sent / apart / 1e9 == pytest.approx(45, rel=0.02)


def test_a_port_does_not_outrun_the_node() -> None:
    """However many ports there are, all traffic of a process goes over its own link first."""
    hardware = load_hardware("a100-80g")
    fast = hardware.model_copy(update={"network": hardware.network.model_copy(update={"gb_s": 200.0})})
    large = reduced(2**32, 8)
    assert large.sent_bytes / collective_seconds(large, ParallelConfig(tp=8), fast) / 1e9 < hardware.node.gb_s


def test_more_nodes_take_longer_even_for_a_byte() -> None:
    """A gather is a ring: one hop per additional process, 9.6 us between nodes and 3.4 us within; an all-reduce is a tree."""
    hardware = load_hardware("h100-80g")

    def of(nodes: int, kind: str) -> float:
        parallel = ParallelConfig(layout="single", dp=8 * nodes)
        return 1e6 * collective_seconds(reduced(2**4, 8 * nodes, "dp", kind), parallel, hardware)

    assert of(64, "all-gather") - of(2, "all-gather") == pytest.approx(62 * (9.6 + 7 * 3.4), rel=1e-3)
    assert of(64, "all-reduce") - of(2, "all-reduce") == pytest.approx(2 * 5 * 9.6, rel=1e-3)
    assert of(2, "all-gather") == pytest.approx(45, rel=1e-2)


def test_a_profile_of_one_process_has_no_link_speed() -> None:
    link = load_hardware("a100-80g").node.model_copy(update={"known": False})
    with pytest.raises(ConfigError, match="calibrated with one process and has no link speed for 2 processes"):
        link.seconds("all-reduce", "float32", 1024, 1024, 2)


MESHES = [{"tp": 4}, {"dp": 2, "tp": 2}, {"pp": 2, "tp": 2}, {"pp": 4, "tp": 1}, {"dp": 2, "cp": 2, "tp": 1}]


def groups_of(sizes: dict[str, int]) -> int:
    """Number of process groups in which this process of a mesh communicates. As on GPUs, each axis asks for its own backend;
    otherwise torch would use its default group for an axis of all processes."""
    known = dist.distributed_c10d._world.pg_map
    before = set(known)
    with temporary_groups(), mock.patch.object(mesh, "_backend", return_value="gloo"):
        mesh_of(parallel_of(sizes), torch.device("cpu"))
        return 1 + sum(group.size() > 1 for group in known if group not in before)


def parallel_of(sizes: dict[str, int]) -> ParallelConfig:
    single = {"layout": "single"} if sizes["tp"] == 1 and "cp" not in sizes else {}
    return ParallelConfig.model_validate({**sizes, **single})


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_every_group_of_the_mesh_has_a_communicator(sizes: dict[str, int]) -> None:
    neighbors = {1: 0, 2: 1, 4: 2}[sizes.get("pp", 1)]
    assert run_distributed(4, groups_of, sizes) == [communicators(parallel_of(sizes)) - neighbors] * 4


def test_communicators_take_memory_from_tensors() -> None:
    card = load_hardware("h100-80g")
    assert card.usable_in(ParallelConfig(tp=8)) == card.usable_bytes, "three are part of the reserve"
    assert card.usable_in(ParallelConfig(pp=2, dp=2, tp=2)) == card.usable_bytes - 2_400_000_000


def test_a_site_shares_its_link() -> None:
    """Two sites of a node of eight: 16 replicas send as much over the link as one process, eight groups of two eight times that."""
    hardware = load_hardware("h100-80g")
    sites = hardware.model_copy(update={"site": SiteLink(gb_s=1.0)})
    large, small = reduced(2**30, 16, "dp"), reduced(2**30, 2, "dp")
    one, eight = ParallelConfig(layout="single", dp=16), ParallelConfig(tp=8, dp=2)
    assert collective_seconds(large, one, sites) == pytest.approx(large.sent_bytes / 1e9, rel=0.01)
    assert collective_seconds(small, eight, sites) == pytest.approx(8 * small.sent_bytes / 1e9, rel=0.01)
    assert link_of("dp", one, sites).name == "between sites" and link_of("tp", eight, sites) == hardware.node
    inside = reduced(2**30, 8)
    assert collective_seconds(inside, eight, sites) == collective_seconds(inside, eight, hardware)
    four = hardware.model_copy(update={"site": SiteLink(gb_s=1.0, nodes=2)})
    assert collective_seconds(large, one, four) == collective_seconds(large, one, hardware)
    # A pipeline of two stages sends from all eight devices; one of four stages, from four.
    sent = reduced(2**26, 2, "pp", "send")
    two, four_stages = (collective_seconds(sent, ParallelConfig(tp=16 // pp, pp=pp), sites) for pp in (2, 4))
    assert two == pytest.approx(2 * four_stages, rel=0.01)


def test_sites_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('like = "h100-80g"\n[site]\ngb_s = 1.1\nnodes = 2\n', encoding="utf-8")
    mine = load_hardware(str(path))
    assert mine.per_site == 16 and mine.site is not None and mine.site.latency_us == 1000
    assert origin(mine, "site.gb_s") == "yours" and load_hardware("h100-80g").per_site is None
