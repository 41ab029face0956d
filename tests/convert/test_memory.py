"""Import and export stream: a process never holds a whole model, only one output file and a tensor or two."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.convert.toys import llama_folder

pytestmark = pytest.mark.slow

FILE_BYTES = 8_000_000

# A warm-up on a tiny model first, so that only what the large one adds counts. VmHWM and not getrusage: a process begins
# with the ru_maxrss of the one that started it. At last the same in one file, which shows that the measure sees the weights.
SCRIPT = """
import re, sys
from pathlib import Path
from boost.convert.export import export
from boost.convert.importing import import_weights
from boost.train.checkpoint import open_checkpoint

small, large, way, folder, file_bytes = *map(Path, sys.argv[1:3]), sys.argv[3], Path(sys.argv[4]), int(sys.argv[5])

def convert(source, out, file_bytes):
    if way == "export":
        return export(open_checkpoint(source), out, None, True, file_bytes)
    return import_weights(source, out, None, None, None, file_bytes)

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

convert(small, folder / "small", file_bytes)
before = peak()
done = convert(large, folder / "large", file_bytes)
added = peak() - before
convert(large, folder / "one", 10**9)
print(done.bytes, added, peak() - before)
"""


def added(way: str, small: Path, large: Path, folder: Path) -> tuple[int, int, int]:
    """Bytes of the weights, and bytes that conversion adds to a process's peak with small files and with one file."""
    words = [sys.executable, "-c", SCRIPT, small, large, way, folder, str(FILE_BYTES)]
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    size, streamed, at_once = map(int, done.stdout.split())
    return size, streamed, at_once


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="the peak of a process is read from Linux's /proc")
def test_neither_way_holds_the_model(tmp_path: Path) -> None:
    small, large = tmp_path / "small", tmp_path / "large"
    llama_folder(small)
    shape = {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 5, "vocab_size": 4096}
    llama_folder(large, torch.float32, **shape, num_attention_heads=8, num_key_value_heads=8)
    imported = tmp_path / "imported"
    for way, sources, out in (
        ("import", (small, large), imported),
        ("export", (imported / "small", imported / "large"), tmp_path / "exported"),
    ):
        size, streamed, at_once = added(way, *sources, out)
        assert size > 80_000_000
        # One file waits, one tensor is read, and what is read stays mapped for that moment; in one file, once and not twice.
        assert streamed < 0.75 * size, f"{way} added {streamed / 1e6:.0f} MB for weights of {size / 1e6:.0f} MB"
        assert 0.8 * size < at_once < 1.4 * size, (
            f"{way} added {at_once / 1e6:.0f} MB for weights of {size / 1e6:.0f} MB"
        )
    index = json.loads((tmp_path / "exported" / "large" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 8
