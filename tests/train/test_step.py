"""Passes launched ahead, and updates launched before their statistics arrive: bitwise the same run."""

import hashlib
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from boost.config import Config
from boost.config.rules import graph_problems
from boost.errors import TrainingError
from boost.train import checkpoint as ckpt
from boost.train import hardware
from boost.train.events import BadStep, EvaluationEnd, Rollback, SaveEnd, StepEnd, StepStart
from boost.train.hardware import StepClock
from boost.train.hooks import Hook
from boost.train.loop import Trainer
from boost.train.metrics import MetricsHook, read_metrics
from boost.train.resume import resume_candidates
from tests import toy
from tests.distributed import run_distributed
from tests.matrices import chosen, one_in
from tests.recorded import recorded_graphs
from tests.train.runs import RATE, Warnings, losses, make_config, make_trainer, mask_step, started

MODES = ("usual", "tensors", "ahead", "graphs")
"""As on CPUs; updates launched from tensors; the passes of the next step ahead of the numbers, as on GPUs; and those captured."""


class Diary(Hook):
    """Records everything that hooks can see at ordered events, except durations."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []
        self.order: list[tuple[str, int]] = []

    def _write(self, trainer: Trainer, name: str, *values: Any) -> None:
        weights = hashlib.sha256()
        for fused in trainer.fused_params:
            weights.update(fused.tensor.detach().numpy().tobytes())
            for moment in trainer.optimizer.moments[fused.tensor].values():
                weights.update(moment.numpy().tobytes())
        counts = {state["step"].item() for state in trainer.optimizer.adamw.state.values()}
        where = (trainer.position, trainer.judge.bad_steps, trainer.judge.trouble, trainer.optimizer.updates, counts)
        self.seen.append((name, *values, *where, weights.hexdigest()))

    def before_step(self, trainer: Trainer, event: StepStart) -> None:
        self.order.append(("before_step", event.step))

    def after_backward(self, trainer: Trainer) -> None:
        self.order.append(("after_backward", trainer.position.step + 1))

    def after_step(self, trainer: Trainer, event: StepEnd) -> None:
        self.order.append(("after_step", event.metrics.step))
        of_step = {
            k: v for k, v in vars(event.metrics).items() if k in ("step", "loss", "lr", "gradient_norm", "tokens")
        }
        rest = (event.skipped, event.last, event.stopping, event.save_requested)
        self._write(trainer, "step", repr(of_step), *rest)  # repr: NaN is not equal to itself

    def on_bad_step(self, trainer: Trainer, event: BadStep) -> None:
        self._write(trainer, "bad step", event.step, event.consecutive)

    def on_evaluation(self, trainer: Trainer, event: EvaluationEnd) -> None:
        self._write(trainer, "evaluation", event.metrics, event.complete)

    def after_save(self, trainer: Trainer, event: SaveEnd) -> None:
        self._write(trainer, "save", event.step)

    def on_rollback(self, trainer: Trainer, event: Rollback) -> None:
        self._write(trainer, "rollback", event)


Acts = tuple[tuple[str, int], ...]


class Act(Hook):
    """Does something at one step, once."""

    def __init__(self, what: str, step: int) -> None:
        self.what, self.step = what, step

    def setup(self, trainer: Trainer) -> None:
        if self.what == "mask":
            mask_step(trainer, self.step)

    def before_step(self, trainer: Trainer, event: StepStart) -> None:
        if event.step == self.step and self.what in ("stop", "save"):
            trainer.request_stop("the test") if self.what == "stop" else trainer.request_save()
        if event.step == self.step and self.what == "signal":
            os.kill(os.getpid(), signal.SIGTERM)

    def after_backward(self, trainer: Trainer) -> None:
        if self.what.startswith("nan") and 0 <= trainer.position.step + 1 - self.step < int(self.what[3:] or 1):
            gradients = (s.tensor.grad for s in trainer.fused_params if s.tensor.grad is not None)
            next(gradients).view(-1)[0] = float("nan")

    def after_step(self, trainer: Trainer, event: StepEnd) -> None:
        if event.metrics.step != self.step:
            return
        if self.what == "late stop":
            trainer.request_stop("the test")
        elif self.what == "late signal":
            os.kill(os.getpid(), signal.SIGTERM)
        elif self.what == "ruin":
            self.step = 0
            with torch.no_grad():
                for fused in trainer.fused_params:
                    fused.tensor.mul_(-50.0)


def trainer_of(config: Config, mode: str, *hooks: Hook) -> Trainer:
    return make_trainer(config, *hooks, ahead=mode in ("ahead", "graphs"), from_tensors=mode != "usual")


def config_of(store: Path, run: Path, clip: float = 0.0, tp: int = 1, **sections: Any) -> Config:
    train = {"steps": 8, "eval_every": 3, "eval_tokens": 64, "save_every": 2, "keep": 9, "async_save": False}
    dtype = sections.pop("dtype", "float64")
    config = make_config(store, run, tp, dtype, **{**sections, "train": {**train, **sections.get("train", {})}})
    return config.model_copy(update={"optim": config.optim.model_copy(update={"clip": clip})})


def moved(config: Config, name: str) -> Config:
    """The same run in a separate folder."""
    return config.model_copy(update={"run": config.run.model_copy(update={"dir": f"{config.run.dir}/{name}"})})


def run(config: Config, mode: str, acts: Acts = (), resume: str | None = None) -> Diary:
    """What hooks saw, up to the end or the error of the run."""
    config, diary = moved(config, mode), Diary()
    if mode == "graphs":
        config = config.changed(train={"cuda_graphs": "on"})
    with recorded_graphs(warm_up=1) as graphs:
        trainer = trainer_of(config, mode, *(Act(*act) for act in acts), diary, MetricsHook())
        Path(config.run.dir).mkdir(parents=True, exist_ok=True)
        trainer.start(resume_candidates(resume, trainer.run))
        try:
            result = trainer.fit()
            diary.seen.append((result.position, result.stopped_by, result.by_signal, result.evaluation))
        except TrainingError as error:
            diary.seen.append((str(error).replace(f"/{mode}/", "/"),))
    assert [graph.replays > 0 for graph in graphs] == [True] * (mode == "graphs")
    return diary


def runs(config: Config, acts: Acts = ()) -> dict[str, list[Any]]:
    """What hooks saw in each mode."""
    return {mode: run(config, mode, acts).seen for mode in MODES}


ROLLBACK = {"on_spike": "rollback", "save_every": 1}
ACTIONS: list[Acts] = [
    (),
    (("nan", 1), ("save", 3), ("stop", 5)),
    (("mask", 1), ("nan2", 3), ("late stop", 6)),
    (("mask", 4), ("signal", 6)),
    (("nan", 3), ("late signal", 5)),
    (("nan3", 4),),
    (("save", 5), ("nan", 8)),
    (("ruin", 6),),
]


@pytest.mark.slow
@pytest.mark.parametrize("acts", [pytest.param(ACTIONS[0], marks=pytest.mark.nightly), *ACTIONS[1:]], ids=str)
def test_hooks_see_the_same_run(store: Path, tmp_path: Path, acts: Acts) -> None:
    """Same losses, weights, moments, counts, positions, evaluations, saves, rollbacks and errors, and byte-identical files."""
    found = runs(config_of(store, tmp_path, train=ROLLBACK if acts == (("ruin", 6),) else {}), acts)
    for mode in MODES[1:]:
        assert found[mode] == found["usual"], mode
        assert contents(tmp_path / mode) == contents(tmp_path / "usual"), mode
    assert len(contents(tmp_path / "usual")) > 1


def contents(run: Path) -> dict[str, Any]:
    """Checkpoint tensors, and metrics without times."""
    tensors = {str(f.relative_to(run)): f.read_bytes() for f in run.rglob("*.safetensors")}
    times = ("seconds", "tokens_per_second", "mfu", "memory_bytes")
    lines = [repr({k: v for k, v in line.items() if k not in times}) for line in read_metrics(run / "metrics.jsonl")]
    return {**tensors, "metrics": lines}


def test_with_clipping_only_the_last_bits_differ(store: Path, tmp_path: Path) -> None:
    """An fp32 divisor gives the same result whenever it is launched, but rounds differently from an fp64 factor on the host."""
    found = runs(config_of(store, tmp_path, clip=0.05, dtype="float32"))
    assert found["graphs"] == found["ahead"] == found["tensors"]
    seen = [losses(tmp_path / mode) for mode in MODES]
    norms = [line["gradient_norm"] for line in read_metrics(tmp_path / "usual/metrics.jsonl") if line["kind"] == "step"]
    assert min(norms) > 0.05 and len(seen[0]) == 8
    assert seen[1] == pytest.approx(seen[0], rel=1e-5)


SHARDED: list[dict[str, Any]] = [{"dp": 2, "shard": "optimizer"}, {"dp": 2, "shard": "full"}]


@pytest.mark.parametrize(
    ("parallel", "acts"),
    chosen(
        [
            "({'tp': 2}, (('nan2', 2), ('late stop', 4)))",
            "({'dp': 2, 'shard': 'full', 'tp': 1}, (('nan', 2), ('mask', 3)))",
        ],
        [
            ({"tp": 2}, (("nan2", 2), ("late stop", 4))),
            ({"tp": 2}, (("ruin", 6),)),
            *(({**sharded, "tp": 1}, (("nan", 2), ("mask", 3))) for sharded in (*SHARDED, {"pp": 2})),
        ],
    ),
)
@pytest.mark.slow
def test_processes_replicas_and_stages_see_the_same_run(
    store: Path, tmp_path: Path, parallel: dict[str, Any], acts: Acts
) -> None:
    """Evaluations gather weights between passes and their update, also before the last one. No pass is repeated for them."""
    train = ROLLBACK if acts == (("ruin", 6),) else {"steps": 6, "save_every": 4, "eval_every": 1}
    config = config_of(store, tmp_path, parallel=parallel, train=train)
    for seen, passes in run_distributed(2, modes_agree, config, acts):
        assert all(seen[mode] == seen["usual"] for mode in seen)
        assert "shard" not in parallel or passes == 6


def modes_agree(config: Config, acts: Acts) -> tuple[dict[str, list[Any]], int]:
    """What hooks saw in each mode, and the number of backward passes ahead."""
    modes = [mode for mode in MODES if mode != "graphs" or not any(graph_problems(config))]
    diaries = {mode: run(config, mode, acts) for mode in modes}
    passes = [name for name, _ in diaries["ahead"].order].count("after_backward")
    return {mode: diary.seen for mode, diary in diaries.items()}, passes


@pytest.mark.parametrize("optim", [{"decay_on": "all"}, {"name": "muon"}, {"name": "loro", "exact_every": 2}], ids=str)
def test_a_step_without_targets_changes_nothing(store: Path, tmp_path: Path, optim: dict[str, Any]) -> None:
    """Weight decay, momentum, and LORO's exact steps would move the weights although all gradients are 0."""
    config, warnings = make_config(store, tmp_path, model={"family": "svd"}), Warnings()
    trainer = started(config.changed(optim={"weight_decay": 0.1, **optim}), warnings)
    mask_step(trainer, 3)
    mask_step(trainer, 4)
    states = list[list[torch.Tensor]]()
    for step in range(1, 6):
        stats = trainer.step(RATE)
        assert ((stats.targets, stats.loss, stats.gradient_norm) == (0, 0, 0)) == (step in (3, 4))
        tensors = (*(fused.tensor.detach() for fused in trainer.fused_params), *trainer.optimizer.state_tensors())
        states.append([tensor.clone() for tensor in tensors])
    assert all(map(torch.equal, states[1], states[3])) and not all(map(torch.equal, states[3], states[4]))
    assert (trainer.judge.bad_steps, trainer.position.step) == (0, 5)
    assert warnings.seen == ["step 3 changed nothing, because none of its tokens has a target"]


@pytest.mark.parametrize("mode", ["ahead", "graphs"])
def test_a_run_goes_on_to_the_bit(store: Path, tmp_path: Path, mode: str) -> None:
    config = config_of(store, tmp_path)
    whole = run(config, "usual").seen[-1]
    run(config, mode, (("late stop", 4),))
    again = run(config, mode, resume="auto")
    assert again.order[0] == ("before_step", 6) and again.seen[-1] == whole


def test_the_order_of_events_ahead(store: Path, tmp_path: Path) -> None:
    """No pass is repeated for an evaluation or a save, only for weights that a hook has changed; none runs after the last step."""
    events = ("before_step", "after_backward")
    order = run(config_of(store, tmp_path, train={"steps": 3, "eval_every": 1}), "ahead").order
    assert order == [
        *[(name, 1) for name in events],
        *[(name, 2) for name in events],
        ("after_step", 1),
        *[(name, 3) for name in events],
        ("after_step", 2),
        ("after_step", 3),
    ]
    order = run(config_of(store, tmp_path / "changed", train={"steps": 4}), "ahead", (("ruin", 2),)).order
    assert [step for name, step in order if name == "after_backward"] == [1, 2, 3, 3, 4]


def losses_after_a_load(config: Config) -> list[tuple[float, float]]:
    """(loss, held-out loss) with initial weights, and after reloading them following an evaluation of others."""
    trainer = started(config)
    saved = trainer.save()
    found = []
    for _ in range(2):
        evaluation = trainer.evaluate(64)
        stats = trainer.step(0.1)
        assert evaluation is not None and saved is not None
        found.append((stats.loss, evaluation.loss))
        trainer.evaluate(64)
        trainer.load(ckpt.open_checkpoint(saved))
    return found


@pytest.mark.parametrize("parallel", one_in(2, SHARDED[::-1]))
@pytest.mark.slow
def test_loaded_weights_are_those_of_the_next_pass(store: Path, tmp_path: Path, parallel: dict[str, Any]) -> None:
    """Not stale weights gathered by an earlier evaluation, as before a rollback."""
    for first, second in run_distributed(2, losses_after_a_load, config_of(store, tmp_path, parallel=parallel)):
        assert first == second


def test_what_needs_numbers_on_the_host_is_never_ahead(store: Path, tmp_path: Path) -> None:
    config = make_config(store, tmp_path, model={"family": "svd"})
    for optim, expected in (({}, True), ({"name": "muon"}, False), ({"name": "loro", "exact_every": 2}, False)):
        each = Config.model_validate(config.model_dump() | {"optim": {"lr": RATE, "warmup_steps": 3, **optim}})
        stepper = make_trainer(each, ahead=True).stepper
        assert stepper.ahead == stepper.from_tensors == expected
    usual = make_trainer(config).stepper
    assert not usual.ahead and not usual.from_tensors, "on a CPU nothing waits"


def test_the_timeline_of_one_step_holds_it_ahead_too(store: Path, tmp_path: Path) -> None:
    config = config_of(store, tmp_path, train={"steps": 5, "eval_every": 0, "save_every": 0, "profile": [2, 3]})
    run(config, "ahead")
    text = (tmp_path / "ahead/profile/rank0.json").read_text()
    assert all(f'"step {step}"' in text for step in (2, 3)) and '"step 1"' not in text


def test_seconds_of_a_step_leave_out_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    at, clock = SimpleNamespace(time=0.0), StepClock(toy.CPU)
    monkeypatch.setattr(hardware, "now", lambda device: at.time)

    def update(end: float) -> float:
        at.time = end
        return end

    at.time = 5.0
    clock.resume()
    assert clock.seconds(update(7.0)) == 2.0
    clock.pause()
    at.time = 17.0
    clock.resume()
    at.time = 18.0
    clock.resume()
    assert clock.seconds(update(20.0)) == 3.0
    assert clock.seconds(update(21.0)) == 1.0, "a pause counts once"
    # Ahead, a step ends where its update does: passes launched before the statistics are read belong to the next one.
    first = update(24.0)
    at.time = 27.0
    assert clock.seconds(first) == 3.0
    clock.pause()
    at.time = 28.0
    clock.resume()
    assert clock.seconds(update(29.0)) == 4.0


def test_checkpoints_in_the_background_hold_the_step_they_name(store: Path, tmp_path: Path) -> None:
    """Passes launched before a save change nothing that it copies."""
    config = config_of(store, tmp_path, train={"async_save": True})
    saved: list[list[bytes]] = []
    for mode in ("usual", "ahead"):
        run(config, mode)
        folders = ckpt.complete_checkpoints(tmp_path / mode / "checkpoints")
        assert [ckpt.step_of(folder) for folder in folders] == [2, 4, 6, 8]
        saved.append([file.read_bytes() for folder in folders for file in sorted((folder / "tensors").iterdir())])
    assert saved[0] == saved[1]
