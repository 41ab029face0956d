"""Made-up results of the wire experiment."""

from collections.abc import Mapping
from typing import Any

from benchmarks.experiments.results import Facts
from benchmarks.experiments.wire_plan import MARKED, NO_LIMIT

ADDED = {NO_LIMIT: 0.0, "share-matched": 0.5, "slow": 1.0}
"""Seconds that each wire adds to a step without overlap; half as much with it."""

MBIT = {NO_LIMIT: None, "share-matched": 400.0, "slow": 100.0}

CONFIG: dict[str, Any] = {
    "model": {"dim": 64, "ffn_dim": 96, "rank": 16, "layers": 2, "heads": 4, "vocab_size": 32},
    "train": {"global_batch": 2, "micro_batch": 2, "seq_len": 16, "compute_dtype": "float32", "param_dtype": "float32"},
}


def made_up(seconds: Mapping[str, float], name: str = "main") -> Facts:
    """A result in which the step of a contender takes its seconds without a limit, and rounds differ by a thousandth."""
    groups = []
    for launch in range(3):
        for wire, added in ADDED.items():
            rows = []
            for contender, own in seconds.items():
                whole = own + added * (0.5 if "halves" in contender else 1)
                found = [whole * (1 + (n + launch) / 1e3) for n in range(7)]
                rows.append({"name": contender, "seconds": found, "sent_bytes": 1000, "config": CONFIG})
            where = {"group": "TP 2", "wire": wire, "launch": launch, "mbit": MBIT[wire], "tp": 2, "threads": 1}
            groups.append({**where, "rows": rows})
    return {
        "experiment": "wire", "set": name, "rounds": 7, "launches": 3, "marked": {wire: MBIT[wire] for wire in MARKED},
        "groups": groups, "environment": {"git": None}, "config": CONFIG,
    }  # fmt: skip
