"""Hardware profiles: what a device and its links reach, as data files with sources. Arithmetic only.

Speeds are those that are reached, not those of a datasheet: a peak times the fraction of it that large operations get, or
points measured on the machine at hand.
"""

import difflib
import itertools
import math
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, ValidationError

from boost.config.schema import Positive, Section
from boost.errors import ConfigError
from boost.plan.work import ATTENTION, ATTENTION_BACKWARD, GEMM, Work

PROFILES = Path(__file__).parent / "profiles"
"""Data files of the package, `<name>.toml`."""

_TERA, _GIGA, _MICRO = 1e12, 1e9, 1e-6

Amount = Annotated[float, Field(ge=0)]
Point = Annotated[tuple[Positive, Positive], Field(strict=False)]
Points = Annotated[tuple[Point, ...], Field(strict=False, min_length=1)]
Triple = Annotated[tuple[Amount, Amount, Amount], Field(strict=False)]


def seconds_at(points: Sequence[tuple[float, float]], size: float) -> float:
    """Seconds for `size` bytes from measured (bytes, microseconds) in rising order of bytes.

    Between two points a straight line of logarithms; below the first its time, beyond the last its speed.
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
    """Speed of matrix products in one dtype: tflops * fraction * the product over m, n, k of dim / (dim + half)."""

    tflops: Positive
    """Peak, dense, TFLOP/s: what MFU counts against."""
    fraction: Positive
    """Of the peak, for GEMMs whose dimensions are all large."""
    half: Triple = (0.0, 0.0, 0.0)
    """m, n and k at which one dimension halves the speed: tiles that are not full, and their beginning and end."""

    def flops_per_s(self, m: int, n: int, k: int) -> float:
        """FLOP/s of [m, k] x [k, n]."""
        speed = self.tflops * _TERA * self.fraction
        for dim, half in zip((m, n, k), self.half, strict=True):
            speed *= dim / (dim + half)
        return speed


class AttentionSpeed(Section):
    """Speed of fused causal attention at one width of a head, at sequences of a few thousand tokens. The half of the scores that
    is masked is not counted; backward five products for forward's two."""

    head_dim: int
    """Width of a head."""
    forward: Positive
    """TFLOP/s."""
    backward: Positive
    """TFLOP/s."""
    half: Amount = 0.0
    """Tokens of a sequence at which it has half of that speed."""


class Speeds(Section):
    """What one device does."""

    memory_gb_s: Positive
    """Bandwidth of device memory, GB/s, as the datasheet says it."""
    memory_fraction: Positive
    """Of it, for element-wise operations on large tensors."""
    probe_us: Amount = 0.0
    """Microseconds that a small fixed work took when the rest was measured (`boost.measure.speed.Probe`): how fast the machine was
    then; 0: not known."""
    kernel_us: Amount
    """Microseconds that every operation takes on the device beside its work."""
    gemm: dict[str, GemmSpeed]
    """By dtype."""
    attention: dict[str, Annotated[tuple[AttentionSpeed, ...], Field(strict=False)]]
    """By dtype; the nearest width of a head counts."""
    kernels: dict[str, Points] = Field(default_factory=dict)
    """Measured (bytes, microseconds) of other kinds of operations, by kind or 'kind dtype'; those that are missing move bytes at
    memory's speed."""

    def gemm_speed(self, dtype: str) -> GemmSpeed:
        """Raises ConfigError for a dtype that the profile does not have."""
        return _of_dtype(self.gemm, dtype)

    def seconds(self, work: Work) -> float:
        """Time on the device of one call. Raises ConfigError for a dtype that the profile does not have."""
        bandwidth = self.memory_gb_s * _GIGA * self.memory_fraction
        moving = work.bytes / bandwidth
        if work.kernel == GEMM:
            speed = self.gemm_speed(work.dtype)
            _, m, n, k = work.shape
            return max(work.flops / speed.flops_per_s(m, n, k), moving) + self.kernel_us * _MICRO
        if work.kernel in (ATTENTION, ATTENTION_BACKWARD):
            head_dim, tokens = work.shape[4], work.shape[3]
            table = _of_dtype(self.attention, work.dtype)
            at = min(table, key=lambda each: abs(math.log(each.head_dim / head_dim)))
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
            f"train.compute_dtype = '{dtype}' has no speed in this hardware profile; it has {', '.join(table)}"
        )
    return table[dtype]


class Link(Section):
    """What processes send each other over. Time of a collective: latency + bytes that one process sends / bandwidth."""

    name: str
    """NVLink | PCIe | InfiniBand | loopback | ..."""
    latency_us: Amount
    """Microseconds of a small collective."""
    gb_s: Positive
    """GB/s that one process sends in large collectives (nccl-tests calls it bus bandwidth)."""
    half_mb: Amount = 0.0
    """How slowly that is reached: small messages move at half of it, those of `half_mb` MB sent at two thirds."""
    all_reduce: Annotated[tuple[Point, ...], Field(strict=False)] = ()
    """(processes, GB/s) of all-reduces over so many processes or more, where the switch adds up (NVLink SHARP)."""
    measured: dict[str, Points] = Field(default_factory=dict)
    """(payload bytes, microseconds) of collectives measured over it, by kind or 'kind dtype', with `processes` processes."""
    processes: int = 2
    """Of the measured collectives."""
    known: bool = True
    """False in a profile calibrated with one process, which sends nothing: numbers above are none."""

    def seconds(self, kind: str, dtype: str, payload: int, sent: int, processes: int, share: float = 1.0) -> float:
        """Of one collective of `payload` bytes in which each of `processes` sends `sent`; `share`: of the bandwidth.

        Raises ConfigError if the profile does not know.
        """
        if not self.known:
            raise ConfigError(
                f"--gpu: this profile was calibrated with one process and has no speed for a collective of {processes}; "
                "calibrate with --nproc 2 or more, or write its [node] and [network]"
            )
        for name in (f"{kind} {dtype}", kind):
            if name in self.measured:
                of_two = seconds_at(self.measured[name], payload)
                return of_two * _rounds(kind, processes) / _rounds(kind, self.processes) / share
        half = self.half_mb * 1e6
        behind = half * sent / (sent + half) if sent else 0.0
        return self.latency_us * _MICRO + (sent + behind) / (self._gb_s(kind, processes) * _GIGA * share)

    def _gb_s(self, kind: str, processes: int) -> float:
        reached = [gb_s for least, gb_s in self.all_reduce if kind == "all-reduce" and processes >= least]
        return reached[-1] if reached else self.gb_s


def _rounds(kind: str, processes: int) -> float:
    """Bytes that one of `processes` sends for each byte of payload."""
    if kind == "send":
        return 1.0
    return (2 if kind == "all-reduce" else 1) * (processes - 1) / processes


class Hardware(Section):
    """A machine: nodes of equal devices."""

    title: str
    """What it is, in words."""
    device: Literal["cuda", "cpu"]
    """What runs the operations. On CUDA devices the host issues them ahead; on CPUs it is the host that runs them."""
    per_node: Annotated[int, Field(ge=1)]
    """Devices of a node."""
    memory_gb: Positive
    """Memory of a device that a process can allocate, 10^9 bytes."""
    reserve_gb: Amount
    """Of it, what is not tensors: context, communication buffers, fragments."""
    host_us: Amount
    """Microseconds that the host needs to issue one operation."""
    step_ms: Amount = 0.0
    """Milliseconds of a step beside its operations: batches, logging, step stats."""
    overlap: Annotated[float, Field(ge=0, le=1)]
    """Of the time of computation, what can hide communication that need not be waited for."""
    speeds: Speeds
    """With all devices of a node at work."""
    alone: Speeds | None = None
    """With one of them at work, where that differs (cores share memory)."""
    node: Link
    """Within a node."""
    network: Link
    """Between nodes: what each device sends when all of its node do."""
    sources: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Where the numbers come from."""

    @property
    def has_fused_norm(self) -> bool:
        """Whether RMSNorm of whole rows is one kernel there."""
        return self.device == "cuda"

    @property
    def usable_bytes(self) -> int:
        """Memory for tensors, on one device."""
        return int((self.memory_gb - self.reserve_gb) * _GIGA)

    def speeds_of(self, processes: int) -> Speeds:
        """With so many processes on a node."""
        return self.alone if self.alone is not None and processes == 1 else self.speeds

    def peak_flops(self, dtype: str) -> float:
        """Peak FLOP/s of one device, for MFU."""
        return _of_dtype(self.speeds.gemm, dtype).tflops * _TERA


def names() -> list[str]:
    """Profiles that are there, without those of users."""
    return sorted(path.stem for path in PROFILES.glob("*.toml"))


def load_hardware(name: str) -> Hardware:
    """A profile by name, or from a file `*.toml`. Raises ConfigError if there is none, or it cannot be read."""
    try:
        return Hardware.model_validate(_read(name))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"--gpu = '{name}': {field}: {first['msg']}") from None


def _read(name: str) -> dict[str, Any]:
    """The document of a profile, unchecked; with `like`, the name of a profile of the package, on top of that one's."""
    path = Path(name) if name.endswith(".toml") else PROFILES / f"{name.lower()}.toml"
    if not path.is_file():
        if name.endswith(".toml"):
            raise ConfigError(f"--gpu = '{name}': there is no such file; 'boost plan calibrate --out {name}' makes one")
        close = difflib.get_close_matches(name.lower(), names(), n=1, cutoff=0.3)
        hint = f"did you mean '{close[0]}'? " if close else ""
        raise ConfigError(
            f"--gpu = '{name}' is no hardware profile; {hint}The profiles are {', '.join(names())}; "
            "'boost plan calibrate' makes one of this machine"
        )
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--gpu = '{name}' is not TOML: {error}") from None
    if "like" not in tree:
        return tree
    like = str(tree.pop("like"))
    if like not in names():
        raise ConfigError(f"--gpu = '{name}': like = '{like}' is no profile; the profiles are {', '.join(names())}")
    return _merged(_read(like), tree)


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Two documents, the second of which counts where both say something."""
    both = {
        key: _merged(below[key], value) if isinstance(value, dict) and isinstance(below.get(key), dict) else value
        for key, value in above.items()
    }
    return below | both
