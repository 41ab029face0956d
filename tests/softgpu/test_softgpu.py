"""The project on a GPU in software: PyTorch's CUDA build with its own autograd threads, streams, compiler and ProcessGroupNCCL.

Nightly, after `make softgpu`. Numbers are real where operations are emulated; elsewhere kernels do nothing, and what is tested is
how they are launched and built. docs/verify.md says what this shows, and what it cannot.
"""

import json
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest

from boost.cli.main import main
from boost.train.metrics import read_metrics
from tests import toy
from tests.matrices import LAYOUTS, Row, family_of
from tests.softgpu.run import Run, homes
from tests.train.commands import saved_steps, toml

pytestmark = pytest.mark.nightly

if not homes():
    pytest.skip("there is no software GPU: `make softgpu` sets it up", allow_module_level=True)

BOOST = ("python", "-m", "boost.cli.main")
PROGRAM = ("python", "-m", "tests.softgpu.programs")

LIMITS = {"float32": (1e-5, 1e-5), "bfloat16": (2**-8, 0.1)}
"""Largest relative errors of losses and gradient norms over three steps. float32: rounding of sums in another order. bfloat16:
one rounding of a single number for the loss, an average of many; more for norms, since AdamW amplifies what rounding leaves of
gradients close to zero."""

MESHES: dict[int, list[Row]] = {
    2: [{"cp": 2}, {"pp": 2}],
    4: [
        {"pp": 2, "tp": 2},
        {"pp": 2, "tp": 2, "schedule": "interleaved-1f1b"},
        {"dp": 2, "tp": 2, "shard": "optimizer"},
        {"dp": 2, "tp": 2, "shard": "full"},
        {"dp": 2, "tp": 2, "shard": "full", "shard_outer": True, "layout": "btp-sp"},
        {"cp": 2, "tp": 2, "layout": "btp-cp"},
    ],
    8: [{"pp": 2, "dp": 2, "tp": 2}],
}
"""Meshes by their number of processes."""


def tree(dtype: str, documents: bool, parallel: Row, micro_batch: int, recompute: str = "none") -> dict[str, Any]:
    """A configuration. A micro-batch of one sequence has halves of its tokens, one of two has halves of its sequences."""
    family = family_of(parallel)
    train = {"seq_len": 16, "micro_batch": micro_batch, "global_batch": 4, "compute_dtype": dtype, "compile": "none"}
    model = {**toy.MODEL, "family": family, "layers": 4 if parallel.get("schedule") else 2, "norm_eps": 1e-2}
    return {
        "model": model | ({} if family == "dense" else {"rank": 8}),
        "parallel": parallel,
        "train": train | {"recompute": recompute},
        "data": {"isolate_documents": documents},
    }


def assert_equal_to_the_cpu(run: Run, folder: Path, processes: int, cells: dict[str, Any]) -> None:
    (folder / "cells.json").write_text(json.dumps(cells))
    torchrun = ("torchrun", "--nproc-per-node", str(processes))
    run(*torchrun, *PROGRAM[1:], "losses", folder / "cells.json", folder / "errors.json")
    errors = json.loads((folder / "errors.json").read_text())
    assert cells.keys() == errors.keys()
    limits = {name: LIMITS[cell["train"]["compute_dtype"]] for name, cell in cells.items()}
    assert {n: e for n, e in errors.items() if any(x > most for x, most in zip(e, limits[n], strict=True))} == {}


@pytest.mark.parametrize("dtype", LIMITS)
def test_layouts_train_to_the_losses_of_the_cpu(run: Run, tmp_path: Path, dtype: str) -> None:
    """Each with and without documents, halves and recomputation."""
    cells = {}
    for layout, documents, overlap, again in product(LAYOUTS, (False, True), ("none", "halves"), (False, True)):
        if overlap == "halves" and layout.get("vanilla") == "published":
            continue  # it has none
        policy = "none" if not again else "low-rank" if family_of(layout) != "dense" else "full-block"
        parallel = {**layout, "tp": 2, "overlap": overlap}
        name = " ".join(map(str, (*layout.values(), f"{documents = }", overlap, policy)))
        cells[name] = tree(dtype, documents, parallel, 1 if documents else 2, policy)
    assert_equal_to_the_cpu(run, tmp_path, 2, cells)


@pytest.mark.parametrize("processes", MESHES)
def test_meshes_train_to_the_losses_of_the_cpu(run: Run, tmp_path: Path, processes: int) -> None:
    cells = {
        f"{dtype} {documents} {parallel}": tree(dtype, documents, {"layout": "btp", **parallel}, 1)
        for dtype, documents, parallel in product(LIMITS, (False, True), MESHES[processes])
    }
    assert_equal_to_the_cpu(run, tmp_path, processes, cells)


def test_captured_passes_train_to_the_same_bits(run: Run, tmp_path: Path) -> None:
    """On two processes, with NCCL's collectives in the graph, which runs its operations in another order than recorded."""
    meshes: list[tuple[Row, str]] = [
        ({"layout": "btp", "tp": 2}, "none"),
        ({"layout": "btp-sp", "tp": 2, "overlap": "halves"}, "low-rank-sharded"),
        ({"layout": "megatron-sp", "tp": 2}, "full-block"),
        ({"layout": "btp", "dp": 2}, "low-rank"),
        ({"layout": "btp", "cp": 2}, "none"),
    ]
    cells = {
        f"{dtype} {parallel}": tree(dtype, False, parallel, 1, policy)
        for dtype, (parallel, policy) in zip(cycle(LIMITS), meshes, strict=False)
    }
    (tmp_path / "cells.json").write_text(json.dumps(cells))
    run("torchrun", "--nproc-per-node", "2", *PROGRAM[1:], "graphs", tmp_path / "cells.json", tmp_path / "out.json")
    assert json.loads((tmp_path / "out.json").read_text()) == []


def test_verify_passes(run: Run, tmp_path: Path) -> None:
    words = "verify demo --nproc 2 --compile first --parallel.tp=2 --run.device=cuda"
    small = "--model.layers=2 --train.seq_len=64"  # the step that it times
    run(*BOOST, *words.split(), *small.split(), "--out", tmp_path / "verify.json")
    report = json.loads((tmp_path / "verify.json").read_text())
    titles = {check["section"].replace(",", ":").partition(":")[0] for check in report["checks"]}
    assert report["verdict"] == "ok"
    assert titles == {"Machines", "Collectives", "Links", "Layouts", "A step", "Full runs"}


def training(folder: Path, store: Path, name: str, *words: str) -> list[str]:
    """`boost train` of eight steps into `folder`/`name`, on GPUs."""
    text = toml(store, steps=8, eval_every=4, eval_tokens=640, log_every=1, save_every=4, keep=10, compile="none")
    (folder / f"{name}.toml").write_text(text)
    return ["train", str(folder / f"{name}.toml"), "--run.dir", str(folder / name), "--run.device", "cuda", *words]


def steps(run_dir: Path) -> list[tuple[int, float, float]]:
    lines = read_metrics(run_dir / "metrics.jsonl")
    return [(line["step"], line["loss"], line["gradient_norm"]) for line in lines if line["kind"] == "step"]


@pytest.mark.parametrize("graphs", ["off", "on"])
def test_a_stopped_run_is_resumed_evaluated_and_continued_in_text(
    run: Run, store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], graphs: str
) -> None:
    """SIGTERM saves. The same bits after a resume, with or without CUDA graphs; the same evaluation at another TP size; the same
    text as on the CPU."""
    run(*BOOST, *training(tmp_path, store, "whole"))
    words = ("--train.cuda_graphs", graphs)
    stopped = run(*BOOST, *training(tmp_path, store, "stopped", *words), stop=b"  loss ")
    assert "stopped by SIGTERM" in stopped and 0 < saved_steps(tmp_path / "stopped")[-1] < 8
    run(*BOOST, *training(tmp_path, store, "stopped", "--resume", "auto", *words))
    assert steps(tmp_path / "stopped") == steps(tmp_path / "whole") and len(steps(tmp_path / "whole")) == 8
    found = run(*BOOST, "eval", tmp_path / "whole", "--device", "cuda", "--json")
    final = [line for line in read_metrics(tmp_path / "whole" / "metrics.jsonl") if line["kind"] == "eval"][-1]
    assert json.loads(found[found.index("{") :])["loss"] == pytest.approx(final["heldout_loss"], rel=1e-5)
    words = ["generate", str(tmp_path / "whole"), "--prompt", "def f", "--max-tokens", "8", "--greedy", "--json"]
    said = run(*BOOST, *words, "--device", "cuda", "--tp", "2")
    capsys.readouterr()
    assert main([*words, "--device", "cpu"]) == 0
    assert json.loads(said[said.index("{") :]) == json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("graphs", ["off", "on"])
def test_a_process_that_hangs_ends_the_run(run: Run, store: Path, tmp_path: Path, graphs: str) -> None:
    words = ("--parallel.tp", "2", "--run.timeout_s", "20", "--inject-fault", "hang@6:1", "--train.cuda_graphs", graphs)
    command = " ".join([*BOOST, *training(tmp_path, store, "hangs", *words)])
    said = run("sh", "-c", f"{command}; test $? -ne 0")
    assert "process 2 of 2 (rank 1) is not responding (last seen" in said
    assert "process 1 of 2 (rank 0) waited 20 s in step 6, phase step" in said


def test_a_process_that_does_not_reach_a_replay_is_named(run: Run) -> None:
    """The other one waits for it in a replay, whose collectives NCCL's watchdog does not see."""
    said = run("sh", "-c", f"torchrun --nproc-per-node 2 {' '.join(PROGRAM[1:])} behind; test $? -ne 0")
    assert "(rank 1) is behind the other processes (last seen in step 7" in said
    assert "(rank 0) waited 5 s in step 7, phase step, in CUDA graph #7" in said
    assert "last recorded in a capturing stream" not in said


@pytest.mark.parametrize("tp", [1, 2])
def test_a_replica_is_lost_and_comes_back(run: Run, store: Path, tmp_path: Path, tp: int) -> None:
    words = ("--parallel.tp", str(tp), "--parallel.dp", "2", "--train.steps", "16", "--train.micro_batch", "1")
    faults = ("--run.recovery", "in-step", "--inject-fault", f"kill@5:{tp}", "--inject-fault", "wait@9:0")
    run(*BOOST, *training(tmp_path, store, "killed", *words, *faults))
    alone = ("--parallel.tp", "1", "--parallel.dp", "1", "--parallel.layout", "single", "--run.device", "cpu")
    assert main(training(tmp_path, store, "whole", *words, *alone)) == 0
    found, expected = steps(tmp_path / "killed"), steps(tmp_path / "whole")
    assert [step for step, *_ in found] == [step for step, *_ in expected] == list(range(1, 17))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3), ours  # AdamW amplifies rounding from step to step
    changes = [line for line in read_metrics(tmp_path / "killed" / "metrics.jsonl") if line["kind"] == "membership"]
    assert [(len(change["lost"]), len(change["joined"])) for change in changes] == [(1, 0), (0, 1)]


@pytest.mark.parametrize("program", [("compiled", "kernels"), ("compiled", "blocks"), ("reductions",)], ids="-".join)
def test_kernels_are_built_for_an_h100(run: Run, program: tuple[str, ...]) -> None:
    run(*PROGRAM, *program, emulated=False)


@pytest.mark.parametrize("part", ["none", "kernels", "blocks"])
def test_passes_are_captured(run: Run, part: str) -> None:
    run(*PROGRAM, "captured", part, emulated=False)


def test_graphs_need_the_memory_that_is_predicted(run: Run) -> None:
    run(*PROGRAM, "memory", emulated=False)


FAULTS = {
    "host read": "the passes of a step cannot be captured (CUDA error: operation not permitted when stream is capturing)",
    "host copy": "the passes of a step cannot be captured (CUDA error: operation not permitted when stream is capturing)",
    "unjoined": "the passes of a step cannot be captured (CUDA error: capturing stream has unjoined work)",
    "waits for the legacy stream": "the passes of a step cannot be captured (CUDA error: dependency created on uncaptured work",
    "memory outside the pool": "a graph uses memory that was freed after the capture",
    "freed input": "a graph uses memory that was freed after the capture",
    "race": "different",
    "": "equal",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_captured_passes_are_found(run: Run, fault: str) -> None:
    assert FAULTS[fault] in run("sh", "-c", f"{' '.join(PROGRAM)} faulty '{fault}' || true")


def test_no_step_waits_for_the_gpu(run: Run) -> None:
    run(*PROGRAM, "synchronizations", emulated=False)


def test_every_operation_has_a_deterministic_kernel(run: Run) -> None:
    run("env", "CUBLAS_WORKSPACE_CONFIG=:4096:8", *PROGRAM, "deterministic", emulated=False)
