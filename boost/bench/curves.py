"""Loss curves of every layout: the same model, seed and data, so that the curves lie on each other.

A layout is one implementation of one function; what remains between two of them is rounding. In float64 it must stay below
1e-8 of the loss at every step, in float32 below 1e-3.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from boost.bench.results import facts_of, save
from boost.config import Config
from boost.config.load import change_family, from_tree
from boost.config.schema import Family
from boost.optim.schedule import learning_rate
from boost.parallel.mesh import Mesh, close_mesh, open_mesh
from boost.train.console import progress
from boost.train.loop import Trainer
from boost.train.model import initialize_model
from boost.train.rundir import RunDirectory

LIMITS = {"float64": 1e-8, "float32": 1e-3}
"""Largest relative difference of a loss to that of one process, by dtype."""

ROUNDING = {"float64": 2.0**-53, "float32": 2.0**-24}
"""Half a unit in the last place of 1, by dtype: differences below it are drawn at it."""


@dataclass(frozen=True)
class Contender:
    """A layout with its switches."""

    name: str
    parallel: dict[str, Any]


LOW_RANK = (
    Contender("btp, online", {"layout": "btp", "norm": "online"}),
    Contender("btp, sync", {"layout": "btp", "norm": "sync"}),
    Contender("btp, ungrouped", {"layout": "btp", "grouping": False}),
    Contender("btp-sp", {"layout": "btp-sp"}),
    Contender("vanilla", {"layout": "vanilla"}),
    Contender("vanilla, published", {"layout": "vanilla", "vanilla": "published"}),
)
DENSE = (Contender("megatron", {"layout": "megatron"}), Contender("megatron-sp", {"layout": "megatron-sp"}))


def contenders(family: Family) -> Sequence[Contender]:
    """The layouts that carry a family."""
    return DENSE if family == "dense" else LOW_RANK


def configuration(config: Config, family: Family, dtype: str, parallel: dict[str, Any]) -> Config:
    """The run of `config` with another family, dtype and cut. Raises ConfigError where that is not legal."""
    tree = config.model_dump()
    change_family(tree["model"], family)
    tree["train"] |= {"param_dtype": dtype, "compute_dtype": dtype}
    tree["parallel"] = parallel
    return from_tree(tree)


def losses(config: Config, mesh: Mesh) -> list[float]:
    """The loss of each of config.train.steps steps, from initial weights. The same on every process of the mesh."""
    trainer = Trainer(config, mesh, RunDirectory(config.run.dir))
    # Not `start`, which would put checkpoints of a run there aside.
    initialize_model(trainer.model, config.train.seed)
    steps = config.train.steps
    return [trainer.step(learning_rate(config.optim, step, steps), stop=False).loss for step in range(steps)]


def all_losses(config: Config, family: Family, dtype: str, mesh: Mesh, tp: int) -> dict[str, list[float]]:
    """Losses by contender, of one process under the name 'single'.

    Every process computes 'single' for itself: none waits for another in a collective meanwhile.
    """
    result = {"single": losses(configuration(config, family, dtype, {}), Mesh(mesh.device))}
    for contender in progress(contenders(family), f"{family}, {dtype}", enabled=mesh.is_main):
        parallel = {**contender.parallel, "tp": tp}
        result[contender.name] = losses(configuration(config, family, dtype, parallel), mesh)
    return result


def worst_difference(curves: dict[str, list[float]]) -> dict[str, float]:
    """Largest relative difference over the steps of each contender to 'single'."""
    alone = curves["single"]
    return {
        name: max(abs(ours - theirs) / abs(theirs) for ours, theirs in zip(curve, alone, strict=True))
        for name, curve in curves.items()
        if name != "single"
    }


def curves_process(config: Config, families: Sequence[Family], out: Path) -> int:
    """One process of the experiment. The main one writes `out`.json and `out`.svg; returns 1 if a limit is broken."""
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
        save(out, facts, picture=draw)
        report(worst)
    mesh.barrier()
    close_mesh()
    return int(broken)


def report(worst: Mapping[str, Mapping[Family, Mapping[str, float]]]) -> None:
    """Prints the largest relative difference of every contender beside its limit."""
    for dtype, by_family in worst.items():
        print(f"{dtype}: largest relative difference to one process over all steps (limit {LIMITS[dtype]:.0e})")
        for family, by_name in by_family.items():
            for name, value in by_name.items():
                print(f"  {family:6} {name:18} {value:.1e}{'' if value <= LIMITS[dtype] else '  ABOVE THE LIMIT'}")


def draw(facts: dict[str, Any], path: Path) -> None:
    """The curves over each other, and below them, by dtype, how far each is from that of one process."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "boost"  # the same bytes for the same numbers
    from matplotlib import pyplot

    curves, limits = facts["losses"], facts["limits"]
    families = list(next(iter(curves.values())))
    figure, axes = pyplot.subplots(
        1 + len(curves), len(families), figsize=(5.5 * len(families), 7.5), sharex=True, squeeze=False,
        gridspec_kw={"height_ratios": [1.6, *[1] * len(curves)]},
    )  # fmt: skip
    for column, family in enumerate(families):
        top = axes[0][column]
        dtype, by_family = next(iter(curves.items()))
        for number, (name, curve) in enumerate(by_family[family].items()):
            # Each thinner than the one below it: curves that lie on each other are all seen.
            top.plot(curve, label=name, linewidth=0.8 * (len(by_family[family]) - number))
        top.set_title(f"{family}: loss, nats a token ({dtype})")
        top.legend(fontsize=8, frameon=False)
        for row, (dtype, by_family) in enumerate(curves.items(), start=1):
            below, alone = axes[row][column], by_family[family]["single"]
            below.plot([])  # 'single' has the first colour
            for name, curve in by_family[family].items():
                if name != "single":
                    apart = [max(abs(a - b) / abs(b), ROUNDING[dtype]) for a, b in zip(curve, alone, strict=True)]
                    below.semilogy(apart, linewidth=0.9)
            below.axhline(limits[dtype], color="black", linestyle="--", linewidth=1)
            below.set_title(f"relative difference to one process, {dtype}; limit {limits[dtype]:.0e}", fontsize=9)
        axes[-1][column].set_xlabel("step")
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.2)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
