"""The training loop: replicas and micro-batches form one batch, resuming is bitwise, and bad numbers change nothing."""

from pathlib import Path
from typing import Any

import pytest
import torch

from boost.config import Config
from boost.config.architecture import IGNORED
from boost.config.schema import OptimConfig
from boost.data.batches import Batch, Batches
from boost.data.prepare import PrepareOptions, prepare
from boost.errors import CheckpointError, ConfigError, DamagedCheckpointError, DataError, TrainingError
from boost.optim.schedule import learning_rate
from boost.parallel import gradients
from boost.parallel.pipeline import Pipeline
from boost.train.loop import Trainer
from boost.train.prefetch import to_device
from boost.train.resume import resume_candidates
from boost.train.rundir import RunDirectory
from tests import toy
from tests.distributed import run_distributed
from tests.train.runs import RATE, Recorder, make_config, make_trainer, started


def losses_of(config: Config, steps: int) -> list[float]:
    trainer = started(config)
    return [trainer.step(RATE).loss for _ in range(steps)]


def order_of_a_step(config: Config) -> list[str]:
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        trainer = started(config)
        finish = trainer.stepper.reducer.finish
        patch.setattr(trainer.stepper.reducer, "finish", lambda: (said.append("finish"), finish()))
        begin = gradients.start_all_reduce_
        patch.setattr(gradients, "start_all_reduce_", lambda *args: (said.append("send"), begin(*args)))
        trainer.step(RATE)
    return said


@pytest.mark.parametrize("parallel", [{"tp": 2, "layout": "btp-sp"}, {"pp": 2, "dp": 2}], ids=str)
def test_gradients_are_sent_once_before_the_backward_pass_is_over(
    store: Path, tmp_path: Path, parallel: dict[str, Any]
) -> None:
    """When their last micro-batch has been added."""
    config = make_config(store, tmp_path, parallel=parallel, train={"micro_batch": 1, "global_batch": 8})
    for said in run_distributed(config.parallel.world_size, order_of_a_step, config)[-2:]:
        assert said == ["send", "finish"]


def test_the_loss_is_a_mean_over_targets_whatever_micro_batches_they_fall_into(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences with one target and with many: the mean of micro-batch means would be a different number."""
    usual = Batches.samples

    def masked(batches: Batches, indices: list[int]) -> Batch:
        batch = usual(batches, indices)
        for targets, index in zip(batch.targets, indices, strict=True):
            targets[1 + index % 3 * 9 :] = IGNORED
        return batch

    monkeypatch.setattr(Batches, "samples", masked)
    trainers = [
        make_trainer(make_config(store, tmp_path, train={"micro_batch": n, "global_batch": 4})) for n in (1, 2, 4)
    ]
    for trainer in trainers:
        trainer.start([])
    (batch,) = trainers[2].batches.numbered(0, [0], 4)
    counted = int((batch.targets != IGNORED).sum())
    assert 0 < counted < batch.targets.size
    total = trainers[2].model(*to_device(batch, False, toy.CPU))
    gradients = torch.autograd.grad(total / counted, list(trainers[2].model.parameters()))
    norm = torch.stack([g.square().sum() for g in gradients]).sum().sqrt().item()
    steps = [[trainer.step(RATE) for _ in range(4)] for trainer in trainers]
    assert steps[2][0].loss == pytest.approx(total.item() / counted, rel=1e-12)
    assert steps[2][0].gradient_norm == pytest.approx(norm, rel=1e-10)
    for ours in steps[:2]:
        assert [s.loss for s in ours] == pytest.approx([s.loss for s in steps[2]], rel=1e-12)
        assert [s.gradient_norm for s in ours] == pytest.approx([s.gradient_norm for s in steps[2]], rel=1e-10)


@pytest.mark.slow
def test_bf16_trains_with_fp32_master_weights(store: Path, tmp_path: Path) -> None:
    dtype = "bfloat16"
    config = make_config(store, tmp_path, 2, dtype)
    losses = run_distributed(2, losses_of, config, 27)[0]
    reference = losses_of(make_config(store, tmp_path, 1, "float32"), 27)
    assert losses[-1] < losses[0] - 1.0
    assert max(abs(a - b) for a, b in zip(losses, reference, strict=True)) < 0.1
    trainer = make_trainer(make_config(store, tmp_path, 1, dtype))
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}


def fit(config: Config, resume: str | None) -> tuple[list[float], int, int]:
    """Held-out losses, the last step, and the number of complete checkpoints."""
    recorder = Recorder()
    trainer = started(config, recorder, resume=resume)
    result = trainer.fit()
    seen = [event.metrics.heldout_loss for event in recorder.of("on_evaluation")]
    return seen, result.position.step, len(list(trainer.run.checkpoints.glob("step-*")))


def test_a_finished_run_resumes_to_its_evaluation_alone(store: Path, tmp_path: Path) -> None:
    config = make_config(store, tmp_path / "run", train={"eval_every": 2, "save_every": 2, "keep": 2})
    seen, step, kept = fit(config, None)
    assert (len(seen), step, kept) == (3, 6, 2)
    again, step, _ = fit(config, "auto")
    assert (again, step) == (seen[-1:], 6)


def test_resume_takes_the_newest_sound_checkpoint(
    store: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config(store, tmp_path / "run", train={"save_every": 2})
    seen, _, _ = fit(config, None)
    newest = tmp_path / "run/checkpoints/step-00000006"
    shard = next((newest / "tensors").iterdir())
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    trainer = make_trainer(config)
    with caplog.at_level("WARNING", logger="boost"):
        trainer.start(resume_candidates("auto", trainer.run))
    assert trainer.position.step == 4
    assert f"{shard.name} has changed" in trainer.warnings[0]
    assert f"{shard.name} has changed" in caplog.text
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.UntypedStorage, "from_file", unmappable)
        with pytest.raises(
            DamagedCheckpointError, match=r"step-00000004/tensors/.*cannot be read: too few pages; .* again$"
        ):
            make_trainer(config).start(resume_candidates("auto", trainer.run))
    again, step, _ = fit(config, "auto")
    assert (again, step) == (seen, 6), "the lost steps are repeated to the bit"


def unmappable(*_: object, **__: object) -> None:
    raise RuntimeError("too few pages")


def test_loro_goes_on_to_the_bit_behind_an_exact_step_that_was_skipped(store: Path, tmp_path: Path) -> None:
    """The step determines the learning rate and whether it is exact; the checkpoint has the update count."""
    optim = {"name": "loro", "lr": RATE, "exact_every": 3, "schedule": "cosine-restarts", "restart_warmup_steps": 2}
    config = make_config(store, tmp_path / "run", model={"family": "svd"}, train={"steps": 8})
    config = config.model_copy(update={"optim": OptimConfig.model_validate({**optim, "warmup_steps": 4})})
    trainer = started(config)

    def steps(trainer: Trainer, count: int) -> list[int]:
        counts = []
        for _ in range(count):
            rate = learning_rate(config.optim, trainer.position.step, config.train.steps)
            trainer.step(rate)
            counts.append(trainer.optimizer.updates)
        return counts

    assert steps(trainer, 2) == [1, 2]
    assert not isinstance(trainer.model, Pipeline)
    handle = trainer.model.blocks[0].mlp_norm.register_hook(lambda gradient: gradient * float("nan"))
    assert steps(trainer, 1) == [2], "the third step would have been exact"
    handle.remove()
    assert steps(trainer, 2) == [3, 4]
    trainer.save()
    assert steps(trainer, 3) == [0, 1, 2]
    again = started(config, resume="auto")
    assert again.optimizer.updates == 4
    assert steps(again, 3) == [0, 1, 2]
    expected = toy.weights(trainer.model)
    assert all(torch.equal(value, expected[name]) for name, value in toy.weights(again.model).items())


def test_resume_refuses_what_would_train_something_else(store: Path, tmp_path: Path) -> None:
    fit(make_config(store, tmp_path / "run"), None)
    other = prepare(PrepareOptions(out=tmp_path / "other", inputs=(__file__,), tokenizer="train:280")).store.path
    changes: list[tuple[Path, dict[str, Any], str]] = [
        (store, {"train": {"seed": 5}}, "train.seed = 5"),
        (store, {"train": {"seq_len": 16}}, "train.seq_len = 16"),
        (store, {"train": {"global_batch": 8}}, "train.global_batch = 8"),
        (store, {"train": {"steps": 3}}, "smallest valid value: 6"),
        (store, {"model": {"rank": 4}}, "model.rank is 8 instead of 4"),
        (other, {}, "tokenizer"),
    ]
    for text, change, words in changes:
        config = make_config(text, tmp_path / "run", **change)
        with pytest.raises((ConfigError, CheckpointError, DataError), match=words):
            fit(config, "auto")


def test_another_way_from_an_earlier_checkpoint_is_what_auto_goes_on_with(store: Path, tmp_path: Path) -> None:
    config = make_config(store, tmp_path / "run", train={"save_every": 2, "keep": 1})
    fit(config.model_copy(update={"train": config.train.model_copy(update={"keep": 9})}), None)
    run = RunDirectory(config.run.dir)
    trainer = started(config, resume=str(run.checkpoints / "step-00000002"))
    trainer.step(RATE)
    saved = trainer.save()
    assert saved.name == "step-00000003"
    assert saved.is_dir(), "what was just saved is not what is removed"
    assert started(config, resume="auto").position.step == 3


def poison(config: Config) -> tuple[list[bool], str]:
    """Steps with a NaN in the last process's weight gradient: whether weights stayed the same, and the error."""
    trainer = started(config)
    trainer.step(RATE)
    before = {k: v.clone() for k, v in toy.weights(trainer.model).items()}

    def harm(gradient: torch.Tensor) -> torch.Tensor:
        return gradient * float("nan") if trainer.mesh.rank == trainer.mesh.size - 1 else gradient

    blocks = trainer.model.decoders[0].blocks if isinstance(trainer.model, Pipeline) else trainer.model.blocks
    handle = blocks[0].mlp_norm.register_hook(harm)
    for _ in range(2):
        trainer.step(RATE)
    same = [torch.equal(v, before[k]) for k, v in toy.weights(trainer.model).items()]
    with pytest.raises(TrainingError) as error:
        trainer.step(RATE)
    handle.remove()
    return same, str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tp", "parallel"), [(2, {}), (1, {"pp": 2}), (2, {"dp": 2, "layout": "btp-sp", "shard": "optimizer"})], ids=str
)
def test_a_nan_on_one_process_changes_no_weight_anywhere_and_ends_the_run(
    store: Path, tmp_path: Path, tp: int, parallel: dict[str, Any]
) -> None:
    config = make_config(store, tmp_path, tp, parallel=parallel)
    for same, message in run_distributed(config.parallel.world_size, poison, config):
        assert all(same)
        assert "3 steps in a row" in message
        assert "optim.lr" in message


def test_a_vocabulary_that_is_too_small_is_refused(store: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model.vocab_size = 290, but .*; set model.vocab_size = 300, the tokenizer"):
        make_trainer(make_config(store, tmp_path, model={"vocab_size": 290}))
