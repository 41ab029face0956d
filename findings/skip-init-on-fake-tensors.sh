#!/bin/sh
# torch 2.13.0: under FakeTensorMode, torch.nn.Linear is built with fake weights, but torch.nn.utils.skip_init of the same module raises
# "Couldn't swap Linear.weight": its to_empty swaps parameters, which a weak reference to them forbids.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cat > "$folder/skip.py" <<'PYTHON'
import sys

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import Linear
from torch.nn.utils import skip_init


def kind(build):
    try:
        return type(build().weight.data).__name__
    except RuntimeError as error:
        return f"{error}: {error.__cause__}"


print("torch", torch.__version__)
found = {"skip_init": kind(lambda: skip_init(Linear, 4, 4))}
with FakeTensorMode():
    found["Linear, fake"] = kind(lambda: Linear(4, 4))
    found["skip_init, fake"] = kind(lambda: skip_init(Linear, 4, 4))
for name, what in found.items():
    print(f"{name}: {what}")
raises = found.pop("skip_init, fake")
sys.exit(found != {"skip_init": "Tensor", "Linear, fake": "FakeTensor"} or "Couldn't swap Linear.weight" not in raises)
PYTHON
"$folder/venv/bin/python" "$folder/skip.py"
