"""What a run says before its first step."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from boost.config.architecture import parameter_count
from boost.config.schema import BF16_WEIGHTS_COST
from boost.data.store import TokenStore
from boost.errors import StoppedError
from boost.train import run as advice
from boost.train.run import advise, model_advice, start_advice
from tests.train.runs import make_config, make_trainer


@pytest.fixture
def enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """The held-out split of the tests' corpus counts as large."""
    monkeypatch.setattr(advice, "FEW_HELDOUT_TOKENS", 10)


def said(store: Path, run: Path, **train: object) -> list[str]:
    return list(start_advice(make_trainer(make_config(store, run, train=train))))


def test_many_epochs(store: Path, tmp_path: Path, enough: None) -> None:
    tokens = (TokenStore.open(store).split("train").n_tokens - 1) // 32 * 32
    steps = 10 * tokens // (4 * 32) + 1
    (line,) = said(store, tmp_path / "run", steps=steps)
    assert " 10 times; beyond 4 epochs, more text helps" in line and str(store) in line
    assert said(store, tmp_path / "run", steps=steps * 4 // 10 - 1) == []


def test_every_store_of_a_mixture(store: Path, mixture: dict[str, float], tmp_path: Path) -> None:
    other = Path(next(path for path in mixture if Path(path) != store))
    samples = {path: (TokenStore.open(Path(path)).split("train").n_tokens - 1) // 32 for path in mixture}
    steps = int(5 * samples[str(other)] / (4 * 0.3))
    assert steps * 4 * 0.7 / samples[str(store)] < 4, "the larger store is read fewer times"
    epochs, *held_out = start_advice(make_trainer(make_config(mixture, tmp_path / "run", train={"steps": steps})))
    assert f"training tokens of {other} 5 times" in epochs
    assert [line.split(" has ")[0] for line in held_out] == [f"the held-out split of {path}" for path in mixture]
    assert all("fewer than 20k, so its loss is noisy" in line for line in held_out)


def test_a_model_that_is_too_large_for_its_data(store: Path, tmp_path: Path) -> None:
    """Nobody trains a preset for measurements, or one with a large vocabulary, without knowing it."""

    def said(steps: int, vocab_size: int) -> list[str]:
        config = make_config(store, tmp_path / f"{steps}-{vocab_size}", train={"steps": steps})
        config = config.changed(model={"vocab_size": vocab_size})
        return [line for line in model_advice(make_trainer(config)) if line not in list(config.model.advice())]

    assert TokenStore.open(store).vocab_size == 300
    enough = -(
        -parameter_count(make_config(store, tmp_path / "run").changed(model={"vocab_size": 600}).model) // (4 * 32)
    )
    assert said(enough, 600) == []
    (line,) = said(2 * enough, 601)
    assert line.startswith("model.vocab_size = 601, but") and line.endswith("set model.vocab_size = 300")
    (line,) = said(enough // 2, 600)
    assert "0.5 per parameter" in line


def test_no_saves(store: Path, tmp_path: Path, enough: None) -> None:
    (line,) = said(store, tmp_path / "run", save_minutes=0.0)
    assert line.startswith("train.save_every and train.save_minutes are 0, so no checkpoint is saved")
    assert said(store, tmp_path / "run", save_minutes=0.0, save_every=2) == []


def test_advice_is_shown_before_the_first_step(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from boost.train.console import ConsoleHook

    trainer = make_trainer(make_config(store, tmp_path / "run", train={"steps": 1}), ConsoleHook())
    advise(trainer)
    trainer.start([])
    trainer.fit()
    lines = capsys.readouterr().out.splitlines()
    (place,) = [number for number, line in enumerate(lines) if line.startswith("warning: the held-out split of ")]
    assert place < next(number for number, line in enumerate(lines) if line.startswith("step "))


def test_tasks_that_form_no_run(store: Path, tmp_path: Path, enough: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    (line,) = said(store, tmp_path / "run")
    assert (
        "OMPI_COMM_WORLD_SIZE = 2: " in line
        and "each of the 2 tasks is a whole run" in line
        and "start 'boost launch' in each" in line
    )
    monkeypatch.setenv("RANK", "0")  # as torchrun sets it
    assert said(store, tmp_path / "run") == []


def test_float32_on_a_gpu(store: Path, tmp_path: Path, enough: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype, expected in (("float32", 1), ("float64", 0)):
        trainer = make_trainer(make_config(store, tmp_path / dtype, dtype=dtype))
        assert not list(start_advice(trainer)), "on CPUs it is the fastest"
        trainer.mesh = replace(trainer.mesh, device=torch.device("cuda"))
        lines = list(start_advice(trainer))
        assert len(lines) == expected and all("add compute_dtype = 'bfloat16' to [train]" in line for line in lines)
        with monkeypatch.context() as patched:
            patched.setattr(advice, "allows_tf32", lambda: True)
            lines = list(start_advice(trainer))
        assert len(lines) == expected and all("this run computes in TF32" in line for line in lines)


def test_weights_in_bfloat16_say_what_they_cost(store: Path, tmp_path: Path, enough: None) -> None:
    lines = said(store, tmp_path / "narrow", param_dtype="bfloat16", compute_dtype="bfloat16")
    assert [line.startswith("train.param_dtype = 'bfloat16' rounds weights") for line in lines] == [True]
    assert not said(store, tmp_path / "wide", param_dtype="float32", compute_dtype="bfloat16")
    measured = json.loads((Path(__file__).parents[2] / "benchmarks" / "precision.json").read_text())
    low, high = (
        {dtype: f"{loss:.2f}" for dtype, loss in measured["heldout_loss"][lr].items()} for lr in ("2e-4", "3e-3")
    )
    cost = (
        f"held-out loss {low['bfloat16']} instead of {low['float32']} after {measured['steps']} steps at lr 2e-4, "
        f"{high['bfloat16']} instead of {high['float32']} at 3e-3"
    )
    assert cost == BF16_WEIGHTS_COST and cost in lines[0]


class StopsAtOnce:
    """A session that shows what is set when processes join."""

    def __init__(self, *_: object) -> None:
        raise StoppedError(f"NCCL_ALGO={os.environ.get('NCCL_ALGO')}")


def test_deterministic_sums_are_asked_of_nccl_before_it_starts(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """NVLink SHARP adds in an order of its own."""
    monkeypatch.setitem(advice.SESSIONS, "restart", f"{__name__}:StopsAtOnce")
    for deterministic, own, expected in ((True, "", "^NVLS,NVLSTree"), (True, "Ring", "Ring"), (False, "", None)):
        for name in ("NCCL_ALGO", "CUBLAS_WORKSPACE_CONFIG", "TORCH_FR_BUFFER_SIZE"):
            monkeypatch.setenv(name, own if name == "NCCL_ALGO" else "")
            if not os.environ[name]:
                monkeypatch.delenv(name)
        result, _ = advice.train(make_config(store, tmp_path / "run", train={"deterministic": deterministic}), None)
        assert result is None and f"stopped by NCCL_ALGO={expected} during" in capsys.readouterr().out
