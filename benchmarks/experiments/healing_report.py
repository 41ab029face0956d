"""Report of factorized and healed models: two tables, and the spectrum and rank of every linear."""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from boost.config.families import SLOTS
from boost.measure import drawing
from boost.measure.document import Figure, Goal, Section, Table
from boost.measure.results import Facts

STARTS = {
    "plain": "plain SVD, the same fraction everywhere",
    "inputs": "weighted by calibration inputs (SVD-LLM)",
    "gradients": "and by output gradients",
    "ranks": "and ranks by cost",
    "fully": "and block by block, fully corrected",
    "all": "the whole method, corrected as far as the text supports it (`boost import --calibrate`)",
    "cola": "the whole method with SiLU on the latents (cola)",
}
RISE_GOAL = 1 / 5
"""Largest rise of perplexity before training, as a fraction of plain SVD's."""
HEALED_GOAL = 0.03
"""Largest perplexity after training, above the dense model's."""


def losses(facts: Facts, **key: Any) -> dict[int, float]:
    """Held-out loss by seed of the rows with this key."""
    return {row["seed"]: row["loss"] for row in facts["rows"] if key.items() <= row.items()}


def rises(facts: Facts, budget: float, start: str) -> dict[int, float]:
    """By seed: perplexity before training minus the dense model's."""
    dense = losses(facts, kind="dense")
    found = losses(facts, kind="start", budget=budget, start=start)
    return {seed: math.exp(loss) - math.exp(dense[seed]) for seed, loss in found.items()}


def healed(facts: Facts, budget: float, start: str, weight: float, lr: float) -> dict[int, float]:
    """By seed: perplexity after training as a fraction of the dense model's, minus 1."""
    dense = losses(facts, kind="dense")
    found = losses(facts, kind="heal", budget=budget, start=start, weight=weight, lr=lr)
    return {seed: math.exp(loss - dense[seed]) - 1 for seed, loss in found.items()}


def section(facts: Facts) -> Section:
    """Perplexity before and after training, and the picture."""
    config, plan = facts["config"], facts["settings"]["plan"]
    model, train = config["model"], config["train"]
    dense = losses(facts, kind="dense")
    perplexities = _spread([math.exp(loss) for loss in dense.values()], ".2f")
    tokens = train["steps"] * train["global_batch"] * train["seq_len"]
    words = (
        f"Dense: width {model['dim']}, MLP {model['ffn_dim']}, {model['layers']} blocks, vocabulary {model['vocab_size']}, "
        f"{train['steps']} steps ({tokens / 1e6:.2f}M tokens), seeds {', '.join(str(seed) for seed in dense)}: held-out perplexity "
        f"{perplexities}. Calibration: {plan['tokens']} tokens. Healing: {plan['heal']:.0%} of the dense model's steps. A "
        "budget is the fraction of the linears' parameters that remains; embedding, head and norms stay."
    )
    budgets = sorted({row["budget"] for row in facts["rows"] if "budget" in row}, reverse=True)
    return Section(
        "Dense in, low-rank out, healed",
        (words, _starts_table(facts, budgets), _heals_table(facts, budgets), _figure(facts, budgets[-1])),
    )


def goals(facts: Facts) -> list[Goal]:
    """None of the performance table."""
    return []


def _starts_table(facts: Facts, budgets: Sequence[float]) -> Table:
    rows = []
    for budget in budgets:
        plain = rises(facts, budget, "plain")
        for start, words in STARTS.items():
            found = rises(facts, budget, start)
            if not found:
                continue
            ratios = [rise / plain[seed] for seed, rise in found.items()]
            kept = {"kind": "start", "budget": budget, "start": start}
            sizes = [row["parameters"] for row in facts["rows"] if kept.items() <= row.items()]
            cells = _spread(list(found.values()), ".3f"), _spread(ratios, ".3f")
            rows.append((f"{budget:g}", words, f"{sizes[0] / 1e6:.2f}", *cells, f"{len(found)}"))
    return Table(
        f"Measured before training: rise of the held-out perplexity over the dense model's (goal: at most {RISE_GOAL:g} of plain "
        "SVD's). ± the standard deviation over seeds.",
        ("budget", "factorized by", "parameters, M:", "rise:", "of plain SVD's:", "seeds:"),
        tuple(rows),
    )


def _heals_table(facts: Facts, budgets: Sequence[float]) -> Table:
    rows = []
    keys = {(row["start"], row["weight"], row["lr"]): None for row in facts["rows"] if row["kind"] == "heal"}
    for budget in budgets:
        for start, weight, lr in keys:
            found = healed(facts, budget, start, weight, lr)
            if found:
                how = f"{weight:g}" if weight else "0 (text only)"
                above = _spread([100 * value for value in found.values()], "+.2f")
                rows.append((f"{budget:g}", STARTS[start], how, f"{lr:g}", above, f"{len(found)}"))
    return Table(
        f"Measured after training: held-out perplexity above the dense model's, in percent (goal: at most {HEALED_GOAL:.0%}). "
        "Teacher: `distill.weight`.",
        ("budget", "factorized by", "teacher", "peak rate:", "above dense, %:", "seeds:"),
        tuple(rows),
    )


def _spread(values: Sequence[float], form: str) -> str:
    spread = f" ± {statistics.stdev(values):{form.lstrip('+')}}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):{form}}{spread}"


def _figure(facts: Facts, budget: float) -> Figure:
    kept = {"kind": "start", "budget": budget, "start": "all"}
    reports = [row["report"] for row in facts["rows"] if kept.items() <= row.items()]
    return Figure(
        "healing",
        f"Cost of every direction of every linear, nats per token, in descending order; dots: the rank at budget {budget:g}. The "
        "dashed line is plain SVD's rank. One line per block, from the first (blue) to the last (orange).",
        lambda path: draw(reports[0], budget, path),
    )


def draw(report: Facts, budget: float, path: Path) -> None:
    """One panel per slot: costs over direction of all blocks, and the ranks."""
    pyplot = drawing.pyplot()
    figure, axes = pyplot.subplots(2, 4, figsize=(7.4, 4.4), sharey=True, layout="constrained")
    blocks = 1 + max(int(row["name"].split(".")[1]) for row in report["linears"])
    # Neither end is lost on a white page or on a dark one.
    colors = pyplot.matplotlib.colors.LinearSegmentedColormap.from_list("blocks", drawing.SERIES[:2])
    for axis, slot in zip(axes.flat, SLOTS, strict=False):
        for row in report["linears"]:
            _, layer, name = row["name"].split(".", 2)
            if name != slot:
                continue
            spectrum, color = report["spectra"][row["name"]], colors(int(layer) / max(blocks, 2))
            at = [1 + spectrum["every"] * n for n in range(len(spectrum["costs"]))]
            axis.semilogy(at, spectrum["costs"], color=color, linewidth=1)
            nearest = min(range(len(at)), key=lambda n: abs(at[n] - row["rank"]))
            axis.semilogy([row["rank"]], [spectrum["costs"][nearest]], "o", color=color, markersize=4)
            same = budget * row["d_out"] * row["d_in"] / (row["d_out"] + row["d_in"])
        axis.axvline(same, color=drawing.MUTED, linestyle="--", linewidth=0.8)
        axis.set_title(slot)
        drawing.tidy(axis)
    axes[0][0].set_ylabel("cost, nats per token")
    axes[1][0].set_ylabel("cost, nats per token")
    axes.flat[-1].axis("off")
    figure.supxlabel("direction", fontsize=9.5, color=drawing.MUTED)
    drawing.write(figure, path)
