"""The paper's evaluation, predicted by the performance model: GPU step times, and speed-ups of the best low-rank layout.

Every number here is modeled. Runs are configured as in `benchmarks.experiments.published`: bf16 weights and activations, 4096-token
sequences, no recomputation. The paper's three systems are joined by stronger ones: `vanilla` with sharded heads and channels,
`megatron-sp`, and `btp-sp`.
"""

import argparse
from dataclasses import asdict
from functools import partial
from pathlib import Path

from benchmarks.commands import add_out
from benchmarks.experiments import colors, computed
from benchmarks.experiments.published import SEQUENCES, TOKENS, Comparison, PublishedRow, Way, configuration
from benchmarks.experiments.published_report import PAPERS_HARDWARE, published_facts, published_parts, ratio_goal
from benchmarks.experiments.results import Facts, Figure, Goal, Section, Table, facts_of
from benchmarks.experiments.sections import save
from boost import drawing
from boost.config import load
from boost.format import format_count
from boost.measure.steps import prediction
from boost.plan.hardware import load_hardware
from boost.plan.timing import predict

STRONG: dict[str, tuple[Way, tuple[str, ...]]] = {
    "megatron-sp": ("full-rank", ("--parallel.layout=megatron-sp", "--parallel.grouping=true")),
    "vanilla": ("vanilla", ("--parallel.vanilla=strong", "--parallel.grouping=true")),
    "btp": ("BOOST", ()),
    "btp-sp": ("BOOST", ("--parallel.layout=btp-sp",)),
}
"""The strongest form of each layout: the paper's system on which it is based, and overrides."""

LOW_RANK = ("btp", "btp-sp")
AGAINST = ("vanilla", "megatron-sp")
"""Baselines for the best low-rank layout, in their strongest form."""


def strongest(row: PublishedRow) -> Facts:
    """Predicted steps of `row` under every layout of STRONG; bytes are maxima over processes."""
    profile = load_hardware(PAPERS_HARDWARE)
    configs = {name: configuration(way, row, 1, own) for name, (way, own) in STRONG.items()}
    steps = {name: predict(config, profile) for name, config in configs.items()}
    sizes = {name: prediction(config, profile) for name, config in configs.items()}
    return {
        "seconds": {name: step.seconds for name, step in steps.items()},
        "mfu": {name: step.mfu for name, step in steps.items()},
        "sent_bytes": {name: size.predicted_sent for name, size in sizes.items()},
        "peak_bytes": {name: size.predicted_peak for name, size in sizes.items()},
    }


def model() -> Facts:
    """Computes all predictions."""
    paper = Comparison(load_hardware(PAPERS_HARDWARE))
    return facts_of(
        "modeled",
        load("boost-7b"),
        paper=[
            {
                **asdict(step.row),
                "published": step.row.seconds,
                "modeled": step.seconds,
                "strong": strongest(step.row) if step.row.tp > 1 else None,
            }
            for step in paper.steps()
        ],
        published=published_facts(),
        computed=[asdict(goal) for goal in computed.compute()],
        accumulation=list(computed.accumulation()),
    )


def gain(seconds: dict[str, float], over: str) -> float:
    """Speed-up of the best low-rank layout over another layout."""
    return seconds[over] / min(seconds[name] for name in LOW_RANK)


def goals(facts: Facts) -> list[Goal]:
    """The paper's ratios, and the goals that need no run."""
    return [ratio_goal(facts["published"]), *computed.goals(facts)]


def section(facts: Facts) -> Section:
    """Tables and figures."""
    return Section(
        "The paper's evaluation, modeled on GPUs",
        (
            "These are predictions of the performance model; nothing was measured. Runs are configured as in the paper: bf16 "
            f"weights and activations, {TOKENS}-token sequences, no recomputation. The published form of a layout has the "
            "extra collectives of the paper's code; plain `vanilla` is the strong form with sharded heads and channels. At TP 1, "
            "all layouts are identical.",
            Figure("modeled-steps", _STEPS_CAPTION, partial(_draw_steps, facts)),
            *published_parts(facts["published"]),
            _strong_table(facts),
            computed.table(facts),
            computed.accumulation_table(facts),
        ),
    )


_STEPS_CAPTION = "Step time of the paper's five sizes: bars are modeled, diamonds are published."


def _strong_table(facts: Facts) -> Table:
    rows = []
    for row in facts["paper"]:
        if strong := row["strong"]:
            tokens = SEQUENCES * TOKENS
            each = {
                "s": [f"{seconds:.2f}" for seconds in strong["seconds"].values()],
                "tokens/s": [format_count(tokens / seconds) for seconds in strong["seconds"].values()],
                "MFU": [f"{100 * mfu:.0f}" for mfu in strong["mfu"].values()],
                "peak": [f"{held / 1e9:.0f}" for held in strong["peak_bytes"].values()],
                "sent": [f"{sent / 1e9:.3g}" for sent in strong["sent_bytes"].values()],
            }
            gains = (f"{gain(strong['seconds'], over):.2f}" for over in AGAINST)
            rows.append((row["size"], f"{row['tp']} x {row['pp']}", *map(" / ".join, each.values()), *gains))
    return Table(
        f"The paper's steps with the strongest form of each layout, modeled. Cells: {' / '.join(STRONG)}. Peak memory and bytes "
        "sent in a step are maxima over GPUs. Gains are for the faster of btp and btp-sp.",
        (
            "size",
            "TP x PP",
            "step, s:",
            "tokens/s:",
            "MFU, %:",
            "peak, GB:",
            "sent, GB:",
            *(f"over {name}:" for name in AGAINST),
        ),
        tuple(rows),
    )


def _draw_steps(facts: Facts, path: Path) -> None:
    pyplot = drawing.pyplot()
    figure, axis = pyplot.subplots(figsize=(7.4, 3.8), layout="constrained")
    # Here, vanilla is in its published form.
    ways = {
        "full-rank": ("modeled", "megatron"),
        "vanilla": ("modeled", "vanilla-published"),
        "BOOST": ("modeled", "btp"),
        "btp-sp": ("strong", "btp-sp"),
    }
    width = 0.8 / len(ways)
    for number, (way, (kind, layout)) in enumerate(ways.items()):
        places = [place + (number - 1.5) * width for place in range(len(facts["paper"]))]
        forms = [
            row["modeled"] if kind == "modeled" else (row["strong"] or {}).get("seconds", {}) for row in facts["paper"]
        ]
        ours = [seconds.get(way, float("nan")) for seconds in forms]
        label = way if kind == "strong" else f"{way}, published form"
        axis.bar(places, ours, 0.9 * width, label=label, color=colors.color_of(layout))
        if kind == "modeled":
            theirs = [row["published"][way] for row in facts["paper"]]
            words = "published" if number == 0 else None
            axis.plot(
                places,
                theirs,
                "D",
                color=drawing.INK,
                markeredgecolor="white",
                markersize=5,
                linestyle="none",
                label=words,
            )
    axis.set_xticks(
        range(len(facts["paper"])), [f"{row['size']}\nTP {row['tp']}, PP {row['pp']}" for row in facts["paper"]]
    )
    axis.set_ylabel("seconds per step")
    axis.grid(visible=True, axis="y")
    figure.legend(loc="outside upper left", ncols=3)
    drawing.write(figure, path)


def arguments(parser: argparse.ArgumentParser) -> None:
    add_out(parser, "modeled")


def run(args: argparse.Namespace) -> int:
    save(args.out, model())
    return 0
