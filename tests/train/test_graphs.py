"""Captured passes: bitwise the same training as without, and one line where a capture is impossible."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from boost.config import Config
from boost.config.rules import check
from boost.errors import ConfigError, TrainingError
from boost.measure.exactness import TrainedModel
from boost.parallel.mesh import Mesh
from boost.train import graphs
from boost.train.step import Stepper
from tests import toy
from tests.convert.toys import save
from tests.distributed import run_distributed
from tests.matrices import LAYOUTS, family_of, first, pairwise
from tests.recorded import RecordedGraph, recorded_graphs
from tests.trained import Trained, small_buckets

STEPS = 8


def captured(config: Config) -> Config:
    return config.changed(train={"cuda_graphs": "on"})


def differences(config: Config, steps: int = STEPS, warm_up: int = graphs.WARM_UP) -> list[str]:
    """What differs in a training with captured passes."""
    usual = Trained(config, steps).seen()
    with recorded_graphs(warm_up) as made:
        seen = Trained(captured(config), steps).seen()
    assert [graph.replays for graph in made] == [steps - warm_up]
    return [
        *(f"step {n}" for n, (a, b) in enumerate(zip(usual.numbers, seen.numbers, strict=True)) if a != b),
        *(f"gradient of {name} in step {n}" for n, (a, b) in enumerate(zip(usual.gradients, seen.gradients, strict=True))
          for name in a if not same_bits(a[name], b[name])),
        *(name for name, value in usual.weights.items() if not same_bits(value, seen.weights[name])),
    ]  # fmt: skip


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.numpy().tobytes() == b.numpy().tobytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "train", [{}, {"recompute": "low-rank", "global_batch": 6}, {"recompute": "full-block"}], ids=str
)
def test_captured_passes_train_the_same_to_the_bit(dtype: str, train: dict[str, Any]) -> None:
    assert differences(toy.toy_config(dtype, train=train)) == []


def test_a_teacher_is_captured_too(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    other = toy.toy_config("float32", model={"family": "dense"})
    distill = {"teacher": str(save(tmp_path / "teacher", other, tmp_path / "tokenizer.json")), "hidden": 0.1}
    config = toy.toy_config("float32", distill=distill)
    with recorded_graphs() as made:
        usual, seen = (Trained(each, 6) for each in (config, captured(config)))
    assert made[0].replays == 3 and usual.numbers == seen.numbers
    texts = [model.stepper.teacher.cross_entropy.item() for model in (usual, seen) if model.stepper.teacher]
    assert texts[0] == texts[1] > 0


def differences_with_buckets(config: Config) -> list[str]:
    with small_buckets():
        return differences(config, 4, warm_up=1)


OPTIONS = {
    "layout": LAYOUTS,
    "axis": ({"tp": 2}, {"tp": 2, "overlap": "halves"}, {"dp": 2}, {"cp": 2}),
    "dtype": ("float32", "bfloat16"),
    "recompute": ("none", "full-block"),
    "reduce_dtype": ("param_dtype", "bfloat16"),
    "tied": (False, True),
}


def config_of(row: dict[str, Any]) -> Config:
    parallel, train = {**row["layout"], **row["axis"]}, {name: row[name] for name in ("recompute", "reduce_dtype")}
    return toy.toy_config(
        row["dtype"], model={"family": family_of(parallel), "tied": row["tied"]}, parallel=parallel, train=train
    )


def legal(row: dict[str, Any]) -> bool:
    try:
        check(config_of(row))
    except ConfigError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("row", first(6, pairwise(OPTIONS, legal)))
def test_collectives_and_buckets_are_captured(row: dict[str, Any]) -> None:
    assert run_distributed(2, differences_with_buckets, config_of(row)) == [[], []]


def test_a_replay_reads_and_writes_the_tensors_of_the_capture() -> None:
    """Gradients and loss stay where they are; a new shape and a moved weight are captured again, after another warm-up."""
    with recorded_graphs(warm_up=1) as made:
        model = Trained(captured(toy.toy_config("float32")), 2)
        places = {p: p.grad.data_ptr() for p in model.model.parameters() if p.grad is not None}
        model.model.zero_grad(set_to_none=True)
        model.step(2)
        assert places and all(p.grad is not None and p.grad.data_ptr() == place for p, place in places.items())
        weight = model.fused_params[0].tensor
        weight.data = weight.data.clone()
        for step in (3, 4):
            model.step(step)
        assert [graph.replays for graph in made] == [2, 1]


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"parallel": {"pp": 2}}, "train.cuda_graphs = 'on' does not support pipelines, but parallel.pp = 2; set"),
        ({"data": {"isolate_documents": True}}, "shapes in every step, but data.isolate_documents = true makes"),
        ({"parallel": {"dp": 2, "shard": "full"}}, "gathered weights, but parallel.shard = 'full'; set"),
        ({"parallel": {"dp": 2, "shard": "optimizer"}}, "gathered weights, but parallel.shard = 'optimizer'; set"),
        ({"parallel": {"dp": 2}, "run": {"recovery": "in-step"}}, "but run.recovery = 'in-step' lets replicas leave"),
    ],
)
def test_what_cannot_be_captured_is_refused_in_one_line(
    sections: dict[str, Any], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        toy.toy_config(**sections, train={"cuda_graphs": "on"})
    assert "\n" not in str(error.value)
    with caplog.at_level("INFO", logger="boost"):
        config, passes = toy.toy_config(**sections), lambda *_: torch.zeros(())
        assert graphs.captured_if_configured(passes, config, [], torch.device("cuda")) is passes
    assert f"no CUDA graphs: {error.value}" in caplog.text


def test_graphs_need_a_gpu(caplog: pytest.LogCaptureFixture) -> None:
    message = "train.cuda_graphs = 'on' needs a GPU, but the device is 'cpu'; set it to 'off'"
    with pytest.raises(ConfigError, match=message):
        Trained(captured(toy.toy_config()), 0)
    with caplog.at_level("INFO", logger="boost"):
        Trained(toy.toy_config(), 0)
    assert not caplog.text


class Reads(TrainedModel):
    """Passes with a fault."""

    def __init__(self, read: Any) -> None:
        usual, config = Stepper._run_passes, captured(toy.toy_config("float32"))

        def run_passes(stepper: Stepper, *arguments: Any) -> Tensor:
            loss = usual(stepper, *arguments)
            read(loss, *arguments)
            return loss

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Stepper, "_run_passes", run_passes)
            super().__init__(config, Mesh(toy.CPU), 6)


def test_a_number_read_on_the_host_is_found() -> None:
    reason = r"the passes of a step cannot be captured \(operation not permitted when stream is capturing.*\); set it to 'off'"
    with recorded_graphs(), pytest.raises(TrainingError, match=reason):
        Reads(lambda loss, *_: loss.item())


def test_a_capture_that_runs_out_of_memory_says_so() -> None:
    def read(*_: Any) -> None:
        if torch.utils._python_dispatch.is_in_torch_dispatch_mode():
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")

    with recorded_graphs(), pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        Reads(read)


def test_an_input_outside_the_static_tensors_is_found() -> None:
    """A tensor of the host, made for one step."""

    def read(loss: Tensor, *_: Any) -> None:
        loss += torch.tensor(1.0)

    with recorded_graphs(), pytest.raises(RuntimeError, match="memory that was freed after the capture"):
        Reads(read)


def test_what_a_capture_does_not_know_is_nan() -> None:
    x, graph = torch.ones(2), RecordedGraph()
    with graph.capture():
        y = x + 1
        z = y.view(1, 2) * x
        y += z.sum()
    assert y.isnan().all() and z.isnan().all()
    for factor in (1.0, 3.0):
        x.fill_(factor)
        graph.replay()
        assert z.tolist() == [[factor * (factor + 1)] * 2]
        assert y.tolist() == [factor + 1 + 2 * factor * (factor + 1)] * 2
    del x
    gc.collect()
    with pytest.raises(RuntimeError, match="freed"):
        graph.replay()
