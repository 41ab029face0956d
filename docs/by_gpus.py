"""Searches the fastest layout of a 7B model by tokens per step and number of H100 GPUs: `python docs/by_gpus.py` (half a minute).

Writes docs/pictures/by-gpus.json, which docs/draw.py draws. More tokens per step amortize the communication that happens once per
step; with many GPUs or few tokens, DP alone runs out of sequences. Pipelines are left out.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from boost.cli.plan import request_of
from boost.plan.hardware import load_hardware
from boost.plan.search import Search

RESULT = Path(__file__).resolve().parent / "pictures" / "by-gpus.json"
SEQ_LEN, SEQUENCES, GPUS = 4096, (1, 4, 16, 64, 256, 1024), (16, 32, 64, 128, 256, 512)


def cell(sequences: int, gpus: int) -> dict[str, Any]:
    """The fastest configuration for a global batch. `layout`: such as 'DP', 'CP 4' or 'btp-sp TP 2'; None if no mesh is legal."""
    args = argparse.Namespace(
        model="7b",
        gpus=gpus,
        seq=SEQ_LEN,
        global_batch=str(sequences),
        memory_margin=0.08,
        overrides=["--parallel.pp=1"],
    )
    search = Search(request_of(args, load_hardware("h100")))
    plan, asked = search.fastest(), {"tokens": sequences * SEQ_LEN, "gpus": gpus}
    if plan is None:
        assert search.empty, "no configuration fits"
        return {**asked, "layout": None}
    parallel = plan.config.parallel
    words = [f"{parallel.layout} TP {parallel.tp}"] * (parallel.tp > 1) + [f"CP {parallel.cp}"] * (parallel.cp > 1)
    return {**asked, "layout": " ".join(words) or "DP", "step_seconds": plan.time.seconds}


def main() -> None:
    cells = [json.dumps(cell(sequences, gpus)) for sequences in SEQUENCES for gpus in GPUS]
    lines = ",\n  ".join(cells)
    RESULT.write_text(f'{{"command": "python docs/by_gpus.py", "cells": [\n  {lines}]}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()
