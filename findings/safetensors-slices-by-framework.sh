#!/bin/sh
# safetensors 0.8.0: get_slice understands other indices for NumPy than for torch. With framework="pt", indices are torch's: of ten rows,
# [8:20] are the last two, [-3:] and lists of rows work, and True adds a dimension. With framework="np", the library's own slicer rejects
# these with three types of error, except True, which silently is row 1. NumPy's arrays understand all of them as torch does.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0
"$folder/venv/bin/pip" install --quiet safetensors==0.8.0 numpy==2.4.6
cat > "$folder/read.py" <<'PYTHON'
import sys

import numpy
import safetensors
from safetensors.numpy import save_file

path, whole = sys.argv[1] + "/tensors.safetensors", numpy.arange(10.0)
save_file({"rows": whole}, path)
print("safetensors", safetensors.__version__)
found = {}
for framework in ("pt", "np"):
    with safetensors.safe_open(path, framework) as file:
        for index in (slice(0, 10, 3), slice(8, 20), slice(-3, None), [0, 2], slice(5, 2), True):
            try:
                found[framework, str(index)] = file.get_slice("rows")[index].tolist()
            except Exception as error:
                found[framework, str(index)] = type(error).__name__
            print(framework, index, found[framework, str(index)], "numpy:", whole[index].tolist())
alike = {index: found["pt", index] == found["np", index] for _, index in found}
sys.exit(
    alike != {index: index == "slice(0, 10, 3)" for index in alike}
    or found["np", "True"] != 1.0
    or found["np", "slice(8, 20, None)"] != "SafetensorError"
    or found["np", "slice(-3, None, None)"] != "OverflowError"
    or found["np", "slice(5, 2, None)"] != "SystemError"
)
PYTHON
"$folder/venv/bin/python" "$folder/read.py" "$folder"
