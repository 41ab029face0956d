"""A whole Slurm in a folder: slurmctld and one slurmd per node, on loopback, without accounting.

    with slurm(folder) as cluster:
        job = cluster.submit("examples/slurm.sh", "run.toml")
        cluster.wait_for(job, "RUNNING")

Each slurmd has host name and /etc/hosts of its own, which needs root. Needs Debian's slurm-wlm (or the same programs); neither
munge nor cgroups. Nodes have one GPU each by name only.
"""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.train.commands import free_ports

LIMIT_S = 600
"""Only against hanging for ever."""
NODES = ("boost1", "boost2")
GRACE_S = 60
BRIEF_GRACE_S = 5

CONFIG = """ClusterName=boost
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
ReturnToService=2
KillWait=30
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,sched_min_interval=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace} State=UP
PartitionName=brief Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE GraceTime={brief_grace} State=UP
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF State=UP
"""


def why_no_slurm() -> str | None:
    """The reason why there can be no Slurm here."""
    if missing := [name for name in ("slurmctld", "slurmd", "sbatch", "srun", "unshare") if shutil.which(name) is None]:
        return f"{', '.join(missing)} not installed (Debian: slurm-wlm)"
    return None if os.geteuid() == 0 else "needs root: each node has a host name of its own"


@dataclass
class Slurm:
    folder: Path
    environment: dict[str, str]

    def call(self, *words: object) -> str:
        """Runs one of Slurm's commands."""
        command = [str(word) for word in words]
        done = subprocess.run(
            command, env=self.environment, cwd=self.folder, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def submit(self, *words: object) -> str:
        """Runs sbatch; returns the job's number. Its output goes to out-JOB in the folder."""
        return self.call("sbatch", "--parsable", "--output", self.folder / "out-%j", *words).strip()

    def job(self, job: str) -> dict[str, str]:
        """What `scontrol show job` says."""
        return dict(re.findall(r"(\S+?)=(\S*)", self.call("scontrol", "show", "job", job)))

    def said(self, job: str) -> str:
        path = self.folder / f"out-{job}"
        return path.read_text() if path.exists() else ""

    def wait_until(self, job: str, condition: Callable[[], Any]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < deadline, f"waited in vain: {self.job(job)}\n{self.said(job)}"
            time.sleep(0.2)

    def wait_for(self, job: str, *states: str) -> dict[str, str]:
        """Waits until the job is in one of these states."""
        self.wait_until(job, lambda: self.job(job)["JobState"] in states)
        return self.job(job)

    def clear(self) -> None:
        """Cancels all jobs and waits until they have ended."""
        self.call("scancel", "--user", "root")
        deadline = time.monotonic() + LIMIT_S
        while self.call("squeue", "-h") and time.monotonic() < deadline:
            time.sleep(0.5)


@contextlib.contextmanager
def slurm(folder: Path, **variables: str) -> Iterator[Slurm]:
    """Starts a Slurm whose jobs get these environment variables. On exit, ends its jobs and its daemons, by process id."""
    ports, host = free_ports(1 + len(NODES)), socket.gethostname()
    nodes = [
        f"NodeName={name} NodeHostname={name} NodeAddr=127.0.0.1 Port={port} CPUs=2 Gres=gpu:1"
        for name, port in zip(NODES, ports[1:], strict=True)
    ]
    text = CONFIG.format(
        host=host, ports=ports, folder=folder, nodes="\n".join(nodes), grace=GRACE_S, brief_grace=BRIEF_GRACE_S
    )
    (folder / "state").mkdir()
    (folder / "slurm.conf").write_text(text)
    (folder / "gres.conf").write_text("Name=gpu File=/dev/null\n")
    (folder / "hosts").write_text(f"127.0.0.1 localhost {' '.join(NODES)} {host}\n")
    environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")} | variables
    private = f'hostname "$0"; mount --bind {folder}/hosts /etc/hosts; exec slurmd -D -N "$0"'
    daemons = [
        ["slurmctld", "-D"],
        *(["unshare", "--uts", "--mount", "sh", "-c", private, name] for name in NODES),
    ]
    processes = []
    cluster = Slurm(folder, environment)
    try:
        for number, command in enumerate(daemons):
            with open(folder / f"daemon{number}", "wb") as log:
                process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
                processes.append(process)
        deadline = time.monotonic() + LIMIT_S
        while "idle" not in (found := idle(environment)) or found.count("idle") < len(NODES):
            assert all(process.poll() is None for process in processes), [
                (folder / f"daemon{number}").read_text() for number in range(len(daemons))
            ]
            assert time.monotonic() < deadline, found
            time.sleep(0.5)
        yield cluster
    finally:
        cluster.clear()
        for process in reversed(processes):
            process.send_signal(signal.SIGTERM)
        for process in processes:
            process.wait(60)


def idle(environment: dict[str, str]) -> str:
    """The states of the nodes."""
    command = ["sinfo", "-h", "-N", "-p", "low", "-o", "%T"]
    return subprocess.run(command, env=environment, capture_output=True, text=True).stdout
