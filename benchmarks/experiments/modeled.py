"""The paper's evaluation, predicted by the performance model: GPU step times, and speed-ups of the best low-rank layout.

Every number here is modeled. Runs are configured as in `benchmarks.experiments.published`: bf16 weights and activations, 4096-token
sequences, no recomputation. In addition to the paper's three systems, there are stronger ones: `vanilla` with sharded heads and
channels, `megatron-sp`, and `btp-sp`.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from benchmarks.commands import add_out
from benchmarks.experiments import colors, computed
from benchmarks.experiments.document import Figure, Goal, Section, Table
from benchmarks.experiments.published import SEQUENCES, STEPS, TOKENS, Comparison, PublishedRow, Way, configuration
from benchmarks.experiments.published_report import PAPERS_HARDWARE, published_facts, published_parts, ratio_goal
from benchmarks.experiments.results import Facts, facts_of
from benchmarks.experiments.sections import save
from boost import drawing
from boost.config import load
from boost.format import format_count
from boost.plan.hardware import load_hardware
from boost.plan.prediction import prediction
from boost.plan.timing import Predictor

HARDWARE = ("a100-80g-8", "h100-80g")
"""Profiles of 8-GPU nodes."""

STRONG: dict[str, tuple[Way, tuple[str, ...]]] = {
    "megatron-sp": ("full-rank", ("--parallel.layout=megatron-sp", "--parallel.grouping=true")),
    "vanilla": ("vanilla", ("--parallel.vanilla=strong", "--parallel.grouping=true")),
    "btp": ("BOOST", ()),
    "btp-sp": ("BOOST", ("--parallel.layout=btp-sp",)),
}
"""The strongest form of each layout: the paper's system it is based on, and overrides."""

LOW_RANK = ("btp", "btp-sp")
WIDTHS = (4, 8)
"""TP sizes of the 7B."""

AGAINST = ("vanilla", "megatron-sp")
"""Baselines of the best low-rank layout, in their strongest form."""


@dataclass(frozen=True)
class Modeled:
    """Predicted steps of one model on one mesh, by layout."""

    hardware: str
    size: str
    tp: int
    pp: int
    sequences: int
    """Sequences per step."""
    micro_batch: int
    seconds: dict[str, float]
    mfu: dict[str, float]
    sent_bytes: dict[str, int]
    """Bytes sent by a process in a step, the maximum over processes."""
    peak_bytes: dict[str, int]
    """Peak memory, the maximum over processes."""
    usable_bytes: int
    """Usable memory per device."""


def predicted(hardware: str, row: PublishedRow, micro_batch: int, more: Sequence[str] = ()) -> Modeled:
    """Predicts steps of `row` under every layout of STRONG. `more`: additional overrides."""
    profile = load_hardware(hardware)
    predictor = Predictor(profile)
    configs = {name: configuration(way, row, micro_batch, [*own, *more]) for name, (way, own) in STRONG.items()}
    some, steps = configs["btp"].train, {name: predictor.predict(config) for name, config in configs.items()}
    sizes = {name: prediction(config, profile) for name, config in configs.items()}
    return Modeled(
        hardware, row.size, row.tp, row.pp, some.global_batch, some.micro_batch,
        {name: step.seconds for name, step in steps.items()},
        {name: step.mfu for name, step in steps.items()},
        {name: each.predicted_sent for name, each in sizes.items()},
        {name: each.predicted_peak for name, each in sizes.items()},
        profile.usable_bytes,
    )  # fmt: skip


def model(hardware: Sequence[str]) -> Facts:
    """Computes all predictions for these profiles. Raises ConfigError for an unknown profile."""
    seven = STEPS[2]
    # Batch 4 as one micro-batch: fewer and larger collectives, and it fits without recomputation.
    scaled = [predicted(name, PublishedRow(seven.size, tp, 1, {}), SEQUENCES) for name in hardware for tp in WIDTHS]
    paper = Comparison(load_hardware(PAPERS_HARDWARE))
    return facts_of(
        "modeled",
        load("boost-7b"),
        paper=[
            {
                **asdict(step.row),
                "published": step.row.seconds,
                "modeled": step.seconds,
                "strong": asdict(predicted(PAPERS_HARDWARE, step.row, 1)) if step.row.tp > 1 else None,
            }
            for step in paper.steps()
        ],
        scaled=[asdict(each) for each in scaled],
        published=published_facts(),
        computed=[asdict(goal) for goal in computed.compute()],
    )


def best(seconds: dict[str, float]) -> str:
    """The fastest of the low-rank layouts."""
    return min(LOW_RANK, key=lambda name: seconds[name])


def gain(seconds: dict[str, float], over: str) -> float:
    """Speed-up of the best low-rank layout over another layout."""
    return seconds[over] / seconds[best(seconds)]


def goals(facts: Facts) -> list[Goal]:
    """The paper's ratios, and the goals that need no run."""
    return [ratio_goal(facts["published"]), *computed.goals(facts)]


def section(facts: Facts) -> Section:
    """Tables and figures."""
    return Section(
        "The paper's evaluation, modeled on GPUs",
        (
            "Predictions of the performance model; nothing here was measured. Runs are configured as in the paper: bf16 "
            f"weights and activations, {TOKENS}-token sequences, no recomputation. The published form of a layout has the "
            "extra collectives of the paper's code; plain `vanilla` is the strong form with sharded heads and channels. At TP 1, "
            "all layouts are the same.",
            Figure("modeled-steps", _STEPS_CAPTION, partial(_draw_steps, facts)),
            *published_parts(facts["published"]),
            _strong_table(facts),
            _scaled_table(facts),
            computed.table(facts),
        ),
    )


_STEPS_CAPTION = "Step time of the paper's five sizes: bars are modeled, diamonds are published."


def _strong_table(facts: Facts) -> Table:
    rows = []
    for row in facts["paper"]:
        if strong := row["strong"]:
            tokens = strong["sequences"] * TOKENS
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
        f"The paper's steps with the strongest form of each layout, modeled. Cells: {' / '.join(STRONG)}. Peak memory, and bytes "
        "sent in a step, are those of the GPU that has the most. Gains are those of the faster of btp and btp-sp.",
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


def _scaled_table(facts: Facts) -> Table:
    rows = [(row["hardware"], str(row["tp"]), *_cells(row)) for row in facts["scaled"]]
    first = facts["scaled"][0]
    return Table(
        f"7B on one node, modeled: step time in ms for {first['sequences']} sequences in one micro-batch, and speed-up of the best "
        f"low-rank layout. {_memory_words(facts['scaled'])}",
        ("hardware", "TP:", *_HEADINGS),
        tuple(rows),
    )


_HEADINGS = (
    *(f"{name} ms:" for name in STRONG),
    "best low-rank layout",
    "over strong vanilla:",
    "over megatron-sp:",
)


def _cells(row: Facts) -> list[str]:
    seconds = row["seconds"]
    times = [f"{1e3 * seconds[name]:,.0f}" for name in STRONG]
    return [*times, best(seconds), *(f"{gain(seconds, over):.2f}" for over in AGAINST)]


def _memory_words(rows: Sequence[Facts]) -> str:
    """States whether all configurations fit in memory, or which do not."""
    short = [
        f"{name} on {row['hardware']}, {row['tp']} x {row['pp']}, {row['sequences']} sequences"
        for row in rows
        for name, needed in row["peak_bytes"].items()
        if needed > row["usable_bytes"]
    ]
    if short:
        return f"These do not fit in memory: {'; '.join(short)}."
    fullest = max(needed / row["usable_bytes"] for row in rows for needed in row["peak_bytes"].values())
    return f"All of them fit in memory (at most {fullest:.0%} used)."


def _seconds(row: Facts, kind: str, way: str) -> float:
    """Modeled seconds of a step in the published or the strongest form; nan if there is none."""
    seconds = row["modeled"] if kind == "modeled" else (row["strong"] or {}).get("seconds", {})
    return float(seconds.get(way, float("nan")))


def _draw_steps(facts: Facts, path: Path) -> None:
    pyplot = drawing.pyplot()
    figure, axis = pyplot.subplots(figsize=(7.4, 3.8), layout="constrained")
    # Here, vanilla is its published form.
    ways = {
        "full-rank": ("modeled", "megatron"),
        "vanilla": ("modeled", "vanilla-published"),
        "BOOST": ("modeled", "btp"),
        "btp-sp": ("strong", "btp-sp"),
    }
    width = 0.8 / len(ways)
    for number, (way, (kind, layout)) in enumerate(ways.items()):
        places = [place + (number - 1.5) * width for place in range(len(facts["paper"]))]
        ours = [_seconds(row, kind, way) for row in facts["paper"]]
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
        range(len(facts["paper"])),
        [f"{row['size']}\nTP {row['tp']}, PP {row['pp']}" for row in facts["paper"]],
    )
    axis.set_ylabel("seconds per step")
    drawing.tidy(axis)
    axis.grid(visible=False, axis="x")
    figure.legend(loc="outside upper left", ncols=3)
    drawing.write(figure, path)


def arguments(parser: argparse.ArgumentParser) -> None:
    words = f"profiles of 8-GPU nodes (default {' '.join(HARDWARE)})"
    parser.add_argument("--hardware", nargs="+", default=list(HARDWARE), metavar="PROFILE", help=words)
    add_out(parser, "modeled")


def run(args: argparse.Namespace) -> int:
    save(args.out, model(args.hardware))
    return 0
