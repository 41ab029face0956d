"""Weights go through in a stream: a process never holds a model whole, only one output file of it and a tensor or two."""

import json
import subprocess
import sys
from pathlib import Path

import torch

from tests.convert.toys import llama_folder

FILE_BYTES = 8_000_000

# A warm-up on a tiny model first, so that only what the large one adds counts. The peak of a process cannot be taken back,
# so it gets one for each conversion.
SCRIPT = """
import resource, sys
from pathlib import Path
from boost.convert.export import export
from boost.convert.importing import import_weights
from boost.convert.spectrum import Truncation
from boost.train.checkpoint import open_checkpoint

small, large, way, folder, file_bytes = *map(Path, sys.argv[1:3]), sys.argv[3], Path(sys.argv[4]), int(sys.argv[5])

def convert(source, out):
    if way == "export":
        return export(open_checkpoint(source), out, None, True, file_bytes)
    return import_weights(source, out, None, None, None, file_bytes)

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

convert(small, folder / "small")
before = peak()
done = convert(large, folder / "large")
print(done.bytes, peak() - before)
"""


def added(way: str, small: Path, large: Path, folder: Path) -> tuple[int, int]:
    """(bytes of the weights, bytes that their conversion added to a process's peak)."""
    words = [sys.executable, "-c", SCRIPT, small, large, way, folder, str(FILE_BYTES)]
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    size, peak = map(int, done.stdout.split())
    return size, peak


def test_neither_way_holds_the_model(tmp_path: Path) -> None:
    small, large = tmp_path / "small", tmp_path / "large"
    llama_folder(small)
    shape = {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8, "vocab_size": 4096}
    llama_folder(large, torch.float32, **shape, num_attention_heads=8, num_key_value_heads=8)
    size, peak = added("import", small, large, tmp_path / "imported")
    assert size > 100_000_000
    # One file waits, one tensor is read, and what is read stays mapped for that moment.
    assert peak < 40_000_000, f"import added {peak / 1e6:.0f} MB for weights of {size / 1e6:.0f} MB"
    size, peak = added(
        "export", tmp_path / "imported" / "small", tmp_path / "imported" / "large", tmp_path / "exported"
    )
    assert peak < 40_000_000, f"export added {peak / 1e6:.0f} MB for weights of {size / 1e6:.0f} MB"
    index = json.loads((tmp_path / "exported" / "large" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 10
