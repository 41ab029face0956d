"""The compatibility file of the GPU scripts keeps what modules compute. It runs on the present torch, in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "gpu" / "torch211"
PROGRAM = """
import torch
from torch.nn import functional as F
from benchmarks.experiments import plain
from boost.models import documents, kernels

x, y, gamma = torch.randn(4, 6), torch.randn(4, 6), torch.rand(6)
for kernel, arguments in ((kernels.gated, (x, y)), (kernels.normed, (x, gamma, 1e-5))):
    assert "sitecustomize" in kernel.function.__module__
    torch.testing.assert_close(kernel(*arguments), kernel.__wrapped__(*arguments), rtol=0, atol=0)
assert documents.document_form("cuda", "bfloat16", False) == "mask"
weight, targets = torch.randn(9, 6), torch.randint(9, (2, 2))
loss = plain.fused_loss(x.view(2, 2, 6), weight, targets, chunk_tokens=3)
torch.testing.assert_close(loss, F.cross_entropy(x @ weight.t(), targets.flatten()))
"""


@pytest.mark.slow
def test_patched_modules_compute_the_same() -> None:
    paths = os.pathsep.join([str(FOLDER), str(FOLDER.parents[2]), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr
