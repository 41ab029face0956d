"""All processes of a run resume from one checkpoint, whatever only one of them can read."""

import ctypes
import errno
import os
import random
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from boost.config import Config
from boost.errors import BoostError, ConfigError, DamagedCheckpointError, LostRunError, TrainingError
from boost.parallel.mesh import Mesh
from boost.train import checkpoint as ckpt
from boost.train.agreement import difference, require_same, run_on_all, run_on_main
from boost.train.checkpoint import Position, load
from boost.train.checkpoint.verify import read_manifest
from boost.train.loop import Trainer
from boost.train.metrics import MetricsHook
from boost.train.resume import require_nothing_lost, resume_candidates
from tests import toy
from tests.distributed import run_distributed
from tests.train.commands import LIMIT_S, ForkedPython, boost_command, free_ports, toml
from tests.train.reads import failing
from tests.train.runs import Do, Warnings, fitted, losses, make_config, make_trainer, request_stop, started

MESHES: dict[str, dict[str, Any]] = {
    "tp 2": {"tp": 2},
    "pp 2": {"pp": 2},
    "dp 2": {"dp": 2},
    "dp 2, ZeRO-1": {"dp": 2, "shard": "optimizer"},
    "cp 2": {"cp": 2},
}
STEPS, EVERY = 8, 2


def config_of(store: Path, folder: Path, parallel: dict[str, Any]) -> Config:
    train = {"steps": STEPS, "save_every": EVERY, "keep": 9, "async_save": False, "micro_batch": 1}
    return make_config(store, folder, parallel=parallel, train=train)


def train_whole(config: Config) -> float:
    return loss_of(fitted(config))


def loss_of(trainer: Trainer) -> float:
    result = trainer.evaluate()
    assert result
    return result.loss


def candidates(trainer: Trainer) -> list[Path]:
    """As `boost train --resume auto` finds them."""

    def find() -> list[Path]:
        found = resume_candidates("auto", trainer.run)
        require_nothing_lost(trainer.run, found, restart=False)
        return found

    found: list[Path] = run_on_main(trainer.mesh, find, BoostError)
    return found


def resume(config: Config, rank: int, number: int | None, error: int, forever: bool) -> tuple[str, int, list[str], int]:
    """(error or '', step to resume from, warnings, reads) on this process, whose read `number` fails if it is `rank`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("boost.train.checkpoint.load.SETTLE_PAUSES_S", (0.001, 0.001))
        trainer = make_trainer(config)
        number = number if trainer.mesh.rank == rank else None
        with failing(Path(config.run.dir) / "checkpoints", number, error, forever) as reads:
            try:
                trainer.start(candidates(trainer))
            except BoostError as refusal:
                return str(refusal), 0, trainer.warnings, len(reads.seen)
        return "", trainer.position.step, trainer.warnings, len(reads.seen)


@pytest.fixture(scope="module")
def runs(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function that returns a mesh's run that stopped after step 6, and the loss of the run that did not."""
    made: dict[str, tuple[Path, float]] = {}

    def get(name: str) -> tuple[Path, float]:
        if name not in made:
            folder = tmp_path_factory.mktemp("whole") / "run"
            loss = run_distributed(2, train_whole, config_of(store, folder, MESHES[name]))[0]
            shutil.rmtree(folder / "checkpoints" / f"step-{STEPS:08d}")
            (folder / "last-saved.json").write_text('{"step": 6}')
            made[name] = folder, loss
        return made[name]

    return get


def copied(source: Path, folder: Path) -> Path:
    shutil.copytree(source, folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "every"),
    [("pp 2", 8), *(pytest.param(name, 1, marks=pytest.mark.nightly) for name in MESHES)],
)
def test_a_read_that_fails_on_one_process_never_splits_a_run(
    store: Path, tmp_path: Path, runs: Any, name: str, every: int
) -> None:
    here = copied(runs(name)[0], tmp_path / "count")
    counts = run_distributed(2, resume, config_of(store, here, MESHES[name]), 0, None, 0, False)
    assert [fact[:3] for fact in counts] == [("", 6, [])] * 2
    outcomes = set[tuple[bool, int]]()
    for rank in (0, 1):
        for number in range(0, counts[rank][3], every):
            for error, forever in ((errno.EIO, True), (errno.ENOENT, True), (errno.EIO, False)):
                here = copied(runs(name)[0], tmp_path / f"{rank}-{number}-{error}-{forever}")
                config = config_of(store, here, MESHES[name])
                (said, step, warnings, _), other = run_distributed(2, resume, config, rank, number, error, forever)
                assert (said, step) == other[:2] and "\n" not in said, (rank, number)
                if said:  # only if the main process cannot list the checkpoints
                    assert rank == 0 and "checkpoints" in said, said
                elif step != 6:
                    assert forever and f"process {rank}" in " ".join(warnings), (rank, number, warnings)
                outcomes.add((bool(said), step))
                shutil.rmtree(here)
    assert outcomes == {(False, 6), (False, 4), (True, 0)}


@pytest.mark.slow
def test_processes_that_see_different_checkpoints_agree_on_an_older_one(store: Path, tmp_path: Path, runs: Any) -> None:
    source, expected = runs("pp 2")
    here = copied(source, tmp_path / "run")
    config = config_of(store, here, MESHES["pp 2"])
    hidden = here / "checkpoints/step-00000006/manifest.json"
    first = run_distributed(2, resume_hiding, config, str(hidden))
    for step, warnings, loss, slept in first:
        assert step == 4 and loss == pytest.approx(expected, rel=1e-12)
        assert "process 1 cannot read what other processes can" in warnings[0] and "manifest.json" in warnings[0]
        assert slept == [0.001, 0.002], "one budget, although loading is tried twice"


def resume_hiding(config: Config, path: str) -> tuple[int, list[str], float, list[float]]:
    """Process 1 never sees a file. Then trains to the end."""
    slept: list[float] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("boost.train.checkpoint.load.SETTLE_PAUSES_S", (0.001, 0.002))
        patch.setattr("boost.train.checkpoint.load.time", SimpleNamespace(sleep=slept.append))
        trainer = make_trainer(config)
        real = read_manifest

        def read(folder: Path) -> Any:
            if trainer.mesh.rank == 1 and str(folder / "manifest.json") == path:
                raise DamagedCheckpointError(f"'{folder}' is not complete: manifest.json is missing")
            return real(folder)

        patch.setattr("boost.train.checkpoint.load.read_manifest", read)
        trainer.start(candidates(trainer))
        step = trainer.position.step
        trainer.fit()
        return step, trainer.warnings, loss_of(trainer), slept


def save_from_different_steps(config: Config, background: bool) -> str:
    """Process 1 has resumed from an earlier step than process 0, as if by another decision. Returns the error of the next save."""
    trainer = started(config)
    trainer.position = Position(6 - trainer.mesh.rank, 768)
    try:
        trainer.save(wait=not background)
        trainer.finish_save()
    except TrainingError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("background", [False, True])
def test_a_checkpoint_of_processes_at_different_steps_is_never_published(
    store: Path, tmp_path: Path, background: bool
) -> None:
    config = make_config(store, tmp_path / "run", parallel={"pp": 2})
    for said in run_distributed(2, save_from_different_steps, config, background):
        assert "process 1 is at step 5, sample 20, but process 0 is at step 6, sample 24" in said
    assert list((tmp_path / "run/checkpoints").iterdir()) == [], "nothing is left of it either"


def facts_differ(folder: Path, store: Path, other_store: Path, change: dict[str, Any]) -> str:
    rank = toy.mesh(2).rank
    where = other_store if rank and not change else store
    trainer = make_trainer(make_config(where, folder, tp=2, **(change if rank else {})))
    try:
        trainer.start([])
    except ConfigError as error:
        return str(error)
    return ""


def test_processes_with_different_configurations_or_stores_are_refused(
    store: Path, mixture: dict[str, float], tmp_path: Path
) -> None:
    other = next(Path(path) for path in mixture if Path(path) != store)
    for said in run_distributed(2, facts_differ, tmp_path, store, other, {"train": {"save_every": 7}}):
        assert said.startswith(
            "train.save_every is 7 on process 1 and 0 on process 0; start all processes with the same"
        )
    for said in run_distributed(2, facts_differ, tmp_path, store, other, {}):
        assert said.startswith("token stores is [[")
    for said in run_distributed(2, facts_differ, tmp_path, store, store, {"run": {"dir": "elsewhere"}}):
        assert said == "", "nodes may see the run directory under different names"


def fail_on(rank: int, error: Exception, failure: type[Exception]) -> str:
    mesh = toy.mesh(2)

    def act() -> int:
        if mesh.rank == rank:
            raise error
        return mesh.rank

    try:
        return str(run_on_all(mesh, act, failure))
    except Exception as raised:
        return f"{type(raised).__name__}: {raised}"


def test_all_processes_raise_the_error_of_one() -> None:
    def said(*arguments: Any) -> str:
        first, second = run_distributed(2, fail_on, *arguments)
        assert first == second
        return str(first)

    assert said(9, ValueError(), BoostError) == "[0, 1]"
    assert said(1, ConfigError("a"), BoostError) == "ConfigError: a"
    assert said(1, ConfigError("a"), TrainingError) == "TrainingError: a"
    assert said(0, DamagedCheckpointError("a"), TrainingError) == "TrainingError: a"
    assert said(0, LostRunError("a"), TrainingError) == "LostRunError: a", "it ends the run whatever else failed"
    assert said(1, OSError(5, "Input/output error", "/a"), TrainingError) == "TrainingError: Input/output error: '/a'"
    first, second = run_distributed(2, fail_on, 1, ValueError("a bug"), TrainingError)
    assert (first, second) == ("TrainingError: a bug", "ValueError: a bug")


def test_what_differs_is_named_once() -> None:
    assert difference({"a": 1, "b": [1]}, {"a": 1, "b": [1]}, "here", "there") is None
    assert str(difference({"a": 1}, {"a": 2, "b": 3}, "here", "there")).startswith(
        "a is 1 on here and 2 on there; start"
    )
    assert str(difference({}, {"b": 3}, "here", "there")).startswith("b is 'missing' on here and 3 on there")
    require_same(Mesh(toy.CPU), {"a": 1})


def best_seen(config: Config) -> tuple[list[int], list[str]]:
    """The steps saved by a run that resumes, and whose best checkpoint process 1 cannot read."""
    with pytest.MonkeyPatch.context() as patch:
        warnings = Warnings()
        trainer = make_trainer(config, warnings)
        if trainer.mesh.rank == 1:
            patch.setattr("boost.train.builtin_hooks.read_best", lambda _: None)
        trainer.start(candidates(trainer))
        trainer.fit()
        return [ckpt.step_of(path) or 0 for path in trainer.saves.complete()], warnings.seen


def test_processes_agree_which_checkpoint_is_the_best(store: Path, tmp_path: Path) -> None:
    """Otherwise one of them would save after an evaluation and wait for the others."""
    train = {"steps": 2, "eval_every": 1, "eval_tokens": 64, "keep_best": True, "save_every": 100}
    config = make_config(store, tmp_path / "run", tp=2, train=train)
    run_distributed(2, train_whole, config)
    (tmp_path / "run/checkpoints/best.json").write_text('{"step": 2, "heldout_loss": 0.5}')  # nothing will be better
    more = make_config(store, tmp_path / "run", tp=2, train=train | {"steps": 4})
    first, second = run_distributed(2, best_seen, more)
    assert first == second and 3 not in first[0] and not first[1]


def in_mount_namespace(hidden: str, words: list[str]) -> int:
    """`boost` in a mount namespace of its own, in which a folder is empty, as on a node that does not see it yet."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(0x00020000) or libc.mount(
        b"none", b"/", None, 0x4000 | 0x40000, None
    ):  # CLONE_NEWNS; private, recursive
        return 77
    if hidden and libc.mount(b"none", hidden.encode(), b"tmpfs", 0, None):
        return 77
    load.SETTLE_PAUSES_S = (0.1, 0.1)  # type: ignore[assignment]
    return boost_command(words)


@pytest.mark.slow
def test_a_process_that_does_not_see_the_newest_checkpoint(store: Path, tmp_path: Path) -> None:
    """Two processes as on two nodes, of which the second does not see the newest folder."""
    config = tmp_path / "run.toml"
    text = toml(store, micro_batch=2, steps=8, save_every=2, keep=9)
    config.write_text(f'{text}dir = "{tmp_path / "run"}"\n')
    words = ["train", str(config), "--resume", "auto"]

    def both(hidden: str) -> list[tuple[int, str, str]]:
        (port,) = free_ports(1)
        environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
        environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        pair = [
            ForkedPython(in_mount_namespace, ("" if rank == 0 else hidden, words), environment | {"RANK": str(rank)})
            for rank in (0, 1)
        ]
        try:
            said = [process.communicate(timeout=LIMIT_S) for process in pair]
            return [(process.returncode, *text) for process, text in zip(pair, said, strict=True)]
        finally:
            for process in pair:
                process.close()

    whole = both("")
    if whole[0][0] == 77:
        pytest.skip("needs the right to mount a tmpfs")
    assert [code for code, *_ in whole] == [0, 0], whole
    losses_of_whole = losses(tmp_path / "run")
    run = tmp_path / "run/checkpoints"
    shutil.rmtree(run / "step-00000008")
    (tmp_path / "run/last-saved.json").write_text('{"step": 6}')
    ended = both(str(run / "step-00000006"))
    assert [code for code, *_ in ended] == [0, 0], ended
    (line,) = [
        line for line in (tmp_path / "run/logs/rank0.log").read_text().splitlines() if "previous checkpoint" in line
    ]
    assert "process 1 cannot read what other processes can" in line and "step-00000006" in line
    assert losses(tmp_path / "run") == pytest.approx(losses_of_whole, rel=1e-6)
    assert ckpt.find_checkpoint(tmp_path / "run").name == "step-00000008"
    assert (run / "superseded-step-00000006").is_dir()


def resume_and_stop(config: Config, steps: int, *fault: Any) -> tuple[str, int]:
    """Resumes although a read fails on one process, and trains a few steps. Returns (error or '', steps done)."""
    rank, number, error, forever = fault
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("boost.train.checkpoint.load.SETTLE_PAUSES_S", (0.001,))
        trainer = make_trainer(config, MetricsHook())
        with failing(Path(config.run.dir), number if trainer.mesh.rank == rank else None, error, forever):
            try:
                trainer.start(candidates(trainer))
            except BoostError as refusal:
                return str(refusal), 0
        stop = Do("after_step", trainer.position.step + steps, request_stop)
        trainer.hooks.insert(0, stop)
        trainer.fit()
        return "", trainer.position.step


@pytest.mark.slow
@pytest.mark.parametrize("resumes", [6, pytest.param(200, marks=pytest.mark.nightly)])
def test_soak(store: Path, tmp_path: Path, resumes: int) -> None:
    """Resumes on changing meshes, each with a random read error on one process, end with the losses of one process that was
    not interrupted."""
    chance = random.Random(resumes)
    steps = resumes + 10

    def config_on(folder: str, parallel: dict[str, Any]) -> Config:
        train = {"steps": steps, "keep": 4, "micro_batch": 1, "async_save": bool(chance.getrandbits(1))}
        return make_config(store, tmp_path / folder, parallel=parallel, train=train)

    trainer = make_trainer(config_on("whole", {}), MetricsHook())
    (tmp_path / "whole").mkdir()
    trainer.start([])
    trainer.fit()
    (tmp_path / "run").mkdir()
    done, refused, fell_back = 0, 0, 0
    for _ in range(resumes):
        mesh, rank, number = chance.choice(list(MESHES.values())), chance.randrange(2), chance.randrange(60)
        fault = rank, number, chance.choice((errno.EIO, errno.ENOENT, errno.ESTALE)), bool(chance.getrandbits(1))
        (said, step), other = run_distributed(2, resume_and_stop, config_on("run", mesh), 2, *fault)
        assert (said, step) == other, fault
        refused += bool(said)
        fell_back += not said and step <= done
        done = step or done
    run_distributed(2, resume_and_stop, config_on("run", MESHES["tp 2"]), steps, 0, None, 0, False)
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "whole"), rel=1e-9)
    assert len(losses(tmp_path / "run")) == steps and refused < resumes / 2, (refused, fell_back)
