"""Draws every layout's loss curve for the same model, seed and data; the curves must coincide.

All layouts implement the same function and differ only in rounding. At every step, the relative difference from the single-process
loss must stay below 1e-8 in float64 and 1e-3 in float32. Exits with code 1 if a difference exceeds its limit.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.commands import add_config, require_least, run_processes, tp_config
from benchmarks.experiments import colors
from benchmarks.experiments.results import Facts, Figure, Section, Table, facts_of
from benchmarks.experiments.sections import save
from boost import drawing
from boost.config import Config
from boost.config.load import change, from_tree
from boost.config.schema import Family, ModelConfig
from boost.data.fit import open_corpus
from boost.optim.schedule import learning_rate
from boost.parallel.mesh import Mesh
from boost.train.evaluate import Evaluation, evaluate
from boost.train.loop import Trainer
from boost.train.model import initialize_model
from boost.train.progress import progress
from boost.train.rendezvous import close_mesh, open_mesh
from boost.train.rundir import RunDirectory

LIMITS = {"float64": 1e-8, "float32": 1e-3}
"""Maximum relative difference of the loss from the single-process loss, by dtype."""

ROUNDING = {"float64": 2.0**-53, "float32": 2.0**-24}
"""Unit roundoff by dtype; smaller differences are drawn at this value."""

BIN = 5
"""Number of steps per point of the figure; each point shows their largest difference."""


@dataclass(frozen=True)
class LayoutVariant:
    """A layout with its options."""

    name: str
    parallel: dict[str, Any]


LOW_RANK = (
    LayoutVariant("btp, online", {"layout": "btp", "norm": "online"}),
    LayoutVariant("btp, sync", {"layout": "btp", "norm": "sync"}),
    LayoutVariant("btp, ungrouped", {"layout": "btp", "grouping": False}),
    LayoutVariant("btp-sp", {"layout": "btp-sp"}),
    LayoutVariant("vanilla", {"layout": "vanilla"}),
    LayoutVariant("vanilla, published", {"layout": "vanilla", "vanilla": "published"}),
)
DENSE = (LayoutVariant("megatron", {"layout": "megatron"}), LayoutVariant("megatron-sp", {"layout": "megatron-sp"}))
ULYSSES = LayoutVariant("ulysses", {"layout": "ulysses"})
TOKEN_SHARDED = (LayoutVariant("btp-cp", {"layout": "btp-cp"}), ULYSSES)
"""Low-rank layouts that replicate weights and shard tokens."""


def contenders(family: Family) -> Sequence[LayoutVariant]:
    """The layouts that shard weights and support a family."""
    return DENSE if family == "dense" else LOW_RANK


def every_layout(family: Family) -> Sequence[LayoutVariant]:
    """All layouts that support a family."""
    return (*DENSE, ULYSSES) if family == "dense" else (*LOW_RANK, *TOKEN_SHARDED)


def configuration(config: Config, family: Family, dtype: str, parallel: dict[str, Any]) -> Config:
    """`config` with another family, dtype and layout. Raises ConfigError if the configuration is invalid.

    bfloat16 applies to GEMMs and activations only; weights are then float32, as in training.
    """
    tree = config.model_dump()
    change(tree, {"model.family": family})
    tree["train"] |= {"param_dtype": "float32" if dtype == "bfloat16" else dtype, "compute_dtype": dtype}
    tree["parallel"] = parallel
    return from_tree(tree)


def at_start(config: Config, mesh: Mesh) -> Trainer:
    """A trainer with initial weights."""
    trainer = Trainer(config, mesh, RunDirectory(config.run.dir))
    initialize_model(trainer.model, config.train.seed)  # not `start`, which would set aside existing checkpoints
    return trainer


def losses(trainer: Trainer) -> list[float]:
    """Trains to the last step. Returns the loss of every step, the same on every process of the mesh."""
    config = trainer.config
    steps = config.train.steps
    return [trainer.step(learning_rate(config.optim, step, steps)).loss for step in range(steps)]


def heldout(trainer: Trainer, tokens: int | None = None) -> Evaluation:
    """Evaluates on the whole held-out split, or on about `tokens` tokens."""
    train, isolate = trainer.config.train, trainer.config.data.isolate_documents
    return evaluate(trainer.model, trainer.heldout, train.seq_len, train.micro_batch, isolate, trainer.mesh, tokens)


def all_losses(config: Config, family: Family, dtype: str, mesh: Mesh, tp: int) -> dict[str, list[float]]:
    """Losses by contender, including the single-process model under the name 'single'.

    Every process computes 'single' independently, so none waits in a collective.
    """
    result = {ALONE: losses(at_start(configuration(config, family, dtype, {}), Mesh(mesh.device)))}
    for contender in progress(every_layout(family), f"{family}, {dtype}", enabled=mesh.is_main):
        parallel = {**contender.parallel, "tp": tp}
        result[contender.name] = losses(at_start(configuration(config, family, dtype, parallel), mesh))
    return result


ALONE = "single"
"""Name of the single-process curve."""


def worst_difference(curves: dict[str, list[float]]) -> dict[str, float]:
    """Maximum relative difference from 'single' over all steps, by contender."""
    alone = curves[ALONE]
    return {
        name: max(abs(ours - theirs) / abs(theirs) for ours, theirs in zip(curve, alone, strict=True))
        for name, curve in curves.items()
        if name != ALONE
    }


def curves_process(config: Config, families: Sequence[Family], out: Path) -> int:
    """Runs the experiment on this process. The main process writes `out`.json, .md and the figure, and returns 1 if any limit is
    exceeded."""
    mesh = open_mesh(config.parallel, config.run.device, config.run.timeout_s)
    curves = {
        dtype: {family: all_losses(config, family, dtype, mesh, mesh.tp.size) for family in families}
        for dtype in LIMITS
    }
    broken = False
    if mesh.is_main:
        worst = {dtype: {f: worst_difference(c) for f, c in by_family.items()} for dtype, by_family in curves.items()}
        broken = any(not w <= LIMITS[dtype] for dtype, by in worst.items() for f in by.values() for w in f.values())
        facts = facts_of("curves", config, limits=LIMITS, worst_relative_difference=worst, losses=curves)
        save(out, facts)
    mesh.barrier()
    close_mesh()
    return int(broken)


def section(facts: Facts) -> Section:
    """Shows every layout's maximum difference and the curves."""
    worst, train, tp = facts["worst_relative_difference"], facts["config"]["train"], facts["config"]["parallel"]["tp"]
    dtypes = list(worst)
    rows = []
    for family, names in next(iter(worst.values())).items():
        for name in names:
            values = [worst[dtype][family][name] for dtype in dtypes]
            held = all(value <= facts["limits"][dtype] for value, dtype in zip(values, dtypes, strict=True))
            rows.append((family, name, *(f"{value:.1e}" for value in values), "holds" if held else "does not hold"))
    headings = [f"{dtype}, limit {facts['limits'][dtype]:.0e}:" for dtype in dtypes]
    return Section(
        "Loss curves of all layouts",
        (
            f"{shape_words(facts['config'])}, TP {tp}: {train['steps']} steps with the same seed, data and data order. All layouts "
            "implement the same function and differ only in rounding.",
            Table(
                "Measured: maximum relative difference of the training loss from that of one process, over all steps.",
                ("family", "layout", *headings, "verdict"),
                tuple(rows),
            ),
            Figure(
                "curves",
                "Loss of every layout (each curve is thinner than the one below it), and its relative difference from that of one "
                f"process, maximum over {BIN} steps; the dashed line is the limit.",
                lambda path: draw(facts, path),
            ),
        ),
    )


def shape_words(config: Mapping[str, Any]) -> str:
    """A description of the model and batch."""
    model, train = config["model"], config["train"]
    rank = f", r {model['rank']}" if model.get("rank") else ""
    return (
        f"{model['layers']} blocks, d {model['dim']}, f {model['ffn_dim']}{rank}, vocabulary {model['vocab_size']}, "
        f"{train['global_batch']} sequences of {train['seq_len']} tokens per step"
    )


def draw(facts: Facts, path: Path) -> None:
    """Draws the loss curves and, below them, the difference of each from one process by dtype."""
    pyplot = drawing.pyplot()
    curves, limits = facts["losses"], facts["limits"]
    families = list(next(iter(curves.values())))
    figure, axes = pyplot.subplots(
        1 + len(curves), len(families), figsize=(3.7 * len(families), 6.6), sharex=True, squeeze=False,
        layout="constrained", gridspec_kw={"height_ratios": [1.6, *[1] * len(curves)]},
    )  # fmt: skip
    for column, family in enumerate(families):
        top = axes[0][column]
        dtype, by_family = next(iter(curves.items()))
        for number, (name, curve) in enumerate(by_family[family].items()):
            # Each curve is thinner than the one below it, so overlapping curves stay visible.
            color = colors.color_of(name, number)
            top.plot(curve, label=name, color=color, linewidth=0.8 * (len(by_family[family]) - number))
        top.set_title(f"{family}: loss, nats per token ({dtype})")
        top.legend(loc="lower left", fontsize=8.5, labelspacing=0.2)
        top.set_ylim(bottom=top.get_ylim()[0] - 0.55 * (top.get_ylim()[1] - top.get_ylim()[0]))  # below the curves
        for row, (dtype, by_family) in enumerate(curves.items(), start=1):
            below, alone = axes[row][column], by_family[family]["single"]
            for number, (name, curve) in enumerate(by_family[family].items()):
                if name != ALONE:
                    apart = [max(abs(a - b) / abs(b), ROUNDING[dtype]) for a, b in zip(curve, alone, strict=True)]
                    at = range(0, len(apart), BIN)
                    largest = [max(apart[begin : begin + BIN]) for begin in at]
                    below.semilogy(at, largest, color=colors.color_of(name, number), linewidth=0.9)
            below.axhline(limits[dtype], color=drawing.INK, linestyle="--", linewidth=1)
            below.set_title(f"relative difference, {dtype}", fontsize=9.5)
        axes[-1][column].set_xlabel("step")
    for axis in axes.flat:
        axis.grid(visible=True)
    drawing.write(figure, path)


def arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser, "curves")
    words = f"families to train, from {', '.join(ModelConfig.choices)} (default: CONFIG's family and dense)"
    parser.add_argument("--families", nargs="+", choices=tuple(ModelConfig.choices), metavar="F", help=words)


def run(args: argparse.Namespace) -> int:
    config = tp_config(args)
    require_least("--tp", [args.tp], 2)
    families = args.families or sorted({config.model.family, "dense"})
    for family in families:  # validate before starting any process
        for contender in every_layout(family):
            configuration(config, family, next(iter(LIMITS)), {**contender.parallel, "tp": args.tp})
    open_corpus(config)
    return run_processes(curves_process, (config, families, args.out), args.tp)
