"""Report of the families experiment: a table with one row per contender, and a figure."""

import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.experiments.intervals import t_interval
from benchmarks.experiments.scores import EXPLAINED, SCORES
from boost.measure import drawing
from boost.measure.document import Figure, Goal, Section, Table
from boost.measure.results import Facts

VARIES = {
    "loro": "svd",
    "svd-spectral": "svd",
    "lax-svd": "svd",
    "lax": "cola",
    "cola-kv": "cola",
    "lax-tensor": "lax",
    "lax-dense": "lax",
    # No longer trained (docs/negative-results.md), but in results.
    "svd-dlr": "svd",
    "cola-dlr": "cola",
    "cola-spectron": "cola",
}
"""What each variant is compared with, if that is not the first contender."""


def rows(facts: Facts) -> list[Facts]:
    """One row per contender, in order. Spreads are standard deviations over seeds; None for a single seed.

    `paired`: held-out loss minus the first contender's with the same seed, and thus the same data order.
    """
    first = next(iter(facts["contenders"]))
    baseline = _losses(facts, first)
    result = []
    for name, contender in facts["contenders"].items():
        losses = _losses(facts, name)
        sound = {seed: loss for seed, loss in losses.items() if loss is not None}
        whole = len(sound) == len(losses)
        paired = [loss - base for seed, loss in sound.items() if (base := baseline[seed]) is not None]
        seconds = step_seconds(facts["timing"]["seconds"][name], contender["exact_every"])
        equal = _equal_time(facts, name)
        result.append(
            {
                "contender": name,
                **{key: contender[key] for key in ("linear", "at_edge", "parameters", "flops_per_token")},
                "lr": contender["lr"] * contender.get("rate_scale", 1.0),
                "seeds": len(losses),
                "diverged": len(losses) - len(sound),
                "loss": _mean_and_spread(list(sound.values())) if whole else None,
                "perplexity": _mean_and_spread([math.exp(loss) for loss in sound.values()]) if whole else None,
                "paired": _mean_and_spread(paired) if whole and len(paired) == len(losses) and name != first else None,
                "step_s": seconds,
                "equal_steps": facts.get("equal_steps", {}).get(name),
                "equal_loss": _mean_and_spread(equal) if equal else None,
            }
        )
    return result


def step_seconds(seconds: dict[str, list[float]], exact_every: int) -> tuple[float, float, float]:
    """(median, lower quartile, upper quartile) of step seconds; for LORO, including the amortized cost of exact steps."""
    low, middle, high = _quartiles(seconds["usual"])
    added = 0.0
    if exact_every:
        added = (statistics.median(seconds["exact"]) - middle) / exact_every
    return middle + added, low + added, high + added


def section(facts: Facts) -> Section:
    """The table and the figure."""
    config, settings, timing = facts["config"], facts["settings"], facts["timing"]
    train, model = config["train"], config["model"]
    found = rows(facts)
    first = found[0]
    sweep, seed, steps = settings["sweep"]
    chosen = "lr: optim.lr for all. "
    if sweep:
        grid = ", ".join(f"{lr:g}" for lr in sweep)
        chosen = (
            f"lr: the best of {grid} by held-out loss after {steps} steps on seed {seed} (* at the edge of the sweep). "
        )
    scaled = {c["rate"]: c["rate_scale"] for c in facts["contenders"].values() if c.get("rate_scale", 1.0) != 1}
    for name, scale in scaled.items():
        chosen += f"Where {name} takes the place of lr: {scale:g} times that, with optim.lr for all other parameters. "
    if every := next((c["exact_every"] for c in facts["contenders"].values() if c["exact_every"]), 0):
        chosen += f"LORO: one exact step every {every} steps, followed by a learning-rate dip. "
    commits = sorted({(row["git"] or {}).get("commit") or "unknown" for row in facts["runs"]})
    tokens = train["global_batch"] * train["seq_len"]
    words = (
        f"Width {model['dim']}, MLP {model['ffn_dim']}, {model['layers']} blocks, vocabulary {model['vocab_size']}; "
        f"{train['steps']} steps of {tokens} tokens ({train['steps'] * tokens / 1e6:.2f}M), seeds "
        f"{', '.join(str(s) for s in facts['seeds'])}. For a given seed, all contenders use the same tokens, data order and "
        f"schedule. {chosen}Commits of the runs: {', '.join(commit[:10] for commit in commits)}."
    )
    caption = (
        "Measured. Loss in nats per token on all held-out text, ± standard deviation over seeds. Against "
        f"{first['contender']}: difference in loss, paired by seed. ms: median step time with quartiles over {timing['rounds']} "
        "interleaved rounds on one thread. Parameters and FLOPs are computed by formula."
    )
    headings: tuple[str, ...] = (
        "model",
        "linear",
        "parameters, M:",
        "FLOPs per token, M:",
        "lr:",
        "held-out loss:",
        "perplexity:",
    )
    headings += (f"against {first['contender']}:", "ms per step:")
    below = (
        "Left: training loss by step at equal tokens; bands span the seeds. Right: held-out loss, mean and standard deviation over "
        f"seeds{', also at equal time (hollow)' if facts.get('equal_steps') else ''}."
    )
    return Section(
        "Families side by side",
        (
            words,
            Table(caption, headings, tuple(_cells(row, first) for row in found)),
            *_equal_time_table(found),
            *_difference_table(facts),
            *_score_table(facts),
            Figure("families", below, lambda path: draw(facts, path)),
        ),
    )


def _equal_time_table(found: Sequence[Facts]) -> Iterator[Table]:
    """The runs of equal time, if there are any."""
    if not any(row["equal_steps"] for row in found):
        return
    cells = tuple(
        (
            row["contender"],
            str(row["equal_steps"]),
            _plus_minus(row["equal_loss"], ".4f") or "diverged",
            _plus_minus(row["loss"], ".4f"),
        )
        for row in found
    )
    caption = (
        f"Measured at equal time: each model is trained for as many steps as take the time of {found[0]['contender']}'s, by the "
        "median step, on a schedule of that length."
    )
    yield Table(caption, ("model", "steps:", "held-out loss at equal time:", "at equal tokens:"), cells)


def differences(facts: Facts) -> dict[tuple[str, str], list[tuple[float, float, float] | None]]:
    """(mean, lower, upper) of the differences in held-out loss between contenders, paired by seed, with 95% t intervals: at equal
    tokens and, if there are such runs, at equal time. By (contender, what it is compared with). None if a run diverged."""
    first, pairs = next(iter(facts["contenders"])), {}
    for name in facts["contenders"]:
        base = VARIES.get(name, first)
        if name == first:
            continue
        pair = name, base if base in facts["contenders"] else first
        found = [_paired([list(_losses(facts, each).values()) for each in pair])]
        if facts.get("equal_steps"):
            found.append(_paired([_equal_time(facts, each) for each in pair]))
        pairs[pair] = found
    return pairs


def _paired(losses: Sequence[Sequence[float | None]]) -> tuple[float, float, float] | None:
    sound = [a - b for a, b in zip(*losses, strict=False) if a is not None and b is not None]
    return t_interval(sound) if sound and len(sound) == max(map(len, losses)) else None


def _difference_table(facts: Facts) -> Iterator[Table]:
    """Every variant against what it varies; nothing for a single seed."""
    if len(facts["seeds"]) < 2:
        return

    def cell(found: tuple[float, float, float] | None) -> str:
        if found is None:
            return "diverged"
        mean, low, high = found
        return f"{mean:+.3f} ({low:+.3f} to {high:+.3f}){'' if low * high > 0 else ', no difference shown'}"

    pairs = differences(facts)
    headings = ("models", "equal tokens:", *(("equal time:",) if facts.get("equal_steps") else ()))
    cells = tuple((f"{a} - {b}", *(cell(each) for each in found)) for (a, b), found in pairs.items())
    yield Table("Measured. Differences in held-out loss, paired by seed, with 95% t intervals.", headings, cells)


def _score_table(facts: Facts) -> Iterator[Table]:
    """Scores of the runs at equal tokens, if there are any."""
    questions = facts["settings"].get("questions")
    if not questions:
        return
    cells = []
    for name in facts["contenders"]:
        runs = [run["scores"] for run in _runs(facts, name).values()]
        values = {score: [100 * run[score] for run in runs if run is not None] for score in SCORES}
        whole = all(run is not None for run in runs)
        found = (_plus_minus(_mean_and_spread(each), ".1f") if whole else "diverged" for each in values.values())
        cells.append((name, *found))
    caption = (
        f"Measured after the runs above, by lm-evaluation-harness on {questions} questions per task from held-out text, ± standard "
        f"deviation over seeds. {EXPLAINED}"
    )
    yield Table(caption, ("model", *(f"{heading}:" for heading in SCORES.values())), tuple(cells))


def goals(facts: Facts) -> list[Goal]:
    """None: no performance goal depends on this experiment."""
    return []


def _cells(row: Facts, first: Facts) -> tuple[str, ...]:
    def share(key: str) -> str:
        return f"{row[key] / 1e6:.2f} ({row[key] / first[key]:.0%})"

    middle, low, high = (1e3 * s for s in row["step_s"])
    diverged = f"diverged, {row['diverged']} of {row['seeds']}"
    return (
        row["contender"], row["linear"], share("parameters"), share("flops_per_token"),
        f"{row['lr']:g}{' *' if row['at_edge'] else ''}",
        _plus_minus(row["loss"], ".4f") or diverged, _plus_minus(row["perplexity"], ".2f") or diverged,
        _plus_minus(row["paired"], "+.4f"), f"{middle:.0f} ({low:.0f} - {high:.0f})",
    )  # fmt: skip


def _plus_minus(numbers: Sequence[float | None] | None, form: str) -> str:
    if numbers is None or numbers[0] is None:
        return ""
    mean, spread = numbers
    return f"{mean:{form}}" + ("" if spread is None else f" ± {spread:{form.lstrip('+')}}")


def _losses(facts: Facts, name: str, kind: str = "runs") -> dict[int, float | None]:
    """Final held-out loss by seed, for this comparison's runs only; the file may have runs of earlier comparisons."""
    return {seed: run["loss"] for seed, run in _runs(facts, name, kind).items()}


def _runs(facts: Facts, name: str, kind: str = "runs") -> dict[int, Facts]:
    """Runs by seed, for this comparison only."""
    lr = facts["contenders"][name]["lr"]
    every = {row["seed"]: row for row in facts[kind] if (row["contender"], row["lr"]) == (name, lr)}
    return {seed: every[seed] for seed in facts["seeds"]}


def _equal_time(facts: Facts, name: str) -> list[float]:
    """Final held-out losses of the runs of equal time; empty if there are none, or if one diverged."""
    steps = facts.get("equal_steps", {}).get(name)
    if steps is None:
        return []
    losses = _losses(facts, name, "runs" if steps == facts["config"]["train"]["steps"] else "equal_time")
    sound = [loss for loss in losses.values() if loss is not None]
    return sound if len(sound) == len(losses) else []


def _mean_and_spread(numbers: Sequence[float]) -> tuple[float, float | None]:
    return statistics.fmean(numbers), statistics.stdev(numbers) if len(numbers) > 1 else None


def _quartiles(numbers: Sequence[float]) -> tuple[float, float, float]:
    if len(numbers) < 2:
        return numbers[0], numbers[0], numbers[0]
    low, middle, high = statistics.quantiles(numbers, n=4, method="inclusive")
    return low, middle, high


def smooth(losses: Sequence[float], window: int) -> list[float]:
    """Moving averages over the last `window` steps, fewer at the start."""
    return [statistics.fmean(losses[max(0, end - window) : end]) for end in range(1, len(losses) + 1)]


def draw(facts: Facts, path: Path) -> None:
    """Draws loss by step with a band over seeds, and the held-out loss of every contender at equal tokens and at equal time."""
    pyplot = drawing.pyplot()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(7.6, 3.7), layout="constrained")
    names = list(facts["contenders"])
    colors = {name: drawing.color_of(name, number - 1) for number, name in enumerate(names)}
    _draw_curves(left, facts, colors)
    for place, name in enumerate(names):
        tokens = [loss for loss in _losses(facts, name).values() if loss is not None]
        for losses, face in ((_equal_time(facts, name), "white"), (tokens, colors[name])):
            if losses:
                mean, spread = _mean_and_spread(losses)
                right.errorbar(
                    mean, place, xerr=spread, marker="o", markersize=6, color=colors[name], markerfacecolor=face
                )
    right.set_yticks(range(len(names)), names)
    right.invert_yaxis()
    right.set(title="held-out loss", xlabel="nats per token")
    if facts.get("equal_steps"):
        marks = [
            pyplot.Line2D([], [], linestyle="", marker="o", color=drawing.MUTED, markerfacecolor=face, label=label)
            for label, face in (("equal tokens", drawing.MUTED), ("equal time", "white"))
        ]
        right.legend(handles=marks, loc="best")
    for axis in (left, right):
        drawing.tidy(axis)
    drawing.write(figure, path)


def _draw_curves(axis: Any, facts: Facts, colors: dict[str, str]) -> None:
    steps = facts["config"]["train"]["steps"]
    window = max(steps // 20, 1)
    for name, contender in facts["contenders"].items():
        curves = [
            smooth(row["losses"], window)
            for row in facts["runs"]
            if (row["contender"], row["lr"]) == (name, contender["lr"]) and row["seed"] in facts["seeds"]
        ]
        length = min(len(curve) for curve in curves)
        drawn = range(0, length, max(window // 4, 1))  # means of a window change little in a quarter of it
        at = [[curve[step] for curve in curves] for step in drawn]
        by_step = [step + 1 for step in drawn]
        axis.plot(by_step, [statistics.fmean(losses) for losses in at], color=colors[name])
        axis.fill_between(
            by_step, [min(losses) for losses in at], [max(losses) for losses in at],
            color=colors[name], alpha=0.2, linewidth=0,
        )  # fmt: skip
    shown = sorted(loss for row in facts["runs"] for loss in smooth(row["losses"], window)[steps // 10 :])
    if shown:  # exclude the steep drop of the first steps, which would flatten the rest of the plot
        axis.set_ylim(shown[0] - 0.1, shown[-1] + 0.1)
    axis.set(xlabel="step", title=f"training loss, {window}-step mean")
