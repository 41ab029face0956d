"""One thread per process, as in every multi-process run; no network access; one small token store for all tests."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import atexit
import gc
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# Otherwise each process that tests start recompiles the package, which takes more than one of its five seconds.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

if "XDG_CACHE_HOME" not in os.environ:  # keep stores that a test verified out of the user's cache
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="boost-test-cache-")
    atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)

# No verdict depends on the machine's speed.
settings.register_profile("boost", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("boost")


LONGEST_FIRST = (
    "families/test_any.py", "elastic/test_recovery.py", "nn/test_training.py", "parallel/test_late.py",
    "elastic/test_recovery_nodes.py", "nn/test_contract.py", "train/test_three_dimensions.py", "train/test_step.py",
    "layouts/test_layouts.py", "layouts/test_options.py", "train/test_agreement.py", "train/test_graphs.py",
    "cli/test_plan.py", "train/test_launch.py", "train/test_checkpoint.py", "parallel/test_compile.py",
    "parallel/test_weights.py", "nn/test_decoder.py", "train/test_nodes.py", "cli/test_launch.py",
    "layouts/test_overlap.py", "data/test_reading.py", "optim/test_factors.py", "train/test_model.py",
    "train/test_lost_directory.py", "cli/test_train.py",
)  # fmt: skip
"""Files that take a quarter of a minute or more: workers that get one of them last would keep the others waiting."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {Path(__file__).parent / name: number for number, name in enumerate(LONGEST_FIRST)}
    assert all(path.is_file() for path in place), "LONGEST_FIRST names a file that was moved"
    items.sort(key=lambda item: place.get(item.path, len(place)))


def pytest_collection_finish() -> None:
    gc.freeze()  # a million objects of modules that no collection during a test has to go through


@pytest.fixture(autouse=True)
def quick_tests_start_no_python(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Starting a Python process takes seconds: tests that do so must be marked slow to keep `make quick` quick."""
    if any(request.node.get_closest_marker(name) for name in ("slow", "nightly")):
        return
    begin = subprocess.Popen.__init__

    def refuse(process: Any, args: Any, *rest: Any, **options: Any) -> None:
        probes = "cdll.LoadLibrary" in str(args)  # inductor's test of the CPU, once per process
        assert sys.executable not in args or probes, "mark this test slow: it starts a Python process"
        begin(process, args, *rest, **options)

    monkeypatch.setattr(subprocess.Popen, "__init__", refuse)


@pytest.fixture(autouse=True)
def hangups_count() -> Iterator[None]:
    """A suite started with nohup would pass its ignored SIGHUP on to the runs that it starts."""
    usual = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, usual)


@pytest.fixture(scope="session")
def transformers() -> Any:
    """The package, imported by the first test that needs it."""
    return pytest.importorskip("transformers")


@pytest.fixture(scope="session")
def datasets() -> Any:
    """The package, without progress bars."""
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    return datasets


@pytest.fixture(params=["fifo", "device", "folder"])
def endless(request: pytest.FixtureRequest) -> Callable[[Path], None]:
    """Replaces a file by something that may block forever when it is opened or read."""

    def replace(path: Path) -> None:
        path.unlink(missing_ok=True)
        if request.param == "fifo":
            os.mkfifo(path)
        elif request.param == "device":
            path.symlink_to("/dev/zero")
        else:
            path.mkdir()

    return replace


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A token store of a few standard-library modules, with a tokenizer of 300 tokens. The held-out module is small (secrets),
    because every run ends with an evaluation of all of it."""
    import argparse
    import ast
    import secrets
    import textwrap

    from boost.data.prepare import PrepareOptions, prepare

    path = tmp_path_factory.mktemp("corpus") / "store"
    inputs = tuple(str(module.__file__) for module in (argparse, ast, secrets, textwrap))
    prepare(PrepareOptions(out=path, inputs=inputs, tokenizer="train:300", heldout=0.1))
    return path


@pytest.fixture(scope="session")
def mixture(store: Path) -> dict[str, float]:
    """Weights of this store and a smaller one, `other`, for data.mixture."""
    import csv
    import shlex

    from boost.data.prepare import PrepareOptions, prepare

    other = store.with_name("other")
    inputs = tuple(str(module.__file__) for module in (csv, shlex))
    prepare(PrepareOptions(out=other, inputs=inputs, tokenizer=str(store), heldout=0.1))
    return {str(store): 0.7, str(other): 0.3}
