"""What the paper reports, by chapter of the report: one sentence each, from the published numbers in `boost.plan.published`; and
how the code that its authors published differs from this one."""

from boost.measure.document import Table
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


CODE = Table(
    "Differences from the code that the paper's authors published, read from its source. No number on this page comes from running "
    "it: the paper's numbers are those that it prints, and all others are of this implementation, baselines included.",
    ("what", "the paper's code", "here"),
    (
        (
            "RMSNorm under TP",
            "by default, every process normalizes its part of a row by itself, which is another function",
            "the function of one process, under every layout and norm; loss and every gradient are tested in float64",
        ),
        (
            "online RMSNorm",
            "the statistic has an all-reduce of its own",
            "the statistic is sent with the latents: one collective per group of linears",
        ),
        (
            "low-rank checkpointing",
            "none: whole layers are recomputed, with their collectives",
            "latents are saved; recomputation sends nothing",
        ),
        (
            "full-rank baseline",
            "five all-reduces in the backward pass of a block",
            "two (`megatron`); or sequence-parallel (`megatron-sp`)",
        ),
        (
            "vanilla baseline",
            "attention, RoPE and the gated product of all heads on every process",
            "the same (`vanilla, published`), and with heads and channels shared out (`vanilla`)",
        ),
        ("embedding under BTP", "two all-reduces of the full width", "no collective"),
        ("grouping", "always", "an option, and so measured"),
        (
            "families",
            "CoLA, always with an activation between its factors, never with that of SwiGLU",
            "`svd`, `cola`, `lax`; both activations are options; LORO",
        ),
        ("grouped-query attention", "fails in the full-rank model", "every layout and family"),
        ("not supported", "sequence parallelism, overlap, torch.compile, CPUs", "all four are supported"),
    ),
)
"""How this implementation differs from the paper's code."""
