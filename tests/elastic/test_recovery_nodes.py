"""In-step recovery across two hosts (network namespaces): processes die, the wire breaks, and there is one history."""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.experiments.hosts import why_no_hosts
from boost.cli.main import main
from boost.train.metrics import read_metrics
from tests.train.commands import toml
from tests.train.nodes import FLOAT64, LIMIT_S, Agent, Node, losses, two_nodes, wait_for, wait_for_step

pytestmark = pytest.mark.slow

ENDLESS = ("--train.steps=100000", "--optim.schedule=constant", "--optim.lr=1e-4", "--train.global_batch=16")
"""A run that its test ends: tame, so that rounding does not grow with the number of steps until then."""


@pytest.fixture
def nodes() -> Iterator[tuple[Node, Node]]:
    if reason := why_no_hosts():
        pytest.skip(reason)
    with two_nodes() as made:
        yield made


@pytest.fixture
def config(tmp_path: Path, store: Path) -> Path:
    path = tmp_path / "run.toml"
    fields: dict[str, Any] = {"micro_batch": 1, "save_every": 50, "eval_every": 0, "log_every": 1}
    path.write_text(f"{toml(store, tp=1, **fields, **FLOAT64)}timeout_s = 600\n")
    return path


def start(nodes: tuple[Node, Node], config: Path, places: str, *words: str, **options: int) -> list[Agent]:
    """Starts the coordinator on the first host, and a replica per letter of `places`: a is the first host, b the second."""
    coordinator = nodes[0].coordinate()
    wait_for([coordinator], lambda: "listening on" in coordinator.said())
    train = ["train", str(config), "--run.dir", str(config.parent / "run"), "--parallel.dp", str(len(places))]
    train += ["--run.recovery", "in-step", "--run.heartbeat_timeout_s", "6", *ENDLESS, *words]
    return [nodes["ab".index(p)].replica(i, nodes[0], train, **options) for i, p in enumerate(places)]


def memberships(config: Path) -> list[dict[str, Any]]:
    metrics = config.parent / "run" / "metrics.jsonl"
    lines = read_metrics(metrics) if metrics.exists() else []
    return [line for line in lines if line["kind"] == "membership"]


@pytest.mark.nightly
@pytest.mark.parametrize(("places", "shard"), [("aabb", "optimizer"), ("ab", "none")])
def test_processes_of_two_hosts_die_and_come_back(
    nodes: tuple[Node, Node], config: Path, places: str, shard: str
) -> None:
    words = ("--parallel.shard", shard) if shard != "none" else ("--parallel.tp", "2")
    happens = (f"kill@5:{2 if places == 'ab' else 1}", "wait@7:0", "kill@13:0", "wait@15:3")
    words += tuple(word for fault in happens for word in ("--inject-fault", fault))
    agents = start(nodes, config, places, *words, max_restarts=5, nproc=1 if shard != "none" else 2)
    run = config.parent / "run"
    wait_for_step(agents, run, 20)
    wait_for(agents, lambda: memberships(config)[-1]["replicas"] == len(places))
    os.kill(agents[1].workers()[0], signal.SIGTERM)
    for agent in agents:
        assert agent.wait(LIMIT_S) == 0, agent.said()
    changes = memberships(config)
    # On a loaded machine, a replica may also miss its heartbeats; it comes back like the two that are killed.
    for what in ("lost", "joined"):
        assert sum(len(line[what]) for line in changes) >= 2, changes
    found, alone = losses(run), config.parent / "alone"
    assert main(["train", str(config), "--run.dir", str(alone), *ENDLESS, "--train.steps", str(len(found))]) == 0
    assert found == pytest.approx(losses(alone), rel=1e-10)


def test_of_a_split_network_the_half_that_reaches_the_store_goes_on_and_the_other_comes_back(
    nodes: tuple[Node, Node], config: Path
) -> None:
    # The half that goes on waits, instead of training at full speed until the other comes back.
    waits = [word for step in (40, 60, 80, 160, 320) for word in ("--inject-fault", f"wait@{step}:0")]
    agents = start(nodes, config, "ab", *waits, max_restarts=3)
    run = config.parent / "run"
    wait_for_step(agents, run, 5)
    nodes[1].connect(False)
    wait_for(agents, lambda: memberships(config))
    (change,) = memberships(config)
    assert change["replicas"] == 1 and "does not answer" in change["lost"][0][1], change
    wait_for_step(agents, run, change["step"] + 2)
    wait_for(agents, lambda: "other replicas continue, so it stops" in agents[1].said())
    nodes[1].connect(True)
    wait_for(agents, lambda: any(line["joined"] for line in memberships(config)))
    steps = [line["step"] for line in read_metrics(run / "metrics.jsonl") if line["kind"] == "step"]
    assert steps == list(range(1, len(steps) + 1)), "one history"


@pytest.mark.nightly
def test_of_a_split_network_no_part_goes_on_without_a_majority(nodes: tuple[Node, Node], config: Path) -> None:
    """One replica of four can reach the store."""
    agents = start(nodes, config, "abbb")
    wait_for_step(agents, config.parent / "run", 5)
    nodes[1].connect(False)
    for agent in agents:
        assert agent.wait(LIMIT_S) != 0, agent.said()
    assert "1 of 4 replicas respond, which is not a majority" in agents[0].said(), agents[0].said()
    for agent in agents[1:]:
        assert re.search("run's store at .* has not responded for 12 s", agent.said()), agent.said()
    assert not memberships(config)


@pytest.mark.nightly
@pytest.mark.parametrize("is_cut", [False, True])
def test_a_run_whose_coordinator_is_gone_goes_on_until_its_next_failure(
    nodes: tuple[Node, Node], config: Path, is_cut: bool
) -> None:
    """The coordinator dies, or the line to it is cut: then requests to it block, which must not pause training."""
    agents = start(nodes, config, "bb")
    run = config.parent / "run"
    wait_for_step(agents, run, 5)
    if is_cut:
        nodes[1].connect(False)
    else:
        nodes[0].agents[0].kill()
    log = run / "logs" / "rank0.log"
    wait_for(agents, lambda: "the run continues until its next failure" in log.read_text())
    wait_for_step(agents, run, read_metrics(run / "metrics.jsonl")[-1]["step"] + 20)
    os.kill(agents[1].workers()[0], signal.SIGKILL)
    assert [agent.wait(LIMIT_S) for agent in agents] == [3, 3], [agent.said() for agent in agents]
    assert "run's store at 10.213.7.1:29410" in agents[0].said().splitlines()[-1], agents[0].said()


@pytest.mark.nightly
def test_when_no_replica_with_weights_is_left_all_torchruns_end(nodes: tuple[Node, Node], config: Path) -> None:
    agents = start(nodes, config, "ab", max_restarts=1)
    wait_for_step(agents, config.parent / "run", 5)
    for agent in agents:
        os.kill(agent.workers()[0], signal.SIGKILL)
    for agent in agents:
        assert agent.wait(LIMIT_S) != 0, agent.said()
        assert "no replica with weights is left" in agent.said(), agent.said()
