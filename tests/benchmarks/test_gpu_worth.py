"""benchmarks/gpu/worth.py: models at equal time, tokens and FLOPs."""

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from benchmarks.gpu.worth import COMPILES, main, read_off, tuned_rate

TOY = (
    "--model.dim=32 --model.ffn_dim=48 --model.layers=2 --model.heads=4 --model.vocab_size=320 --train.seq_len=32 "
    "--train.global_batch=4 --train.micro_batch=4 --train.compute_dtype=float32"
)


def test_rates_are_the_tuned_ones_over_the_width() -> None:
    """The page's table of families names the rates at width 192."""
    page = (Path(__file__).parents[2] / "benchmarks" / "results" / "families-2026-11.md").read_text(encoding="utf-8")
    for family in ("dense", "svd", "cola", "lax"):
        (row,) = (line.split(" | ") for line in page.splitlines() if line.startswith(f"| {family} | ") and "%" in line)
        assert tuned_rate(family, 192) == pytest.approx(float(row[4]))
        assert tuned_rate(family, 384) == pytest.approx(float(row[4]) / 2)


def test_readings_lie_between_evaluations() -> None:
    points = [{"tokens": 10, "heldout_loss": 4.0}, {"tokens": 20, "heldout_loss": 3.0}]
    assert read_off({"points": points}, "tokens", 15) == 3.5


@pytest.mark.slow
def test_families_train_for_the_same_time(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for family, rank in (("dense", ""), ("cola", "--model.rank=8")):
        words = (
            f"worth train {family} {store} --out {tmp_path} --seconds 0.3 --every 0.1 --eval-tokens 100 --device cpu"
        )
        monkeypatch.setattr("sys.argv", f"{words} {TOY} {rank}".split())
        assert main() == 0
        run = json.loads((tmp_path / f"worth-{family}-0.json").read_text())
        times = [point["seconds"] for point in run["points"]]
        assert times == sorted(times) and times[-2] < 0.3 <= times[-1], "the last reading is the only one at the end"
        assert run["points"][0]["tokens"] > COMPILES * 4 * 32
    monkeypatch.setattr("sys.argv", ["worth", "compare", str(tmp_path)])
    assert main() == 0
    losses = json.loads((tmp_path / "worth.json").read_text())["losses"]
    assert [(name, list(found)) for name, found in losses.items()] == [
        (name, ["seconds", "tokens", "flops"]) for name in ("cola", "dense")
    ]


@pytest.mark.slow
def test_a_packed_store_is_unpacked_first(store: Path, tmp_path: Path) -> None:
    python = tmp_path / "python"  # runs nothing but the unpacking
    python.write_text(f'#!/bin/sh\n[ "$2" != tarfile ] || exec {sys.executable} "$@"\necho "$@"\n')
    python.chmod(0o755)
    with tarfile.open(tmp_path / "store.tar.xz", "w:xz") as packed:
        packed.add(store, ".")
    changes = {"STORE": f"{tmp_path}/store.tar.xz", "OUT": f"{tmp_path}/out", "PYTHON": str(python), "DEVICE": "cpu"}
    script = Path(__file__).parents[2] / "benchmarks" / "gpu" / "worth.sh"
    subprocess.run([script], env=os.environ | changes, check=True, capture_output=True)
    assert f"train dense {tmp_path}/out/store " in (tmp_path / "out" / "worth-dense-0.log").read_text()
    files = {path.name: path.read_bytes() for path in store.iterdir()}
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "out" / "store").iterdir()}
