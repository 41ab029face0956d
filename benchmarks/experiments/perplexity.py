"""Final perplexity of every layout with the same model, hyperparameters and data, over several seeds, in the training dtype.

All layouts implement the same function, so all should train the same model. This experiment measures the effect of rounding over a
whole run on held-out perplexity, relative to the spread between seeds.
"""

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.experiments.curves import (
    LayoutVariant,
    at_start,
    configuration,
    contenders,
    heldout,
    losses,
    shape_words,
)
from boost.config import Config
from boost.config.load import from_tree
from boost.config.schema import Family
from boost.errors import TrainingError
from boost.measure import drawing
from boost.measure.document import Figure, Goal, Section, Table
from boost.measure.results import Facts, as_markdown, facts_of, save_section
from boost.parallel.mesh import Mesh, close_mesh, open_mesh
from boost.train.console import progress

LIMIT = 0.1
"""Maximum perplexity difference between a layout and one process with the same seed, over the standard deviation of seeds."""

SINGLE = LayoutVariant("single", {})


@dataclass(frozen=True)
class PerplexityRun:
    """The result of one training run."""

    family: Family
    layout: str
    seed: int
    losses: list[float]
    """Loss of every step, nats per token."""
    heldout_loss: float
    """Loss on all held-out text after the last step, nats per token."""
    perplexity: float


@dataclass(frozen=True)
class PerplexityRow:
    """One layout over its seeds."""

    family: Family
    layout: str
    loss: tuple[float, float]
    """Training loss of the last step: mean, standard deviation."""
    perplexity: tuple[float, float]
    """Held-out perplexity: mean, standard deviation."""
    apart: float | None
    """Maximum perplexity difference from `single` with the same seed; None for `single`."""
    share: float | None
    """`apart` over the standard deviation of `single` over seeds."""

    @property
    def holds(self) -> bool:
        """Whether layouts differ far less than seeds do."""
        return self.share is None or self.share <= LIMIT


def layouts(family: Family) -> list[LayoutVariant]:
    """One process, then every layout that supports the family, without ungrouped forms."""
    return [SINGLE, *(each for each in contenders(family) if each.parallel.get("grouping", True))]


def seeded(config: Config, family: Family, dtype: str, seed: int, contender: LayoutVariant) -> Config:
    """The configuration of one run; layouts differ only in `parallel`. Raises ConfigError if the configuration is invalid."""
    parallel = {} if contender is SINGLE else {**contender.parallel, "tp": config.parallel.tp}
    tree = configuration(config, family, dtype, parallel).model_dump()
    tree["train"]["seed"] = seed
    return from_tree(tree)


def work(config: Config, families: Sequence[Family], dtype: str, seeds: Sequence[int]) -> Iterator[tuple[str, Config]]:
    """Yields (layout, configuration) of every run."""
    for family in families:
        for seed in seeds:
            for contender in layouts(family):
                yield contender.name, seeded(config, family, dtype, seed, contender)


def trained(layout: str, config: Config, mesh: Mesh) -> PerplexityRun:
    """Trains one run on all processes of the mesh. Every process repeats the single-process run, so none waits for another.

    Raises TrainingError if a loss is not finite.
    """
    trainer = at_start(config, Mesh(mesh.device) if layout == SINGLE.name else mesh)
    curve, found = losses(trainer), heldout(trainer)
    if not all(map(math.isfinite, (*curve, found.loss))):
        raise TrainingError(
            f"{config.model.family}, {layout}, seed {config.train.seed}: the loss is not finite; use a lower --optim.lr"
        )
    return PerplexityRun(config.model.family, layout, config.train.seed, curve, found.loss, found.perplexity)


def perplexity_process(
    config: Config, families: Sequence[Family], dtype: str | None, seeds: Sequence[int], out: Path
) -> int:
    """Runs the experiment on this process. The main process writes `out`.json, .md and the figure, and returns 1 if any layout
    exceeds LIMIT.

    `dtype` is that of GEMMs and activations; None: float32 on CPUs, bfloat16 on GPUs.
    """
    mesh = open_mesh(config.parallel, config.run.device, config.run.timeout_s)
    dtype = dtype or ("bfloat16" if mesh.device.type == "cuda" else "float32")
    runs = [
        trained(layout, of_run, mesh)
        for layout, of_run in progress(list(work(config, families, dtype, seeds)), "runs", enabled=mesh.is_main)
    ]
    held = True
    if mesh.is_main:
        found = [asdict(run) for run in runs]
        facts = facts_of("perplexity", config, dtype=dtype, seeds=list(seeds), limit=LIMIT, runs=found)
        held = all(row.holds for row in rows(facts))
        save_section(out, facts, section(facts))
        print(as_markdown(facts, section(facts)))
    mesh.barrier()
    close_mesh()
    return int(not held)


def rows(facts: Facts) -> list[PerplexityRow]:
    """One row per family and layout, in run order."""
    by_layout: dict[tuple[Family, str], dict[int, Facts]] = {}
    for run in facts["runs"]:
        by_layout.setdefault((run["family"], run["layout"]), {})[run["seed"]] = run
    result = []
    for (family, layout), of_seed in by_layout.items():
        alone = by_layout[family, SINGLE.name]
        apart = share = None
        if layout != SINGLE.name:
            apart = max(abs(run["perplexity"] - alone[seed]["perplexity"]) for seed, run in of_seed.items())
            share = apart / statistics.stdev(run["perplexity"] for run in alone.values())
        loss = _mean_and_spread([run["losses"][-1] for run in of_seed.values()])
        perplexity = _mean_and_spread([run["perplexity"] for run in of_seed.values()])
        result.append(PerplexityRow(family, layout, loss, perplexity, apart, share))
    return result


def section(facts: Facts) -> Section:
    """The table and the figure."""
    train, seeds = facts["config"]["train"], facts["seeds"]
    words = (
        f"{shape_words(facts['config'])}, TP {facts['config']['parallel']['tp']}, {facts['dtype']}: {train['steps']} steps with "
        f"each of the seeds {', '.join(map(str, seeds))}. All layouts use the same initial weights, hyperparameters, tokens and "
        "data order. `single` is one process. The paper has no such table."
    )
    caption = (
        "Measured: training loss of the last step in nats per token and perplexity on all held-out text, mean ± standard deviation "
        f"over {len(seeds)} seeds; and the maximum perplexity difference from `single` with the same seed, as a percentage of the "
        f"standard deviation of `single` over seeds (limit {facts['limit']:.0%})."
    )
    headings = ("family", "layout", "final loss:", "held-out perplexity:", "max difference from single:")
    picture = (
        "Left: training loss by step with a band over seeds; each curve is thinner than the one below it. "
        "Right: held-out perplexity, one point per seed, with mean and standard deviation."
    )
    return Section(
        "Final perplexity of all layouts",
        (
            words,
            Table(caption, (*headings, "relative to seed spread:", "verdict"), tuple(map(_cells, rows(facts)))),
            Figure("perplexity", picture, lambda path: draw(facts, path)),
        ),
    )


def goals(facts: Facts) -> list[Goal]:
    """None: no performance goal depends on this experiment."""
    return []


def _cells(row: PerplexityRow) -> tuple[str, ...]:
    cells: tuple[str, ...] = (row.family, row.layout, f"{row.loss[0]:.4f} ± {row.loss[1]:.4f}")
    cells += (f"{row.perplexity[0]:.3f} ± {row.perplexity[1]:.3f}",)
    if row.apart is None or row.share is None:
        return (*cells, "", "", "")
    return (*cells, f"{row.apart:.1e}", f"{100 * row.share:.2g} %", "holds" if row.holds else "does not hold")


def _mean_and_spread(numbers: Sequence[float]) -> tuple[float, float]:
    return statistics.fmean(numbers), statistics.stdev(numbers)


def draw(facts: Facts, path: Path) -> None:
    """Draws one row per family: loss by step with a band over seeds, and perplexities with error bars."""
    pyplot = drawing.pyplot()
    table = rows(facts)
    families = list(dict.fromkeys(row.family for row in table))
    figure, axes = pyplot.subplots(len(families), 2, figsize=(11, 4 * len(families)), squeeze=False)
    colors = pyplot.get_cmap("tab10")
    for (left, right), family in zip(axes, families, strict=True):
        of_family = [row for row in table if row.family == family]
        for number, row in enumerate(of_family):
            runs = [run for run in facts["runs"] if (run["family"], run["layout"]) == (family, row.layout)]
            _draw_curve(left, runs, row.layout, colors(number), 0.8 * (len(of_family) - number))
            # Points next to the error bar keep both visible.
            right.plot(
                [number + 0.15] * len(runs), [r["perplexity"] for r in runs], "o", color=colors(number), markersize=4
            )
            mean, spread = row.perplexity
            right.errorbar(number - 0.1, mean, yerr=spread, marker="s", capsize=4, color=colors(number))
        left.set(title=f"{family}: loss, nats per token ({facts['dtype']})", xlabel="step")
        left.legend(fontsize=8, frameon=False)
        right.set(
            title=f"{family}: held-out perplexity, {len(facts['seeds'])} seeds", xlim=(-0.5, len(of_family) - 0.5)
        )
        right.set_xticks(range(len(of_family)), [row.layout for row in of_family], rotation=20, fontsize=8, ha="right")
        for axis in (left, right):
            drawing.tidy(axis)
    figure.tight_layout()
    drawing.write(figure, path)


def _draw_curve(axis: Any, runs: Sequence[Facts], name: str, color: Any, width: float) -> None:
    at = list(zip(*(run["losses"] for run in runs), strict=True))
    steps = range(1, len(at) + 1)
    axis.plot(steps, [statistics.fmean(each) for each in at], label=name, color=color, linewidth=width)
    axis.fill_between(steps, list(map(min, at)), list(map(max, at)), color=color, alpha=0.1, linewidth=0)
