"""Builds a hardware profile from a datasheet line: `tflops=165,mem=24,bw=1008,link=pcie4`.

Values that the line does not list are copied or scaled from measured GPUs, and marked as estimates.
"""

import copy
from typing import Any

from boost.errors import ConfigError

BASE = "h100-80g"
"""The built-in profile that supplies everything else: latencies, launch overhead, overlap, and how speed scales with size."""

LINKS = {
    "pcie3": 11.0, "pcie4": 22.0, "pcie5": 44.0,
    "nvlink2": 130.0, "nvlink3": 230.0, "nvlink4": 363.0, "nvlink5": 673.0,
}  # fmt: skip
"""GB/s that a process sends in large collectives: for PCIe, about 0.7 of the one-way x16 bandwidth (an estimate); for NVLink with a
switch, about as in the profiles."""

RAMP_MB = {"pcie": 4.0, "nvlink": 40.0}
"""Message size in MB at which a link reaches two thirds of its bandwidth."""

GEMM_SHARE, MEMORY_SHARE = 0.62, 0.85
"""Fraction of peak FLOP/s that large GEMMs sustain in training (published H100 runs), and the fraction of memory bandwidth that
element-wise operations reach."""

ATTENTION_SHARES = ((64, 0.37, 0.34), (128, 0.50, 0.42))
"""(head dimension, forward, backward): fractions of peak that fused attention reaches, between those of the A100 and the H100."""

PORT_SHARE = 0.9
"""Fraction of a network port's bandwidth that large collectives reach (nccl-tests: 320 to 390 of 400 GB/s per node)."""

GIB = 1.0625
"""GB that CUDA reports per GB in a card's name, which is nearly a GiB (CUDA reports 85.0 GB for an "80 GB" card)."""

_HELP = 'example: --gpu "tflops=165,mem=24,bw=1008,link=pcie4"'

KEYS = {
    "tflops": "dense bf16 peak in TFLOP/s",
    "mem": "memory in GB",
    "bw": "memory bandwidth in GB/s",
    "link": f"{', '.join(LINKS)}, or a bandwidth in GB/s (default pcie4)",
    "net": "network bandwidth per GPU in Gb/s (default 100)",
    "fp32": "fp32 peak in TFLOP/s (default tflops / 8)",
    "per_node": "GPUs per node (default 8)",
    "site": "each site's bandwidth to other sites in Gb/s, if the GPUs are at several sites",
    "nodes_per_site": "nodes per site (default 1; only with site)",
}
"""Keys in a datasheet line; the first three are required."""


def tree_of(line: str, base: dict[str, Any]) -> dict[str, Any]:
    """Builds the raw profile for a datasheet line. `base`: the raw profile of BASE. Raises ConfigError for an invalid line."""
    said: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in line.split(","))):
        key, equals, value = (word.strip() for word in part.partition("="))
        if key not in KEYS or not equals or not value:
            raise ConfigError(
                f"--gpu = '{line}': '{part}' must be KEY=VALUE with one of the keys {', '.join(KEYS)}; {_HELP}"
            )
        said[key] = value
    missing = [key for key in ("tflops", "mem", "bw") if key not in said]
    if missing:
        raise ConfigError(f"--gpu = '{line}' lacks {missing[0]} ({KEYS[missing[0]]}); {_HELP}")
    tflops, memory, bandwidth = (_number(line, said, key) for key in ("tflops", "mem", "bw"))
    link, ramp = _link(line, said.get("link", "pcie4"))
    port = _number(line, said, "net", 100.0)
    fp32 = _number(line, said, "fp32", tflops / 8)
    per_node = _number(line, said, "per_node", 8.0)
    nodes_per_site = _number(line, said, "nodes_per_site", 1.0)
    for key, number in (("per_node", per_node), ("nodes_per_site", nodes_per_site)):
        if number != int(number):
            raise ConfigError(f"--gpu = '{line}': {key} = {number:g} must be an integer; {_HELP}")
    if "nodes_per_site" in said and "site" not in said:
        raise ConfigError(f"--gpu = '{line}': nodes_per_site needs site ({KEYS['site']}); {_HELP}")
    tree = copy.deepcopy(base)
    tree.update(
        title=f"datasheet: {tflops:g} TFLOP/s in bf16, {memory:g} GB at {bandwidth:g} GB/s, {said.get('link', 'pcie4')} (estimate)",
        architecture="datasheet", has_runs=False, per_node=int(per_node), memory_gb=memory * GIB, reserve_gb=0.055 * memory * GIB,
        communicator_gb=0.01 * memory * GIB,
        sources=[f"--gpu: {line}", "All other values: copied or scaled from measured GPUs (estimates)"],
        provenance={"": "estimate"} | dict.fromkeys(("memory_gb", "speeds.memory_gb_s"), "datasheet"),
    )  # fmt: skip
    speeds = tree["speeds"]
    speeds.update(memory_gb_s=bandwidth, memory_fraction=MEMORY_SHARE)
    speeds["gemm"]["bfloat16"].update(tflops=tflops, fraction=GEMM_SHARE)
    for dtype in ("float32", "float64"):
        speeds["gemm"][dtype].update(tflops=fp32)
    speeds["attention"]["bfloat16"] = [
        {"head_dim": width, "forward": forward * tflops, "backward": backward * tflops}
        for width, forward, backward in ATTENTION_SHARES
    ]
    for dtype in ("float32", "float64"):
        speeds["attention"][dtype] = [{"head_dim": 128, "forward": 0.45 * fp32, "backward": 0.36 * fp32}]
    tree["node"].update(name="NVLink" if ramp == "nvlink" else "PCIe", gb_s=link, half_mb=RAMP_MB[ramp], all_reduce=[])
    tree["network"].update(name="network", gb_s=PORT_SHARE * port / 8)
    if "site" in said:
        tree["site"] = {"gb_s": PORT_SHARE * _number(line, said, "site") / 8, "nodes": int(nodes_per_site)}
    return tree


def _number(line: str, said: dict[str, str], key: str, otherwise: float | None = None) -> float:
    if key not in said and otherwise is not None:
        return otherwise
    value = _positive(said[key])
    if value is None:
        raise ConfigError(f"--gpu = '{line}': {key} = {said[key]} must be a number above 0 ({KEYS[key]})")
    return value


def _link(line: str, word: str) -> tuple[float, str]:
    """Parses a link into (GB/s, key of RAMP_MB)."""
    if word.lower() in LINKS:
        return LINKS[word.lower()], word.lower().rstrip("0123456789")
    speed = _positive(word)
    if speed is None:
        raise ConfigError(f"--gpu = '{line}': link = {word} must be {KEYS['link']}")
    return speed, "nvlink" if speed > LINKS["pcie5"] else "pcie"


def _positive(word: str) -> float | None:
    """The number if it is finite and positive, else None."""
    try:
        value = float(word)
    except ValueError:
        return None
    return value if 0 < value < float("inf") else None
