"""In-step recovery on whole runs: processes die, and losses match an undisturbed run."""

import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from boost.cli.main import main
from boost.config import Config
from boost.elastic import recovery
from boost.elastic.beats import WAITS_S
from boost.elastic.groups import Membership
from boost.elastic.membership import DEAD, SILENT, Coordinator, Decision, Member
from boost.elastic.mesh import replica_of_rank
from boost.elastic.recovery import Recovery, decode, encode
from boost.elastic.session import Admission
from boost.elastic.supervise import Supervisor
from boost.errors import ConfigError, ExcludedError, StoppedError, StorageError, TrainingError
from boost.measure.counting import CollectiveCounter
from boost.parallel.gradients import StepFlags
from boost.train.agreement import PeersLostError
from boost.train.checkpoint import Checkpoint, SavedCheckpoint
from boost.train.evaluate import Evaluation
from boost.train.faults import Fault
from boost.train.launch import Supervise, can_fork, launch
from boost.train.loop import Trainer
from boost.train.metrics import read_metrics
from boost.train.replicas import Mismatch, ReplicaReport
from boost.train.run import train_process
from boost.train.signals import StopRequest
from tests import toy
from tests.train.commands import LIMIT_S, QUIET, Command, saved_steps, training
from tests.train.runs import make_config

FP64 = ("--train.param_dtype", "float64", "--train.compute_dtype", "float64")
MESHES = {
    "dp2": ("--parallel.tp", "1", "--parallel.dp", "2"),
    "dp4": ("--parallel.tp", "1", "--parallel.dp", "4"),
    "dp2-tp2": ("--parallel.tp", "2", "--parallel.dp", "2"),
    "pp2-dp2": ("--parallel.tp", "1", "--parallel.dp", "2", "--parallel.pp", "2", "--model.tied", "true"),
    "dp2-cp2": ("--parallel.tp", "1", "--parallel.dp", "2", "--parallel.cp", "2", "--parallel.layout", "btp-cp"),
}
ONE_PROCESS = [f"--parallel.{axis}=1" for axis in ("tp", "dp", "pp", "cp")]
ONE_PROCESS += ["--parallel.layout=single", "--parallel.shard=none"]
BATCH = ("--train.global_batch", "8", "--train.micro_batch", "1")


def trained(folder: Path, store: Path, *words: str) -> tuple[int, str, str, list[dict[str, Any]]]:
    """Exit code, stdout, stderr and metrics of a whole run."""
    folder.mkdir()
    with Command(folder, store, *FP64, *BATCH, *words) as command:
        code, out, err = command.finish()
    metrics = folder / "run" / "metrics.jsonl"
    return code, out, err, read_metrics(metrics) if metrics.exists() else []


def undisturbed(folder: Path, store: Path, *words: str) -> list[dict[str, Any]]:
    """Metrics of the same run on one process, this one, which takes a fraction of the time."""
    folder.mkdir()
    command = training(folder, store, *FP64, *BATCH, *words, *ONE_PROCESS)
    assert main(command[command.index("train") :]) == 0
    return read_metrics(folder / "run" / "metrics.jsonl")


def launched(entry: Any, work: tuple[Any, ...], processes: int, logs: Path, supervise: Supervise | None = None) -> int:
    """The exit code of a run whose processes start as those of `boost train`."""
    forks = can_fork()
    return launch(entry, work, processes, logs, holds_signals=True, forks=forks, supervise=supervise)


def faults(*texts: str) -> list[str]:
    return [word for text in texts for word in ("--inject-fault", text)]


def of(kind: str, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in lines if line["kind"] == kind]


def assert_same_steps(found: list[dict[str, Any]], expected: list[dict[str, Any]], steps: int) -> None:
    """Every step appears once, with the expected loss and norm."""
    for lines in (found, expected):
        assert [line["step"] for line in of("step", lines)] == list(range(1, steps + 1))
    for a, b in zip(of("step", found), of("step", expected), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-12), a["step"]
        assert a["gradient_norm"] == pytest.approx(b["gradient_norm"], rel=1e-10), a["step"]


def assert_complete(changes: list[dict[str, Any]]) -> None:
    """Each record of a change says all that has changed since the one before."""
    replicas = changes[0]["of"]
    for change in changes:
        replicas += len(change["joined"]) - len(change["lost"])
        assert change["replicas"] == replicas, changes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "victims"),
    [
        ("dp2-tp2", (0,)),
        pytest.param("dp4", (1, 0), marks=pytest.mark.nightly),
        pytest.param("pp2-dp2", (2,), marks=pytest.mark.nightly),
        pytest.param("dp2-cp2", (1,), marks=pytest.mark.nightly),
    ],
)
def test_a_replica_is_lost_and_comes_back(store: Path, tmp_path: Path, mesh: str, victims: tuple[int, ...]) -> None:
    words = (*MESHES[mesh], "--train.steps", "16", "--train.eval_every", "11", "--train.save_every", "7")
    if mesh != "dp4":
        words += ("--train.global_batch", "4")
    if "pp" not in mesh:
        words += ("--model.layers", "1")
    kills = [f"kill@{5 + 2 * i}:{rank}" for i, rank in enumerate(victims)]
    waits = [f"wait@{9 + 4 * i}:3" for i, _ in enumerate(victims)]
    code, out, err, found = trained(
        tmp_path / "killed", store, *words, "--run.recovery", "in-step", *faults(*kills, *waits)
    )
    assert code == 0, out + err
    expected = undisturbed(tmp_path / "whole", store, *words)
    assert_same_steps(found, expected, 16)
    assert [line["step"] for line in of("eval", found)] == [line["step"] for line in of("eval", expected)]
    changes = of("membership", found)
    assert_complete(changes)
    assert sum(len(line["lost"]) for line in changes) == len(victims)
    assert any("was killed by SIGKILL" in why for line in changes for _, why in line["lost"])
    assert sum(len(line["joined"]) for line in changes) == len(victims), "they came back before the end"
    assert "lost replica" in out and "rejoined" in out and "held-out perplexity" in out, (
        "the terminal moves with the main one"
    )
    assert "Traceback" not in out + err and not list((tmp_path / "killed" / "run").glob("*.lock"))


@pytest.mark.nightly  # the test of an operation behind hands over sharded moments on every commit
@pytest.mark.parametrize(
    "words",
    [
        ("--parallel.dp", "4", "--parallel.shard", "optimizer"),
        ("--optim.name", "muon"),
        ("--model.family", "svd", "--optim.name", "loro", "--optim.exact_every", "9"),
    ],
    ids=["zero-1", "muon", "loro"],
)
def test_state_of_every_kind_is_handed_over(store: Path, tmp_path: Path, words: tuple[str, ...]) -> None:
    """A loss, a rejoin, a save of what each replica then holds, and a start from it on a different number of replicas."""
    words = ("--parallel.tp", "1", "--parallel.dp", "2", *words, "--optim.schedule", "constant")
    every = "--run.recovery in-step --train.save_every 6 --train.eval_every 0 --train.steps 24"
    in_step = (*words, *every.split())
    happens = faults("kill@5:1", "wait@7:0", "kill@13:0", "wait@15:1")
    code, out, err, found = trained(tmp_path / "killed", store, *in_step, *happens)
    assert code == 0, out + err
    assert [len(line["joined"]) for line in of("membership", found)] == [0, 1, 0, 1], of("membership", found)
    plain = (*words, *QUIET, "--parallel.dp", "2", "--parallel.shard", "none")
    expected = undisturbed(tmp_path / "whole", store, *plain, "--train.steps", "30")
    assert_same_steps(found, [line for line in expected if line["step"] <= 24], 24)
    with Command(
        tmp_path / "killed", store, *FP64, *BATCH, *plain, "--train.steps", "30", "--resume", "auto"
    ) as command:
        code, out, err = command.finish()
    assert code == 0 and "resumed at step 24" in out, out + err
    assert_same_steps(read_metrics(command.run / "metrics.jsonl"), expected, 30)


@pytest.mark.nightly
def test_the_batches_of_a_mixture_stay(store: Path, mixture: dict[str, float], tmp_path: Path) -> None:
    """A lost replica's sequences count as often when others take them over."""
    words = ("--parallel.tp", "1", "--parallel.dp", "2", "--train.steps", "20", "--train.eval_every", "7")
    words += ("--data.mixture", "{ " + ", ".join(f'"{path}" = {weight}' for path, weight in mixture.items()) + " }")
    in_step = ("--run.recovery", "in-step", *faults("kill@5:1", "wait@9:0"))
    code, out, err, found = trained(tmp_path / "killed", store, *words, *in_step)
    assert code == 0, out + err
    expected = undisturbed(tmp_path / "whole", store, *words)
    assert_same_steps(found, expected, 20)
    assert sum(len(line["lost"]) for line in of("membership", found)) == 1
    for a, b in zip(of("eval", found), of("eval", expected), strict=True):
        assert a["heldout_loss"] == pytest.approx(b["heldout_loss"], rel=1e-12)


def is_behind(config: Config, *rest: Any) -> int:
    """Trains; replica 2 learns that the membership is over before it completes the last operation of step 9, when the others
    are already in step 10."""
    usual, operations = Recovery.run, 2 if config.divides_moments else 1
    seen: list[int] = []

    def run(self: Recovery, attempt: Any) -> Any:
        here = self.trainer is not None and self.trainer.position.step == 8 and self.member == Member(2, "2.0")
        if not here or self._depth or self.decision.number:
            return usual(self, attempt)
        seen.append(self.operation)
        if len(seen) != operations:
            return usual(self, attempt)

        def attempt_and_stay_behind() -> Any:
            found = attempt()
            if self.decision.number == 0:
                assert self.membership.over.wait(60)
                raise PeersLostError("a test")
            return found

        return usual(self, attempt_and_stay_behind)

    Recovery.run = run  # type: ignore[method-assign]
    return train_process(config, *rest)


@pytest.mark.slow
@pytest.mark.parametrize("shard", [pytest.param("none", marks=pytest.mark.nightly), "optimizer"])
def test_a_replica_that_is_an_operation_behind_computes_what_the_others_do_not_hold(
    store: Path, tmp_path: Path, shard: str
) -> None:
    def losses_of(name: str, recovery: str, faults: Any) -> list[float]:
        parallel = {"dp": 4, "shard": shard} if faults else {"dp": 1, "layout": "single"}
        train: dict[str, Any] = {"steps": 14, "global_batch": 8, "micro_batch": 1}
        train |= {"param_dtype": "float64", "compute_dtype": "float64"}
        config = make_config(store, tmp_path / name, parallel=parallel, train=train, run={"recovery": recovery})
        supervise = Supervisor(tuple((rank,) for rank in range(4)), restarts=0).supervise if faults else None
        entry, work = (is_behind, (config, None, None, faults)) if faults else (train_process, (config, None))
        assert launched(entry, work, 4 if faults else 1, tmp_path / "logs", supervise) == 0
        lines = read_metrics(tmp_path / name / "metrics.jsonl")
        assert len(of("membership", lines)) == bool(faults)
        return [line["loss"] for line in of("step", lines)]

    expected = losses_of("whole", "restart", None)
    found = losses_of("killed", "in-step", [Fault("kill", 10, 0)])
    assert len(found) == 14 and found == pytest.approx(expected, rel=1e-13)


@pytest.mark.slow
def test_both_copies_of_a_piece_lost_end_the_run(store: Path, tmp_path: Path) -> None:
    sharded = "--parallel.shard optimizer --run.recovery in-step --train.steps 50"
    words = (*MESHES["dp4"], *QUIET, *sharded.split())
    code, _, err, _ = trained(tmp_path / "run", store, *words, *faults("kill@9:0", "kill@9:2"))
    assert code == 3 and "2 of 4 parts of the moments are lost" in err and "Traceback" not in err, err


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "mesh"), [(0, "dp2"), pytest.param(1, "dp2", marks=pytest.mark.nightly)])
def test_a_flipped_weight_is_found_although_the_exchange_overwrites_it(
    store: Path, tmp_path: Path, rank: int, mesh: str
) -> None:
    """Both holders update the flipped row; after the exchange, all replicas have the row of one of them."""
    sharded = "--parallel.shard optimizer --run.recovery in-step --train.steps 12 --train.check_replicas_every 5"
    words = (*MESHES[mesh], *QUIET, *sharded.split(), "--run.replica_restarts", "0")
    code, _, err, _ = trained(tmp_path / "run", store, *words, *faults(f"flip@7:{rank}"))
    assert code == 3 and "at step 10, processes 0 (host " in err and ") should have the same weights and moments" in err
    assert "memory or arithmetic failed there; these weights were not saved" in err and "Traceback" not in err, err
    assert saved_steps(tmp_path / "run" / "run") == []


def dies_rolling_back(marker: str, config: Config, *rest: Any) -> int:
    """Trains and requests a rollback in step 9, during which a process is killed once."""
    count, load = Trainer._count, Trainer.load

    def count_and_ask(self: Trainer, stats: Any) -> None:
        count(self, stats)
        if self.position.step == 9 and not self.position.skipped:
            self.judge.rollback_reason = "a test"

    def load_and_die(self: Trainer, checkpoint: Checkpoint) -> None:
        load(self, checkpoint)
        if marker and self.judge.rollbacks and self.mesh.dp.rank == 1 and not os.path.exists(marker):
            Path(marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)

    Trainer._count, Trainer.load = count_and_ask, load_and_die  # type: ignore[method-assign]
    return train_process(config, *rest)


@pytest.mark.nightly
def test_a_rollback_that_loses_a_replica_is_a_rollback(store: Path, tmp_path: Path) -> None:
    def losses_of(name: str, marker: str, recovery: str, supervise: Supervise | None) -> list[tuple[int, float]]:
        train = {"steps": 24, "global_batch": 4, "micro_batch": 1, "save_every": 3, "on_spike": "rollback"}
        config = make_config(store, tmp_path / name, parallel={"dp": 2}, train=train, run={"recovery": recovery})
        work = marker, config, None
        assert launched(dies_rolling_back, work, 2, tmp_path / "logs", supervise) == 0
        lines = read_metrics(tmp_path / name / "metrics.jsonl")
        return [(line["step"], line["loss"]) for line in of("step", lines)]

    marker = str(tmp_path / "marker")
    found = losses_of("killed", marker, "in-step", Supervisor(((0,), (1,)), restarts=5).supervise)
    expected = losses_of("whole", "", "restart", None)
    assert os.path.exists(marker) and [step for step, _ in found] == [step for step, _ in expected]
    assert [loss for _, loss in found] == pytest.approx([loss for _, loss in expected], rel=1e-12)


def counts_collectives(folder: str, config: Config, *rest: Any) -> int:
    """Trains; writes how many collectives of which kind and size this process issued. (torch 2.15 also counts objects that are
    gathered, which are bytes.)"""
    counter, usual = CollectiveCounter(), Trainer.fit

    def fit(self: Trainer) -> Any:
        with counter:
            return usual(self)

    Trainer.fit = fit  # type: ignore[method-assign]
    code = train_process(config, *rest)
    seen = sorted([x.kind, x.dtype, x.elements] for x in counter.collectives if "int" not in x.dtype)
    Path(folder, f"collectives{os.environ['RANK']}.json").write_text(json.dumps(seen))
    return code


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_without_a_fault_it_is_the_same_run_to_the_last_bit(store: Path, tmp_path: Path, tp: int) -> None:
    """With the same collectives."""
    losses, sent, processes = [], [], 2 * tp
    for mode in ("restart", "in-step"):
        folder = tmp_path / mode
        folder.mkdir()
        train = {"steps": 10, "global_batch": 4}
        config = make_config(store, folder / "run", tp, parallel={"dp": 2}, train=train, run={"recovery": mode})
        ranks = tuple(tuple(range(first, first + tp)) for first in range(0, processes, tp))
        supervise = Supervisor(ranks, restarts=0).supervise if mode == "in-step" else None
        work = (str(folder), config, None)
        assert launched(counts_collectives, work, processes, tmp_path / "logs", supervise) == 0
        losses.append([line["loss"] for line in of("step", read_metrics(folder / "run" / "metrics.jsonl"))])
        sent.append([json.loads((folder / f"collectives{rank}.json").read_text()) for rank in range(processes)])
    assert losses[0] == losses[1] and len(losses[0]) == 10
    assert sent[0] == sent[1] and len(sent[0][0]) >= 20, "gradients and statistics of 10 steps"


@pytest.mark.slow
def test_a_process_that_stops_is_left_out_and_ended(store: Path, tmp_path: Path) -> None:
    # On a loaded machine, 3 s without a beat are no hang.
    watched = "--train.steps 20 --run.recovery in-step --run.heartbeat_timeout_s 6"
    words = (*MESHES["dp2"], *QUIET, *watched.split())
    code, out, err, found = trained(tmp_path / "hung", store, *words, *faults("hang@6:1"))
    assert code == 0, out + err
    assert [line["step"] for line in of("step", found)] == list(range(1, 21))
    assert next(line["lost"] for line in of("membership", found))[0][1].count("does not answer") == 1


@pytest.mark.nightly
def test_when_all_die_the_run_ends_and_says_why(store: Path, tmp_path: Path) -> None:
    words = (*MESHES["dp4"], "--train.save_every", "4", "--train.steps", "14", "--run.recovery", "in-step")
    code, _, err, _ = trained(tmp_path / "all", store, *words, *faults(*(f"kill@9:{rank}" for rank in range(4))))
    assert code == 3 and "was killed by SIGKILL" in err and "resume with --resume auto" in err
    assert "Traceback" not in err
    with Command(tmp_path / "all", store, *FP64, *BATCH, *words, "--resume", "auto") as command:
        code, out, err = command.finish()
    assert code == 0, out + err
    assert "resumed at step 8 of 14" in out or "resumed at step 4 of 14" in out, (
        "the save of step 8 may have been in flight"
    )


@pytest.mark.slow
def test_the_run_saves_and_ends_when_its_launcher_is_killed(store: Path, tmp_path: Path) -> None:
    """Like a run without recovery. The store of the run is in the launcher's folder, which the last process removes."""
    with Command(tmp_path, store, *BATCH, *MESHES["dp2"], *QUIET, "--run.recovery", "in-step") as command:
        metrics = command.run / "metrics.jsonl"
        command.wait_for(lambda: metrics.exists() and len(read_metrics(metrics)) > 5)
        processes = command.processes()[1:]
        os.kill(command.process.pid, signal.SIGKILL)
        command.process.wait()
        deadline = time.monotonic() + LIMIT_S
        while any(Path(f"/proc/{pid}").exists() for pid in processes) and time.monotonic() < deadline:
            time.sleep(0.05)
    (end,) = of("end", read_metrics(metrics))
    # Each process notices by itself; the main one may hear of it from another first.
    assert end["reason"] in ("SIGTERM", "a signal to another process") and saved_steps(command.run) == [end["step"]]
    assert not list(command.shared.glob("boost-launch-*"))


def stops_when_told() -> int:
    with StopRequest() as request:
        while not request.requested:
            time.sleep(0.01)
    return 0


def test_a_signal_while_the_replicas_start_reaches_all_of_them(tmp_path: Path) -> None:
    def supervise(folder: Path, start: Callable[[int], None], *rest: Any) -> dict[int, int]:
        def start_and_signal(rank: int) -> None:
            start(rank)
            if rank == 0:
                os.kill(os.getpid(), signal.SIGTERM)

        return Supervisor(((0,), (1,)), restarts=0).supervise(folder, start_and_signal, *rest)

    assert launched(stops_when_told, (), 2, tmp_path, supervise) == 0


def dies_handing_over(marker: str, victim: str, config: Config, *rest: Any) -> int:
    """Trains; during the first state transfer, the donor or the newcomer is killed."""
    usual = Recovery._transfer_state

    def transfer(self: Recovery, newcomer: Any = None) -> None:
        is_donor = newcomer is None and self.mesh.dp.rank == 0
        if self.decision.joined and {"donor": is_donor, "newcomer": newcomer is not None}[victim]:
            try:
                os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                pass
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        usual(self, newcomer)

    Recovery._transfer_state = transfer  # type: ignore[method-assign]
    return train_process(config, *rest)


@pytest.mark.nightly
@pytest.mark.parametrize("victim", ["donor", "newcomer"])
def test_one_that_dies_while_state_is_handed_over_is_one_more_loss(store: Path, tmp_path: Path, victim: str) -> None:
    def config_of(name: str, recovery: str, **parallel: Any) -> Config:
        train = {"steps": 24, "global_batch": 6, "micro_batch": 1}
        return make_config(store, tmp_path / name, parallel=parallel, train=train, run={"recovery": recovery})

    config = config_of("killed", "in-step", dp=3)
    supervise = Supervisor(tuple((rank,) for rank in range(3)), restarts=5).supervise
    marker = tmp_path / "marker"
    work = (str(marker), victim, config, None, None, [Fault("kill", 4, 1), Fault("wait", 6, 2)])
    assert launched(dies_handing_over, work, 3, tmp_path / "logs", supervise) == 0
    assert marker.exists()
    whole = config_of("whole", "restart", layout="single")
    assert launched(train_process, (whole, None), 1, tmp_path / "logs") == 0
    found, expected = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("killed", "whole"))
    assert_same_steps(found, expected, 24)
    assert_complete(of("membership", found))
    # With the donor, a newcomer that has not got everything is out too.
    assert sum(len(line["lost"]) for line in of("membership", found)) >= 2


def waiting_replica(stopped: str | None = None) -> Recovery:
    """A restarted replica 1 of 2 that has not joined yet, without its processes."""
    found, first = Recovery.__new__(Recovery), (Member(0, "0.0"), Member(1, "1.0"))
    found.store, found.member, found.decision = dist.HashStore(), Member(1, "1.1"), Decision(0, first)
    found.replica, found._beats = SimpleNamespace(size=1, process=0), SimpleNamespace(status=lambda member: "")  # type: ignore[assignment]
    found._coordinator, found._stopped = Coordinator(found.store, 2, 1), lambda: stopped
    return found


@pytest.mark.parametrize("place", ["this process", "another one of the replica"])
def test_a_stop_signal_ends_a_replica_that_waits_to_join(place: str) -> None:
    waits = waiting_replica("SIGTERM" if place == "this process" else None)
    if place != "this process":
        other = waiting_replica("SIGTERM")
        other.store = waits.store
        with pytest.raises(StoppedError, match="SIGTERM"):
            other._require_not_stopped()
    with pytest.raises(StoppedError, match="SIGTERM"):
        waits.enter(None)  # type: ignore[arg-type]


def test_a_replica_that_the_others_take_for_lost_does_not_wait_to_join_for_ever() -> None:
    waits = waiting_replica()
    Coordinator(waits.store, 2, 1, lambda member: SILENT).exclude_lost([waits.member], Member(0, "0.0"))
    with pytest.raises(ExcludedError, match="does not answer"):
        waits.enter(None)  # type: ignore[arg-type]


def test_a_replica_that_finds_no_member_that_answers_marks_them_for_their_launchers() -> None:
    waits, status = waiting_replica(), lambda member: SILENT if member.replica == 0 else DEAD
    waits._beats = SimpleNamespace(status=status)  # type: ignore[assignment]
    waits._coordinator = Coordinator(waits.store, 2, 1, status)
    waits._coordinator._decide(waits.decision)
    with pytest.raises(ExcludedError, match="no replica with weights is left"):
        waits.enter(None)  # type: ignore[arg-type]
    reasons = Coordinator(waits.store, 2, 1).lost_among(waits.decision.members)
    assert list(reasons.values()) == ["silent: does not answer", "dead: was restarted"]


def test_a_save_that_one_of_two_changes_abandoned_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second change finds no save in flight."""
    found, in_flight, requested = waiting_replica(), [7], list[bool]()
    saver = SimpleNamespace(abandon=lambda: in_flight.pop() if in_flight else None)
    trainer: Any = SimpleNamespace(
        saves=SimpleNamespace(saver=saver),
        stepper=SimpleNamespace(prefetcher=SimpleNamespace(close=lambda: None)),
        notify=lambda *_: None,
        add_hooks=lambda _: None,
        request_save=lambda: requested.append(True),
    )
    found.trainer, found.membership, found._repeats_save, found._is_fitting = trainer, Membership(-1), False, True
    found._coordinator = SimpleNamespace(wait_until_ready=lambda *_: None)  # type: ignore[assignment]
    found.mesh = SimpleNamespace(become=lambda _: None, is_main=False)  # type: ignore[assignment]
    monkeypatch.setattr(recovery, "join_members", lambda *_: None)
    for number in (1, 2):
        found._connect(Decision(number, found.decision.members))
    for _ in range(2):
        found._tell(trainer, None)  # type: ignore[arg-type]
    assert requested == [True], "once"


def test_a_replica_that_waits_says_why_the_others_could_not_continue() -> None:
    waits = waiting_replica()
    for decision in (waits.decision, Decision(1, (), refused="2 of 4 parts of the moments are lost")):
        waits._coordinator._decide(decision)
    with pytest.raises(ExcludedError, match="2 of 4 parts"):
        waits.enter(None)  # type: ignore[arg-type]


def test_nccl_errors_leave_the_process_alive_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun exports 1, with which the first error in a communicator would end the survivors."""
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    monkeypatch.setattr(recovery, "choose_device", lambda device: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    with pytest.raises(ConfigError, match="BOOST_REPLICA"):  # the next thing that a process looks for
        Recovery(toy.toy_config(parallel={"tp": 1, "dp": 2}, run={"recovery": "in-step"}), lambda: None)
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"


def member_on_gpu() -> Recovery:
    """Replica 1 of 2, which waits for a result on its GPU, without its processes."""
    found = waiting_replica()
    found.mesh, found.trainer, found._depth = SimpleNamespace(device=torch.device("cuda")), SimpleNamespace(), 0  # type: ignore[assignment]
    found.membership, found.member = Membership(0), found.decision.members[1]
    since = time.monotonic() - 2 * WAITS_S
    group: Any = SimpleNamespace(nccl=None, stream_waits_since=lambda: since)
    found.membership.groups.append(group)
    return found


def test_a_replica_that_falls_silent_is_excluded_by_those_whose_gpus_wait_for_it() -> None:
    """NCCL's wait returns at once, so the host waits where it reads the result."""
    waits = member_on_gpu()
    status = {0: SILENT, 1: ""}
    waits._check_membership(Coordinator(waits.store, 2, 1, lambda member: status[member.replica]), None)
    assert waits.membership.over.is_set()
    lost = Coordinator(waits.store, 2, 1).lost_among(waits.decision.members)
    assert [member.replica for member in lost] == [0]


class Unreachable(dist.HashStore):
    """A store that a training step must not ask, or whose connection has failed."""

    def check(self, keys: list[str]) -> bool:
        raise dist.DistNetworkError("Broken pipe")

    def clone(self) -> "Unreachable":
        return self


def test_a_step_does_not_ask_the_store_who_waits() -> None:
    """A thread does, because the request may block."""
    member, store = waiting_replica(), waiting_replica().store
    member.store, member._coordinator.store, member.warnings = Unreachable(), Unreachable(), []
    member.membership, hook = Membership(0), Admission(member)
    trainer: Any = SimpleNamespace(requested=StepFlags.NONE)
    Coordinator(store, 2, 1).announce(Member(1, "1.1"))
    for requested in (StepFlags.NONE, StepFlags.JOIN):
        hook.after_backward(trainer)
        assert trainer.requested == requested
        member._check_membership(Coordinator(store, 2, 1), None)
    member.decision = Decision(1, member.decision.members, seen=1)
    assert not member.has_waiting()


def test_the_death_of_the_coordinator_is_told_and_ends_the_run_only_at_the_next_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    member = member_on_gpu()  # waits
    member.store, member._where, member._closed = Unreachable(), "login:29410", threading.Event()
    member._coordinator.store, member.warnings, member._patience_s = member.store, [], 1.0
    member._answered, member.replica = time.monotonic() - 99, SimpleNamespace(process=0)  # type: ignore[assignment]
    monkeypatch.delenv("BOOST_LAUNCH_DIR", raising=False)
    monkeypatch.setattr(recovery, "WATCH_S", 0.0)
    member._slow, member._looks_at_pace, member.slots = {}, False, 2
    member._watch()
    assert member.warnings == [
        "the run's store at login:29410 does not respond (Broken pipe); the run continues until its next failure"
    ]
    since, limit = member._waits() or (0.0, 0.0)
    assert time.monotonic() - since < limit, "its requests fail, so none blocks"
    with pytest.raises(TrainingError, match="start a new 'boost coordinate'"):
        member._recover()


def test_a_replica_that_cannot_tell_whether_the_others_continue_asks_for_another_try(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A launcher restarts it: with code 2, it would not."""
    member, left = waiting_replica(), list[int]()
    monkeypatch.setattr("boost.train.overdue.leave", left.append)
    member._where, member._patience_s, member.membership = "login:29410", 12.0, Membership(0)
    member._answered, member.warnings = time.monotonic() - 99, []
    assert member._waits() is None and "silent for 12 s" in member.warnings[0]
    asked = time.monotonic()
    with member._asking():
        since, limit = member._waits() or (math.inf, 0.0)
        assert limit == 12 and asked <= since <= time.monotonic()
    member._end_alone()
    member._coordinator.exclude(member.member.incarnation, DEAD, "was restarted")
    member._check_membership(member._coordinator, time.monotonic() - recovery.EXCLUDED_GRACE_S - 1)
    assert left == [3, 3]
    said = capsys.readouterr().err
    assert "has not responded for 12 s" in said and "the other replicas continue without this one" in said


def test_a_store_that_blocks_does_not_delay_the_end_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    member, waits = waiting_replica(), threading.Event()
    monkeypatch.setattr(recovery, "SILENCE_S", 0.01)
    member.store, member._closed = SimpleNamespace(set=lambda *_: waits.wait(600)), threading.Event()  # type: ignore[assignment]
    member.membership = Membership(0)
    member.close()
    assert not waits.is_set()
    waits.set()


def test_communicators_are_closed_with_the_run() -> None:
    waits, log = member_on_gpu(), list[str]()
    group: Any = SimpleNamespace(nccl="nccl", abort=lambda: log.append("abort"), unregister=lambda: log.append("leave"))
    waits.membership.groups[:], waits._closed = [group], threading.Event()
    waits.close()
    assert log == ["abort", "leave"]


def test_an_error_that_aborted_kernels_cause_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their output is garbage: a check of it may fail."""
    waits, ended = member_on_gpu(), [True, False]
    waits.operation = 7

    def recover() -> object:
        waits.membership = Membership(1)
        return recovery._REPEAT

    def attempt() -> str:
        if ended.pop(0):
            waits.membership.end()
            raise TrainingError("replicas differ")
        return "sum"

    monkeypatch.setattr(waits, "_recover", recover)
    assert waits.run(attempt) == "sum" and waits.operation == 8


@pytest.mark.parametrize(
    "value",
    [
        None,
        1.5,
        "x",
        [Path("a"), None],
        (1, (True,)),
        Evaluation(5, 1.0, 2.0, 3.0),
        Evaluation(5, 1.0, 2.0, 3.0, {"code": Evaluation(2, 1.0, 2.0, 3.0)}),
        SavedCheckpoint(3, Path("step-3"), ("slow disk",)),
        ReplicaReport((Mismatch((1, 2), 4, True),), ((0, "embed"),), ("a", "b")),
    ],
)
def test_results_reach_those_that_are_behind(value: Any) -> None:
    assert decode(json.loads(json.dumps(encode(value)))) == value


def test_errors_reach_them_too() -> None:
    with pytest.raises(StorageError, match="disk full"):
        decode(json.loads(json.dumps(encode(StorageError("disk full")))))
    with pytest.raises(TrainingError, match="during the exchange of a result of type object"):
        decode(encode(object()))


@pytest.mark.parametrize(
    ("parallel", "sections", "said"),
    [
        ({"tp": 2, "dp": 1}, {}, r"parallel\.dp = 1; nearest valid value: 2"),
        (
            {"tp": 1, "dp": 2, "shard": "full"},
            {},
            r"parallel\.shard = 'full' shards them over replicas; set parallel\.shard = 'optimizer'",
        ),
        (
            {"layout": "btp-sp", "tp": 2, "dp": 2, "shard": "optimizer", "shard_outer": True},
            {},
            r"parallel\.shard_outer = true shards them over replicas",
        ),
        (
            {"tp": 1, "dp": 2, "shard": "optimizer"},
            {"model": {"family": "svd"}, "optim": {"name": "loro"}},
            r"can shard only the optimizer state of AdamW, but optim\.name = 'loro'; set parallel\.shard = 'none'",
        ),
        (
            {"tp": 1, "dp": 2, "pp": 2, "schedule": "interleaved-1f1b"},
            {"model": {"layers": 4}, "train": {"global_batch": 8, "micro_batch": 1}},
            r"parallel\.schedule = 'interleaved-1f1b' does not support",
        ),
    ],
)
def test_what_it_does_not_carry_is_refused_with_one_line(
    parallel: dict[str, Any], sections: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^run\.recovery = 'in-step'.*{said}") as error:
        toy.toy_config(parallel=parallel, **sections, run={"recovery": "in-step"})
    assert "\n" not in str(error.value)


def test_ranks_of_a_replica_are_those_of_the_mesh() -> None:
    config = toy.toy_config(parallel={"tp": 2, "dp": 2, "pp": 2}, train={"global_batch": 8})
    assert [replica_of_rank(config.parallel, rank) for rank in range(8)] == [
        (0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3),
    ]  # fmt: skip
