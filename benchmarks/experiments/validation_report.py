"""Report of the validation: verdicts, every measured step, and a figure."""

from pathlib import Path
from typing import Any, Literal

from benchmarks.experiments import colors
from benchmarks.experiments.results import Facts, Figure, Goal, Section, Table, machine, number, origin, percent
from benchmarks.experiments.validation import GPU, MACHINE, Verdict, off, verdicts
from boost import drawing
from boost.format import format_bytes

TITLES = {MACHINE: "Steps measured on CPUs", GPU: "Steps measured on a GPU"}

_PROBED = (
    "The speed of this shared machine varies by up to 2x. Therefore, the same small workload is timed right before "
    "and after each operation or step, in every process, during calibration and measurement. Seconds at the profile's speed are "
    "wall-clock seconds divided by the slowdown of that workload since calibration. All numbers are medians of interleaved "
    "rounds. A share is single-rank emulation of TP, without collectives."
)


def section(facts: Facts) -> Section:
    """The verdicts, a figure, and the steps of each device type."""
    rows = tuple(map(verdict_words, verdicts(facts)))
    headings = ("section", "what", "predictions:", "worst:", "limit:", "verdict")
    parts: list[str | Table | Figure] = [Table("All verdicts, with the worst prediction for each.", headings, rows)]
    measured = [name for name in (MACHINE, GPU) if facts[name]]
    if measured:
        caption = "Predicted over measured seconds (modeled over measured); the band is +-10%."
        parts.append(Figure("validation", caption, lambda path: draw(facts, path)))
    for name in (MACHINE, GPU):
        parts += [f"{TITLES[name]}.", *(measured_parts(facts[name]) if name in measured else ["Not measured."])]
    return Section("The performance model against measured steps", tuple(parts))


def goals(facts: Facts) -> list[Goal]:
    """The goals for time, bytes and memory of measured steps: how many are within the limit, and the worst one."""
    sections = [facts[name] for name in (MACHINE, GPU) if facts[name]]
    where = "; ".join(f"{len(each['rows'])} configurations on {machine(each['environment'])}" for each in sections)
    kinds: tuple[tuple[str, str, Literal["measured", "counted"]], ...] = (
        ("time", "time", "measured"), ("bytes", "bytes sent", "counted"), ("memory", "memory", "measured"),
    )  # fmt: skip
    result = []
    for words, what, kind in kinds:
        judged = [verdict for verdict in verdicts(facts) if verdict.what == what]
        if not judged:
            result.append(Goal(f"performance model: {words}", "", "", "", None, kind, "Not measured yet."))
            continue
        limit, errors = judged[0].limit, {row["name"]: off(row)[what] for each in sections for row in each["rows"]}
        beyond = [f"{name} {percent(error)}" for name, error in errors.items() if abs(error) > limit]
        summary = f"{len(errors) - len(beyond)} of {len(errors)}; worst {percent(max(errors.values(), key=abs))}"
        remark = f"Beyond the limit: {', '.join(beyond)}." if beyond else ""
        figure, met = f"within {limit:.0%}" if limit else "exact", all(verdict.holds for verdict in judged)
        result.append(Goal(f"performance model: {words}", figure, where, summary, met, kind, remark))
    return result


def verdict_words(verdict: Verdict) -> tuple[str, ...]:
    """Table cells: section, quantity, number of predictions, worst error, limit, verdict."""
    limit = "equal" if verdict.limit == 0 else f"{verdict.limit:.0%}"
    few = f"fewer than {verdict.least}" if verdict.count < verdict.least else "does not hold"
    words = "holds" if verdict.holds else few
    return verdict.section, verdict.what, str(verdict.count), percent(verdict.worst), limit, words


def measured_parts(section: Facts) -> list[str | Table]:
    """The steps of one device type: where they were measured, and every configuration."""
    environment, hardware = section["environment"], section["hardware"]
    lead = f"`{' '.join(environment['command'])}`; {origin(environment)}. Profile: {hardware['title']}."
    lead += f" {_PROBED}" if hardware["speeds"]["probe_us"] else ""
    headings: tuple[str, ...] = (
        "configuration",
        "processes:",
        "wall-clock seconds:",
        "at the profile's speed (quartiles):",
    )
    headings += ("predicted:", "off:")
    headings += ("peak memory, measured:", "predicted:", "off:", "bytes sent, counted:", "predicted:")
    body = []
    for row in section["rows"]:
        errors, (low, high) = off(row), row["quartiles_s"]
        body.append(
            (
                row["name"], str(row["processes"]),
                number(row["raw_s"]), f"{number(row['measured_s'])} ({number(low)} - {number(high)})",
                number(row["predicted_s"]),
                percent(errors["time"]),
                format_bytes(row["measured_peak"]), format_bytes(row["predicted_peak"]), percent(errors["memory"]),
                f"{row['counted_sent']:,}", "equal" if errors["bytes sent"] == 0 else f"{row['predicted_sent']:,}",
            )
        )  # fmt: skip
    caption = "Every configuration: measured time, counted memory and bytes, with predictions."
    return [lead, Table(caption, headings, tuple(body))]


def draw(facts: Facts, path: Path) -> None:
    """Plots predicted over measured seconds: one panel per device type, one marker per number of processes."""
    panels = [(TITLES[name], facts[name]["rows"]) for name in (MACHINE, GPU) if facts[name]]
    size = (4.2 * len(panels), 3.8)
    figure, axes = drawing.pyplot().subplots(1, len(panels), figsize=size, squeeze=False, layout="constrained")
    for axis, (title, rows) in zip(axes[0], panels, strict=True):
        pairs: dict[int, list[tuple[float, float]]] = {}
        for row in rows:
            pairs.setdefault(row["processes"], []).append((row["measured_s"], row["predicted_s"]))
        groups = {f"{count} process{'es' if count > 1 else ''}": points for count, points in pairs.items()}
        draw_pairs(axis, f"{title}, seconds", "measured", groups, "log")
    drawing.write(figure, path)


def draw_pairs(
    axis: Any, title: str, measured: str, groups: dict[str, list[tuple[float, float]]], scale: str, band: float = 0.1
) -> None:
    """Plots predicted over measured pairs by legend label, with a band of relative errors."""
    from matplotlib import ticker

    values = [value for points in groups.values() for point in points for value in point]
    low, high = min(values) / 1.3, max(values) * 1.2
    ends = [low, high]
    axis.fill_between(
        ends, [(1 - band) * end for end in ends], [(1 + band) * end for end in ends],
        color=drawing.LINE, linewidth=0, label=f"within {band:.0%}",
    )  # fmt: skip
    axis.plot(ends, ends, color=drawing.MUTED, linewidth=1)
    for place, ((name, points), marker) in enumerate(zip(groups.items(), "osD^vP", strict=False)):
        x, y = zip(*points, strict=True)
        axis.plot(x, y, marker, label=name, markersize=5, color=colors.color_of(name, place))
    axis.set(title=title, xlabel=measured, ylabel="predicted", xlim=ends, ylim=ends, xscale=scale, yscale=scale)
    if scale == "log":
        for side in (axis.xaxis, axis.yaxis):
            side.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
            side.set_major_formatter("{x:g}")
            side.set_minor_formatter(ticker.NullFormatter())
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(loc="upper left", handletextpad=0.4, fontsize=8.5)
