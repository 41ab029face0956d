"""Convergence under every layout: loss curves, held-out perplexity and downstream accuracy of every family, over several seeds.

All layouts implement the same function, so all should train the same model. Runs of one family and seed differ only in [parallel];
the experiment measures the effect of rounding over a whole run, paired by seed, relative to the effect of the seed. LORO, an
optimizer for low-rank factors, counts as a family. Finished runs are kept in PATH.json, so the same command resumes the experiment,
and you can add families, seeds and dtypes. Exits with code 1 unless layouts differ far less than seeds do.
"""

import argparse
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.commands import add_config, require_least, run_processes, tp_config
from benchmarks.experiments.curves import LayoutVariant, at_start, every_layout, heldout, losses
from benchmarks.experiments.perplexity_report import SINGLE, holds
from benchmarks.experiments.results import Facts, facts_of, keep, machine, resumed
from benchmarks.experiments.scores import require_harness, scored, task_folder
from benchmarks.experiments.sections import save
from boost.config import Config
from boost.config.load import change, from_tree
from boost.config.schema import Family
from boost.data.fit import open_corpus
from boost.errors import ConfigError, TrainingError
from boost.parallel.mesh import Mesh
from boost.train.progress import progress
from boost.train.rendezvous import choose_device, close_mesh, open_mesh
from boost.train.rundir import git_state


@dataclass(frozen=True)
class FamilyVariant:
    """A family, as changes to a configuration."""

    family: Family
    model: dict[str, Any] = field(default_factory=dict)
    optim: dict[str, Any] = field(default_factory=dict)


EXACT_STEPS, RESTART_WARMUP = 8, 5
"""Exact steps per LORO run, each of which clears Adam's moments, and warm-up steps after each."""

FAMILIES = {
    "dense": FamilyVariant("dense"),
    "svd": FamilyVariant("svd"),
    "cola": FamilyVariant("cola"),
    "lax": FamilyVariant("lax", {"over": "cola", "gate": "identity"}),
    # As published (ICLR 2025): its epsilon, no decay, no clipping, a cosine schedule that dips after each exact step.
    "loro": FamilyVariant(
        "svd", optim={"name": "loro", "eps": 1e-6, "weight_decay": 0.0, "clip": 0.0, "schedule": "cosine-restarts"}
    ),
}

LIMITS = {"float32": 0.1, "bfloat16": 0.5}
"""Maximum bound on the perplexity difference from one process, relative to the standard deviation over seeds, by dtype. bfloat16's
rounding errors are 65,536 times float32's, and a run amplifies them to a visible fraction of the effect of a seed."""

POINTS = 150
"""Maximum number of kept losses per run."""

ONE_PROCESS = LayoutVariant(SINGLE, {})


@dataclass(frozen=True)
class ConvergenceExperiment:
    """What to train."""

    families: tuple[str, ...]
    """Names of FAMILIES."""
    seeds: tuple[int, ...]
    dtypes: tuple[str, ...]
    """Dtypes of GEMMs and activations; weights are float32."""
    few_seeds: tuple[int, ...]
    """Seeds for all dtypes except the first."""
    questions: int
    """Questions per task from held-out text, used to score models trained in the first dtype; 0: none."""

    def seeds_of(self, dtype: str) -> tuple[int, ...]:
        """Seeds of the runs in a dtype."""
        return self.seeds if dtype == self.dtypes[0] else self.few_seeds


@dataclass(frozen=True)
class Task:
    """One training run."""

    family: str
    layout: str
    dtype: str
    seed: int
    config: Config

    @property
    def key(self) -> tuple[str, str, str, int]:
        """Identifies the run."""
        return self.family, self.layout, self.dtype, self.seed


@dataclass(frozen=True)
class ConvergenceRun:
    """The result of one training run."""

    family: str
    layout: str
    dtype: str
    seed: int
    losses: list[float]
    """Losses of the steps in `kept_steps`, in nats per token."""
    heldout_loss: float
    """Loss on held-out text (`train.eval_tokens`) after the last step, in nats per token."""
    perplexity: float
    scores: dict[str, float] | None
    """Accuracy by task; None: not requested."""
    answers: str | None
    """The answer to each question (`benchmarks.experiments.scores.Scored`)."""
    seconds: float
    git: dict[str, Any] | None


def layouts(family: str) -> list[LayoutVariant]:
    """A single process, then every layout that supports the family, without ungrouped variants."""
    variants = every_layout(FAMILIES[family].family)
    return [ONE_PROCESS, *(each for each in variants if each.parallel.get("grouping", True))]


def kept_steps(steps: int) -> list[int]:
    """At most POINTS evenly spaced steps, counted from 1 and including the last."""
    every = math.ceil(steps / POINTS)
    return list(range(steps, 0, -every))[::-1]


def configuration(config: Config, family: str, layout: LayoutVariant, dtype: str, seed: int) -> Config:
    """The configuration of one run. Layouts differ only in `parallel`. Raises ConfigError if the configuration is invalid."""
    if config.optim.name != "adamw":
        raise ConfigError(
            f"optim.name = '{config.optim.name}' is one of the families; use a configuration with 'adamw'"
        )
    tree, of_family = config.model_dump(), FAMILIES[family]
    own_optimizer = {f"optim.{key}": value for key, value in of_family.optim.items()}
    change(tree, {"model.family": of_family.family, **own_optimizer})
    if tree["model"].get("rank") is None:
        tree["model"].pop("rank", None)
    tree["model"] |= of_family.model
    if of_family.optim:
        every = max(config.train.steps // EXACT_STEPS, 1)
        tree["optim"] |= {"exact_every": every, "restart_warmup_steps": min(RESTART_WARMUP, every)}
    tree["train"] |= {
        "seed": seed,
        "param_dtype": "float32",
        "compute_dtype": dtype,
        "recompute": "none",
        "recompute_every": 1,
    }
    tree["parallel"] = {} if layout is ONE_PROCESS else {**layout.parallel, "tp": config.parallel.tp}
    return from_tree(tree)


def tasks_of(config: Config, plan: ConvergenceExperiment) -> list[Task]:
    """All runs, dtype by dtype and seed by seed. Raises ConfigError if a configuration is invalid."""
    return [
        Task(family, layout.name, dtype, seed, configuration(config, family, layout, dtype, seed))
        for dtype in plan.dtypes
        for seed in plan.seeds_of(dtype)
        for family in plan.families
        for layout in layouts(family)
    ]


def start(config: Config, plan: ConvergenceExperiment, out: Path) -> Facts:
    """Empty results, or the results of an earlier call with the same settings; seeds, families and dtypes may be added.

    Raises ConfigError if `out`.json has results with other settings.
    """
    store = open_corpus(config).stores[0]
    settings = {
        # Paths do not matter: the content at these paths is compared. Every contender replaces family and seed.
        "config": config.model_dump(exclude={"run": True, "parallel": True, "data": {"store"}, "train": {"seed"}}),
        "tp": config.parallel.tp,
        "tokenizer": store.fingerprint,
        "text": [store.content(split) for split in ("train", "heldout")],
        "device": choose_device(config.run.device).type,
        "torch": str(torch.__version__),
        "questions": plan.questions,
        "families": {name: asdict(family) for name, family in FAMILIES.items()},
        "layouts": {each.name: each.parallel for name in ("dense", "cola") for each in layouts(name)},
    }
    numbers = {name: list(getattr(plan, name)) for name in ("families", "seeds", "dtypes", "few_seeds")}
    numbers |= {"kept_steps": kept_steps(config.train.steps)}
    fresh = facts_of("perplexity", config, settings=settings, limits=LIMITS, **numbers, complete=False)
    settings["machine"] = machine(fresh["environment"])  # runs are paired, and different processors round differently
    return resumed(fresh, {"runs": []}, out)


def perplexity_process(config: Config, plan: ConvergenceExperiment, out: Path) -> int:
    """Runs the experiment on this process. The main process writes `out`.json after each run, and at the end .md and the figure.

    Returns 1 if a bound exceeds its limit. Raises TrainingError if a loss is not finite.
    """
    mesh = open_mesh(config.parallel, config.run.device, config.run.timeout_s)
    facts = start(config, plan, out)
    tasks = tasks_of(config, plan)
    waiting = _waiting(tasks, facts, mesh)
    with task_folder(config, plan.questions) as folder:
        for turn in progress(turns(waiting, mesh.size), "runs", enabled=mesh.is_main):
            asked = folder if turn[0].dtype == plan.dtypes[0] else None
            facts["runs"] += _gathered(_train_turn(turn, mesh, asked), mesh)
            if mesh.is_main:
                keep(out, facts)
    held = True
    if mesh.is_main:
        facts["complete"], held = True, holds(facts)
        save(out, facts)
    mesh.barrier()
    close_mesh()
    return int(not held)


def _waiting(tasks: Sequence[Task], facts: Facts, mesh: Mesh) -> list[Task]:
    """The runs that the main process does not have yet."""
    done = {(row["family"], row["layout"], row["dtype"], row["seed"]) for row in facts["runs"]}
    waits = torch.tensor([task.key not in done for task in tasks], dtype=torch.uint8, device=mesh.device)
    if mesh.size > 1:
        dist.broadcast(waits, src=0)
    return [task for task, each in zip(tasks, waits.tolist(), strict=True) if each]


def turns(waiting: Sequence[Task], processes: int) -> list[list[Task]]:
    """Groups of runs that run concurrently: single-process runs in one dtype, or one run on all processes."""
    found = []
    for dtype in dict.fromkeys(task.dtype for task in waiting):
        alone = [task for task in waiting if task.layout == SINGLE and task.dtype == dtype]
        found += [alone[first : first + processes] for first in range(0, len(alone), processes)]
        found += [[task] for task in waiting if task.layout != SINGLE and task.dtype == dtype]
    return found


def _train_turn(turn: Sequence[Task], mesh: Mesh, folder: Path | None) -> ConvergenceRun | None:
    """Runs this process's part of a turn. Returns its single-process run, or on the main process the run of all processes."""
    if turn[0].layout == SINGLE:
        return trained(turn[mesh.rank], Mesh(mesh.device), folder) if mesh.rank < len(turn) else None
    run = trained(turn[0], mesh, folder)
    return run if mesh.is_main else None


def trained(task: Task, mesh: Mesh, folder: Path | None) -> ConvergenceRun:
    """Trains, evaluates and scores one run on all processes of the mesh. Raises TrainingError if a loss is not finite."""
    begun = time.perf_counter()
    trainer = at_start(task.config, mesh)
    curve, found = losses(trainer), heldout(trainer, task.config.train.eval_tokens or None)
    if not all(map(math.isfinite, (*curve, found.loss))):
        raise TrainingError(
            f"{task.family}, {task.layout}, {task.dtype}, seed {task.seed}: the loss is not finite; use a lower --optim.lr"
        )
    scores = scored(trainer, folder) if folder is not None else None
    return ConvergenceRun(
        *task.key, [round(curve[step - 1], 8) for step in kept_steps(len(curve))], found.loss, found.perplexity,
        scores.accuracy if scores else None, scores.answers if scores else None,
        round(time.perf_counter() - begun, 1), git_state(),
    )  # fmt: skip


def _gathered(run: ConvergenceRun | None, mesh: Mesh) -> list[Facts]:
    """The runs of all processes in a turn, by rank. They are exchanged as JSON, so nothing received is unpickled."""
    if mesh.size == 1:
        return [asdict(run)] if run else []
    text = json.dumps(asdict(run) if run else None).encode()
    sizes = torch.zeros(mesh.size, dtype=torch.int64, device=mesh.device)
    sizes[mesh.rank] = len(text)
    dist.all_reduce(sizes)
    most = int(sizes.max())
    sent = torch.frombuffer(bytearray(text.ljust(most)), dtype=torch.uint8).to(mesh.device)
    received = [torch.empty_like(sent) for _ in range(mesh.size)]
    dist.all_gather(received, sent)
    found: Iterator[Any] = (json.loads(bytes(each.tolist())) for each in received)
    return [each for each in found if each is not None]


def arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser, "perplexity")
    words = f"families to train (default {' '.join(FAMILIES)})"
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=FAMILIES, metavar="F", help=words)
    words = "training seeds (default 0 1 2)"
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="N", help=words)
    words = "dtypes of GEMMs and activations; weights are float32 (default: float32 on CPUs, bfloat16 on GPUs)"
    parser.add_argument("--dtypes", nargs="+", choices=tuple(LIMITS), metavar="D", help=words)
    words = "seeds for all --dtypes except the first (default: --seeds)"
    parser.add_argument("--few-seeds", type=int, nargs="+", metavar="N", help=words)
    words = "also score each run of the first dtype on N questions per task made from held-out text (default 0: none)"
    parser.add_argument("--questions", type=int, default=0, metavar="N", help=words)


def run(args: argparse.Namespace) -> int:
    config = tp_config(args)
    require_least("--tp", [args.tp], 2)
    require_least("--questions", [args.questions], 0)
    for name, seeds in (("--seeds", args.seeds), ("--few-seeds", args.few_seeds or args.seeds)):
        require_least(name, seeds, 0)
        if len(set(seeds)) < max(len(seeds), 2):
            words = " ".join(map(str, seeds))
            raise ConfigError(f"{name} = {words}: a spread needs at least two distinct seeds, such as 0 1 2")
    if unknown := set(args.few_seeds or ()) - set(args.seeds):
        raise ConfigError(f"--few-seeds: {min(unknown)} is not one of --seeds; choose some of those")
    if args.questions:
        require_harness()
    usual = "bfloat16" if choose_device(config.run.device).type == "cuda" else "float32"
    plan = ConvergenceExperiment(
        families=tuple(dict.fromkeys(args.families)),
        seeds=tuple(args.seeds),
        dtypes=tuple(dict.fromkeys(args.dtypes or [usual])),
        few_seeds=tuple(args.few_seeds or args.seeds),
        questions=args.questions,
    )
    tasks_of(config, plan)  # validate before starting any process
    start(config, plan, args.out)
    return run_processes(perplexity_process, (config, plan, args.out), args.tp)
