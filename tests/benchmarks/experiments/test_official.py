"""The comparison with published code, with a stand-in for that code."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.commands import main
from benchmarks.experiments import official
from boost.config import load


def cola(act: Callable[[Tensor], Tensor]) -> Any:
    """transformers' LLaMA with factors named as in CoLA's class."""
    transformers = pytest.importorskip("transformers")

    class Linear(nn.Module):
        def __init__(self, linear: nn.Linear, rank: int) -> None:
            super().__init__()
            self.cola_a = nn.Parameter(torch.zeros(linear.in_features, rank))
            self.cola_b = nn.Parameter(torch.zeros(rank, linear.out_features))

        def forward(self, x: Tensor) -> Tensor:
            return act(x.float() @ self.cola_a) @ self.cola_b

    def build(config: Any) -> nn.Module:
        model: nn.Module = transformers.LlamaForCausalLM(config)
        for module in list(model.model.layers.modules()):
            for name, child in module.named_children():
                if isinstance(child, nn.Linear):
                    setattr(module, name, Linear(child, config.rank))
        return model

    return SimpleNamespace(ColaConfig=transformers.LlamaConfig, ColaForCausalLM=build)


def test_the_same_function_agrees_and_another_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    preset, words, _ = official.RECIPES["CoLA without clipping"]
    config = load(preset, [*words, "--model.layers=1"])
    monkeypatch.setitem(sys.modules, "cola", cola(nn.functional.silu))
    assert 0 < max(official.compare(config).values()) < 1e-6  # transformers 5 computes RoPE's angles in fp32
    monkeypatch.setitem(sys.modules, "cola", cola(nn.functional.gelu))
    assert min(official.compare(config).values()) > 1e-4


def test_a_missing_clone_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["official", "--cola", str(tmp_path)]) == 2
    assert f"--cola = '{tmp_path}' has no folder 'cola'" in capsys.readouterr().err
