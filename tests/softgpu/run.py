"""Runs commands on the software GPU of `make softgpu`: eight H100s whose kernels do nothing, or are emulated on the CPU.

python -m tests.softgpu.run 2.13.0 boost train demo --run.device cuda      # emulated
python -m tests.softgpu.run 2.13.0 --launches-only python program.py       # kernels do nothing
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = Path(os.environ.get("SOFTGPU", REPOSITORY / ".softgpu"))

Run = Callable[..., str]
"""The fixture `run`."""

Call = tuple[str, ...]
"""Name, elements, dtype, and peer or root."""


def homes() -> list[Path]:
    """The installations, one folder per version of torch."""
    return sorted(path.parent for path in FOLDER.glob("*/libcuda.so.1"))


@contextmanager
def environment(home: Path, emulated: bool = True) -> Iterator[tuple[Path, dict[str, str]]]:
    """(a launch's folder, its processes' environment). At the end, the folder and any processes still running are removed."""
    # In memory: communicators are files of hundreds of megabytes, of which little is written. Short: sockets are below it.
    shared = Path(tempfile.mkdtemp(prefix="softgpu-", dir="/dev/shm"))
    (shared / "tmp").mkdir()
    cache = shared / "tmp" / "cache"  # for each launch, although a process that has compiled exports its own
    changes = {
        "PATH": f"{home / 'venv/bin'}:{os.environ['PATH']}",
        "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'tests/softgpu/site'}",
        "LD_PRELOAD": str(home / "libcuda.so.1"),
        "TRITON_LIBCUDA_PATH": str(home),
        "TMPDIR": str(shared / "tmp"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "SOFTGPU_DIR": str(shared),
        "OMP_NUM_THREADS": "1",
    }
    try:
        yield shared, os.environ | changes | ({"SOFTGPU_EMULATE": "1"} if emulated else {})
    finally:
        for process in processes_of(shared):
            os.kill(process, signal.SIGKILL)
        shutil.rmtree(shared, ignore_errors=True)


def processes_of(shared: Path) -> list[int]:
    """Processes of a launch, found by their environment, because some have separate sessions."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"SOFTGPU_DIR={shared}".encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:
            continue  # it has ended, or belongs to another user
    return found


def differences(shared: Path) -> list[str]:
    """Communicators on which processes issued different calls, or the same in another order, or messages that do not pair up.
    If not all have destroyed it, after an abort or a death, some may have issued only the first of these calls."""
    calls: dict[str, dict[str, list[Call]]] = {}
    sizes: dict[str, int] = {}
    for path in shared.glob("calls.*"):
        for line in path.read_text().splitlines():
            communicator, rank, size, call = line.split(" ", 3)
            calls.setdefault(communicator, {}).setdefault(rank, []).append(tuple(call.rsplit(" ", 3)))
            sizes[communicator] = int(size)
    wrong = []
    for communicator, by_rank in calls.items():
        whole = all(any(call[0] == "destroy" for call in listed) for listed in by_rank.values())
        every = [[c for c in listed if c[0] not in ("send", "recv", "abort", "destroy")] for listed in by_rank.values()]
        common = (max if whole else min)(map(len, every))
        sent = Counter((rank, c[3], *c[1:3]) for rank, listed in by_rank.items() for c in listed if c[0] == "send")
        received = Counter((c[3], rank, *c[1:3]) for rank, listed in by_rank.items() for c in listed if c[0] == "recv")
        if len(by_rank) != sizes[communicator]:
            wrong.append(f"{communicator}: {len(by_rank)} of {sizes[communicator]} processes took part")
        elif any(listed[:common] != every[0][:common] for listed in every):
            place = next(i for i in range(common) if len({tuple(listed[i : i + 1]) for listed in every}) > 1)
            wrong.append(f"{communicator}: call {place} is {[listed[place : place + 1] for listed in every]}")
        elif whole and sent != received:
            wrong.append(f"{communicator}: {sent - received} sent, {received - sent} received")
    return wrong


def main() -> int:
    version, *command = sys.argv[1:]
    emulated = command[0] != "--launches-only"
    with environment(FOLDER / version, emulated) as (shared, variables):
        code = subprocess.run(command[not emulated :], env=variables).returncode
        print(*differences(shared), sep="\n", file=sys.stderr)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
