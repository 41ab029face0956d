"""What a published run costs: predicted hours and memory of each preset and of the dense model of the same recipe.

    python -m benchmarks.costs

Writes benchmarks/costs.json. The times are predictions of `boost plan`; a run also evaluates and saves.
"""

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.experiments.results import write_numbers
from boost.cli.main import main as boost
from boost.config import Config, load
from boost.train.rundir import environment

RESULT = Path(__file__).parent / "costs.json"
SIZES = ("60m", "130m", "350m", "1b", "7b")
MACHINES = {"one RTX 4090": ("rtx4090", 1), "one H100": ("h100", 1), "eight H100": ("h100", 8)}


def cost(preset: str, gpu: str, gpus: int) -> dict[str, Any]:
    """The fastest plan of a preset's whole run; {} if none fits."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        code = boost(["plan", "--model", preset, "--gpus", str(gpus), "--gpu", gpu, "--json"])
    if code != 0:
        return {}
    best = json.loads(out.getvalue())["best"]
    hours = best["step_seconds"] * load(preset).train.steps / 3600
    return {
        "hours": hours,
        "gpu_hours": hours * gpus,
        "gb": best["memory_bytes"] / 1e9,
        "parallel": best["config"]["parallel"],
    }


def main() -> int:
    result: dict[str, Any] = {"environment": environment(Config()), "machines": {}}
    for name, (gpu, gpus) in MACHINES.items():
        for size in SIZES:
            low, dense = cost(f"cola-{size}", gpu, gpus), cost(f"llama-{size}", gpu, gpus)
            ratio = dense["hours"] / low["hours"] if low and dense else None
            result["machines"].setdefault(name, {})[size] = {"cola": low, "llama": dense, "ratio": ratio}
            print(name, size, low.get("hours"), dense.get("hours"), ratio, flush=True)
    write_numbers(RESULT, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
