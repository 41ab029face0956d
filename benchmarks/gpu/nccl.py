"""NCCL with world size 1: checks that every collective in use runs and returns its input, in each dtype, and probes PREMUL_SUM.

PREMUL_SUM with factor 1.0 in bf16 returns zeros in torch 2.13.0 (pytorch issue 190745), so FSDP is configured to use plain sums
(`boost.parallel.sharding`). This script shows whether that is still necessary.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from boost.config.traffic import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER
from boost.measure.verify.arithmetic import DTYPES, PLAIN
from boost.parallel.mesh import Axis


def premultiplied(device: torch.device) -> str:
    """The result of PREMUL_SUM(1.0) on bf16 ones."""
    x = torch.ones(8, dtype=torch.bfloat16, device=device)
    try:
        dist.all_reduce(x, op=dist._make_nccl_premul_sum(1.0))
    except (AttributeError, RuntimeError, ValueError) as error:
        return f"refused: {str(error).splitlines()[0]}"
    return "right" if bool((x == 1).all()) else f"WRONG: ones become {float(x[0])}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device("cpu")
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(os.path.join(folder, "store"), 1)
        backend = "cpu:gloo,cuda:nccl" if args.device == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        axis = Axis(0, 1, dist.group.WORLD)
        facts: dict[str, Any] = {"torch": str(torch.__version__), "device": args.device, "wrong": []}
        if args.device == "cuda":
            facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        for dtype in DTYPES:
            x = torch.arange(12, device=device).to(dtype).view(4, 3)
            for kind in (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL):
                if not torch.equal(PLAIN[kind](x, axis), x):
                    facts["wrong"].append(f"{kind} {dtype}")
        facts["premul_sum_bf16"] = premultiplied(device)
        dist.destroy_process_group()
    args.out.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(facts, indent=1))
    return int(bool(facts["wrong"]))


if __name__ == "__main__":
    raise SystemExit(main())
