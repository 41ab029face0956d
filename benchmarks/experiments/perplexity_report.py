"""Report of convergence under every layout: differences between each family's layouts, a table per family, and a figure."""

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.experiments import colors
from benchmarks.experiments.contest import CONFIDENCE, t_interval
from benchmarks.experiments.curves import shape_words
from benchmarks.experiments.results import Facts, Figure, Section, Table
from benchmarks.experiments.scores import EXPLAINED, SCORES
from boost import drawing

SINGLE = "single"
"""Name of the single-process layout."""

SHORT = {"float32": "fp32", "bfloat16": "bf16"}
STYLES = ("-", "--")
"""Line styles of the first and the second dtype."""

WINDOW = 10
"""Kept losses per moving average in the figure; single steps are too noisy to tell families apart."""
DRAWN = 50
"""Approximate number of points per line of the figure."""


def smooth(losses: Sequence[float], window: int) -> list[float]:
    """Moving averages over the last `window` steps, fewer at the start."""
    return [statistics.fmean(losses[max(0, end - window) : end]) for end in range(1, len(losses) + 1)]


@dataclass(frozen=True)
class LayoutResult:
    """One layout in one dtype over its seeds."""

    family: str
    layout: str
    dtype: str
    loss: tuple[float, float]
    """Training loss of the last step: mean, standard deviation."""
    perplexity: tuple[float, float]
    """Held-out perplexity: mean, standard deviation."""
    worst: float
    """Maximum perplexity difference from `single` with the same seed."""
    bound: float
    """Upper bound on the mean difference, with CONFIDENCE."""
    share: float
    """`bound` divided by the standard deviation of `single` over seeds, in the first dtype."""
    limit: float
    accuracy: tuple[float, ...]
    """Mean accuracy on each task in percent; empty if not scored."""
    changed: float
    """Number of questions answered differently from `single` with the same seed (mean over seeds)."""
    questions: int
    """Number of questions in all tasks."""

    @property
    def holds(self) -> bool:
        """Whether layouts differ far less than seeds do."""
        return self.share <= self.limit


def bound(differences: Sequence[float]) -> float:
    """Distance from 0 to the farther end of the mean difference's t interval; with CONFIDENCE, the mean is closer to 0."""
    _, low, high = t_interval(differences)
    return max(abs(low), abs(high))


def rows(facts: Facts) -> list[LayoutResult]:
    """One row per family, layout and dtype, in order."""
    result = []
    for family in facts["families"]:
        # The effect of a seed does not depend on the dtype, and the first dtype has the most seeds.
        seeds = statistics.stdev(run["perplexity"] for run in _runs(facts, family, facts["dtypes"][0])[SINGLE])
        for dtype in facts["dtypes"]:
            of_layout = _runs(facts, family, dtype)
            alone = of_layout[SINGLE]
            for layout, runs in of_layout.items():
                pairs = list(zip(runs, alone, strict=True))
                apart = [run["perplexity"] - other["perplexity"] for run, other in pairs]
                scored = [(run, other) for run, other in pairs if run["scores"]]
                result.append(
                    LayoutResult(
                        family, layout, dtype,
                        _mean_and_spread([run["losses"][-1] for run in runs]),
                        _mean_and_spread([run["perplexity"] for run in runs]),
                        max(map(abs, apart)), bound(apart), bound(apart) / seeds if seeds else math.inf,
                        facts["limits"][dtype],
                        tuple(100 * statistics.fmean(run["scores"][name] for run, _ in scored) for name in SCORES if scored),
                        statistics.fmean(
                            sum(a != b for a, b in zip(run["answers"], other["answers"], strict=True)) for run, other in scored
                        ) if scored else 0.0,
                        len(scored[0][0]["answers"]) if scored else 0,
                    )
                )  # fmt: skip
    return result


def holds(facts: Facts) -> bool:
    """Whether every bound is within its limit."""
    return all(row.holds for row in rows(facts))


def _runs(facts: Facts, family: str, dtype: str) -> dict[str, list[Facts]]:
    """Runs by layout, in the order of this comparison's seeds; the file may also have runs with other seeds."""
    seeds = facts["seeds"] if dtype == facts["dtypes"][0] else facts["few_seeds"]
    found: dict[str, dict[int, Facts]] = {}
    for run in facts["runs"]:
        if (run["family"], run["dtype"]) == (family, dtype):
            found.setdefault(run["layout"], {})[run["seed"]] = run
    names = [SINGLE, *(name for name in found if name != SINGLE)]
    return {name: [found[name][seed] for seed in seeds] for name in names}


def _mean_and_spread(numbers: Sequence[float]) -> tuple[float, float]:
    return statistics.fmean(numbers), statistics.stdev(numbers)


def section(facts: Facts) -> Section:
    """Maximum differences between layouts, one table per family, and the figure."""
    found = rows(facts)
    train, seeds = facts["config"]["train"], ", ".join(map(str, facts["seeds"]))
    if facts["dtypes"][1:] and facts["few_seeds"] != facts["seeds"]:
        seeds += f" ({', '.join(facts['dtypes'][1:])}: {', '.join(map(str, facts['few_seeds']))})"
    words = (
        f"{shape_words(facts['config'])}, TP {facts['config']['parallel']['tp']}: {train['steps']} steps with each of the seeds "
        f"{seeds}. All layouts of a family use the same initial weights, hyperparameters, tokens and data order; "
        "`single` runs on one process, and `loro` is svd trained with LORO. The paper has no such table."
    )
    picture = (
        "Top: moving average of the training loss; the band spans all layouts and seeds of a family. Bottom: relative difference "
        "of a step's loss from that of one process with the same seed (maximum over all layouts and seeds)."
    )
    return Section(
        "Convergence under every layout",
        (
            words,
            _summary(facts, found),
            _columns(facts, found),
            *(_of_family(facts, found, family) for family in facts["families"]),
            Figure("perplexity", picture, lambda path: draw(facts, path)),
        ),
    )


def _summary(facts: Facts, found: Sequence[LayoutResult]) -> Table:
    cells = []
    for family in facts["families"]:
        for dtype in facts["dtypes"]:
            of_both = [row for row in found if (row.family, row.dtype) == (family, dtype)]
            alone, others = of_both[0], of_both[1:]
            last = max(others, key=lambda row: row.bound)
            verdict = _verdict(row.holds for row in others)
            spread = f"{alone.perplexity[0]:.2f} ± {alone.perplexity[1]:.2f}"
            worst = f"{max(row.worst for row in others):.1e}"
            shares = _percent(last.share), _percent(last.limit)
            cells.append((family, dtype, spread, worst, f"{last.bound:.1e}", last.layout, *shares, verdict))
    caption = (
        "Measured: held-out perplexity of one process (mean ± standard deviation over seeds), and how far the layouts are "
        "from it, paired by seed: the largest difference over all runs, and the largest bound over all layouts. With "
        f"{CONFIDENCE:.0%} confidence, the mean difference over seeds is below the bound (the end of the t interval farther from "
        f"0). The verdict compares the bound with the standard deviation over seeds ({SHORT[facts['dtypes'][0]]})."
    )
    headings = ("family", "dtype", "perplexity, one process:", "largest difference:", "largest bound:", "of layout")
    return Table(caption, (*headings, "of seed spread:", "limit:", "verdict"), tuple(cells))


def _columns(facts: Facts, found: Sequence[LayoutResult]) -> str:
    """The paragraph that introduces the family tables."""
    first, questions = SHORT[facts["dtypes"][0]], max(row.questions for row in found)
    words = (
        "Each of the next tables shows one family: the training loss of the last step in nats per token, and held-out perplexity "
        f"({first}), both as mean ± standard deviation over seeds. The difference is the largest difference in perplexity from "
        "`single` with the same seed, followed by the bound in parentheses. The verdict covers all dtypes."
    )
    if questions:
        words += (
            f" Accuracy ({first}) on {facts['settings']['questions']} questions per task from held-out text is measured by "
            f"lm-evaluation-harness; changed answers are those of the {questions} that differ from `single` (mean over seeds). "
            f"{EXPLAINED}"
        )
    return words


def _of_family(facts: Facts, found: Sequence[LayoutResult], family: str) -> Table:
    dtypes, questions = facts["dtypes"], max(row.questions for row in found)
    by_layout: dict[str, list[LayoutResult]] = {}
    for row in found:
        if row.family == family:
            by_layout.setdefault(row.layout, []).append(row)
    headings = ("layout", *(f"final loss, {SHORT[dtype]}:" for dtype in dtypes), "perplexity:", "difference (bound):")
    both = f" ({', '.join(SHORT[dtype] for dtype in dtypes)})" if len(dtypes) > 1 else ""
    headings += (f"bound / seed spread{both}:",)
    if questions:
        names = " / ".join(heading.partition(",")[0] for heading in SCORES.values())
        headings += (f"{names}, %:", "answers changed:")
    caption = f"Measured, {family}, by layout."
    return Table(caption, (*headings, "verdict"), tuple(_cells(each, bool(questions)) for each in by_layout.values()))


def _cells(row_of: Sequence[LayoutResult], scored: bool) -> tuple[str, ...]:
    first, alone = row_of[0], row_of[0].layout == SINGLE
    cells: tuple[str, ...] = (first.layout, *(f"{row.loss[0]:.4f} ± {row.loss[1]:.4f}" for row in row_of))
    cells += (f"{first.perplexity[0]:.3f} ± {first.perplexity[1]:.3f}",)
    cells += (
        ("", "")
        if alone
        else (f"{first.worst:.1e} ({first.bound:.1e})", ", ".join(_percent(row.share) for row in row_of))
    )
    if scored:
        cells += (" / ".join(f"{each:.1f}" for each in first.accuracy), "" if alone else f"{first.changed:.1f}")
    return (*cells, "" if alone else _verdict(row.holds for row in row_of))


def _verdict(held: Iterator[bool]) -> str:
    return "holds" if all(held) else "does not hold"


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.2g}%"


def draw(facts: Facts, path: Path) -> None:
    """Draws every family's loss with a band over layouts and seeds, and below it the largest difference from one process."""
    pyplot = drawing.pyplot()
    figure, (top, below) = pyplot.subplots(
        2, 1, figsize=(7.4, 5.6), sharex=True, layout="constrained", gridspec_kw={"height_ratios": [1.4, 1]}
    )
    steps = facts["kept_steps"]
    every = max(len(steps) // DRAWN, 1)
    for number, family in enumerate(facts["families"]):
        for dtype, style in zip(facts["dtypes"], STYLES, strict=False):
            of_layout, color = _runs(facts, family, dtype), colors.color_of(family, number)
            if dtype == facts["dtypes"][0]:
                curves = [smooth(run["losses"], WINDOW)[::every] for runs in of_layout.values() for run in runs]
                _draw_losses(top, steps[::every], curves, family, color)
            apart = _apart(of_layout)
            largest = [max(apart[place : place + every]) for place in range(0, len(apart), every)]
            below.semilogy(steps[::every], largest, style, color=color, linewidth=0.9)
    if len(facts["dtypes"]) > 1:
        for dtype, style in zip(facts["dtypes"], STYLES, strict=False):
            below.plot([], [], style, color="gray", label=SHORT[dtype])
        below.legend()
    top.legend()
    top.set_ylabel("training loss, nats per token")
    below.set(xlabel="step", ylabel="relative difference")
    for axis in (top, below):
        axis.grid(visible=True)
    drawing.write(figure, path)


def _draw_losses(axis: Any, steps: Sequence[int], curves: Sequence[Sequence[float]], name: str, color: Any) -> None:
    at = list(zip(*curves, strict=True))
    axis.plot(steps, [statistics.fmean(each) for each in at], label=name, color=color, linewidth=1)
    axis.fill_between(steps, list(map(min, at)), list(map(max, at)), color=color, alpha=0.12, linewidth=0)


def _apart(of_layout: dict[str, list[Facts]]) -> list[float]:
    """Largest relative difference from one process by step, at least float32's unit roundoff."""
    alone = [run["losses"] for run in of_layout[SINGLE]]
    found = [
        [abs(a - b) / abs(b) for a, b in zip(run["losses"], other, strict=True)]
        for layout, runs in of_layout.items()
        if layout != SINGLE
        for run, other in zip(runs, alone, strict=True)
    ]
    return [max(2.0**-24, *each) for each in zip(*found, strict=True)]
