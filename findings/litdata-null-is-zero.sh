#!/bin/sh
# litdata 0.2.76: the first sample decides the fields of a dataset and their types. A later sample without one of the fields, or with null in
# it, is written and read with 0, False or "" there, whatever the writer meant: an unlabeled sample gets class 0. Fields that the first
# sample does not have are dropped. Neither optimize nor StreamingDataset warns. A number of another type, such as 2.5 after 1, is an error.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0
"$folder/venv/bin/pip" install --quiet litdata==0.2.76 torchvision==0.28.0 numpy==2.4.6
cat > "$folder/records.py" <<'PYTHON'
import sys

import litdata

WRITTEN = [
    {"text": "a", "label": 1, "good": True},
    {"text": "b", "label": None, "good": None},
    {"text": None, "label": 2, "good": True},
    {"label": 3, "score": 7},
]
READ = [
    {"text": "a", "label": 1, "good": True},
    {"text": "b", "label": 0, "good": False},
    {"text": "", "label": 2, "good": True},
    {"text": "", "label": 3, "good": False},
]


def same(record):
    return record


if __name__ == "__main__":
    folder = sys.argv[1] + "/records"
    litdata.optimize(fn=same, inputs=WRITTEN, output_dir=folder, num_workers=1, chunk_size=10)
    dataset = litdata.StreamingDataset(folder, shuffle=False)
    read = [dataset[number] for number in range(len(dataset))]
    print("litdata", litdata.__version__)
    for record, found in zip(WRITTEN, read):
        print("written", record, "read", found)
    sys.exit(read != READ)
PYTHON
"$folder/venv/bin/python" -W ignore "$folder/records.py" "$folder" 2> "$folder/log" || { cat "$folder/log"; exit 1; }
