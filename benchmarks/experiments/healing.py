"""Dense models factorized and healed: held-out perplexity after each ingredient, and after training on few tokens.

For each seed: a dense run; at each budget, the same model factorized by plain SVD and with one ingredient of `boost import
--budget --calibrate` added at a time; then training on a small fraction of the dense run's steps, with and without the dense
model as teacher. What is finished is kept in the results and the work folder: the same command resumes.
"""

import functools
import itertools
import json
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.experiments.resumable import keep, resumed
from boost.api.trainer import Trainer
from boost.config import Config
from boost.config.architecture import parameter_count
from boost.config.load import from_tree
from boost.convert.compress import Compression, Method, compress, dense_decoder
from boost.convert.importing import CheckpointWeights, import_weights
from boost.convert.spectrum import Truncation
from boost.data.fit import open_fitting_store
from boost.data.store import TokenStore
from boost.errors import TrainingError
from boost.measure.results import Facts, as_markdown, facts_of, save_section
from boost.models.decoder import Decoder
from boost.parallel.mesh import Mesh
from boost.train.checkpoint import find_checkpoint, load_weights, open_checkpoint
from boost.train.evaluate import evaluate
from boost.train.model import build_decoder

INGREDIENTS = {
    "inputs": Method(gradients=False, allot=False, sequential=False),
    "gradients": Method(allot=False, sequential=False),
    "ranks": Method(sequential=False),
    "fully": Method(shrink=False),
}
"""Each one adds to the one before it: weights of the inputs, of the outputs' gradients, ranks by cost, corrections that undo what
the blocks before have changed. The whole method makes only a share of these corrections."""
STARTS = ("plain", "all")
"""How the model is factorized, for every seed: by plain SVD with the same fraction in every linear, and by the whole method."""
STARTS_OF_ONE_SEED = ("cola", *INGREDIENTS)
"""For the first seed only. cola: the whole method, with SiLU on the latents."""
HEALS = (("plain", 0.5), ("all", 0.0), ("all", 0.5), ("all", 1.0))
"""(start, distill.weight) of the runs that heal. 0: text only."""
HEALS_OF_ONE_SEED = (("cola", 0.5),)
COLA_RATE = 1 / 30
"""Factor on the peak rate of a cola start: its A is small and its B large, so that SiLU is nearly linear, and Adam moves every
element by about the rate. At the rate of svd, 16 steps raise the perplexity by half."""
MULTIPLE = 4
"""Ranks are multiples of this; those of plain SVD, of 1."""
CPU = torch.device("cpu")


@dataclass(frozen=True)
class HealingExperiment:
    """What is trained, factorized and healed."""

    seeds: tuple[int, ...]
    budgets: tuple[float, ...]
    heal: float
    """Fraction of the dense run's steps."""
    heal_lrs: tuple[float, ...]
    """Peak learning rates of the runs that heal."""
    tokens: int
    """Calibration tokens."""
    work: Path
    """Folder of the checkpoints."""


def measure(config: Config, plan: HealingExperiment, out: Path) -> int:
    """The experiment. Writes `out`.json after each result, .md and pictures at the end. Raises ConfigError if `out` holds results
    of other settings."""
    from benchmarks.experiments.healing_report import section

    torch.set_num_threads(1)
    facts = _begin(config, plan, out)
    for seed in plan.seeds:
        for part in _parts(config, plan, seed, facts):
            part()
            keep(out, facts)
    facts["seeds"], facts["complete"] = list(plan.seeds), True
    save_section(out, facts, section(facts))
    print(as_markdown(facts, section(facts)))
    return 0


def _parts(config: Config, plan: HealingExperiment, seed: int, facts: Facts) -> Iterator[Callable[[], None]]:
    """What is missing of one seed, in order."""
    rows, folder, first = facts["rows"], plan.work / f"seed-{seed}", seed == plan.seeds[0]

    def missing(key: Facts, path: Path) -> bool:
        return not path.exists() or not any(key.items() <= row.items() for row in rows)

    def done(key: Facts, work: Callable[[], Facts]) -> None:
        begun = time.perf_counter()
        rows[:] = [row for row in rows if not key.items() <= row.items()]
        rows.append({**key, **work(), "seconds": round(time.perf_counter() - begun, 1)})
        print(json.dumps({k: v for k, v in rows[-1].items() if k != "report"}), flush=True)

    dense = folder / "dense"
    key: Facts = {"seed": seed, "kind": "dense"}
    if missing(key, dense):
        yield functools.partial(done, key, functools.partial(train, dense_config(config, seed, dense)))
    for starts, heals in ((STARTS, HEALS), (STARTS_OF_ONE_SEED * first, HEALS_OF_ONE_SEED * first)):
        for budget in plan.budgets:
            for start in starts:
                key = {"seed": seed, "kind": "start", "budget": budget, "start": start}
                path = folder / f"{budget:g}-{start}"
                if missing(key, path):
                    yield functools.partial(done, key, functools.partial(factorize, dense, path, config, plan, key))
            for peak, (start, weight) in itertools.product(plan.heal_lrs, heals):
                lr = float(f"{peak * (COLA_RATE if start == 'cola' else 1):.3g}")
                key = {"seed": seed, "kind": "heal", "budget": budget, "start": start, "weight": weight, "lr": lr}
                run = folder / f"{budget:g}-{start}-{weight:g}-{lr:g}"
                if missing(key, run):
                    source = folder / f"{budget:g}-{start}"
                    yield functools.partial(done, key, functools.partial(heal, config, plan, key, source, run))


def dense_config(config: Config, seed: int, folder: Path) -> Config:
    """The dense run of a seed."""
    tree = config.model_dump(exclude_none=True)
    tree["train"] |= {"seed": seed}
    tree["parallel"], tree["run"]["dir"] = {"layout": "single"}, str(folder)
    return from_tree(tree)


def heal(config: Config, plan: HealingExperiment, key: Facts, source: Path, run: Path) -> Facts:
    """Trains a factorized model on few batches of the same size, in another order than the dense run's."""
    tree = config.model_dump(exclude_none=True, exclude={"model"})
    steps = max(round(plan.heal * config.train.steps), 1)
    tree["model"] = open_checkpoint(source).config.model.model_dump()
    tree["train"] |= {"seed": key["seed"] + 1000, "steps": steps, "eval_every": 0, "save_every": 0}
    tree["optim"] |= {"lr": key["lr"], "warmup_steps": max(steps // 8, 1), "weight_decay": 0.0}
    tree["parallel"], tree["run"]["dir"] = {"layout": "single"}, str(run)
    if key["weight"]:
        tree["distill"] = {"teacher": str(run.parent / "dense"), "weight": key["weight"]}
    return train(from_tree(tree), source)


def train(config: Config, start: Path | None = None) -> Facts:
    """Trains to the end, or finishes an interrupted run, and evaluates on all held-out text."""
    result = Trainer(config, resume="auto", start_from=start).fit()
    if result.evaluation is None:
        raise TrainingError(f"the run was stopped by {result.stopped_by}; the same command resumes")
    return {"loss": result.evaluation.loss, "tokens": result.position.tokens}


def factorize(dense: Path, out: Path, config: Config, plan: HealingExperiment, key: Facts) -> Facts:
    """Factorizes the dense checkpoint into `out` and evaluates it on all held-out text."""
    start, budget, store = key["start"], key["budget"], TokenStore.open(config.data.store)
    shutil.rmtree(out, ignore_errors=True)  # of an interrupted experiment
    family = "cola" if start == "cola" else "svd"
    how = Compression(budget, str(store.path), family, plan.tokens, MULTIPLE)
    if start in INGREDIENTS:
        weights = CheckpointWeights(find_checkpoint(dense))
        found = compress(dense_decoder(weights, CPU), store, how, config.train.seq_len, INGREDIENTS[start])
        out.mkdir(parents=True)  # nothing is trained from it
        return {"loss": heldout_loss(found.decoder, store, config), "parameters": parameter_count(found.decoder.model)}
    done = import_weights(dense, out, None, None, Truncation(budget=budget) if start == "plain" else how, 10**9)
    decoder = build_decoder(
        from_tree({**config.model_dump(exclude={"model"}), "model": done.model.model_dump()}), Mesh(CPU)
    )
    load_weights(open_checkpoint(out), decoder, Mesh(CPU))
    report = {} if start == "plain" else {"report": done.report}
    return {"loss": heldout_loss(decoder, store, config), "parameters": parameter_count(done.model), **report}


def heldout_loss(decoder: Decoder, store: TokenStore, config: Config) -> float:
    """Loss on all held-out text, nats per token."""
    split, train = store.split("heldout"), config.train
    return evaluate(decoder, split, train.seq_len, train.micro_batch, False, Mesh(CPU)).loss


def _begin(config: Config, plan: HealingExperiment, out: Path) -> Facts:
    """Empty results, or those of an earlier call with the same settings."""
    store = open_fitting_store(config)
    described = config.model_dump(exclude={"run": True, "parallel": True, "data": {"store"}})
    settings = {
        "config": described,
        "text": [store.content(split) for split in ("train", "heldout")],
        "plan": {"heal": plan.heal, "tokens": plan.tokens},
    }
    return resumed(facts_of("healing", config, settings=settings, complete=False), {"rows": []}, out)
