"""Provenance: where each number of a hardware profile comes from."""

from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from boost.plan.hardware import Hardware

Origin = Literal["calibrated", "yours", "published", "fitted", "datasheet", "estimate"]
"""calibrated: measured by 'boost plan calibrate'; yours: from your own profile; published: measured by others, cited in `sources`;
fitted: to published speeds (docs/record.md); datasheet: from the vendor; estimate: our own."""

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
    "published": "measured by others",
    "fitted": "fitted to the public record",
    "datasheet": "from a datasheet",
    "estimate": "estimated",
}


def origin(hardware: "Hardware", field: str) -> Origin:
    """Origin of a dotted field: the entry of [provenance] with the longest matching prefix; the entry '' matches all fields."""
    parts = field.split(".")
    for length in range(len(parts), 0, -1):
        if (name := ".".join(parts[:length])) in hardware.provenance:
            return hardware.provenance[name]
    return hardware.provenance.get("", "estimate")


def provenance_words(hardware: "Hardware") -> str:
    """Summary such as 'GEMMs, attention measured by others; memory size from a datasheet; network estimated'."""
    found: dict[Origin, list[str]] = {}
    for field, words in QUANTITIES.items():
        found.setdefault(origin(hardware, field), []).append(words)
    return "; ".join(f"{', '.join(found[name])} {_WORDS[name]}" for name in _WORDS if name in found)


def provenance_of_file(tree: dict[str, Any]) -> dict[str, Origin]:
    """Provenance of a user's file without its own [provenance]: every number in it is 'yours'."""
    return tree.get("provenance") or (dict.fromkeys(_leaves(tree), "yours") if "like" in tree else {"": "yours"})


def _leaves(tree: dict[str, Any], prefix: str = "") -> list[str]:
    names: list[str] = []
    for key, value in tree.items():
        names += _leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else [f"{prefix}{key}"]
    return names
