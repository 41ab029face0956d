"""Compares model families: same shape, tokens, data order and schedule, several seeds each, on one machine.

Every paper tunes the peak learning rate per method, so each contender chooses its own in a small sweep on a separate seed.
Every run uses one process and one thread, so concurrent runs affect only wall-clock time. Step times are therefore measured
separately, with all contenders interleaved. Finished runs are saved: the same command resumes.
"""

import functools
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.experiments.contest import take_turns
from benchmarks.experiments.curves import at_start, heldout
from benchmarks.experiments.families_report import goals, section, step_seconds
from benchmarks.experiments.resumable import keep, resumed
from benchmarks.experiments.scores import scores, task_folder
from boost.config import Config
from boost.config.architecture import flops_per_token, parameter_count
from boost.config.load import change_family, from_tree
from boost.config.optimizers import OptimConfig
from boost.config.schema import Family
from boost.data.fit import open_fitting_store
from boost.errors import ConfigError, TrainingError
from boost.measure.results import Facts, as_markdown, facts_of, save_section
from boost.optim.schedule import learning_rate
from boost.parallel.mesh import Mesh, choose_device
from boost.train.evaluate import Evaluation
from boost.train.loop import Trainer
from boost.train.rundir import git_state

__all__ = [
    "CONTENDERS",
    "USUAL",
    "FamilyVariant",
    "FamilyExperiment",
    "Task",
    "FamilyRun",
    "compare",
    "configuration",
    "goals",
    "section",
]


@dataclass(frozen=True)
class FamilyVariant:
    """A model and optimizer variant, as changes to a configuration."""

    linear: str
    family: Family
    model: dict[str, Any] = field(default_factory=dict)
    optim: dict[str, Any] = field(default_factory=dict)
    kv_rank: float = 1.0
    """Rank of keys and values, as a fraction of model.rank."""
    rate: str = "lr"
    """Field of [optim] that the sweep sets; if it is another one, optim.lr keeps its value."""
    rate_scale: float = 1.0
    """Factor between a rate of the sweep and the value of that field."""


# LORO as published (ICLR 2025): its epsilon, no decay, no clipping, a cosine that dips after each exact step.
LORO = {"name": "loro", "eps": 1e-6, "weight_decay": 0.0, "clip": 0.0, "schedule": "cosine-restarts"}
EXACT_STEPS = 8
"""Exact steps per LORO run. Published runs have 20 (60M) to 500 (1B), 500 and 200 steps apart. A run of a few hundred steps
cannot match both, and each exact step clears Adam's moments, which then need tens of steps to recover."""
RESTART_WARMUP = 5
"""Warm-up steps after each exact step, as published."""

CONTENDERS = {
    "dense": FamilyVariant("W x", "dense"),
    "svd": FamilyVariant("B (A x)", "svd"),
    "cola": FamilyVariant("B silu(A x)", "cola"),
    "lax": FamilyVariant("B silu(LN(A x + h before))", "lax", {"over": "cola", "gate": "identity"}),
    "loro": FamilyVariant("B (A x), LORO", "svd", optim=LORO),
    "svd-spectral": FamilyVariant("B (A x), spectral start", "svd", {"factor_init": "spectral"}),
    "lax-svd": FamilyVariant("B LN(A x + h before)", "lax", {"over": "svd", "gate": "identity"}),
    "lax-tensor": FamilyVariant("B silu(LN(A x + R h C))", "lax", {"over": "cola", "gate": "tensor"}),
    "lax-dense": FamilyVariant("B silu(LN(A x + G h + g))", "lax", {"over": "cola", "gate": "dense"}),
    "cola-kv": FamilyVariant("B silu(A x), half the rank for k, v", "cola", kv_rank=0.5),
}
USUAL = ("dense", "svd", "cola", "lax", "loro")


@dataclass(frozen=True)
class FamilyExperiment:
    """What to compare, and how."""

    contenders: tuple[str, ...]
    seeds: tuple[int, ...]
    sweep: tuple[float, ...]
    """Peak learning rates to choose from; empty: optim.lr for all."""
    sweep_seed: int
    sweep_steps: int
    rounds: int
    """Timing rounds."""
    jobs: int
    """Concurrent runs."""
    equal_time: bool = False
    """Whether each contender is also trained for as long as the first one takes: another number of steps, on its own schedule."""
    questions: int = 0
    """Questions per task from held-out text, on which each run of the comparison is scored; 0: none."""


@dataclass(frozen=True)
class Task:
    """One training run."""

    contender: str
    seed: int
    lr: float
    config: Config
    tasks: Path | None = None
    """Folder of the tasks on which the model is scored after the run."""


@dataclass(frozen=True)
class FamilyRun:
    """The result of one training run."""

    contender: str
    seed: int
    lr: float
    losses: list[float]
    """Training loss of every step, finite ones only."""
    heldout: list[tuple[int, float]]
    """(step, held-out loss) of intermediate evaluations."""
    loss: float | None
    """Loss on all held-out text after the last step, nats per token; None if the run diverged."""
    bits_per_byte: float | None
    seconds: float
    """Wall-clock time. Concurrent runs share the machine, so this says nothing about step time."""
    git: dict[str, Any] | None
    scores: dict[str, float] | None = None
    """Accuracy on tasks from held-out text, if asked for and the run did not diverge."""


def configuration(config: Config, name: str, seed: int, lr: float, steps: int) -> Config:
    """`config` for one contender, on one process. Raises ConfigError if the configuration is invalid.

    Warm-up stays the same fraction of the run if `steps` differs from `config`.
    """
    contender, tree = CONTENDERS[name], config.model_dump()
    if config.optim.name != "adamw":
        raise ConfigError(
            f"optim.name = '{config.optim.name}' is one of the contenders; use a configuration with 'adamw'"
        )
    change_family(tree["model"], contender.family, contender.model.get("over", "cola"))
    if tree["model"].get("rank") is None:
        tree["model"].pop("rank", None)
    tree["model"] |= contender.model
    if contender.kv_rank != 1:
        rank = config.model.rank or config.model.dim // 4
        tree["model"]["ranks"] = {**config.model.ranks, "kv": max(round(rank * contender.kv_rank), 1)}
    warmup = round(config.optim.warmup_steps * steps / config.train.steps)
    OptimConfig.switch(tree["optim"], contender.optim)
    tree["optim"] |= {**contender.optim, contender.rate: lr * contender.rate_scale, "warmup_steps": warmup}
    if contender.optim.get("name") == "loro":
        every = max(steps // EXACT_STEPS, 1)
        tree["optim"] |= {"exact_every": every, "restart_warmup_steps": min(RESTART_WARMUP, every)}
    tree["train"] |= {"seed": seed, "steps": steps, "recompute": "none", "recompute_every": 1}
    tree["parallel"] = {}
    return from_tree(tree)


def train(task: Task) -> FamilyRun:
    """Trains and evaluates. A run whose loss becomes non-finite stops and has no held-out loss."""
    config, begun = task.config, time.perf_counter()
    trainer = _trainer(config)
    steps, every = config.train.steps, config.train.eval_every
    losses: list[float] = []
    on_the_way: list[tuple[int, float]] = []
    last: Evaluation | None = None
    found: dict[str, float] | None = None
    try:
        for step in range(steps):
            stats = trainer.step(learning_rate(config.optim, step, steps))
            if math.isfinite(stats.loss):
                losses.append(round(stats.loss, 5))
            if every and (step + 1) % every == 0 and step + 1 < steps:
                on_the_way.append((step + 1, round(heldout(trainer, config.train.eval_tokens or None).loss, 5)))
        last = heldout(trainer)
        if task.tasks is not None and math.isfinite(last.loss):
            found = scores(trainer, task.tasks)
    except TrainingError:
        pass  # several consecutive non-finite steps: reported as no held-out loss
    sound = last is not None and math.isfinite(last.loss)
    return FamilyRun(
        task.contender, task.seed, task.lr, losses, on_the_way,
        last.loss if last and sound else None, last.bits_per_byte if last and sound else None,
        round(time.perf_counter() - begun, 1), git_state(), found,
    )  # fmt: skip


def compare(config: Config, plan: FamilyExperiment, out: Path) -> int:
    """Runs the experiment: sweep, training runs, timing. Writes `out`.json (after each run), .md and .svg.

    Raises ConfigError if `out` has results with other settings, and TrainingError if a process dies.
    """
    facts = _begin(config, plan, out)
    run = functools.partial(_run_all, facts=facts, out=out, plan=plan)
    swept = [
        Task(name, plan.sweep_seed, lr, configuration(config, name, plan.sweep_seed, lr, plan.sweep_steps))
        for lr in plan.sweep
        for name in plan.contenders
    ]
    run(swept, "sweep")
    with task_folder(config, plan.questions) as folder:
        tasks = _of_equal_tokens(config, plan, facts, folder)
        run(tasks, "runs")
    facts["contenders"] = {task.contender: _describe(task, plan) for task in tasks}
    facts["seeds"] = list(plan.seeds)
    if set(facts["timing"].get("seconds", {})) != set(plan.contenders) or facts["timing"]["rounds"] != plan.rounds:
        alone = {task.contender: task.config for task in tasks}
        facts["timing"] = {"rounds": plan.rounds, "seconds": time_steps(alone, plan.rounds)}
        keep(out, facts)
    if plan.equal_time:
        run(_of_equal_time(tasks, config, facts), "equal_time")
    facts["complete"] = True
    save_section(out, facts, section(facts))
    print(as_markdown(facts, section(facts)))
    return 0


def _of_equal_tokens(config: Config, plan: FamilyExperiment, facts: Facts, folder: Path | None) -> list[Task]:
    """The comparison: every contender at its best rate of the sweep, seed by seed."""
    rates = {name: best_rate(facts["sweep"], name) if plan.sweep else config.optim.lr for name in plan.contenders}
    return [
        Task(name, seed, rates[name], configuration(config, name, seed, rates[name], config.train.steps), folder)
        for place, seed in enumerate(plan.seeds)
        for name in _rotated(plan.contenders, place)
    ]


def _of_equal_time(tasks: Sequence[Task], config: Config, facts: Facts) -> list[Task]:
    """The same runs for the time that the first contender takes, by the measured time of a step; without those of equal length.

    The numbers of steps are kept in the results: a resumed experiment does not depend on a new measurement.
    """
    steps, kept = config.train.steps, facts["equal_steps"]
    seconds = {
        name: step_seconds(facts["timing"]["seconds"][name], contender["exact_every"])[0]
        for name, contender in facts["contenders"].items()
    }
    first = seconds[next(iter(seconds))]
    for name, own in seconds.items():
        kept.setdefault(name, max(round(steps * first / own), 1))
    return [
        Task(t.contender, t.seed, t.lr, configuration(config, t.contender, t.seed, t.lr, kept[t.contender]))
        for t in tasks
        if kept[t.contender] != steps
    ]


def best_rate(sweep: Iterable[Facts], contender: str) -> float:
    """The learning rate with the lowest held-out loss. Raises TrainingError if every run diverged."""
    sound = [(row["loss"], row["lr"]) for row in sweep if row["contender"] == contender and row["loss"] is not None]
    if not sound:
        raise TrainingError(f"{contender} diverged at every learning rate of --sweep; try lower ones")
    return float(min(sound)[1])


def time_steps(configs: dict[str, Config], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Times optimizer steps with contenders interleaved. Returns seconds by contender: {"usual": [...], "exact": [...]}.

    LORO's exact steps are rare and slow and are listed separately, at least `rounds` // 8 of them.
    """
    usual = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the runs; on a shared machine, waiting threads would time other users' work
    trainers = {name: _trainer(_with_frequent_exact_steps(config, rounds)) for name, config in configs.items()}
    kinds: dict[str, list[str]] = {name: [] for name in configs}
    calls = {name: functools.partial(_step, trainer, kinds[name]) for name, trainer in trainers.items()}
    turns = take_turns(calls, next(iter(trainers.values())).mesh, rounds)
    torch.set_num_threads(usual)
    return {
        name: {
            kind: [s for s, of in zip(seconds, kinds[name][-rounds:], strict=True) if of == kind]
            for kind in ("usual", "exact")
        }
        for name, seconds in turns.seconds.items()
    }


def _step(trainer: Trainer, kinds: list[str]) -> list[Tensor]:
    """Runs one optimizer step and appends its kind to `kinds`. Returns the loss and a weight."""
    every = trainer.config.optim.exact_every
    kinds.append("exact" if every and (trainer.position.step + 1) % every == 0 else "usual")
    stats = trainer.step(trainer.config.optim.lr / 100)
    return [torch.tensor(stats.loss), trainer.fused_params[0].tensor]


def _with_frequent_exact_steps(config: Config, rounds: int) -> Config:
    every = config.optim.exact_every
    if not every:
        return config
    tree = config.model_dump()
    every = max(min(every, rounds // 4), 2)
    tree["optim"] |= {"exact_every": every, "restart_warmup_steps": min(RESTART_WARMUP, every)}
    return from_tree(tree)


def _trainer(config: Config) -> Trainer:
    return at_start(config, Mesh(choose_device(config.run.device)))


def _rotated(names: Sequence[str], by: int) -> list[str]:
    by %= len(names)
    return [*names[by:], *names[:by]]


def _describe(task: Task, plan: FamilyExperiment) -> Facts:
    contender, config = CONTENDERS[task.contender], task.config
    return {
        **asdict(contender),
        "lr": task.lr,
        "at_edge": len(plan.sweep) > 1 and task.lr in (min(plan.sweep), max(plan.sweep)),
        "exact_every": config.optim.exact_every,
        "parameters": parameter_count(config.model),
        "flops_per_token": flops_per_token(config.model, config.train.seq_len),
    }


def _begin(config: Config, plan: FamilyExperiment, out: Path) -> Facts:
    """Empty results, or those of an earlier run with the same settings."""
    store = open_fitting_store(config)
    # Paths do not matter; the content at these paths is compared below.
    described = config.model_dump(exclude={"run": True, "parallel": True, "data": {"store"}})
    settings = {
        "config": described,
        "tokenizer": store.fingerprint,
        "text": [store.content(split) for split in ("train", "heldout")],
        "device": choose_device(config.run.device).type,
        "torch": str(torch.__version__),
        "sweep": [plan.sweep, plan.sweep_seed, plan.sweep_steps],
        "questions": plan.questions,
        "contenders": {name: asdict(contender) for name, contender in CONTENDERS.items()},
        "exact_steps": EXACT_STEPS,
    }
    results: Facts = {"sweep": [], "runs": [], "timing": {}, "equal_steps": {}, "equal_time": []}
    return resumed(facts_of("families", config, settings=settings, complete=False), results, out)


def _run_all(tasks: Sequence[Task], kind: str, *, facts: Facts, out: Path, plan: FamilyExperiment) -> None:
    """Trains the tasks missing from facts[kind] and saves each result as it completes."""
    done = {_key(row) for row in facts[kind]}
    waiting = [task for task in tasks if _key(asdict(task)) not in done]
    for number, trained in enumerate(each_trained(waiting, min(plan.jobs, len(waiting))), start=1):
        facts[kind].append(asdict(trained))
        keep(out, facts)
        outcome = "diverged" if trained.loss is None else f"held-out loss {trained.loss:.4f}"
        print(
            f"{kind} {number}/{len(waiting)}: {trained.contender}, seed {trained.seed}, lr {trained.lr:g}: {outcome}, "
            f"{trained.seconds:.0f} s",
            flush=True,
        )


def _key(row: Facts) -> tuple[str, int, float]:
    return row["contender"], row["seed"], row["lr"]


def each_trained(tasks: Sequence[Task], jobs: int, work: Callable[[Task], FamilyRun] = train) -> Iterator[FamilyRun]:
    """Yields results as they complete, from `jobs` single-threaded processes. Raises TrainingError if a process dies."""
    if not tasks:
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_quiet_single_thread) as pool:
        futures: list[Future[FamilyRun]] = [pool.submit(work, task) for task in tasks]
        try:
            for future in as_completed(futures):
                yield future.result()
        except BrokenProcessPool:
            raise TrainingError(
                "a process died during a run (killed, or out of memory); finished runs are kept: run the "
                "command again, with fewer --jobs if memory is short"
            ) from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _quiet_single_thread() -> None:
    """Initializes a pool process: one thread (threads change summation order) and no output (the parent prints)."""
    torch.set_num_threads(1)
    sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
