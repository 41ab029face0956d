"""Draws six of the pictures in docs/pictures: `python docs/draw.py`. The output is deterministic.

Rows, shards and collectives are derived from the layouts (`boost.plan.pictures`), and bytes from the collective table and the
planner's trace of the decoder. Step times and the fastest layouts come from result files.
"""

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import facts

from boost.config import Config, load
from boost.drawing import INK, MARGIN, MUTED, PAPER, WIDTH, Canvas
from boost.plan.categories import LATENTS, RESIDUAL, WIDE
from boost.plan.inspection import Inspection, inspect
from boost.plan.pictures import BAR, COLORS, FORWARD, PATH, BlockCanvas, DiagramRow, block_rows
from boost.plan.trace import pass_of_block

PICTURES = Path(__file__).resolve().parent / "pictures"
GAIN = "\N{GREEK SMALL LETTER GAMMA}"
TP, RANK, TOKENS = 4, 1, 16384
"""TP size, the TP rank shown, tokens per micro-batch (four sequences of 4,096)."""


def config_of(layout: str, family: str = "cola", **parallel: str) -> Config:
    """The 7B shape under a layout: TP 4, one micro-batch of 16,384 tokens, bf16."""
    flags = {
        "model.family": family,
        "parallel.layout": layout,
        "parallel.tp": TP,
        "train.micro_batch": 4,
        "train.global_batch": 4,
        "train.seq_len": 4096,
        **{f"parallel.{key}": value for key, value in parallel.items()},
    }
    return load("boost-7b", [f"--{key}={value}" for key, value in flags.items()])


# One block under four layouts, side by side.

COLUMN = (WIDTH - 2 * MARGIN) / 4
SIDE_BY_SIDE = (
    ("megatron (full-rank)", "megatron", "dense"),
    ("vanilla", "vanilla", "cola"),
    ("btp", "btp", "cola"),
    ("btp-sp", "btp-sp", "cola"),
)


def layouts_picture() -> None:
    """Draws one TP rank under four layouts, one per column; attention, gated product and residual stream are aligned."""
    inspections = [inspect(config_of(layout, family)) for _, layout, family in SIDE_BY_SIDE]
    columns = [segments(rescaled(list(block_rows(inspection)))) for inspection in inspections]
    heights = [max(sum(row_height(row) + 8 for row in part) for part in parts) for parts in zip(*columns, strict=True)]
    top = 120.0
    bottom = top + sum(heights)
    canvas = BlockCanvas(
        bottom + 172,
        "One block under four layouts: what one of 4 TP ranks holds, and what it sends",
        "7B shape: d = 4096, f = 11008, r = 1024; T = 16,384 tokens, bf16. "
        "Filled: the shard of this rank. Outlined: the whole tensor.",
    )
    for index, ((words, _, _), parts) in enumerate(zip(SIDE_BY_SIDE, columns, strict=True)):
        x, color = MARGIN + index * COLUMN, COLORS[index]
        canvas.box(x + 3, top - 34, COLUMN - 6, bottom - top + 40, color, radius=8, alpha=0.055)
        canvas.text(words, x + COLUMN / 2, top - 15, 13, color, "center", bold=True)
        y = top
        for part, height in zip(parts, heights, strict=True):
            column_part(canvas, part, x, y, height, color)
            y += height
    bytes_chart(canvas, inspections, bottom + 34)
    canvas.write(PICTURES / "layouts.svg")


def rescaled(rows: Sequence[DiagramRow], width: float = 50.0) -> list[DiagramRow]:
    """Rows whose residual stream is `width` pixels wide."""
    scale = width / next(row.pieces[0].width for row in rows if row.residual)
    return [
        replace(row, pieces=tuple(replace(p, width=p.width * scale, height=p.height * scale) for p in row.pieces))
        for row in rows
    ]


def segments(rows: Sequence[DiagramRow]) -> list[list[DiagramRow]]:
    """Splits rows before each aligned row: residual stream, attention, gated product."""
    starts = [index for index, row in enumerate(rows) if row.residual or row.boxes]
    return [list(rows[start:stop]) for start, stop in itertools.pairwise([*starts, len(rows)])]


def row_height(row: DiagramRow) -> float:
    """Height of a row in a column: its text above its drawing."""
    if row.bars:
        return len(row.lines) * (BAR + 3) - 3
    words = 15 + 13 * len(row.details)
    return words if row.boxes else words + 2 + row.size[1]


def column_part(canvas: BlockCanvas, rows: Sequence[DiagramRow], x: float, y: float, height: float, color: str) -> None:
    """Draws the rows of one column between two aligned rows, with unused space spread evenly."""
    middle = x + COLUMN / 2
    spare = (height - sum(row_height(row) + 8 for row in rows)) / max(len(rows), 1)
    for row in rows:
        for line, (side, words) in enumerate(row.lines):
            says = f"{'↓↑'[side]} {words.partition(' · ')[0].replace(' + statistic', ' + stat.')}"
            canvas.collective(side, says, x + 9, y + line * (BAR + 3), COLUMN - 18)
        if not row.bars:
            canvas.text(row.title, middle, y + 11, 11.5, align="center", bold=True)
            for line, detail in enumerate(row.details):
                canvas.text(detail, middle, y + 24 + 13 * line, 10.5, MUTED, "center", room=COLUMN - 18)
            canvas.tensors(row, middle, y + 17 + 13 * len(row.details), color, RANK, TP)
        y += row_height(row) + 8 + spare


def sent_per_token(inspection: Inspection) -> float:
    """Bytes that one TP rank sends for a block, forward and backward, per token of the micro-batch."""
    issued = inspection.of_micro_batch
    return sum(c.sent_bytes for c in issued if c.layer == inspection.layer) / inspection.tokens


def bytes_chart(canvas: Canvas, inspections: Sequence[Inspection], y: float) -> None:
    """Draws bytes per token as bars, and the legend."""
    canvas.text("Sent by one TP rank per token and block, forward and backward:", MARGIN, y, 12.5, bold=True)
    sent = [sent_per_token(inspection) for inspection in inspections]
    for index, (number, (_, layout, _)) in enumerate(zip(sent, SIDE_BY_SIDE, strict=True)):
        top, width = y + 12 + 19 * index, 560 * number / max(sent)
        canvas.text(layout, MARGIN + 76, top + 11, 12, align="right")
        canvas.box(MARGIN + 86, top, width, 13, COLORS[index], radius=2)
        canvas.text(f"{number / 1000:.1f} kB", MARGIN + 94 + width, top + 11, 12)
    words = (
        "↓ collective of the forward pass · ↑ of the backward pass · hatched: replicated, gradient summed once per step"
    )
    canvas.text(words, MARGIN, y + 112, 11.5, MUTED)


# Online norm against sync.


def online_norm_picture() -> None:
    """Draws the forward pass of one group of linears with each norm, from left to right."""
    canvas = Canvas(
        330,
        "RMSNorm of a hidden-sharded residual stream: sync and online",
        "Forward pass of q, k and v on one of p TP ranks; residual x: [T, d/p], A [3r, d/p], B [3d/p, r]. "
        "Dark: a collective, for which every rank waits.",
    )
    counts = {norm: forward_collectives(norm) for norm in ("sync", "online")}
    rows = (
        ("sync", [("s = Σ x²", "[T, 1]", 0), ("all-reduce", "s: T numbers", 1), (f"x {GAIN} / rms", "[T, d/p]", 0),
                  ("u = A x", "[T, 3r] partial", 0), ("all-reduce", "u: 3r T numbers", 1), ("act(u)", "[T, 3r]", 0),
                  ("y = B h", "[T, 3d/p]", 0)]),
        ("online", [("s = Σ x²", "[T, 1] partial", 0), (f"u = A ({GAIN} x)", "[T, 3r] partial", 0),
                    ("all-reduce", "u, s: (3r + 1) T numbers", 1), ("act(u / rms)", "[T, 3r]", 0), ("y = B h", "[T, 3d/p]", 0)]),
    )  # fmt: skip
    for index, (norm, steps) in enumerate(rows):
        y = 108 + 100 * index
        canvas.text(norm, MARGIN, y + 18, 14, COLORS[index * 2], bold=True)
        canvas.text(f"{counts[norm]} collectives", MARGIN, y + 35, 11, MUTED)
        canvas.text("a block, forward", MARGIN, y + 48, 11, MUTED)
        chain(canvas, steps, y, COLORS[index * 2])
    words = "Both compute the same function: the norm scales a whole token by 1 / rms, so it commutes with A. "
    canvas.text(f"{words}The gain {GAIN} scales the columns of A.", MARGIN, 300, 12, room=WIDTH - 2 * MARGIN)
    canvas.write(PICTURES / "online-norm.svg")


def forward_collectives(norm: str) -> int:
    """Number of collectives in the forward pass of one block."""
    inspection = inspect(config_of("btp", norm=norm))
    issued = inspection.of_micro_batch
    return sum(c.layer == inspection.layer and c.phase == "forward" for c in issued)


def chain(canvas: Canvas, steps: Sequence[tuple[str, str, int]], y: float, color: str) -> None:
    """Draws operations from left to right; collectives are dark and wider."""
    left, gap = MARGIN + 104, 8.0
    total = sum(1.35 if collective else 1.0 for _, _, collective in steps)
    unit = min(104.0, (WIDTH - MARGIN - left - gap * (len(steps) - 1)) / total)
    for index, (words, detail, collective) in enumerate(steps):
        width = unit * (1.35 if collective else 1.0)
        if index:
            canvas.line([(left - gap, y + 28), (left, y + 28)], PATH)
        fill, ink, muted, edge = (*FORWARD, "#d0d5dd", "none") if collective else (PAPER, INK, MUTED, color)
        canvas.box(left, y, width, 56, fill, edge, radius=5)
        canvas.text(words, left + width / 2, y + 24, 12.5, ink, "center", bold=True, room=width - 8)
        canvas.text(detail, left + width / 2, y + 42, 11, muted, "center", room=width - 8)
        left += width + gap


# What recomputation saves and recomputes.

POLICIES = ("none", "low-rank", "low-rank+attention-output", "full-block")


def recomputation_picture() -> None:
    """Draws which tensors of a block each policy saves or recomputes, and the bytes saved."""
    saved = {policy: saved_tensors(policy) for policy in POLICIES}
    everything = [("residual stream", RESIDUAL), ("latents of q, k, v", LATENTS), ("q, k, v", WIDE), ("attention output", WIDE),
                  ("latents of o", LATENTS), ("residual stream, before the MLP", RESIDUAL), ("latents of gate, up", LATENTS),
                  ("gate, up, their product", WIDE), ("latents of down", LATENTS)]  # fmt: skip
    top, line, first, width = 128.0, 27.0, MARGIN + 236, 152.0
    canvas = Canvas(
        top + line * len(everything) + 110,
        "train.recompute: what a block saves for its backward pass, under btp",
        "Filled: saved. Striped: recomputed. Tensors from the block's input to its output; 7B shape, TP 4, 16,384 tokens, bf16.",
    )
    color_of = {RESIDUAL: COLORS[0], LATENTS: COLORS[1], WIDE: COLORS[2]}
    end = top + line * len(everything)
    for column, policy in enumerate(POLICIES):
        x = first + column * width
        canvas.text(policy, x + width / 2, top - 12, 12.5, align="center", bold=True, room=width - 8)
        for row, (is_saved, (_, category)) in enumerate(zip(present(saved[policy]), everything, strict=True)):
            color = color_of[category]
            canvas.box(
                x + 8, top + row * line, width - 16, 20, color, radius=4, alpha=1.0 if is_saved else 0.14,
                hatch="" if is_saved else color,
            )  # fmt: skip
        total = sum(size for _, size in saved[policy])
        canvas.text(f"{total / 1e6:,.0f} MB", x + width / 2, end + 16, 13, align="center", bold=True)
        canvas.text(f"{recommunicated(policy)} collectives", x + width / 2, end + 40, 12, align="center")
    for row, (words, _) in enumerate(everything):
        canvas.text(words, MARGIN, top + row * line + 15, 12.5)
    canvas.text("saved by a block and rank", MARGIN, end + 16, 12.5, bold=True)
    canvas.text("re-communicated", MARGIN, end + 40, 12.5, bold=True)
    for column, words in enumerate(("residual stream", "latents, width r", "wide activations, d or f")):
        canvas.box(MARGIN + 190 * column, end + 68, 14, 14, COLORS[column], radius=2)
        canvas.text(words, MARGIN + 190 * column + 20, end + 79, 12)
    canvas.write(PICTURES / "recomputation.svg")


def recomputing(policy: str) -> Config:
    """The btp configuration with a recomputation policy."""
    return config_of("btp").changed(train={"recompute": policy})


def recommunicated(policy: str) -> int:
    """Number of collectives of one block that the backward pass repeats."""
    inspection = inspect(recomputing(policy))
    issued = inspection.of_micro_batch
    return sum(c.layer == inspection.layer and c.phase == "recompute" for c in issued)


def saved_tensors(policy: str) -> list[tuple[str, int]]:
    """(category, bytes) of each tensor that the second block saves, excluding weights, in forward order."""
    return [held for held in pass_of_block(recomputing(policy), 1).saved if held[0] in (RESIDUAL, LATENTS, WIDE)]


def present(saved: Sequence[tuple[str, int]]) -> list[bool]:
    """Which of the picture's nine rows are saved, determined by category and order."""
    flags = dict.fromkeys(range(9), False)
    order = {RESIDUAL: [0, 5], LATENTS: [1, 4, 6, 8], WIDE: [2, 3, 7]}
    residual = [size for category, size in saved if category == RESIDUAL]
    latents = [size for category, size in saved if category == LATENTS and size > 2**20]  # not statistics
    wide = [size for category, size in saved if category == WIDE and size > 2**20]
    for row in order[RESIDUAL][: len(residual)] + order[LATENTS][: len(latents)]:
        flags[row] = True
    for row in {1: [3], 7: [2, 3, 7], 0: []}[len(wide)]:  # attention's output; q, k, v, output, gate, up, product
        flags[row] = True
    return list(flags.values())


# Step times.

RESULTS = facts.ROOT / "benchmarks"
DENSE, VANILLA, BTP = "dense (Megatron)", "low-rank, vanilla TP", "low-rank, BTP"
LAYOUTS = {DENSE: "megatron-sp", VANILLA: "vanilla", BTP: "btp"}


def step_times() -> dict[tuple[str, str, str], dict[str, float]]:
    """Milliseconds per step by layout, for each (measured or predicted, hardware, what runs)."""
    wire, column = RESULTS / "results" / "wire.md", "1756 Mbit/s, share-matched, ms"
    rows = {**LAYOUTS, VANILLA: "vanilla, published", BTP: "btp, online"}
    modeled = {DENSE: "full-rank s", VANILLA: "vanilla s", BTP: "BOOST s"}

    def of_7b(place: int) -> dict[str, float]:
        text = (RESULTS / "results" / "modeled.md").read_text(encoding="utf-8")
        cells = {name: facts.cell(text, f"Step time > 7B > {heading}") for name, heading in modeled.items()}
        return {name: 1000 * float(cell.split(" / ")[place].split()[0]) for name, cell in cells.items()}

    return {
        ("measured", "2 CPU cores, TP 2", "d 1024, network throttled"): {
            name: float(facts.current("0", wire, f"TP 2: step > {row} > {column}").replace(",", ""))
            for name, row in rows.items()
        },
        ("measured", "1 H200: one of 4 TP ranks", "7B blocks, nothing is sent"): {
            name: float(facts.current("0.0", RESULTS / "gpu" / "h200.json", f"shares > rows > {layout} > ms"))
            for name, layout in LAYOUTS.items()
        },
        ("measured by the paper", "4 A100s, TP 4", "7B"): of_7b(0),
        ("predicted", "4 A100s, TP 4", "7B"): of_7b(1),
    }


def steps_picture(columns: int, text: float, name: str, title: str, subtitle: str) -> None:
    """Draws the step times of a dense model and of a low-rank one under vanilla TP and BTP as bars. `text`: size of the text."""
    groups = step_times()
    panel, line, height = (WIDTH - 2 * MARGIN) / len(groups), 1.4 * text, 150.0
    row = height + 5 * line + 14
    legend, legend_lines = 82 + row * math.ceil(len(groups) / columns), 1 if columns > 2 else 3
    canvas = Canvas(legend + 1.6 * line * legend_lines, title, subtitle)
    width = columns * panel + 2 * MARGIN
    canvas.figure.set_figwidth(width / 100)
    canvas.axes.set_xlim(0, width)
    for index, ((kind, where, what), times) in enumerate(groups.items()):
        left, bottom = MARGIN + index % columns * panel, 75 + index // columns * row + line + height
        for bar, (layout, ms) in enumerate(times.items()):
            x, size = left + 18 + 58 * bar, height * ms / max(times.values())
            canvas.box(x, bottom - size, 44, size, COLORS[bar], radius=2, alpha=0.5 if kind == "predicted" else 1.0)
            words = f"{ms:.0f} ms" if ms >= 100 else f"{ms:.1f} ms"
            canvas.text(words, x + 22, bottom - size - 7, text, align="center", bold=layout == BTP)
        canvas.text(kind, left + 98, bottom + 1.3 * line, text + 1, align="center", bold=True)
        canvas.text(where, left + 98, bottom + 2.3 * line, text, MUTED, "center")
        canvas.text(what, left + 98, bottom + 3.3 * line, text, MUTED, "center")
    for bar, layout in enumerate((DENSE, VANILLA, BTP)):
        x, y = (MARGIN + 18 + 230 * bar, legend) if legend_lines == 1 else (MARGIN + 18, legend + 1.5 * line * bar)
        canvas.box(x, y, 13, 13, COLORS[bar], radius=2)
        canvas.text(layout, x + 20, y + 11, text + 1)
    canvas.write(PICTURES / name)


# The fastest layout by tokens per step and number of GPUs.


def by_gpus_picture() -> None:
    """Draws docs/pictures/by-gpus.json as a grid; each layout has its own color."""
    result = Path(__file__).resolve().parent / "pictures" / "by-gpus.json"
    cells = json.loads(result.read_text(encoding="utf-8"))["cells"]
    columns = sorted({cell["gpus"] for cell in cells})
    rows = sorted({cell["tokens"] for cell in cells})
    layouts = sorted({cell["layout"].split()[0] for cell in cells if cell["layout"]})
    left, top, line = 150.0, 128.0, 40.0
    width = (WIDTH - left - MARGIN) / len(columns)
    title = "Predicted fastest layout by tokens per step and number of GPUs: 7b, cola"
    subtitle = "h100, sequences of 4,096: the fastest configuration without a pipeline"
    canvas = Canvas(top + len(rows) * line + MARGIN, title, subtitle)
    canvas.text("tokens per step", MARGIN, top - 12, 13, MUTED)
    for column, gpus in enumerate(columns):
        canvas.text(f"{gpus} GPUs", left + column * width + 12, top - 12, 13, MUTED)
    for number, tokens in enumerate(rows):
        y = top + number * line
        canvas.text(f"{tokens:,}", MARGIN, y + 25, 13)
        for cell in (cell for cell in cells if cell["tokens"] == tokens):
            x, layout = left + columns.index(cell["gpus"]) * width, cell["layout"]
            fill, ink = (COLORS[layouts.index(layout.split()[0])], PAPER) if layout else (PAPER, MUTED)
            canvas.box(x + 3, y + 3, width - 6, line - 6, fill, PATH, radius=4, line=1.0)
            canvas.text(layout or "too few tokens", x + 12, y + 25, 13, ink, room=width - 20)
    canvas.write(PICTURES / "by-gpus.svg")


def draw() -> None:
    """Writes the six pictures."""
    steps_picture(
        4,
        12,
        "steps.svg",
        "Time per training step: a dense model, and a low-rank one under two kinds of tensor parallelism",
        "Bars in one group have the same shape, batch and hardware; groups have different scales.",
    )
    steps_picture(2, 14.5, "steps-narrow.svg", "Time per training step", "Groups have different scales.")  # for a phone
    layouts_picture()
    online_norm_picture()
    recomputation_picture()
    by_gpus_picture()


if __name__ == "__main__":
    draw()
