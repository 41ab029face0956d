"""Training runs with in-step recovery on one machine or two hosts, whose processes are killed at random (`benchmarks.recovery`)."""

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.experiments.hosts import Host
from boost.elastic.membership import Coordinator, Decision
from boost.train.heartbeat import Beat, read_beats
from boost.train.metrics import read_metrics
from boost.train.progress import progress

BOOST = [sys.executable, "-m", "boost.cli.main"]
PROCESSES = 4
"""Processes per run."""


class Run:
    """A running `boost train`."""

    def __init__(self, args: argparse.Namespace, folder: Path, words: str) -> None:
        self.args, self.folder = args, folder
        self.temporary = folder.with_name(f"{folder.name}.tmp")
        shutil.rmtree(self.temporary, ignore_errors=True)
        self.temporary.mkdir(parents=True)
        self.spares_pairs = False
        """Whether to kill only one process at a time, and none before the optimizer moments have been resharded."""
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            [*BOOST, *training(args, folder, words)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"TMPDIR": str(self.temporary.resolve())},
        )
        self.seconds = 0.0

    def finish(self) -> None:
        """Waits for the run to exit. Raises SystemExit if it failed."""
        out, err = self.process.communicate()
        self.seconds = time.monotonic() - self.began
        if self.process.returncode or "Traceback" in err:
            raise SystemExit(
                f"recovery: {self.folder} exited with code {self.process.returncode}:\n{out[-3000:]}\n{err[-3000:]}"
            )

    @property
    def over(self) -> bool:
        return self.process.poll() is not None

    def disturb(self, chance: random.Random) -> Any:
        """Kills processes `args.kills` times; yields the time and victims of each kill."""
        for _ in progress(range(self.args.kills), f"kills of {self.folder.parent.name}"):
            time.sleep(min(chance.expovariate(1 / self.args.every), 3 * self.args.every))
            # Drawn once per kill; otherwise, a replica that is slow to rejoin would attract all kills.
            wants_outside = chance.random() < 0.3
            while self.process.poll() is None:
                if victims := self.victims(chance, wants_outside):
                    for beat in victims:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(beat.pid, signal.SIGKILL)
                    yield {
                        "at_s": round(time.monotonic() - self.began, 2),
                        "victims": [described(each) for each in victims],
                    }
                    break
                time.sleep(0.05)

    def has_resharded(self, replicas: int) -> bool:
        """Whether the optimizer moments are sharded over `replicas` replicas: the first step after each change reshards them."""
        changes = lines(self.folder, "membership")
        if not changes:
            return True
        return changes[-1]["replicas"] == replicas and lines(self.folder, "step")[-1]["step"] > changes[-1]["step"]

    def workers(self) -> list[Beat]:
        """The live processes that send heartbeats; empty until all of them are training."""
        launch = next(self.temporary.glob("boost-launch-*"), None)
        beats = read_beats(launch) if launch is not None else []
        return [beat for beat in beats if alive(beat.pid)] if all(beat.step for beat in beats) else []

    def victims(self, chance: random.Random, wants_outside: bool) -> list[Beat]:
        """Processes to kill now; with `wants_outside`, one that is rejoining, if there is one. Empty if the kill would leave no
        replica with weights."""
        launch = next(self.temporary.glob("boost-launch-*"), None)
        if launch is None or (latest := membership(launch)) is None:
            return []
        if not lines(self.folder, "step"):
            return []  # losing a process before the first step aborts the run
        decision, gone = latest
        if self.spares_pairs and not self.has_resharded(len(decision.members)):
            return []
        beats = {beat.incarnation: beat for beat in read_beats(launch) if alive(beat.pid)}
        by_member: dict[str, list[Beat]] = {}
        for beat in read_beats(launch):
            if alive(beat.pid) and beat.incarnation not in gone:
                by_member.setdefault(beat.incarnation, []).append(beat)
        whole = {name for name, each in by_member.items() if len(each) == max(map(len, by_member.values()))}
        inside = [member.incarnation for member in decision.members if member.incarnation in whole]
        outside = [name for name in beats if name not in inside and name not in gone]
        if self.spares_pairs and len(inside) < len(decision.members):
            return []  # also if the survivors have not noticed an earlier kill yet
        size = 2 if chance.random() < 0.2 and not self.spares_pairs else 1
        if outside and wants_outside:
            return [chance.choice(by_member[chance.choice(outside)])]
        chosen = chance.sample(inside, min(size, len(inside)))
        # A replica that has just joined may not have the weights yet.
        safe = set(inside) - set(decision.joined) - set(chosen)
        return [chance.choice(by_member[name]) for name in chosen] if safe else []


class Hosts:
    """A running `boost train` on two hosts."""

    def __init__(self, args: argparse.Namespace, folder: Path, words: str, hosts: Sequence[Host]) -> None:
        self.args, self.folder, self.seconds = args, folder, 0.0
        self._losses: dict[int, int] = {}
        """Killed replicas, with the number of losses that the metrics had recorded for each when it was killed."""
        folder.parent.mkdir(parents=True, exist_ok=True)
        self.began = time.monotonic()
        self.coordinator = subprocess.Popen(hosts[0].command(*BOOST, "coordinate"), stdout=subprocess.DEVNULL)
        time.sleep(5)
        self.agents = []
        for number in range(PROCESSES):
            host = hosts[number * len(hosts) // PROCESSES]
            said = folder.with_name(f"replica{number}.txt").open("w", encoding="utf-8")
            elastic = [
                "--nproc-per-node",
                "1",
                "--max-restarts",
                "1000",
                "--monitor-interval",
                "0.2",
                "--rdzv-backend",
                "c10d",
            ]
            elastic += f"--rdzv-endpoint 127.0.0.1:{29420 + number} --rdzv-id {number} --local-addr 127.0.0.1".split()
            elastic += ["--rdzv-conf", "is_host=1", "-m", "boost.cli.main"]
            environment = {"GLOO_SOCKET_IFNAME": host.wire, "OMP_NUM_THREADS": "1", "BOOST_REPLICA": str(number)}
            environment |= {"BOOST_COORDINATOR": f"{hosts[0].address}:29410"}
            command = host.command(sys.executable, "-m", "torch.distributed.run", *elastic)
            command += training(args, folder, words)
            self.agents.append(
                subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, env=os.environ | environment)
            )

    def worker(self, number: int) -> int | None:
        """The process ID of a replica, or None if it is not running."""
        found = subprocess.run(
            ["pgrep", "-P", str(self.agents[number].pid), "-f", "boost.cli.main"], capture_output=True, text=True
        ).stdout.split()
        return int(found[0]) if found and alive(int(found[0])) else None

    def disturb(self, chance: random.Random) -> Iterator[dict[str, Any]]:
        """Same as `Run.disturb`."""
        for _ in progress(range(self.args.kills), "kills on two hosts"):
            time.sleep(min(chance.expovariate(1 / self.args.every), 3 * self.args.every))
            wants_outside = chance.random() < 0.3
            while all(agent.poll() is None for agent in self.agents):
                if victims := self.victims(chance, wants_outside):
                    pids = [pid for pid in map(self.worker, victims) if pid is not None]
                    for pid in pids:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)
                    yield {"at_s": round(time.monotonic() - self.began, 2), "victims": ["host"] * len(pids)}
                    break
                time.sleep(0.1)

    def victims(self, chance: random.Random, wants_outside: bool) -> list[int]:
        """Replicas to kill now; with `wants_outside`, one that is starting, if any is. Empty if none with weights would remain.
        No launcher sees all processes, so a loss is noticed only when the replica falls silent or restarts; until then, the
        replica counts as a member."""
        if not (steps := lines(self.folder, "step")):
            return []
        inside = dict.fromkeys(range(PROCESSES), 0)
        """Replicas in the membership, and the step at which each joined."""
        losses = Counter[int]()
        for change in lines(self.folder, "membership"):
            for replica, _ in change["lost"]:
                inside.pop(replica, None)
                losses[replica] += 1
            inside |= dict.fromkeys(change["joined"], change["step"])
        outside = [replica for replica in range(PROCESSES) if replica not in inside]
        among, size = (outside, 1) if outside and wants_outside else (list(inside), 2 if chance.random() < 0.2 else 1)
        chosen = chance.sample(among, min(size, len(among)))
        unnoticed = {replica for replica, before in self._losses.items() if losses[replica] == before}
        if unnoticed & set(chosen) or not all(map(self.worker, chosen)):
            return []
        safe = {replica for replica, step in inside.items() if steps[-1]["step"] > step} - unnoticed - set(chosen)
        # Silent members keep their votes: by design, a minority of responding members does not continue.
        silent = unnoticed | (set(chosen) & set(inside))
        if not any(map(self.worker, safe)) or len(safe) < len(silent):
            return []
        self._losses = {replica: losses[replica] for replica in silent}
        return chosen

    def finish(self) -> None:
        """Waits for all torchrun processes to exit. Raises SystemExit if one failed."""
        codes = [agent.wait() for agent in self.agents]
        self.seconds = time.monotonic() - self.began
        if any(codes):
            raise SystemExit(f"recovery: torchrun exited with codes {codes}; see {self.folder.parent}/replica*.txt")

    def end(self) -> None:
        """Terminates the torchrun processes and the coordinator."""
        for process in (*self.agents, self.coordinator):
            process.terminate()
            process.wait()


def training(args: argparse.Namespace, folder: Path, words: str) -> list[str]:
    """Arguments of `boost train` for the small model."""
    words += f" --run.dir {folder} --data.store {args.store} --train.steps {args.steps} --train.save_every 5"
    return ["train", "demo", *words.split(), "--train.eval_every", "20", "--train.eval_tokens", "2048"]


def membership(launch: Path) -> tuple[Decision, set[str]] | None:
    """(latest membership decision, dead incarnations); None before the first decision."""
    if not (launch / "members").exists():
        return None
    coordinator = Coordinator(dist.FileStore(str(launch / "members"), -1), 1, 1)
    latest = coordinator.latest()
    if latest is None:
        return None
    names = {beat.incarnation for beat in read_beats(launch)} | {each.incarnation for each in latest.members}
    return latest, {name for name in names if coordinator.lost_reason(name)}


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] not in "ZX"
    return False


def described(beat: Beat) -> str:
    """The phase and step in a process's last heartbeat, up to a second old."""
    return f"{beat.phase}{', saving' if beat.saving and beat.phase != 'save' else ''}: {beat.where.split(' ')[-1]}"


def lines(run: Path, kind: str) -> list[dict[str, Any]]:
    """The run's metrics of a kind; none before it has any."""
    metrics = run / "metrics.jsonl"
    return [line for line in read_metrics(metrics) if line["kind"] == kind] if metrics.exists() else []
