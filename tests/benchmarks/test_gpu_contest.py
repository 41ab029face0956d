"""The contest for a GPU, dry on the CPU: contenders that run are timed, others are listed, and what is measured is not repeated."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import contest
from boost.models.kernels import KERNELS


def test_every_kernel_of_the_model_is_measured() -> None:
    arguments = contest.kernel_arguments(8, 32, torch.float32, torch.device("cpu"))
    assert arguments.keys() == KERNELS.keys()
    for name, each in arguments.items():
        KERNELS[name](*each)


@pytest.mark.slow
def test_a_piece_is_measured_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(piece: str, *words: str) -> int:
        monkeypatch.setattr(
            "sys.argv", ["contest", piece, "--device", "cpu", "--out", str(tmp_path / "c.json"), *words]
        )
        return contest.main()

    assert run("attention", "--seconds", "-1") == 3 and "run it again" in capsys.readouterr().out
    assert run("attention") == 0
    found = json.loads((tmp_path / "c.json").read_text())["attention"]["attention, width 16, 64 tokens"]
    assert {len(times) for times in found["seconds"].values()} == {7}
    assert found["seconds"].keys() == found["profiles"].keys() >= {"chosen by torch"}
    assert "flash-attn 4 wheel" in found["left_out"].keys() ^ found["seconds"].keys()
    assert run("attention", "--seconds", "-1") == 0, "nothing is left"
    monkeypatch.setattr("benchmarks.gpu.contest.MODES", ("none", "auto"))
    assert run("build") == 0
    found = json.loads((tmp_path / "c.json").read_text())
    assert found["attention"] and found["build"]["share btp: train.compile"]["seconds"].keys() == {"none", "auto"}
