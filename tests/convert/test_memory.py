"""Import and export stream: a process never holds a whole model, only one output file and a tensor or two."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from boost.convert.export import export
from boost.convert.importing import import_weights
from boost.train.checkpoint import open_checkpoint
from tests.convert.toys import llama_folder
from tests.peaks import in_new_process, needs_proc, peak

pytestmark = pytest.mark.slow

FILE_BYTES = 8_000_000


def convert(way: str, small: Path, large: Path, folder: Path) -> int:
    """Prints the bytes of the weights, and those that conversion adds to the peak with small files and with one file."""

    def run(source: Path, out: str, file_bytes: int = FILE_BYTES) -> Any:
        if way == "export":
            return export(open_checkpoint(source), folder / out, None, True, file_bytes)
        return import_weights(source, folder / out, None, None, None, file_bytes)

    run(small, "small")  # only what the large one adds counts
    before = peak()
    done = run(large, "large")
    added = peak() - before
    run(large, "one", 10**9)  # shows that the measure sees the weights
    print(done.bytes, added, peak() - before)
    return 0


@needs_proc
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
        size, streamed, at_once = in_new_process(convert, way, *sources, out)
        assert size > 80_000_000
        # One file waits, one tensor is read, and what is read stays mapped for that moment; in one file, once and not twice.
        assert streamed < 0.75 * size, f"{way} added {streamed / 1e6:.0f} MB for weights of {size / 1e6:.0f} MB"
        assert 0.8 * size < at_once < 1.4 * size, (
            f"{way} added {at_once / 1e6:.0f} MB for weights of {size / 1e6:.0f} MB"
        )
    index = json.loads((tmp_path / "exported" / "large" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 8
