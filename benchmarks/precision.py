"""What weights in bfloat16 cost: a small model, trained with weights and moments in float32 and in bfloat16, at two rates.

    boost prepare --stdlib --out data/stdlib
    python benchmarks/precision.py data/stdlib runs/precision

Writes benchmarks/precision.json.
"""

import argparse
import itertools
import json
import subprocess
import sys
from pathlib import Path

from benchmarks.experiments.results import write_numbers
from boost.train.metrics import read_metrics

RESULT = Path(__file__).parent / "precision.json"
TRAIN = (
    "train demo --parallel.tp 1 --model.dim 64 --model.ffn_dim 128 --model.layers 2 --model.heads 4 --model.rank 16 "
    "--train.steps 200 --train.global_batch 4 --train.micro_batch 4 --train.seq_len 32 --train.save_minutes 0 "
    "--optim.schedule constant"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path, help="a token store, such as data/stdlib")
    parser.add_argument("folder", type=Path, help="output folder for the runs")
    args = parser.parse_args()
    losses: dict[str, dict[str, float]] = {}
    for rate, dtype in itertools.product(("2e-4", "3e-3"), ("float32", "bfloat16")):
        run = args.folder / f"{rate}-{dtype}"
        words = f"{TRAIN} --optim.lr {rate} --train.param_dtype {dtype} --train.compute_dtype {dtype}"
        where = ["--data.store", str(args.store), "--run.dir", str(run)]
        subprocess.run([sys.executable, "-m", "boost.cli.main", *words.split(), *where], check=True)
        evaluations = [line for line in read_metrics(run / "metrics.jsonl") if line["kind"] == "eval"]
        losses.setdefault(rate, {})[dtype] = evaluations[-1]["heldout_loss"]
    origin = json.loads(min(run.glob("environment*.json")).read_text(encoding="utf-8"))
    del origin["command"]  # TRAIN has all of it except the paths
    result = {"environment": origin, "command": TRAIN, "steps": 200, "heldout_loss": losses}
    write_numbers(RESULT, result)
    print(json.dumps(losses, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
