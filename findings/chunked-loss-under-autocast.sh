#!/bin/sh
# torch 2.13.0: F.linear_cross_entropy returns an fp32 loss under autocast, as F.cross_entropy does. With options, which only choose
# chunks, it returns the loss in the dtype of the hidden states, so in bf16 after any linear layer: a loss of 17.53 becomes 17.5, and a
# curve becomes a staircase. Outside autocast, bf16 hidden states with an fp32 weight are an error without options, but run with them.
# There is no warning in any case. The gradients are as accurate as without options.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cat > "$folder/loss.py" <<'PYTHON'
import sys
import warnings

import torch
import torch.nn.functional as F

warnings.simplefilter("error")
torch.manual_seed(0)
hidden = torch.randn(256, 32, requires_grad=True)
weight, targets = torch.randn(500, 32, requires_grad=True), torch.randint(500, (256,))


def loss(x, chunked):
    return F.linear_cross_entropy(x, weight, targets, options=torch.nn.LinearCrossEntropyOptions() if chunked else None)


print("torch", torch.__version__)
exact = loss(hidden, False)
of_exact = torch.autograd.grad(exact, weight)[0]
dtypes, errors, mixed = {}, {}, {}
for chunked in (False, True):
    with torch.autocast("cpu", torch.bfloat16):
        made = loss(F.linear(hidden, torch.eye(32)), chunked)
    dtypes[chunked] = made.dtype
    errors[chunked] = ((torch.autograd.grad(made, weight)[0] - of_exact).norm() / of_exact.norm()).item()
    print(f"chunked {chunked}, autocast: {made.dtype}, {made.item()} instead of {exact.item()}; gradient off by {errors[chunked]:.1e}")
    try:
        mixed[chunked] = str(loss(hidden.bfloat16(), chunked).dtype)
    except RuntimeError as error:
        mixed[chunked] = "RuntimeError"
    print(f"chunked {chunked}, no autocast, hidden states in bf16, weight in fp32: {mixed[chunked]}")
sys.exit(
    dtypes != {False: torch.float32, True: torch.bfloat16}
    or mixed != {False: "RuntimeError", True: "torch.bfloat16"}
    or errors[True] > 2 * errors[False]
)
PYTHON
"$folder/venv/bin/python" "$folder/loss.py"
