"""What `--resume` accepts, what it rejects, and what it reports about changes."""

import json
from pathlib import Path
from typing import Any

import pytest

from boost.config import Config
from boost.errors import CheckpointError, ConfigError
from boost.optim.schedule import learning_rate
from boost.train import checkpoint as ckpt
from boost.train.metrics import MetricsHook, read_metrics
from boost.train.resume import changes, require_nothing_lost, resume_candidates, resume_warnings
from boost.train.run import check_before_start
from boost.train.rundir import RunDirectory
from tests.train.runs import fitted, make_config, make_trainer, started


def trained(config: Config) -> RunDirectory:
    Path(config.run.dir).mkdir(exist_ok=True)
    trainer = fitted(config, MetricsHook())
    return trainer.run


def candidates(run: RunDirectory) -> list[Path]:
    return resume_candidates("auto", run)


def test_a_run_whose_checkpoints_are_gone_does_not_start_over(store: Path, tmp_path: Path) -> None:
    config = make_config(store, tmp_path / "run")
    run = trained(config)
    require_nothing_lost(run, candidates(run), restart=False)
    run.checkpoints.rename(tmp_path / "elsewhere")  # as an unmounted file system leaves it
    run.checkpoints.mkdir()
    with pytest.raises(
        CheckpointError, match=r"a checkpoint at step 6, but --resume auto finds no .*--restart starts over"
    ):
        require_nothing_lost(run, candidates(run), restart=False)
    require_nothing_lost(run, candidates(run), restart=True)
    before = run.metrics.read_bytes()
    trained(config)
    assert (run.path / "metrics.1.jsonl").read_bytes() == before, "a run that starts over keeps the earlier metrics"
    assert len(read_metrics(run.metrics)) == len(before.splitlines())


def test_the_step_that_was_saved_is_noted_outside_the_checkpoints_and_in_their_names(
    store: Path, tmp_path: Path
) -> None:
    run = trained(make_config(store, tmp_path / "run"))
    assert json.loads((run.path / "last-saved.json").read_text()) == {"step": 6}
    run.last_saved.write_bytes(b"\x00")
    assert run.recorded_save() is None
    run.last_saved.unlink()
    for path in ckpt.complete_checkpoints(run.checkpoints):
        (path / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="a checkpoint at step 6"):
        require_nothing_lost(run, candidates(run), restart=False)


def test_a_run_that_never_saved_starts_over(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.checkpoints.mkdir()
    run.metrics.write_text('{"kind": "step", "step": 1}\n')
    require_nothing_lost(run, candidates(run), restart=False)


def test_a_checkpoint_that_does_not_exist_is_refused_before_anything_is_written(store: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="missing"):
        check_before_start(make_config(store, tmp_path / "runs" / "mine"), str(tmp_path / "missing"), None)
    assert not (tmp_path / "runs").exists()


def test_a_resumed_run_says_what_changed_and_what_becomes_of_the_learning_rate(store: Path, tmp_path: Path) -> None:
    config = make_config(store, tmp_path / "run", train={"save_every": 4, "steps": 6})
    run = trained(config)
    found = ckpt.open_checkpoint(candidates(run)[0])
    longer = config.model_copy(update={"train": config.train.model_copy(update={"steps": 9})})
    before, after = (learning_rate(config.optim, 5, 6), learning_rate(config.optim, 6, 9))
    said = f"the learning rate at step 7 is {after:.4g}; at the end of the earlier schedule, it was {before:.4g}"
    assert said in resume_warnings(found, [], longer) and resume_warnings(found, [], config) == []
    longer = make_config(store, tmp_path / "run", train={"save_every": 4, "steps": 60})
    again, same = make_trainer(longer), make_trainer(config)
    for trainer in (again, same):
        trainer.start([ckpt.checkpoint_path(run.checkpoints, 4)])
    assert "changed since 'step-00000004': train.steps 6 -> 60" in again.warnings
    rate = "the learning rate at step 5 is 0.002998; without these changes it would be"
    assert any(text.startswith(rate) for text in again.warnings)
    assert same.warnings == []


def test_lines_of_garbage_do_not_block_a_resume(store: Path, tmp_path: Path) -> None:
    garbage = [b"garbage\n", b"\xff\xfe\n", b"[1, 2]\n", b"{" * 100_000 + b"\n"]
    config = make_config(store, tmp_path / "run")
    run = trained(config)
    lines = run.metrics.read_bytes().splitlines(keepends=True)
    run.metrics.write_bytes(b"".join([*lines[:2], *garbage, *lines[2:]]))
    fitted(config, MetricsHook(), resume="auto")
    assert [line["step"] for line in read_metrics(run.metrics) if line["kind"] == "step"] == list(range(1, 7))
    assert (run.path / "metrics.jsonl.damaged").read_bytes() == b"".join(garbage)


def test_every_hyperparameter_that_changes_is_named(store: Path, tmp_path: Path) -> None:
    before = make_config(store, tmp_path)
    now = make_config(store, tmp_path, train={"steps": 9, "compute_dtype": "float32", "log_every": 3})
    optim = now.optim.model_copy(update={"lr": 0.5, "beta2": 0.95, "clip": 0.0})
    now = now.model_copy(update={"optim": optim, "data": now.data.model_copy(update={"isolate_documents": True})})
    assert changes(before, now) == [
        "train.steps 6 -> 9",
        "train.compute_dtype 'float64' -> 'float32'",
        "optim.lr 0.003 -> 0.5",
        "optim.beta2 0.999 -> 0.95",
        "optim.clip 0.5 -> 0.0",
        "data.isolate_documents False -> True",
    ]
    assert changes(now, now) == []


def numbers(run: RunDirectory) -> list[tuple[str, int, float, dict[str, float]]]:
    lines = [line for line in read_metrics(run.metrics) if line["kind"] in ("step", "eval")]
    return [(x["kind"], x["step"], x.get("loss", x.get("heldout_loss")), x.get("heldout_losses", {})) for x in lines]


def test_a_mixture_resumes_to_the_bit_and_refuses_other_weights(mixture: dict[str, float], tmp_path: Path) -> None:
    sizes = {"steps": 6, "eval_every": 3, "save_every": 2, "eval_tokens": 96}
    run = trained(make_config(mixture, tmp_path / "run", train=sizes))
    whole = numbers(run)
    assert [set(losses) for kind, *_, losses in whole if kind == "eval"] == [{"store", "other"}] * 2
    config = make_config(dict(reversed(mixture.items())), tmp_path / "run", train=sizes)
    again = fitted(config, MetricsHook(), resume=str(run.checkpoints / "step-00000002"))
    assert again.warnings == []
    assert numbers(run) == whole
    refused: list[tuple[Any, str]] = [
        (dict.fromkeys(mixture, 1.0), "data.mixture = .*1.0.*was trained with the weights .*0.7"),
        (Path(next(iter(mixture))), "different text than data.store = "),
    ]
    for other, words in refused:
        with pytest.raises((ConfigError, CheckpointError), match=words):
            started(make_config(other, tmp_path / "run", train=sizes), resume="auto")
