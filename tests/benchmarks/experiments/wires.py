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


def made_up(
    seconds: Mapping[str, float], launches: int = 3, rounds: int = 7, group: str = "TP 2", name: str = "main"
) -> Facts:
    """A result in which the step of a contender takes its seconds without a limit, and rounds differ by a thousandth."""
    found = []
    for launch in range(launches):
        for wire, added in ADDED.items():
            rows = [
                {
                    "name": contender,
                    "seconds": [
                        (own + added * (0.5 if "halves" in contender else 1)) * (1 + (n + launch) / 1e3)
                        for n in range(rounds)
                    ],
                    "sent_bytes": 1000,
                    "config": CONFIG,
                }
                for contender, own in seconds.items()
            ]
            found.append(
                {
                    "group": group,
                    "wire": wire,
                    "launch": launch,
                    "mbit": MBIT[wire],
                    "rows": rows,
                    "tp": 2,
                    "threads": 1,
                }
            )
    marked = {wire: MBIT[wire] for wire in MARKED}
    return {
        "experiment": "wire", "set": name, "rounds": rounds, "launches": launches, "marked": marked, "groups": found,
        "environment": {"git": None}, "config": CONFIG,
    }  # fmt: skip
