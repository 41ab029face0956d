"""Training across two hosts (network namespaces): same losses, traffic over the wire, and the cost of losing a host."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.experiments.hosts import why_no_hosts
from boost.cli.main import main
from boost.config import load
from boost.config.architecture import parameter_count
from boost.train.checkpoint import complete_checkpoints
from boost.train.metrics import read_metrics
from tests.train.commands import alive, toml
from tests.train.nodes import FLOAT64, LIMIT_S, PORT, Agent, Node, losses, two_nodes, wait_for, wait_for_step

pytestmark = pytest.mark.slow

STEPS = 8


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, store: Path) -> Path:
    path = tmp_path_factory.mktemp("nodes") / "run.toml"
    fields: dict[str, Any] = {"micro_batch": 2, "steps": STEPS, "save_every": 3, "eval_every": 0, "log_every": 1}
    path.write_text(f"{toml(store, tp=1, **fields, **FLOAT64)}timeout_s = 600\n")
    return path


@pytest.fixture(scope="module")
def alone(config: Path) -> list[float]:
    """The losses of the same run on one process."""
    run = config.parent / "alone"
    assert main(["train", str(config), "--run.dir", str(run), "--optim.schedule", "constant"]) == 0
    return losses(run)


@pytest.fixture
def nodes() -> Iterator[tuple[Node, Node]]:
    if reason := why_no_hosts():
        pytest.skip(reason)
    with two_nodes() as made:
        yield made


def start(
    nodes: tuple[Node, Node], config: Path, run: Path, *words: str, tp: int = 1, max_restarts: int = 0
) -> list[Agent]:
    """A torchrun on each node."""
    train = command(config, run, *words, tp=tp)
    return [node.torchrun(nodes[0], train, nproc=tp, max_restarts=max_restarts) for node in nodes]


def command(config: Path, run: Path, *words: str, tp: int = 1) -> list[str]:
    """TP inside a node, DP across the two."""
    mesh = ("--parallel.tp", str(tp), "--parallel.dp", "2", "--optim.schedule", "constant")
    return ["train", str(config), "--run.dir", str(run), "--resume", "auto", *mesh, *words]


def wait_for_checkpoint(agents: list[Agent], run: Path) -> None:
    """Waits until one is complete: the write continues in the background after its step."""
    wait_for(agents, lambda: complete_checkpoints(run / "checkpoints"))


@pytest.mark.parametrize(
    ("tp", "number"),
    [
        (1, signal.SIGUSR1),
        pytest.param(1, signal.SIGTERM, marks=pytest.mark.nightly),
        pytest.param(2, signal.SIGTERM, marks=pytest.mark.nightly),
    ],
)
def test_two_nodes_train_what_one_process_trains_and_save_when_one_gets_a_signal(
    nodes: tuple[Node, Node], config: Path, alone: list[float], tmp_path: Path, tp: int, number: int
) -> None:
    """SIGTERM is that of a Kubernetes node that is drained: a torchrun that exits with 0 would not be restarted. SIGUSR1, without
    --signals-to-handle, kills a torchrun; its processes must save nevertheless."""
    run = tmp_path / "run"
    agents = start(nodes, config, run, "--train.steps", "5000", "--train.save_every", "0", tp=tp)
    wait_for_step(agents, run, STEPS)
    workers = [*agents[0].workers(), *agents[1].workers()]
    agents[1].process.send_signal(number)
    codes = [agent.wait(LIMIT_S) for agent in agents]
    assert 0 not in codes and (number == signal.SIGTERM or codes[1] == -number), [agent.said() for agent in agents]
    assert len(workers) == 2 * tp
    wait_for([], lambda: not any(alive(pid) for pid in workers))
    (saved,) = complete_checkpoints(run / "checkpoints")
    assert json.loads((saved / "state.json").read_text())["step"] == read_metrics(run / "metrics.jsonl")[-1]["step"]
    assert "checkpoint saved" in agents[0].said()
    assert [agent.said().count("run directory ") for agent in agents] == [1, 0], "one process speaks for the run"
    assert len(alone) == STEPS and losses(run)[:STEPS] == pytest.approx(alone, rel=1e-10)
    gradients = parameter_count(load(str(config), []).model) * 8
    for node in nodes:
        assert node.received() > STEPS * gradients, "each step's gradients come from the other node"


@pytest.mark.nightly
def test_a_killed_process_restarts_both_nodes_and_the_run_goes_on(
    nodes: tuple[Node, Node], config: Path, alone: list[float], tmp_path: Path
) -> None:
    """The node whose process was killed counts a restart, the other often none; they must rendezvous anyway."""
    run = tmp_path / "run"
    agents = start(nodes, config, run, max_restarts=1)
    wait_for_checkpoint(agents, run)
    (worker,) = agents[1].workers()
    os.kill(worker, signal.SIGKILL)
    for agent in agents:
        assert agent.wait(LIMIT_S) == 0, agent.said()
    assert "resumed at step" in agents[0].said()
    assert losses(run) == pytest.approx(alone, rel=1e-10)


@pytest.mark.nightly
def test_a_node_that_takes_anothers_place_is_let_in(
    nodes: tuple[Node, Node], config: Path, alone: list[float], tmp_path: Path
) -> None:
    """Like a pod of examples/kubernetes.yaml that is recreated while the others wait."""
    run = tmp_path / "run"

    def torchrun(node: Node) -> Agent:
        return node.torchrun(nodes[0], command(config, run), nproc=1, max_restarts=1, own_store=True)

    agents = [torchrun(node) for node in nodes]
    wait_for_checkpoint(agents, run)
    agents[1].kill()
    agents[1] = torchrun(nodes[1])
    for agent in agents:
        assert agent.wait(LIMIT_S) == 0, agent.said()
    assert losses(run) == pytest.approx(alone, rel=1e-10)


@pytest.mark.nightly
def test_a_node_that_is_cut_off_ends_with_its_processes(nodes: tuple[Node, Node], config: Path, tmp_path: Path) -> None:
    """Restarts are left, but the rendezvous host cannot be reached: its requests would block for 15 minutes."""
    # No saves, because a process would wait half an hour for the others.
    options = "--train.steps 5000 --train.save_every 0 --run.timeout_s 20"
    words = command(config, tmp_path / "run", *options.split())
    agents = [node.launch(nodes[0], words, nproc=1, max_restarts=3) for node in nodes]
    wait_for_step(agents, tmp_path / "run", STEPS)
    nodes[1].connect(False)
    assert agents[1].wait(400) == 3, agents[1].said()
    assert f"the rendezvous at {nodes[0].address}:{PORT} does not respond" in agents[1].said().splitlines()[-1]


@pytest.mark.parametrize("node", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_mistake_on_one_node_ends_all_nodes_at_once_and_is_printed_once(
    nodes: tuple[Node, Node], config: Path, tmp_path: Path, node: int
) -> None:
    """The other node's process waits for it, and restarts are left. (This machine has no GPU.)"""
    words = [command(config, tmp_path / "run"), command(config, tmp_path / "run")]
    words[node] += ["--run.device", "cuda"]
    agents = [made.launch(nodes[0], its, nproc=1, max_restarts=3) for made, its in zip(nodes, words, strict=True)]
    assert [agent.wait(LIMIT_S) for agent in agents] == [2, 2], [agent.said() for agent in agents]
    assert [agent.said().count("boost: error: ") for agent in agents] == [int(node == 0), int(node == 1)]
    assert "run.device = 'cuda'" in agents[node].said()
