#!/bin/sh
# torch 2.13.0: a model trains under selective checkpointing. With its layers and itself sharded by FSDP2 (fully_shard), the same
# training raises in the first backward pass, because FSDP2's own profiler ranges (record_function) count as operations, and
# recomputing a layer opens more of them than the forward pass did. Plain checkpointing is not affected.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cat > "$folder/train.py" <<'PYTHON'
import functools
import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import create_selective_checkpoint_contexts


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(2))
        self.head = nn.Linear(8, 16, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x).relu()
        return self.head(x)


def run(rank, store, results, selective, sharded):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    saved = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    model = checkpoint_wrapper(Model(), **({"context_fn": saved} if selective else {}))
    for part in (*model.layers, model) if sharded else ():
        fully_shard(part)
    try:
        model(torch.arange(16).view(2, 8)).square().sum().backward()
        results[rank] = "trains"
    except RuntimeError as error:
        results[rank] = "raises" if "_record_function_enter" in str(error) else str(error)
    dist.destroy_process_group()


if __name__ == "__main__":
    print("torch", torch.__version__)
    found = {}
    for selective, sharded in ((False, True), (True, False), (True, True)):
        with tempfile.TemporaryDirectory() as place, mp.Manager() as manager:
            results = manager.dict()
            mp.spawn(run, (os.path.join(place, "store"), results, selective, sharded), nprocs=2)
            found[selective, sharded] = sorted(set(results.values()))
        print(f"selective: {selective}, sharded: {sharded}:", *found[selective, sharded])
    expected = {(False, True): ["trains"], (True, False): ["trains"], (True, True): ["raises"]}
    sys.exit(found != expected)
PYTHON
OMP_NUM_THREADS=1 "$folder/venv/bin/python" "$folder/train.py"
