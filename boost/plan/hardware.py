"""Hardware profiles (data files with the achievable speeds of a device and its links, and their sources), and collective costs.

Speeds are achieved speeds, not datasheet peaks: the peak times the fraction that large operations reach, or points measured on the
machine.
"""

import difflib
import functools
import itertools
import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field, ValidationError

from boost.config.gpus import find_peak, gpu_peaks
from boost.config.schema import Config, ParallelConfig, Positive, Section
from boost.config.traffic import ITEMSIZE, Collective
from boost.errors import ConfigError
from boost.plan.datasheet import BASE, tree_of
from boost.plan.work import ATTENTION, ATTENTION_BACKWARD, GEMM, Work
from boost.text import read_toml

PROFILES = Path(__file__).parent / "profiles"
"""Folder with the built-in profiles, `<name>.toml`."""

_TERA, _GIGA, _MICRO = 1e12, 1e9, 1e-6
_RESERVED_COMMUNICATORS = 3
"""Communicators whose memory is part of `reserve_gb`."""

Amount = Annotated[float, Field(ge=0)]
Point = Annotated[tuple[Positive, Positive], Field(strict=False)]
Points = Annotated[tuple[Point, ...], Field(strict=False, min_length=1)]
Triple = Annotated[tuple[Amount, Amount, Amount], Field(strict=False)]

Origin = Literal["calibrated", "yours", "measured", "published", "fitted", "datasheet", "estimate"]
"""calibrated: measured by 'boost plan calibrate'; yours: from your own profile; measured: by us (docs/results.md); published: by
others, cited in `sources`; fitted: to published speeds; datasheet: from the vendor; estimate: our own."""

QUANTITIES = {
    "memory_gb": "memory size",
    "speeds.gemm.bfloat16": "GEMMs",
    "speeds.attention.bfloat16": "attention",
    "speeds.memory_gb_s": "memory bandwidth",
    "node.gb_s": "links in a node",
    "network.gb_s": "network",
    "host_us": "launches",
}
"""The numbers that matter most for predictions, by field."""

_WORDS: dict[Origin, str] = {
    "calibrated": "calibrated",
    "yours": "from your file",
    "measured": "measured by us",
    "published": "measured by others",
    "fitted": "fitted to the public record",
    "datasheet": "from a datasheet",
    "estimate": "estimated",
}


def seconds_at(points: Sequence[tuple[float, float]], size: float) -> float:
    """Seconds for `size` bytes, interpolated from measured (bytes, microseconds) points sorted by bytes.

    Log-log interpolation between points; constant time below the first, constant speed beyond the last.
    """
    first, last = points[0], points[-1]
    if size <= first[0]:
        return first[1] * _MICRO
    if size >= last[0]:
        return last[1] * _MICRO * size / last[0]
    (x0, y0), (x1, y1) = next((a, b) for a, b in itertools.pairwise(points) if a[0] <= size <= b[0])
    share = math.log(size / x0) / math.log(x1 / x0)
    return y0 * (y1 / y0) ** share * _MICRO


class GemmSpeed(Section):
    """GEMM speed in one dtype: tflops * fraction * product over m, n, k of dim / (dim + half)."""

    tflops: Positive
    """Dense peak in TFLOP/s. MFU is relative to it."""
    fraction: Positive
    """Fraction of peak that GEMMs with large dimensions reach."""
    half: Triple = (0.0, 0.0, 0.0)
    """(m, n, k) sizes, each of which halves the speed on its own (partial tiles, prologue and epilogue)."""

    def flops_per_s(self, m: int, n: int, k: int) -> float:
        """Achieved FLOP/s of [m, k] x [k, n]."""
        speed = self.tflops * _TERA * self.fraction
        for dim, half in zip((m, n, k), self.half, strict=True):
            speed *= dim / (dim + half)
        return speed


class AttentionSpeed(Section):
    """Speed of fused causal attention for one head dimension, at sequence lengths of a few thousand tokens.

    FLOPs exclude masked scores: two matmuls in the forward pass, five in the backward pass.
    """

    head_dim: int
    forward: Positive
    """TFLOP/s in the forward pass."""
    backward: Positive
    """TFLOP/s in the backward pass."""
    half: Amount = 0.0
    """Sequence length in tokens at which the speed halves."""


class Speeds(Section):
    """Speeds of one device."""

    memory_gb_s: Positive
    """Peak memory bandwidth in GB/s, from the datasheet."""
    memory_fraction: Positive
    """Fraction of `memory_gb_s` that element-wise operations on large tensors reach."""
    probe_us: Amount = 0.0
    """Microseconds that a small fixed workload took during calibration (`boost.measure.speed.Probe`), a reference for
    the machine's speed at that time; 0: unknown."""
    kernel_us: Amount
    """Fixed cost of every kernel on the device, in microseconds."""
    gemm: dict[str, GemmSpeed]
    """GEMM speed by dtype."""
    attention: dict[str, Annotated[tuple[AttentionSpeed, ...], Field(strict=False)]]
    """Attention speeds by dtype; the entry with the nearest head dimension applies."""
    kernels: dict[str, Points] = Field(default_factory=dict)
    """Measured (bytes, microseconds) points by kernel kind or 'kind dtype'. Kernels without points run at memory bandwidth."""

    def gemm_speed(self, dtype: str) -> GemmSpeed:
        """GEMM speed in a dtype. Raises ConfigError if the profile has none."""
        return _of_dtype(self.gemm, dtype)

    def seconds(self, work: Work) -> float:
        """Device seconds for one call. Raises ConfigError if the profile has no speed for its dtype."""
        bandwidth = self.memory_gb_s * _GIGA * self.memory_fraction
        moving = work.bytes / bandwidth
        if work.kernel == GEMM:
            speed = self.gemm_speed(work.dtype)
            _, m, n, k = work.shape
            return max(work.flops / speed.flops_per_s(m, n, k), moving) + self.kernel_us * _MICRO
        if work.kernel in (ATTENTION, ATTENTION_BACKWARD):
            head_dim, tokens = work.shape[4], work.shape[3]
            table = _of_dtype(self.attention, work.dtype)
            at = min(table, key=lambda speed: abs(math.log(speed.head_dim / head_dim)))
            tflops = at.forward if work.kernel == ATTENTION else at.backward
            reached = tflops * _TERA * tokens / (tokens + at.half)
            return max(work.flops / reached, moving) + self.kernel_us * _MICRO
        for name in (f"{work.kernel} {work.dtype}", work.kernel):
            if name in self.kernels:
                return seconds_at(self.kernels[name], work.bytes)
        return moving + self.kernel_us * _MICRO


_T = TypeVar("_T")


def _of_dtype(table: dict[str, _T], dtype: str) -> _T:
    if dtype not in table:
        raise ConfigError(
            f"train.compute_dtype = '{dtype}': this hardware profile has speeds only for {', '.join(table)}"
        )
    return table[dtype]


class Link(Section):
    """An interconnect. A collective takes latency + latency of additional hops + bytes sent by one process / bandwidth."""

    name: str
    """Name, such as NVLink, PCIe, InfiniBand or loopback."""
    latency_us: Amount
    """Latency of a small collective within one node, or over two nodes, in microseconds."""
    hop_us: Amount = 0.0
    """Latency that each additional process adds to a ring, in microseconds."""
    gb_s: Positive
    """GB/s sent by one process in large collectives (nccl-tests' bus bandwidth)."""
    half_mb: Amount = 0.0
    """Message size in MB at which bandwidth reaches two thirds of its peak; small messages get half of the peak."""
    all_reduce: Annotated[tuple[Point, ...], Field(strict=False)] = ()
    """(processes, GB/s) for all-reduces over at least that many processes, if the switch performs the reduction (NVLink SHARP)."""
    measured: dict[str, Points] = Field(default_factory=dict)
    """Measured (payload bytes, microseconds) points for collectives over `processes` processes, by kind or 'kind dtype'."""
    processes: int = 2
    """Group size in the measured collectives."""
    known: bool = True
    """False if the profile was calibrated with one process, so that its link speeds are placeholders."""

    def seconds(self, kind: str, dtype: str, payload: int, sent: int, processes: int, share: float = 1.0) -> float:
        """Seconds for one collective with `payload` bytes, in which each of `processes` processes sends `sent` bytes.

        `share`: number of links that a group's traffic is spread over; a fraction if groups share a link.

        Raises ConfigError if the profile has no link speeds.
        """
        if not self.known:
            raise ConfigError(
                f"--gpu: this profile was calibrated with one process and has no link speed for {processes} processes; "
                "calibrate with --nproc 2 or more, or fill in its [node] and [network] tables"
            )
        for name in (f"{kind} {dtype}", kind):
            if name in self.measured:
                of_two = seconds_at(self.measured[name], payload)
                return of_two * _rounds(kind, processes) / _rounds(kind, self.processes) / share
        # If the switch performs the reduction, the entry with the largest group size up to `processes` applies.
        reached = [gb_s for least, gb_s in self.all_reduce if kind == "all-reduce" and processes >= least]
        half, on_link = self.half_mb * 1e6, sent / share
        ramp = half * on_link / (on_link + half) if on_link else 0.0
        return self.latency_us * _MICRO + (on_link + ramp) / ((reached[-1] if reached else self.gb_s) * _GIGA)


class SiteLink(Link):
    """The link from a site, such as a building or a cloud region, to other sites. All devices at the site share it."""

    name: str = "between sites"
    latency_us: Amount = 1000.0
    gb_s: Positive
    """GB/s that all devices at a site together send to other sites, such as 1.1 over a 10 Gbit/s link."""
    nodes: Annotated[int, Field(ge=1)] = 1
    """Nodes per site."""


def _rounds(kind: str, processes: int) -> float:
    """Bytes sent by each process per byte of payload."""
    if kind == "send":
        return 1.0
    return (2 if kind == "all-reduce" else 1) * (processes - 1) / processes


class HostTime(Section):
    """Host microseconds per operation, by what is compiled (train.compile). One number in a profile stands for all."""

    none: Amount
    """Nothing is compiled."""
    kernels: Amount
    """Each group of element-wise operations on its own."""
    blocks: Amount
    """Whole blocks."""
    step: Amount
    """At the end of a step, where one launch serves many tensors."""

    def in_pass(self, config: Config, device: str) -> float:
        """For the passes of a micro-batch; 0 if they are one CUDA graph."""
        return 0.0 if config.captures_passes else float(getattr(self, config.compiled_part(device)))


class Hardware(Section):
    """A cluster of identical nodes."""

    title: str
    """Human-readable name."""
    architecture: str = ""
    """Device generation, such as a100; '' in a calibrated profile."""
    device: Literal["cuda", "cpu"]
    """Device type. On CUDA the host launches kernels asynchronously; on CPU it runs them itself."""
    per_node: Annotated[int, Field(ge=1)]
    """Devices per node: those that the fastest links connect."""
    per_host: int | None = None
    """Devices per host, each with its own launcher; None: as many as per node."""
    memory_gb: Positive
    """Memory of one device, in GB (10^9 bytes)."""
    reserve_gb: Amount
    """Memory in GB that is not available to tensors: CUDA context, buffers of three communicators, fragmentation."""
    communicator_gb: Amount = 0.0
    """Memory in GB for each additional communicator (`communicators`)."""
    host_us: Annotated[
        HostTime,
        BeforeValidator(lambda us: dict.fromkeys(HostTime.model_fields, us) if isinstance(us, int | float) else us),
    ]
    """Host time to launch one operation, in microseconds."""
    step_ms: Amount = 0.0
    """Fixed overhead per step in milliseconds: data loading, logging, step stats."""
    overlap: Annotated[float, Field(ge=0, le=1)]
    """Fraction of compute time that asynchronous communication can overlap."""
    straggling: Amount = 0.0
    """Fraction of the step time that each doubling of nodes adds, because all nodes wait for the slowest one."""
    speeds: Speeds
    """Speeds while all devices in a node are busy."""
    alone: Speeds | None = None
    """Speeds while a single device is busy, if they differ (CPU cores share memory bandwidth)."""
    node: Link
    """Interconnect within a node."""
    network: Link
    """Interconnect between nodes; bandwidth is per device while all devices in a node send."""
    site: SiteLink | None = None
    """Link between sites, if the nodes are in more than one."""
    has_runs: bool = False
    """Whether published steps on this GPU were compared with predictions (docs/results.md). Built-in profiles do not inherit it."""
    sources: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Sources of the numbers."""
    provenance: dict[str, Origin] = Field(default_factory=dict)
    """Origin of each number by dotted field or table; the key '' covers all others (`origin`)."""

    @property
    def is_gpu(self) -> bool:
        """Whether the device runs fused kernels for norms, attention and compiled code."""
        return self.device == "cuda"

    @property
    def per_site(self) -> int | None:
        """Devices per site; None if there is only one site."""
        return None if self.site is None else self.per_node * self.site.nodes

    @property
    def usable_bytes(self) -> int:
        """Bytes available to tensors on one device in a mesh with at most three communicators."""
        return int((self.memory_gb - self.reserve_gb) * _GIGA)

    def usable_in(self, parallel: ParallelConfig) -> int:
        """Bytes available to tensors on one device in this mesh."""
        further = max(0, communicators(parallel) - _RESERVED_COMMUNICATORS)
        return self.usable_bytes - int(further * self.communicator_gb * _GIGA)

    def speeds_of(self, processes: int) -> Speeds:
        """Speeds with `processes` busy processes on a node."""
        return self.alone if self.alone is not None and processes == 1 else self.speeds

    def peak_flops(self, dtype: str) -> float:
        """Peak FLOP/s of one device for a dtype, used for MFU. Raises ConfigError if the profile has none."""
        return _of_dtype(self.speeds.gemm, dtype).tflops * _TERA


def communicators(parallel: ParallelConfig) -> int:
    """Largest number of NCCL communicators that a process in this mesh opens: one per group in `boost.parallel.mesh.mesh_of`, one
    for all processes, and one per pipeline neighbor, over which stages exchange metadata."""
    axes = sum(size > 1 for size in parallel.axes.values())
    replicas = parallel.dp * parallel.cp * parallel.tp > 1
    return (parallel.world_size > 1) + axes + (parallel.cp > 1) + replicas + min(parallel.pp - 1, 2)


def names() -> list[str]:
    """Names of the built-in profiles."""
    return sorted(path.stem for path in PROFILES.glob("*.toml"))


def profile_of(name: str, memory_bytes: int) -> str | None:
    """Returns the built-in profile for a GPU, given torch's device name and its memory; None if there is none.

    The longest match wins, so that an H100 PCIe is not taken for an H100 SXM, nor a GB200 for a B200.
    """
    matches: list[tuple[int, str]] = []
    for profile in names():
        parts = re.fullmatch(r"(.+)-(\d+)g(-\d+)?", profile)  # a100-80g, or a100-80g-8 for eight GPUs per node
        assert parts is not None, profile
        fits = abs(memory_bytes / 1e9 / int(parts[2]) - 1) < 0.15
        if fits and all(word in name.upper() for word in parts[1].upper().split("-")):
            matches.append((-len(parts[1]), profile))
    return min(matches)[1] if matches else None


def load_hardware(name: str) -> Hardware:
    """Loads a profile by name or its first word ('h100'), from a `.toml` file, or from a datasheet line ('tflops=165,mem=24,...',
    `boost.plan.datasheet`). Raises ConfigError if it does not exist or is invalid."""
    tree = _raw(BASE if "=" in name else name)
    # `gpu` names the entry in boost/config/gpus.toml that supplies missing peaks.
    peak = find_peak(str(tree.pop("gpu", "")))
    for dtype, speed in tree.get("speeds", {}).get("gemm", {}).items():
        tflops = None if peak is None else peak.of_dtype(dtype)
        if isinstance(speed, dict) and tflops is not None:
            speed.setdefault("tflops", tflops)
    try:
        return Hardware.model_validate(tree_of(name, tree) if "=" in name else tree)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"--gpu = '{name}': {field}: {first['msg']}") from None


def _raw(name: str) -> dict[str, Any]:
    """Reads the raw tables of a profile, whose `like` key names a built-in profile to inherit from."""
    own, word = name.endswith(".toml"), name.lower()
    if word not in names():  # an abbreviation: the first of the shortest names that begin with this word
        word = min((profile for profile in names() if profile.startswith(f"{word}-")), key=len, default=word)
    path = Path(name) if own else PROFILES / f"{word}.toml"
    if not path.is_file():
        if own:
            command = f"boost plan calibrate --out {shlex.quote(name)}"
            raise ConfigError(f"--gpu = '{name}': no such file; create it with: {command}")
        first = word.partition("-")[0].replace(" ", "")
        firsts = {profile.partition("-")[0] for profile in names()}
        # A GPU without a profile is no typing error for another one.
        exists = first not in firsts and any(first == peak.name.replace(" ", "").lower() for peak in gpu_peaks())
        near = [] if exists or not difflib.get_close_matches(first, firsts) else names()
        close = difflib.get_close_matches(word, near, n=1, cutoff=0.3)
        says = f"is not a hardware profile; did you mean '{close[0]}'?" if close else "is not supported;"
        raise ConfigError(
            f"--gpu = '{name}' {says} valid profiles: {', '.join(names())}; "
            "run 'boost plan calibrate' on this machine, or use a datasheet: --gpu \"tflops=165,mem=24,bw=1008,link=pcie4\""
        )
    try:
        tree = read_toml(path)
    except ConfigError as error:
        raise ConfigError(f"--gpu = '{name}': {error}") from None
    if own:
        # Every number in a user's file is 'yours', unless the file has its own [provenance].
        yours: dict[str, Origin] = dict.fromkeys(_leaves(tree), "yours") if "like" in tree else {"": "yours"}
        tree["provenance"] = tree.get("provenance") or yours
    if "like" not in tree:
        return tree
    like = str(tree.pop("like"))
    if like not in names():
        raise ConfigError(f"--gpu = '{name}': like = '{like}' must be a built-in profile: {', '.join(names())}")
    below = _raw(like)
    if not own:
        below.pop("has_runs", None)
    return _merged(below, tree)


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Merges two tables recursively; values in `above` win."""
    both = {
        key: _merged(below[key], value) if isinstance(value, dict) and isinstance(below.get(key), dict) else value
        for key, value in above.items()
    }
    return below | both


# Where each number comes from.


def origin(hardware: Hardware, field: str) -> Origin:
    """Origin of a dotted field: the entry in [provenance] with the longest matching prefix; the entry '' matches all fields."""
    parts = field.split(".")
    for length in range(len(parts), 0, -1):
        if (name := ".".join(parts[:length])) in hardware.provenance:
            return hardware.provenance[name]
    return hardware.provenance.get("", "estimate")


def provenance_words(hardware: Hardware) -> str:
    """Summary such as 'GEMMs, attention measured by others; memory size from a datasheet; network estimated'."""
    by_origin: dict[Origin, list[str]] = {}
    for field, words in QUANTITIES.items():
        by_origin.setdefault(origin(hardware, field), []).append(words)
    return "; ".join(f"{', '.join(by_origin[name])} {_WORDS[name]}" for name in _WORDS if name in by_origin)


def _leaves(tree: dict[str, Any], prefix: str = "") -> list[str]:
    names: list[str] = []
    for key, value in tree.items():
        names += _leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else [f"{prefix}{key}"]
    return names


# The cost of a collective. Global ranks are ordered (pp, dp, cp, tp) with TP innermost, and are assigned to nodes in that order.


@dataclass(frozen=True)
class Span:
    """How the processes in a collective are spread over nodes."""

    processes: int
    per_node: int
    """Number of the group's processes on one node."""

    @property
    def inside(self) -> bool:
        """Whether the group is within one node."""
        return self.per_node >= self.processes


def span(axis: str, parallel: ParallelConfig, per_node: int) -> Span:
    """Span of one group along an axis; axes are those of `Collective.axis`."""
    return _span(axis, parallel.tp, parallel.cp, parallel.dp_cp, parallel.pp, per_node)


@functools.cache
def _span(axis: str, tp: int, cp: int, dp_cp: int, pp: int, per_node: int) -> Span:
    world = tp * dp_cp * pp
    strides = {
        "tp": (tp, 1), "cp": (cp, tp), "dp": (dp_cp, tp), "replicas": (dp_cp * tp, 1), "pp": (2, dp_cp * tp), "world": (world, 1),
    }  # fmt: skip
    size, stride = strides[axis]
    here = min(size, max(per_node // stride, 1))
    if axis == "pp" and world > per_node:
        here = 1  # some neighbors are on different nodes, and the rest wait for them
    # A group that is not aligned with nodes, such as TP 3 on nodes of 4, may span two of them.
    if axis != "pp" and here == size and per_node % (size * stride) and world > per_node:
        here = max(size // 2, 1)
    return Span(size, here)


def link_of(axis: str, parallel: ParallelConfig, hardware: Hardware) -> Link:
    """The slowest link that the collectives along an axis cross: in a node, between nodes, or between sites."""
    if hardware.site is not None and not span(axis, parallel, hardware.per_site or 1).inside:
        return hardware.site
    return hardware.node if span(axis, parallel, hardware.per_node).inside else hardware.network


def collective_seconds(collective: Collective, parallel: ParallelConfig, hardware: Hardware) -> float:
    """Seconds for one collective while all groups along its axis run it concurrently. Rings cross all links at the same
    time, so the slowest link determines the time."""
    sent = collective.kind, collective.dtype, collective.elements * ITEMSIZE[collective.dtype], collective.sent_bytes
    site, per_site, between_sites = hardware.site, hardware.per_site, 0.0
    if site and per_site and not (where := span(collective.axis, parallel, per_site)).inside:
        # Over the link, each group sends as much as one of its processes does. A pipeline sends only between consecutive stages.
        sending = (
            min(parallel.tp * parallel.dp_cp, per_site) if collective.kind == "send" else per_site / where.per_node
        )
        between_sites = site.seconds(*sent, collective.processes, 1 / sending)
    # The links in a node and between nodes.
    where = span(collective.axis, parallel, hardware.per_node)
    link = hardware.node if where.inside else hardware.network
    # A group's processes on one node use all of their network ports.
    share = 1.0 if where.inside or collective.kind == "send" else float(where.per_node)
    if not where.inside:
        share = min(share, hardware.node.gb_s / hardware.network.gb_s)
    seconds = link.seconds(*sent, collective.processes, max(share, 1.0))
    # A link's own latency covers one node or two nodes. Over more nodes, gathers and scatters run in rings, with one hop per
    # additional process (NCCL, `src/graph/tuning.cc`), and all-reduces in trees over nodes, with two hops per doubling.
    nodes = -(-where.processes // where.per_node)
    if nodes > 2 and collective.kind == "all-reduce":
        seconds += 2 * math.log2(nodes / 2) * hardware.network.hop_us * 1e-6
    elif nodes > 2 and collective.kind != "send":
        seconds += (nodes - 2) * (hardware.network.hop_us + (where.per_node - 1) * hardware.node.hop_us) * 1e-6
    return max(seconds, between_sites)
