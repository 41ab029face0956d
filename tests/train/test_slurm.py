"""examples/slurm.sh on a real Slurm: two nodes, requeued by the time limit and by preemption, resumed, cancelled, refused."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from boost.train.metrics import read_metrics
from tests.train.commands import ForkedPython, boost_command, free_ports, saved_steps, toml
from tests.train.slurm import Slurm, slurm, why_no_slurm

pytestmark = pytest.mark.nightly  # the script on stand-ins for Slurm: train/test_examples.py

REPOSITORY = Path(__file__).parents[2]
SCRIPT = REPOSITORY / "examples" / "slurm.sh"
ONE_GPU = ("--nodes", "2", "--gpus-per-node", "1")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if reason := why_no_slurm():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("slurm")
    boost = folder / "bin" / "boost"
    boost.parent.mkdir()
    boost.write_text(f'#!/bin/sh\nexec {sys.executable} -m boost.cli.main "$@"\n')
    boost.chmod(0o755)
    variables = {
        "PATH": f"{boost.parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(REPOSITORY),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    with slurm(folder, **variables) as made:
        yield made


@pytest.fixture(autouse=True)
def alone(cluster: Slurm) -> Iterator[None]:
    """Ends the jobs that a test leaves behind."""
    yield
    cluster.clear()


@pytest.fixture
def config(store: Path, tmp_path: Path) -> Path:
    """An endless run on two nodes with one process each, which saves only when it is told to."""
    path = tmp_path / "run.toml"
    text = toml(store, tp=1, micro_batch=2, steps=100000, save_every=0, eval_every=0, log_every=1)
    path.write_text(f'{text}dir = "{tmp_path / "run"}"\n'.replace("[parallel]", "[parallel]\ndp = 2", 1))
    return path


def last_step(run: Path) -> int:
    metrics = run / "metrics.jsonl"
    return max((line["step"] for line in read_metrics(metrics)), default=0) if metrics.exists() else 0


def started(cluster: Slurm, config: Path, *options: str, fault: str = "") -> str:
    """Submits the script and waits for a few steps."""
    job = cluster.submit(*ONE_GPU, *options, SCRIPT, config, *(["--inject-fault", fault] if fault else []))
    cluster.wait_until(job, lambda: last_step(config.parent / "run") > 3 or cluster.job(job)["JobState"] == "FAILED")
    assert cluster.job(job)["JobState"] == "RUNNING", cluster.said(job)
    return job


def resumes(cluster: Slurm, job: str, run: Path) -> int:
    """The job goes back to the queue with a checkpoint and resumes there; then a plain scancel saves. Returns the step."""
    cluster.wait_until(job, lambda: "resumed at step" in cluster.said(job))
    assert cluster.job(job)["Restarts"] == "1"
    (saved,) = saved_steps(run)
    assert f"resumed at step {saved} " in cluster.said(job)
    cluster.wait_until(job, lambda: last_step(run) > saved + 3)
    cluster.call("scancel", job)
    cluster.wait_for(job, "CANCELLED")
    cluster.wait_until(job, lambda: len(saved_steps(run)) == 2)
    steps = [line["step"] for line in read_metrics(run / "metrics.jsonl") if line["kind"] == "step"]
    assert steps == list(range(1, max(saved_steps(run)) + 1)), "no step is lost or trained twice"
    return saved


def test_a_typo_is_refused_at_once_and_the_code_is_visible(cluster: Slurm, config: Path) -> None:
    job = cluster.submit(*ONE_GPU, SCRIPT, config, "--optim.lrr", "1")
    found = cluster.wait_for(job, "FAILED", "COMPLETED", "CANCELLED")
    assert (found["JobState"], found["ExitCode"], found["Restarts"]) == ("FAILED", "2:0", "0"), cluster.said(job)
    assert cluster.said(job).splitlines() == ["boost: error: unknown key 'optim.lrr'; did you mean 'optim.lr'?"]


def test_a_mistake_that_the_processes_find_is_not_repeated(cluster: Slurm, config: Path) -> None:
    """The mesh is too small for two nodes."""
    job = cluster.submit(*ONE_GPU, SCRIPT, config, "--parallel.dp", "1")
    found = cluster.wait_for(job, "FAILED", "COMPLETED", "CANCELLED")
    assert (found["JobState"], found["ExitCode"], found["Restarts"]) == ("FAILED", "2:0", "0"), cluster.said(job)
    assert cluster.said(job).count("boost: error: ") == 1, cluster.said(job)


def test_a_run_that_ends_is_completed(cluster: Slurm, config: Path) -> None:
    job = cluster.submit(*ONE_GPU, SCRIPT, config, "--train.steps", "3")
    found = cluster.wait_for(job, "FAILED", "COMPLETED", "CANCELLED")
    assert (found["JobState"], found["NumNodes"], found["Restarts"]) == ("COMPLETED", "2", "0"), cluster.said(job)
    assert last_step(config.parent / "run") == 3


def test_the_time_limit_saves_requeues_and_resumes(cluster: Slurm, config: Path) -> None:
    job = started(cluster, config, "--time", "3", "--signal", "B:USR1@90")
    resumes(cluster, job, config.parent / "run")
    assert "stopped by SIGUSR1" in cluster.said(job)


def test_a_preempted_job_that_saves_in_time_is_requeued_and_resumes(cluster: Slurm, config: Path) -> None:
    job = started(cluster, config, "--partition", "low")
    cluster.submit("--partition", "high", "--exclusive", "--nodes", "2", "--wrap", "sleep 2")
    resumes(cluster, job, config.parent / "run")
    assert "stopped by SIGTERM" in cluster.said(job)


def test_a_save_that_outlives_the_grace_time_is_not_cut_short(cluster: Slurm, config: Path) -> None:
    """A step of 20 s with a grace of 5 s: the tasks get SIGTERM at the grace's start and twice at its end, then have KillWait."""
    job = started(cluster, config, "--partition", "brief", fault="slow@6")
    cluster.submit("--partition", "high", "--exclusive", "--nodes", "2", "--wrap", "sleep 2")
    assert resumes(cluster, job, config.parent / "run") == 6


def test_an_array_of_replicas_saves_and_is_requeued(cluster: Slurm, config: Path) -> None:
    """In-step recovery: preempted, both tasks save; with a new coordinator, both resume."""
    (port,) = free_ports(1)
    run = config.parent / "run"
    words = ("--run.recovery", "in-step", "--run.startup_timeout_s", "600")
    options = ("--nodes", "1", "--gpus-per-node", "1", "--array", "0-1", "--partition", "low")
    with coordinator(port):
        job = cluster.submit(*options, "--export", f"ALL,BOOST_COORDINATOR=127.0.0.1:{port}", SCRIPT, config, *words)
        tasks = [f"{job}_{number}" for number in range(2)]
        cluster.wait_until(job, lambda: last_step(run) > 3)
        cluster.submit("--partition", "high", "--exclusive", "--nodes", "2", "--wrap", "sleep 2")
        cluster.wait_until(job, lambda: [cluster.job(task)["Restarts"] for task in tasks] == ["1", "1"])
        cluster.wait_until(job, lambda: saved_steps(run))
        (saved,) = saved_steps(run)
    with coordinator(port):
        cluster.wait_until(job, lambda: last_step(run) > saved + 3)
        cluster.call("scancel", job)
        for task in tasks:
            cluster.wait_for(task, "CANCELLED")
    steps = [line["step"] for line in read_metrics(run / "metrics.jsonl") if line["kind"] == "step"]
    assert len(saved_steps(run)) == 2 and steps == list(range(1, max(saved_steps(run)) + 1))


@contextlib.contextmanager
def coordinator(port: int) -> Iterator[None]:
    """`boost coordinate`."""
    process = ForkedPython(boost_command, [["coordinate", "--port", str(port)]], os.environ)
    try:
        yield
    finally:
        process.close()
