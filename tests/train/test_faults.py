"""Injected faults: their syntax, and the effect of those that leave the process alive."""

import errno
from pathlib import Path

import pytest
import torch

from boost.errors import ConfigError
from boost.train.checkpoint import complete_checkpoints
from boost.train.faults import KINDS, Fault, FaultInjection, fail_next_write, flip_exponent_bit, parse_fault
from tests.train.runs import Recorder, fitted, make_config


def test_words() -> None:
    assert parse_fault("kill@5", 10, 2) == Fault("kill", 5, 0)
    assert parse_fault("disk-full@10:1", 10, 2) == Fault("disk-full", 10, 1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kill", r"must be KIND@STEP or KIND@STEP:RANK, such as kill@5:1; kinds: kill, hang"),
        ("kill@x", r"must be KIND@STEP"),
        ("kill@-1", r"must be KIND@STEP"),
        ("melt@3", r"unknown fault 'melt'; kinds: kill, "),
        ("kill@0", r"there is no step 0; nearest step: 1$"),
        ("kill@11", r"there is no step 11; nearest step: 10$"),
        ("kill@3:2", r"there is no rank 2; largest valid rank: 1$"),
    ],
)
def test_a_mistake_is_one_line(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"^--inject-fault {text}:? {said}"):
        parse_fault(text, 10, 2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_flipped_exponent_bit_is_finite_and_comes_back(dtype: torch.dtype) -> None:
    weights = torch.full((2, 3), 0.03, dtype=dtype)
    before = weights.clone()
    flip_exponent_bit(weights)
    assert (weights[0, 0] / before[0, 0]).item() in (16, 1 / 16)
    assert torch.equal(weights.view(-1)[1:], before.view(-1)[1:])
    flip_exponent_bit(weights)
    assert torch.equal(weights, before)


def test_one_write_fails_below_the_folder_and_only_one(tmp_path: Path) -> None:
    fail_next_write(tmp_path / "checkpoints")
    (tmp_path / "elsewhere").write_text("x")
    with pytest.raises(OSError) as caught:
        (tmp_path / "checkpoints" / "step").mkdir(parents=True)
    if not (tmp_path / "checkpoints").exists():
        (tmp_path / "checkpoints").mkdir()
    assert caught.value.errno == errno.ENOSPC
    (tmp_path / "checkpoints" / "step").mkdir()
    fail_next_write(tmp_path / "checkpoints")
    with pytest.raises(OSError, match="No space left"):
        (tmp_path / "checkpoints" / "step" / "file").write_text("x")
    (tmp_path / "checkpoints" / "step" / "file").write_text("x")


def test_a_gradient_that_is_nan_costs_one_step_and_a_full_disk_one_save(store: Path, tmp_path: Path) -> None:
    recorder = Recorder()
    config = make_config(store, tmp_path / "run", train={"save_every": 2, "keep": 5, "async_save": False})
    fitted(config, recorder, FaultInjection([Fault("nan", 3), Fault("nan", 3, 1), Fault("disk-full", 4)]))
    assert [event.step for event in recorder.of("on_bad_step")] == [3]
    assert recorder.of("on_warning")[0] == "injected fault: nan at step 3 on rank 0"
    assert [path.name[-1] for path in complete_checkpoints(tmp_path / "run" / "checkpoints")] == ["2", "6"]
    assert any("No space left on device" in text for text in recorder.of("on_warning"))


def test_every_kind_is_explained() -> None:
    assert set(KINDS) == set(FaultInjection([]).actions(None))  # type: ignore[arg-type]
