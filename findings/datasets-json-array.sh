#!/bin/sh
# datasets 5.2.0: load_dataset("json") rounds the floats of a JSON array to ten decimals, so that 3e-11 becomes 0.0, and keeps them
# exactly if the same rows are JSON lines. An array is parsed and written again by pandas' ujson, whose default is ten decimals, before
# pyarrow reads it; lines go to pyarrow as they are.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet datasets==5.2.0 pandas==3.1.1 pyarrow==26.0.1
cat > "$folder/read.py" <<'PYTHON'
import json
import sys
from pathlib import Path

import datasets

folder, row = Path(sys.argv[1]), {"share": 0.12345678901234568, "rate": 3e-11}
(folder / "array.json").write_text(json.dumps([row]))
(folder / "lines.jsonl").write_text(json.dumps(row))
print("datasets", datasets.__version__)
found = []
for name in ("array.json", "lines.jsonl"):
    cache = str(folder / f"cache-{name}")
    found += datasets.load_dataset("json", data_files=str(folder / name), split="train", cache_dir=cache)
    print(name, found[-1])
sys.exit(found != [{"share": 0.123456789, "rate": 0.0}, row])
PYTHON
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" "$folder/read.py" "$folder"
