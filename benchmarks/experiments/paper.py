"""What the paper reports, by chapter of the report: one sentence each, from the published numbers in `boost.plan.published`."""

from boost.plan.published import COMMUNICATION, GEMM_MS, GROUPING_US, NORM_MS, SAVED_PER_ADDED, STEPS, UTILIZATION


def sentence(chapter: str) -> str:
    """The paper's figures for a chapter; '' if it has none."""
    made = _SENTENCES.get(chapter)
    return made() if made else ""


def _steps() -> str:
    cut = [row for row in STEPS if row.tp > 1]
    vanilla, full = (
        [row.seconds[way] / row.seconds["BOOST"] for row in cut] for way in ("vanilla", "full-rank")
    )  # fmt: skip
    return (
        f"On A100s, {cut[0].size} to {cut[-1].size}, BOOST's steps are {min(vanilla):.2f}x to {max(vanilla):.2f}x as fast as "
        f"vanilla's and {min(full):.2f}x to {max(full):.2f}x as fast as full-rank ones."
    )


def _gemms() -> str:
    times = {way: sum(GEMM_MS[way]) for way in ("full-rank", "vanilla", "BOOST")}
    shares = {way: " and ".join(f"{100 * share:.0f}%" for share in found) for way, found in UTILIZATION.items()}
    return (
        f"For its 7B at TP 4, the GEMMs of a block take {times['full-rank']:.2f} ms (full rank), {times['vanilla']:.2f} ms "
        f"(vanilla) and {times['BOOST']:.2f} ms (BOOST). Attention and MLP reach {shares['vanilla']} of an A100's peak under "
        f"vanilla, and {shares['BOOST']} under BOOST."
    )


def _communication() -> str:
    full, vanilla, boost = (COMMUNICATION["7B"][way] for way in ("full-rank", "vanilla", "BOOST"))
    return (
        f"For a block of its 7B at TP 4 and batch 4, forward: {full[0]} MiB in {full[1]} ms (full rank), {vanilla[0]} MiB in "
        f"{vanilla[1]} ms (vanilla), {boost[0]} MiB in {boost[1]} ms (BOOST)."
    )


def _grouping() -> str:
    gains = [f"{before / after:.2f}x at batch {batch}" for batch, (before, after) in GROUPING_US.items()]
    return f"Grouping makes a 7B block faster by {' and '.join(gains)}."


def _norms() -> str:
    shown = [f"{sync:g} ms against {online:g} ms at batch {batch}" for batch, (sync, online) in NORM_MS.items()]
    return f"RMSNorm of its 7B, sync against online: {' and '.join(shown)}."


def _recomputation() -> str:
    shown = [
        f"{ours:g} MB/ms against vanilla's {theirs:g} at batch {batch} ({ours / theirs:.2f}x)"
        for batch, (ours, theirs) in SAVED_PER_ADDED.items()
    ]
    return f"Memory saved per added time by low-rank checkpointing: {' and '.join(shown)}."


_SENTENCES = {
    "End to end": _steps,
    "GEMMs": _gemms,
    "Communication": _communication,
    "Grouping": _grouping,
    "Norms": _norms,
    "Recomputation": _recomputation,
    "Convergence": lambda: "The paper has no loss curves and no perplexities; its reviewers asked for them.",
}
