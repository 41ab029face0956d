import contextlib
import dataclasses
import functools
import json
import math
import os
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from boost.config import Config, load
from boost.errors import ConfigError, DataError, StorageError
from boost.train import best_effort
from boost.train.checkpoint import Position
from boost.train.events import EvalMetrics, Rollback, SampleEnd, StepMetrics, TrainResult
from boost.train.metrics import KINDS, MetricsHook, RunEnd, read_metrics, truncate_metrics
from boost.train.rundir import RunDirectory


def step(number: int, loss: float = 4.5) -> StepMetrics:
    return StepMetrics(number, loss, 1e-3, 0.5, 8000.0, 0.41, 1 << 30, number * 256, 0.03)


def start(path: Path, *overrides: str) -> tuple[RunDirectory, Config]:
    config = load(None, ["--run.dir", str(path), *overrides])
    return RunDirectory.create(config, resume=True), config


@contextlib.contextmanager
def opened(run: RunDirectory, config: Config, *arguments: Any, **options: Any) -> Iterator[Any]:
    """A hook that writes. Its methods take no trainer."""
    hook: Any = MetricsHook()
    hook.open(run, config, *arguments, **options)
    for name in ("on_sample", "on_train_end"):
        setattr(hook, name, functools.partial(getattr(hook, name), None))
    yield hook
    hook.teardown(None)


def end(step: int) -> TrainResult:
    return TrainResult(Position(step, 0), None, None)


def write(path: Path, steps: list[StepMetrics], done: int = 0) -> RunDirectory:
    run, config = start(path)
    with opened(run, config, done) as writer:
        for metrics in steps:
            writer.write(metrics)
    return run


def test_every_line_is_there_before_the_writer_closes(tmp_path: Path) -> None:
    run, config = start(tmp_path)
    with opened(run, config) as writer:
        writer.write(step(1))
        writer.write(EvalMetrics(1, 4.0, math.exp(4.0), 1.5, 512))
        lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    assert {**lines[0], "cross_entropy": None} == {"kind": "step", **dataclasses.asdict(step(1))}
    assert "cross_entropy" not in lines[0]
    assert lines[1] | {"kind": "eval", "heldout_loss": 4.0, "bits_per_byte": 1.5, "tokens": 512} == lines[1]


def test_numbers_that_are_not_finite_are_valid_json_and_come_back(tmp_path: Path) -> None:
    run = write(tmp_path, [step(1, math.nan), step(2, math.inf), step(3, -math.inf)])

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    losses = [json.loads(line, parse_constant=refuse)["loss"] for line in run.metrics.read_text().splitlines()]
    assert losses == ["nan", "inf", "-inf"]
    read = [line["loss"] for line in read_metrics(run.metrics)]
    assert math.isnan(read[0])
    assert read[1:] == [math.inf, -math.inf]


def test_resuming_drops_the_steps_that_come_again_and_a_torn_line(tmp_path: Path) -> None:
    run = write(tmp_path, [step(number) for number in range(1, 6)])
    with open(run.metrics, "a") as file:
        file.write('{"kind": "step", "step": 3, "lo')
    write(tmp_path, [step(4, 9.0), step(5, 9.5)], done=3)
    read = [(line["step"], line["loss"]) for line in read_metrics(run.metrics)]
    assert read == [(1, 4.5), (2, 4.5), (3, 4.5), (4, 9.0), (5, 9.5)]
    assert not list(tmp_path.glob(".metrics*"))


def test_a_run_resumed_at_its_end_evaluates_and_ends_once(tmp_path: Path) -> None:
    run, config = start(tmp_path, "--train.steps", "2")
    sampled, final = (EvalMetrics(2, 4.0, 54.6, 1.5, 512, whole) for whole in (False, True))
    for done in (0, 2):
        with opened(run, config, done) as writer:
            for metrics in (final,) if done else (step(1), step(2), sampled, final):
                writer.write(metrics)
            writer.on_train_end(end(2))
    lines = [(line["kind"], line.get("final")) for line in read_metrics(run.metrics)]
    assert lines == [("step", None), ("step", None), ("eval", False), ("eval", True), ("end", None)]


def test_a_crash_while_truncating_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write(tmp_path, [step(1), step(2)])
    before = run.metrics.read_bytes()

    def fail(source: Any, target: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("boost.train.metrics.os.replace", fail)
    with pytest.raises(StorageError, match="No space left on device"):
        write(tmp_path, [], done=1)
    assert run.metrics.read_bytes() == before


def test_read_metrics_leaves_out_a_torn_last_line_only(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = ['{"kind": "e", "step": 1}\n', '{"kind": "e", "step": 2}\n']
    path.write_text("".join([*lines, '{"step"']))
    assert read_metrics(path) == [json.loads(line) for line in lines]
    path.write_text('{"step"\n'.join(lines))
    with pytest.raises(DataError, match="line 2 of"):
        read_metrics(path)


def test_tensorboard_neither_starts_a_thread_nor_loses_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A renamed run directory is no error, because the file stays open; a failing disk is one warning."""
    monkeypatch.setattr(best_effort, "_failing", set())
    run, config = start(tmp_path / "run")
    threads, said = threading.active_count(), list[str]()
    with opened(run, config, warn=said.append) as writer:
        (tmp_path / "run").rename(tmp_path / "renamed")
        writer.write(step(1))
        assert threading.active_count() == threads and not said
        with open("/dev/full", "wb") as full:
            os.dup2(full.fileno(), writer._board._file.fileno())
        for number in (2, 3):
            writer.write(step(number))
    assert said == ["cannot write TensorBoard events: No space left on device; training continues"]
    points = EventAccumulator(str(tmp_path / "renamed/tensorboard")).Reload().Scalars("train/loss")
    assert [point.step for point in points] == [1]


WRONG = ["x", True, None, [], {}, -1, 1.5, 10**400, {"a": "x"}]
"""Values of a wrong type or size for most fields."""


def test_a_line_of_a_wrong_shape_is_damaged_for_every_reader(tmp_path: Path) -> None:
    """Any field of any kind is left out or replaced: the line is either read with the right types or moved aside."""
    run, _ = start(tmp_path, "--train.steps", "9")
    good = [
        {"kind": "step", **dataclasses.asdict(step(1))},
        {"kind": "eval", **dataclasses.asdict(EvalMetrics(1, 4.0, math.exp(4.0), 1.5, 512, False, {"text": 4.0}))},
        {"kind": "sample", **dataclasses.asdict(SampleEnd(1, "a", "b"))},
        {"kind": "end", **dataclasses.asdict(RunEnd(1, "done", ""))},
        {"kind": "membership", "step": 1, "replicas": 1},
    ]
    for line in good:
        for name in line:
            for changed in ({**line, name: value} for value in WRONG):
                _check(run, changed)
            _check(run, {key: value for key, value in line.items() if key != name})
    for text in ("3", "[]", '"step"', "null", "{}", "[" * 100_000, "\udcff"):
        _check(run, text)


def _check(run: RunDirectory, line: dict[str, Any] | str) -> None:
    text = line if isinstance(line, str) else json.dumps(line)
    first = json.dumps({"kind": "step", **dataclasses.asdict(step(1, 3.0))})
    run.metrics.write_bytes(f"{first}\n{text}\n{first}\n".encode("utf-8", "surrogateescape"))
    damaged: list[int] = []
    lines = read_metrics(run.metrics, damaged)
    assert damaged in ([], [2]) and len(lines) == 3 - len(damaged), text
    for read in lines:
        assert read["step"] >= 0 and isinstance(read["step"], int), text
        number = {"step": "loss", "eval": "heldout_loss"}.get(read["kind"])
        assert number is None or isinstance(read[number], float | int), text
    run.metrics.with_name("metrics.jsonl.damaged").unlink(missing_ok=True)
    assert truncate_metrics(run.metrics, 9) == len(damaged), text
    assert [line["loss"] for line in read_metrics(run.metrics) if line["kind"] == "step" and line["loss"] == 3.0]
    if damaged:
        assert (
            run.metrics.with_name("metrics.jsonl.damaged").read_bytes().decode("utf-8", "surrogateescape")
            == f"{text}\n"
        )


class FakeTracker(types.ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.calls: list[tuple[Any, ...]] = []

    def init(
        self, *, config: dict[str, Any], resume: str, project: str = "", name: str = "", id: str = "", dir: str = ""
    ) -> None:
        self.calls.append(("init", project, name, config["model"]["family"], resume, id, dir))

    def define_metric(self, name: str, *, step_metric: str) -> None:
        self.axis = name, step_metric

    def log(self, values: dict[str, Any], *, step: int | None = None) -> None:
        """As in W&B, a step that is not given is one more than the last, and an earlier one than the last is dropped."""
        last = max((call[2] for call in self.calls if call[0] == "log"), default=-1)
        if step is None or step >= last:
            self.calls.append(("log", values, last + 1 if step is None else step))

    def finish(self) -> None:
        self.calls.append(("finish",))


def test_a_tracker_gets_the_same_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeTracker("wandb")
    monkeypatch.setitem(sys.modules, "wandb", fake)
    run, config = start(tmp_path / "first", "--run.wandb", "true", "--run.project", "mine")
    with opened(run, config) as writer:
        writer.write(step(7))
        writer.write(EvalMetrics(7, 4.0, 54.6, 1.5, 512))
    (recorded,) = json.loads((tmp_path / "first/trackers.json").read_text()).items()
    assert recorded == ("wandb", recorded[1]) and len(recorded[1]) == 8
    assert fake.calls[0] == ("init", "mine", "first", "cola", "allow", recorded[1], str(run.path))
    assert fake.axis == ("*", "step") and fake.calls[1][1]["train/loss"] == 4.5 and fake.calls[1][1]["step"] == 7
    expected = {"heldout_loss": 4.0, "perplexity": 54.6, "bits_per_byte": 1.5, "tokens": 512}
    assert fake.calls[2][1] == {"step": 7, **{f"eval/{name}": value for name, value in expected.items()}}
    assert fake.calls[3:] == [("finish",)]


@pytest.mark.parametrize(("flags", "project"), [((), ""), (("--run.project", "mine"), "mine")])
def test_what_the_environment_says_to_a_tracker_outranks_defaults(
    flags: tuple[str, ...], project: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeTracker("wandb")
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setenv("WANDB_PROJECT", "theirs")
    monkeypatch.setenv("WANDB_NAME", "theirs")
    run, config = start(tmp_path, "--run.wandb", "true", *flags)
    with opened(run, config):
        assert fake.calls[0][:3] == ("init", project, ""), "what is not passed is W&B's to read"


def test_steps_that_a_run_repeats_reach_trackers_and_tensorboard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeTracker("wandb")
    monkeypatch.setitem(sys.modules, "wandb", fake)
    run, config = start(tmp_path, "--run.wandb", "true")
    with opened(run, config) as writer:
        for number in (1, 2, 3):
            writer.write(step(number))
        writer.on_rollback(None, Rollback(1, 3, "spike"))
        writer.write(step(2, 4.0))
    logged = [(values[1]["step"], values[1]["train/loss"]) for values in fake.calls if values[0] == "log"]
    assert logged == [(1, 4.5), (2, 4.5), (3, 4.5), (2, 4.0)]
    events = EventAccumulator(str(run.tensorboard))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 4.5), (2, 4.0)]


def test_a_missing_package_is_one_line_and_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write(tmp_path, [step(1), step(2)])
    before = run.metrics.read_bytes()
    monkeypatch.setitem(sys.modules, "wandb", None)
    _, config = start(tmp_path, "--run.wandb", "true")
    with pytest.raises(ConfigError) as caught:
        MetricsHook().open(run, config, 1)
    assert str(caught.value) == "run.wandb = true: the package 'wandb' is not installed; run 'pip install wandb'"
    assert run.metrics.read_bytes() == before


def test_a_resumed_run_is_the_same_run_for_trackers_and_one_that_starts_over_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeTracker("wandb")
    monkeypatch.setitem(sys.modules, "wandb", fake)
    run, config = start(tmp_path, "--run.wandb", "true")
    for _ in range(2):
        with opened(run, config) as writer:
            writer.write(step(1))
    run.set_aside_metrics()
    MetricsHook().open(run, config)
    monkeypatch.setenv("WANDB_RUN_ID", "by-agent")
    other, other_config = start(tmp_path / "other", "--run.wandb", "true")
    MetricsHook().open(other, other_config)
    first, again, over, agent = (call[5] for call in fake.calls if call[0] == "init")
    assert first == again != over and agent == "by-agent"
    assert json.loads((tmp_path / "trackers.1.json").read_text()) == {"wandb": first}


def test_tensorboard_has_configuration_samples_and_hyperparameters_of_all_runs_of_a_folder(tmp_path: Path) -> None:
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    found = {}
    for name, flags in (("svd", ("--model.family", "svd")), ("cola", ("--optim.lr", "0.5"))):
        run, config = start(tmp_path / name, *flags)
        with opened(run, config) as writer:
            for number in (1, 2):
                writer.write(step(number, 5.0 - number))
                writer.write(EvalMetrics(number, 4.0 / number, 54.6, 1.5, 512))
            writer.on_sample(SampleEnd(2, "Once", " upon\n  a # time"))
            writer.on_sample(SampleEnd(2, "def", " f()"))
            writer.on_train_end(end(2))
        events = EventAccumulator(str(run.tensorboard))
        events.Reload()
        assert [event.value for event in events.Scalars("eval/heldout_loss")] == [4.0, 2.0]
        assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 4.0), (2, 3.0)]
        assert {"train/lr", "train/gradient_norm", "train/mfu", "train/memory_bytes"} <= set(events.Tags()["scalars"])
        text = {tag: events.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in events.Tags()["tensors"]}
        assert "    [model]\n" in text["config/text_summary"] and f'family = "{name}"' in text["config/text_summary"]
        assert text["sample/1/text_summary"] == "    Once[...] upon\n      a # time\n"
        assert "sample/2/text_summary" in text
        content = events.PluginTagToContent("hparams")
        data = {tag: HParamsPluginData.FromString(content[tag]) for tag in content}
        assert set(data) == {"_hparams_/session_start_info", "_hparams_/session_end_info"}, "no list for all runs"
        hparams = data["_hparams_/session_start_info"].session_start_info.hparams
        found[name] = hparams["optim.lr"].number_value, hparams["model.family"].string_value
        assert "run.dir" not in hparams and hparams["train.eval_every"].number_value == 0
    assert found == {"svd": (found["svd"][0], "svd"), "cola": (0.5, "cola")}


def test_text_that_looks_like_a_number_stays_text(tmp_path: Path) -> None:
    run, config = start(tmp_path)
    with opened(run, config) as writer:
        writer.on_sample(SampleEnd(1, "inf", "nan"))
    assert read_metrics(run.metrics) == [{"kind": "sample", "step": 1, "prompt": "inf", "text": "nan"}]


def test_the_page_names_every_kind_and_field() -> None:
    page = (Path(__file__).parents[2] / "docs/run-directory.md").read_text()
    for kind, fields in KINDS.items():
        section = page.partition(f"### `{kind}`")[2].partition("\n### ")[0].partition("\n## ")[0]
        listed = [line.split("`")[1] for line in section.splitlines() if line.startswith("| `")]
        assert listed == [field.name for field in dataclasses.fields(fields)], kind
