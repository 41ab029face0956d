"""Report of `python -m benchmarks single`: tables, a figure and goals."""

from pathlib import Path

from benchmarks.experiments.contest import Ratio, Seconds, in_words, launches, ratio, rounds_words, spread
from benchmarks.experiments.plain import EAGER, FORMS
from benchmarks.experiments.results import Facts, Figure, Goal, Section, Table
from boost import drawing

LOW_RANK = ("cola", "svd", "lax")
GEMM = "matrix product"
"""Contender that defines the ceiling."""
LEAST_SHARE, LEAST_SHARE_WIDE, WIDE = 0.85, 0.90, 1024
"""Goals: minimum ratio of speed-up to FLOP ratio below d = WIDE, the minimum from WIDE up, and WIDE."""
MOST_OVERHEAD, LEAST_COMPILED, LEAST_MFU = 1.0, 1.1, 0.62
"""Goals: maximum time relative to plain modules; minimum speed relative to compiled ones; minimum fraction of the ceiling."""


def section(facts: Facts) -> Section:
    """Tables and a figure."""
    return Section(
        "One process: low-rank against dense, and ours against plain PyTorch modules",
        (
            f"Whole training steps: forward and backward pass, clipping, AdamW. Times are medians of {rounds_words(facts)}, "
            "with quartiles in parentheses. Ratios are medians of per-round ratios, with 95% bootstrap intervals. "
            "Times are measured; FLOPs per token (6 per weight plus attention, without the embedding) are computed by formula.",
            *(_families(size) for size in facts["sizes"]),
            _overhead(facts),
            *(f"{s['size']}: skipped {name} ({why})." for s in facts["sizes"] for name, why in s["left_out"].items()),
            Figure("single-share", "Speed-up over dense next to the FLOP ratio", lambda path: draw(facts, path)),
        ),
    )


def goals(facts: Facts) -> list[Goal]:
    """The goals that this experiment decides."""
    shares = {f"{size['size']} {family}": share(size, family) for size in facts["sizes"] for family in LOW_RANK}
    least = {
        f"{size['size']} {family}": LEAST_SHARE_WIDE if size["models"][family]["dim"] >= WIDE else LEAST_SHARE
        for size in facts["sizes"]
        for family in LOW_RANK
    }
    overheads = {
        f"{size['size']} {family}": overhead(size, family)
        for size in facts["sizes"]
        for family in size["contests"]
        if family != "families"
    }
    where = "; ".join(_where(size) for size in facts["sizes"])
    return [
        Goal(
            "low-rank at TP=1 against dense, tokens/s",
            f">= {LEAST_SHARE_WIDE:.2f} x the FLOP ratio at d {WIDE}, {LEAST_SHARE} x below",
            where,
            _list(shares),
            all(found.low >= least[name] for name, found in shares.items()),
        ),
        Goal(
            "layout machinery at TP=1 against plain PyTorch modules",
            f"<= {MOST_OVERHEAD:.2f}x the time",
            where,
            _list(overheads),
            all(found.high <= MOST_OVERHEAD for found in overheads.values()),
        ),
        _compiled_goal(facts),
        _mfu_goal(facts),
    ]


def _compiled_goal(facts: Facts) -> Goal:
    what, figure = (
        "BOOST against the same model compiled by torch.compile, 1B, one GPU",
        f">= {LEAST_COMPILED:.2f}x the speed",
    )
    found = {
        f"{size['size']} {family}, {form}": versus(size, family, form)
        for size in facts["sizes"]
        for family, contest in size["contests"].items()
        for form in FORMS[1:]
        if form in contest["seconds"]
    }
    judged = any(size["device"] == "cuda" for size in facts["sizes"]) and bool(found)
    where = "; ".join(_where(size) for size in facts["sizes"]) if judged else ""
    met = all(each.low >= LEAST_COMPILED for each in found.values()) if judged else None
    on_cpus = "" if judged else f"needs a GPU; on this machine: {_list(found) or 'not measured'}"
    return Goal(what, figure, where, _list(found) if judged else "", met, remark=on_cpus)


def _mfu_goal(facts: Facts) -> Goal:
    what, figure = "low-rank MFU, 1B, bf16, one GPU", f">= {LEAST_MFU:.0%} of the measured GEMM ceiling"
    judged = [s for s in facts["sizes"] if s["device"] == "cuda" and s["gemm"]["dtype"] == "bfloat16"]
    if not judged:
        found = "; ".join(f"{s['size']} {_percent(ceiling(s, 'cola'))}" for s in facts["sizes"])
        return Goal(
            what,
            figure,
            "",
            "",
            None,
            remark=f"needs a GPU and bf16; cola on this machine, relative to its ceiling: {found}",
        )
    shares = {f"{s['size']} {family}": ceiling(s, family) for s in judged for family in LOW_RANK}
    met = all(found.value >= LEAST_MFU for found in shares.values())
    summary = ", ".join(f"{name} {_percent(found)}" for name, found in shares.items())
    return Goal(what, figure, "; ".join(_where(s) for s in judged), summary, met)


def share(size: Facts, family: str) -> Ratio:
    """Speed-up over dense / FLOP ratio."""
    scale = flop_ratio(size, family)
    found = speedup(size, family)
    return Ratio(found.value / scale, found.low / scale, found.high / scale)


def speedup(size: Facts, name: str) -> Ratio:
    """Tokens/s relative to our dense model."""
    seconds = size["contests"]["families"]["seconds"]
    return ratio(seconds["dense"], seconds[name])


def flop_ratio(size: Facts, family: str) -> float:
    """FLOPs of the dense model / FLOPs of a family."""
    return float(size["flops_per_token"]["dense"] / size["flops_per_token"][family])


def overhead(size: Facts, family: str) -> Ratio:
    """Our step time / the step time of plain modules."""
    seconds = size["contests"][family]["seconds"]
    return ratio(seconds["ours"], seconds[EAGER])


def versus(size: Facts, family: str, form: str) -> Ratio:
    """Our speed / the speed of plain modules in one of their forms."""
    seconds = size["contests"][family]["seconds"]
    return ratio(seconds[form], seconds["ours"])


def ceiling(size: Facts, name: str) -> Ratio:
    """FLOP/s of a training step / FLOP/s of the large GEMM. Peers are dense."""
    seconds, flops = size["contests"]["families"]["seconds"], size["flops_per_token"]
    work = flops.get(name, flops["dense"]) * size["tokens"]
    return ratio(work * launches(seconds[GEMM]), size["gemm"]["flops"] * launches(seconds[name]))


def _families(size: Facts) -> Table:
    seconds, tokens = size["contests"]["families"]["seconds"], size["tokens"]
    rows = []
    for name, times in seconds.items():
        if name == GEMM:
            continue
        family = name if name in size["flops_per_token"] else "dense"
        found, peer = spread(times), family != name
        cells = [name, f"{size['parameters'][family] / 1e6:.1f}", f"{size['flops_per_token'][family] / 1e6:.0f}"]
        cells += [
            f"{1e3 * found.median:.0f} ({1e3 * found.low:.0f} to {1e3 * found.high:.0f})",
            f"{tokens / found.median:.0f}",
            in_words(speedup(size, name)),
            f"{flop_ratio(size, family):.2f}",
            "" if peer or name == "dense" else in_words(share(size, name)),
            _percent(ceiling(size, name)),
        ]
        rows.append(tuple(cells))
    product = spread(seconds[GEMM])
    gemm = size["gemm"]
    caption = (
        f"{_where(size)}. The ceiling is the speed of a {gemm['width']} x {gemm['width']} x {gemm['width']} GEMM in "
        f"{gemm['dtype']} in the same rounds, {gemm['flops'] / product.median / 1e12:.3g} TFLOP/s. Measured."
    )
    headings = ("model", "parameters, M:", "MFLOP per token:", "step, ms:", "tokens/s:", "x dense:", "FLOP ratio:")
    return Table(caption, (*headings, "x dense / FLOP ratio:", "of ceiling:"), tuple(rows))


def _overhead(facts: Facts) -> Table:
    rows = []
    for size in facts["sizes"]:
        for family, turns in size["contests"].items():
            if family == "families":
                continue
            cells = [_milliseconds(turns["seconds"][name]) for name in ("ours", EAGER)]
            cells.append(in_words(overhead(size, family)))
            for form in FORMS[1:]:
                times = turns["seconds"].get(form)
                cells += [_milliseconds(times), in_words(versus(size, family, form))] if times else ["", ""]
            rows.append((size["size"], family, *cells))
    caption = (
        "Our step against the same model in plain PyTorch modules with the same weights (same-input linears merged, as in BOOST): "
        "eager, as a whole under torch.compile with a fused loss, and with compiled blocks. Measured, except for empty cells."
    )
    headings = ("size", "family", "ours, ms:", "plain, ms:", "ours / plain:", "compiled, ms:", "our speed / compiled:")
    return Table(caption, (*headings, "compiled blocks, ms:", "our speed / compiled blocks:"), tuple(rows))


def _milliseconds(times: Seconds) -> str:
    found = spread(times)
    return f"{1e3 * found.median:.0f} ({1e3 * found.low:.0f} to {1e3 * found.high:.0f})"


def _where(size: Facts) -> str:
    model, train = size["models"]["cola"], size["train"]
    return (
        f"{size['size']}: {model['layers']} blocks, d {model['dim']}, f {model['ffn_dim']}, {model['heads']} heads, r "
        f"{model['rank']}, V {model['vocab_size']}, {train['global_batch']} x {train['seq_len']} tokens, "
        f"{train['compute_dtype']}, {size['device']}"
    )


def _list(found: dict[str, Ratio]) -> str:
    return ", ".join(f"{name} {in_words(each)}" for name, each in found.items())


def _percent(found: Ratio) -> str:
    return f"{100 * found.value:.0f}% ({100 * found.low:.0f} to {100 * found.high:.0f})"


def draw(facts: Facts, path: Path) -> None:
    """Draws one bar per family and size: the speed-up over dense, with a mark at the FLOP ratio."""
    pyplot = drawing.pyplot()

    names = [(size, family) for size in facts["sizes"] for family in LOW_RANK]
    found = [speedup(size, family) for size, family in names]
    figure, axis = pyplot.subplots(figsize=(0.85 * len(names) + 1.0, 3.2), layout="constrained")
    errors = [[max(each.value - each.low, 0) for each in found], [max(each.high - each.value, 0) for each in found]]
    places = range(len(names))
    values, ratios = [each.value for each in found], [flop_ratio(size, family) for size, family in names]
    axis.bar(places, values, 0.65, color=drawing.SERIES[0], label="measured")
    axis.errorbar(places, values, yerr=errors, fmt="none", ecolor=drawing.INK, elinewidth=1)
    axis.hlines(ratios, [x - 0.4 for x in places], [x + 0.4 for x in places], color=drawing.SERIES[1], linewidth=2,
                label="FLOP ratio")  # fmt: skip
    for x, each, most in zip(places, found, ratios, strict=True):
        above = max(each.high, most)
        axis.annotate(f"{each.value:.2f} of {most:.2f}", (x, above), (0, 4), textcoords="offset points", ha="center")
    axis.axhline(1, color=drawing.MUTED, linewidth=1, linestyle="--")
    axis.set_xticks(places, [f"{family}\n{size['size']}" for size, family in names])
    axis.set(ylim=(0, 1.1 * max(*ratios, *values)), title="speed-up over dense")
    axis.grid(visible=True, axis="y")
    figure.legend(loc="outside upper right", ncols=2)
    drawing.write(figure, path)
