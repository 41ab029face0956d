"""The contest for a GPU, dry on the CPU: contenders that run are timed, others are listed, and what is measured is not repeated."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.gpu import contest
from boost.config import load
from boost.measure.steps import Stepper, shape
from boost.models.kernels import KERNELS
from boost.parallel.mesh import Mesh


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


class Linear(nn.Module):
    """A linear with factors named and transposed as in CoLA's class."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        self.cola_a = nn.Parameter(torch.zeros(linear.in_features, rank))
        self.cola_b = nn.Parameter(torch.zeros(rank, linear.out_features))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.silu(x @ self.cola_a) @ self.cola_b


@pytest.mark.slow
def test_the_published_code_computes_our_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for that code: transformers' LLaMA with other linears."""
    transformers = pytest.importorskip("transformers")

    def build(config: Any) -> nn.Module:
        model: nn.Module = transformers.LlamaForCausalLM(config)
        for module in list(model.model.layers.modules()):
            for name, child in module.named_children():
                if isinstance(child, nn.Linear):
                    setattr(module, name, Linear(child, config.rank))
        return model

    stand_in = SimpleNamespace(ColaConfig=transformers.LlamaConfig, ColaForCausalLM=build)
    monkeypatch.setitem(sys.modules, "cola", stand_in)
    monkeypatch.setattr("sys.path", [*sys.path])
    size = shape(64, 2, 176, 4, tp=1, vocab_size=256, seq_len=32)
    config = load("cola-60m", ["--run.device=cpu", "--train.compute_dtype=float32", *size, *contest.batch(2)])
    with pytest.raises(FileNotFoundError, match="has no folder 'cola'"):
        contest._published(config, tmp_path, torch.device("cpu"))
    (tmp_path / "cola").mkdir()
    theirs = contest._published(config, tmp_path, torch.device("cpu"))()
    ours = Stepper(config, Mesh(torch.device("cpu"))).step()
    assert theirs[0].item() == pytest.approx(ours[0].item(), rel=1e-6)
