"""Programs that the tests run on the software GPU: python -m tests.softgpu.programs NAME ARGUMENTS."""

import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._inductor.runtime.triton_heuristics import CachingAutotuner

from benchmarks.experiments.shares import without_the_others
from benchmarks.gpu.contest import kernel_arguments
from boost.config import Config
from boost.config.load import from_tree
from boost.config.schema import ParallelConfig, RunConfig
from boost.measure.exactness import TrainedModel, alone, made_up_batches
from boost.measure.steps import Stepper, look_at
from boost.models import kernels
from boost.parallel.mesh import Mesh, mesh_of, temporary_groups
from boost.plan.memory import peak
from boost.train import heartbeat
from boost.train.graphs import WARM_UP, CapturedPasses
from boost.train.hardware import idle_in_graphs
from boost.train.heartbeat import Heartbeat
from boost.train.rendezvous import close_mesh, open_mesh, world_size
from boost.train.step import Stepper as TrainingStepper
from tests.matrices import ONE_EACH
from tests.toy import CPU, toy_config

STEPS = 3
GPU = torch.device("cuda", 0)
PLAIN = {"recompute": "none"}


def losses(cells: str, out: str) -> None:
    """Trains each configuration (by name, as trees) on all processes of this launch. Writes the
    largest relative error of a loss and of a gradient norm in three steps, against one process on the CPU."""
    world = open_mesh(ParallelConfig(layout="single", dp=world_size()), "cuda", timeout_s=600)
    expected: dict[str, list[tuple[float, float]]] = {}
    errors: dict[str, tuple[float, ...]] = {}
    for name, tree in json.loads(Path(cells).read_text()).items():
        config = from_tree(tree)
        single = alone(config.model_copy(update={"train": config.train.model_copy(update=PLAIN)}))
        single = single.model_copy(update={"parallel": ParallelConfig(layout=single.parallel.layout)})
        key = single.model_dump_json(exclude={"parallel"})  # every layout computes the same function
        if key not in expected:
            expected[key] = TrainedModel(single, Mesh(CPU), STEPS).numbers
        with temporary_groups():
            numbers = TrainedModel(config, mesh_of(config.parallel, world.device), STEPS).numbers
        by_kind = zip(*([abs(a / e - 1) for a, e in zip(*pair)] for pair in zip(numbers, expected[key])))  # noqa: B905
        errors[name] = tuple(max(values) for values in by_kind)
    of_all: list[Any] = [None] * world.size
    dist.all_gather_object(of_all, errors)
    if world.is_main:
        worst = {name: [max(each[name][i] for each in of_all) for i in range(2)] for name in errors}
        Path(out).write_text(json.dumps(worst))
    world.barrier()
    close_mesh()


def graphs(cells: str, out: str) -> None:
    """Trains each configuration (by name, as trees) with and without CUDA graphs, on all processes of this launch. Writes the
    names of those whose losses, gradient norms or weights differ in any bit."""
    world = open_mesh(ParallelConfig(layout="single", dp=world_size()), "cuda", timeout_s=600)
    different: list[str] = []
    for name, tree in json.loads(Path(cells).read_text()).items():
        config, seen = from_tree(tree), []
        for each in (config, config.changed(train={"cuda_graphs": "on"})):
            with temporary_groups():
                model = TrainedModel(each, mesh_of(each.parallel, world.device), 20)
                seen.append((model.numbers, [value.tolist() for value in model.seen().weights.values()]))
        require_captured(model.stepper)
        different += [name] * (seen[0] != seen[1])
    of_all: list[Any] = [None] * world.size
    dist.all_gather_object(of_all, different)
    if world.is_main:
        Path(out).write_text(json.dumps([name for each in of_all for name in each]))
    world.barrier()
    close_mesh()


def behind() -> None:
    """The second of two processes does not reach a replay. Heartbeats are frequent enough to read the flight recorder during the
    capture, if they did."""

    def on_hang(message: str) -> None:
        print(message, flush=True)
        os._exit(1)

    heartbeat.INTERVAL_S = 0.01
    world = open_mesh(ParallelConfig(layout="single", dp=world_size()), "cuda", timeout_s=600)
    config = toy_config(parallel={"layout": "btp-sp", "tp": 2}, train={"compile": "none", "cuda_graphs": "on"})
    with Heartbeat(world, RunConfig.model_validate({"timeout_s": 5}), on_hang):
        stepper = Stepper(config, mesh_of(config.parallel, world.device))
        for step in range(WARM_UP + 4):
            if step == WARM_UP + 3:
                require_captured(stepper._training)
                heartbeat.enter(heartbeat.Phase.STEP, step + 1)
                time.sleep(3600 * world.rank)
            stepper.step()


def require_captured(stepper: TrainingStepper) -> None:
    assert isinstance(stepper.run_passes, CapturedPasses) and stepper.run_passes._graph is not None


def small(model: dict[str, Any], parallel: dict[str, Any], dtype: str = "bfloat16", **sections: Any) -> Config:
    """A configuration for programs without emulation, whose kernels do nothing: large enough for FlashAttention."""
    train = {"micro_batch": 2, "global_batch": 4, "seq_len": 64, "compile": "none", **sections.pop("train", {})}
    sizes = {"dim": 128, "ffn_dim": 192, "heads": 8, "kv_heads": 4, "layers": 2, "vocab_size": 256}
    rank = {} if model["family"] == "dense" else {"rank": 32}
    return toy_config(dtype, model={**model, **sizes, **rank}, parallel={**parallel, "tp": 4}, train=train, **sections)


def launched_configs() -> Iterator[Config]:
    """Every layout and family, in both dtypes, with and without documents and recomputation; TP 4."""
    families = [*ONE_EACH, *(({"family": family}, {"layout": "btp"}) for family in ("svd", "lax"))]
    for (model, parallel), dtype, documents, again in product(families, ("float32", "bfloat16"), *[(False, True)] * 2):
        policy = "none" if not again else "full-block" if model["family"] == "dense" else "low-rank+attention-output"
        yield small(model, parallel, dtype, data={"isolate_documents": documents}, train={"recompute": policy})


@contextmanager
def one_rank(config: Config) -> Iterator[Stepper]:
    """Steps of TP rank 0 of 4, whose collectives return its own data. Only launch them, because their results are garbage."""
    torch._dynamo.reset()
    with without_the_others(config.parallel, GPU) as mesh:
        stepper = Stepper(config, mesh)
        made = made_up_batches(config, 0)  # several documents in each sequence
        batches: Any = stepper._training.prefetcher._batches
        batches.make = lambda step: made
        yield stepper


def synchronizations() -> None:
    """Fails if the passes or the update of a step wait for the GPU, in any layout."""
    for config in launched_configs():
        with one_rank(config) as stepper:
            stepper._launch()
            torch.cuda.set_sync_debug_mode("error")
            stepper._launch()
            torch.cuda.set_sync_debug_mode("default")


def captured(part: str) -> None:
    """Fails if the passes of a step cannot be captured, or if a replay waits for the GPU, in any layout."""
    for config in launched_configs() if part == "none" else [small(*each) for each in ONE_EACH[:2]]:
        if config.data.isolate_documents:
            continue
        with one_rank(config.changed(train={"cuda_graphs": "on", "compile": part})) as stepper:
            for _ in range(WARM_UP + 1):
                stepper._launch()
            require_captured(stepper._training)
            torch.cuda.set_sync_debug_mode("error")
            stepper._launch()
            torch.cuda.set_sync_debug_mode("default")


def memory() -> None:
    """Fails if the memory that a graph and an evaluation need differs by more than 5 % from the prediction. Allocates as on a GPU,
    but touches nothing."""
    sizes = {"family": "cola", "dim": 1024, "ffn_dim": 2736, "layers": 8, "heads": 16, "rank": 256, "vocab_size": 32000}
    train = {"seq_len": 1024, "micro_batch": 8, "global_batch": 16, "compute_dtype": "bfloat16", "compile": "kernels"}
    for recompute in ("none", "low-rank"):
        tree = {"model": sizes, "parallel": {"layout": "single"}, "train": train}
        config = from_tree(tree).changed(train={"recompute": recompute, "cuda_graphs": "on"})
        seen, predicted = look_at(Stepper(config, Mesh(GPU))), peak(config, on_gpu=True).total
        print(f"{recompute}: {seen.peak_bytes / 1e9:.2f} GB, {predicted / 1e9:.2f} GB predicted")
        assert abs(predicted / seen.peak_bytes - 1) < 0.05
        gc.collect()
        assert not idle_in_graphs, "a graph that is gone keeps no memory"


def faulty(fault: str) -> None:
    """Trains on one GPU with a fault in the passes, and prints whether the captured ones compute the same."""
    config = toy_config("float32", train={"compile": "none"})
    config, usual = alone(config), TrainingStepper._run_passes
    side, kept = torch.cuda.Stream(), [torch.ones(2**20, device=GPU)]

    def run_passes(stepper: TrainingStepper, *arguments: Any) -> Tensor:
        loss, here = usual(stepper, *arguments), torch.cuda.current_stream()
        if fault == "host read":
            loss.item()
        elif fault == "host copy":
            loss.copy_(torch.ones(()))
        elif fault == "waits for the legacy stream":
            here.wait_stream(torch.cuda.default_stream())
        elif fault == "freed input":
            loss += kept[0][0] - 1
        elif fault == "memory outside the pool":
            with torch.cuda.stream(torch.cuda.default_stream()):
                more = torch.ones(2**20, device=GPU)
            loss += more[0]
        elif fault in ("unjoined", "race"):
            side.wait_stream(here)
            with torch.cuda.stream(side):
                more = loss + 1
            if fault == "race":
                loss += more
                here.wait_stream(side)
        return loss

    TrainingStepper._run_passes = run_passes  # type: ignore[method-assign]
    plain, captured = (
        TrainedModel(config.changed(train={"cuda_graphs": graphs}), Mesh(GPU), WARM_UP + 3) for graphs in ("off", "on")
    )
    print("equal" if plain.numbers == captured.numbers else "different")
    kept.clear()
    torch.cuda.empty_cache()
    captured.step(0)


def deterministic() -> None:
    """Fails if an operation of a step has no deterministic kernel, in any layout and family."""
    torch.use_deterministic_algorithms(True)
    for config in launched_configs():
        with one_rank(config) as stepper:
            stepper._launch()


def compiled(part: str) -> None:
    """Builds the Triton kernels of every layout's blocks (or hand-written kernels), forward and backward, for an H100."""
    for (model, parallel), documents in product(ONE_EACH, (False, True)):
        config = small(model, parallel, data={"isolate_documents": documents}, train={"compile": part})
        with one_rank(config) as stepper:
            stepper._launch()
    built = [path.read_text() for path in Path(cache_dir()).rglob("*.ptx")]
    print(len(built), "kernels")
    assert len(built) > 10 and all(".target sm_90" in text for text in built)


def reductions() -> None:
    """Fails if a reduction of a hand-written kernel has two candidates: TP ranks that time them differently would choose
    different orders of summation, and the copies of what they all hold would drift apart."""
    torch._inductor.config.compile_threads = 1  # otherwise other processes choose candidates
    made: list[tuple[str, int]] = []
    usual = CachingAutotuner.__init__

    def init(tuner: CachingAutotuner, *args: Any, **kwargs: Any) -> None:
        usual(tuner, *args, **kwargs)
        if "REDUCTION" in str(tuner.heuristic_type):
            made.append((tuner.fn.__name__, len(tuner.configs or ())))

    CachingAutotuner.__init__ = init  # type: ignore[method-assign]
    kernels.use("inductor")
    with torch.no_grad():
        for name, arguments in kernel_arguments(16384, 4096, torch.bfloat16, GPU).items():
            kernels.KERNELS[name](*arguments)
    print(made)
    assert len(made) >= 5 and all(candidates == 1 for _, candidates in made), made


PROGRAMS: dict[str, Callable[..., None]] = {
    function.__name__: function
    for function in (
        losses,
        graphs,
        behind,
        synchronizations,
        captured,
        memory,
        faulty,
        deterministic,
        compiled,
        reductions,
    )
}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](*sys.argv[2:])
