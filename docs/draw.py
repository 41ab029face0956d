"""Draws the pictures of docs/concepts into docs/pictures: `python docs/draw.py`. The same code gives the same bytes.

Everything is derived: rows, shards and collectives from the layouts (`boost.plan.picture`), bytes from the collective table and
from the planner's trace of the decoder.
"""

import itertools
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from boost.config import Config, load
from boost.plan.categories import LATENTS, RESIDUAL, WIDE
from boost.plan.inspection import Inspection, inspect
from boost.plan.memory import memory
from boost.plan.picture import block_rows
from boost.plan.svg import BAR, COLORS, INK, LINE, MARGIN, MUTED, PAPER, WIDTH, DiagramRow, DiagramText, Page
from boost.plan.tape import Held

PICTURES = Path(__file__).resolve().parent / "pictures"
GAIN = "\N{GREEK SMALL LETTER GAMMA}"
DARK, LIGHT, LIGHT_INK = "#344054", "#dde3ec", "#344054"
TP, RANK, TOKENS = 4, 1, 16384
"""TP size, the TP rank that is shown, tokens of one micro-batch (four sequences of 4,096)."""


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


class Sheet(Page):
    """A page with a title and drawing primitives."""

    def __init__(self, title: str, after: str, subtitle: str, description: str) -> None:
        super().__init__(DiagramText(title, after, subtitle, description, ""), TP)

    def finish(self, name: str) -> None:
        """Writes the picture, one element per line."""
        self.svg.text = "\n"
        for element in self.svg:
            element.tail = "\n"
        (PICTURES / name).write_text(ET.tostring(self.svg, encoding="unicode") + "\n", encoding="utf-8", newline="\n")

    def box(self, x: float, y: float, width: float, height: float, fill: str, stroke: str = "none") -> None:
        self._add("rect", x=x, y=y, width=width, height=height, rx=5, fill=fill, stroke=stroke)

    def text(self, words: str, x: float, y: float, size: float = 11.5, fill: str = INK, **options: object) -> None:
        self._text(words, x, y, size, fill, **options)  # type: ignore[arg-type]


# One block under four layouts, side by side.

COLUMN = (WIDTH - 2 * MARGIN) / 4
SIDE_BY_SIDE = (
    ("megatron (full-rank)", "megatron", "dense"),
    ("vanilla", "vanilla", "cola"),
    ("btp", "btp", "cola"),
    ("btp-sp", "btp-sp", "cola"),
)


def layouts_picture() -> None:
    """Four columns, one TP rank of each layout; attention, the gated product and the residual stream are aligned."""
    inspections = [inspect(config_of(layout, family)) for _, layout, family in SIDE_BY_SIDE]
    columns = [segments(rescaled(list(block_rows(inspection)))) for inspection in inspections]
    heights = [max(sum(row_height(row) + 8 for row in part) for part in parts) for parts in zip(*columns, strict=True)]
    sheet = Sheet(
        "one block", "under four layouts: what one of 4 TP ranks holds, and what it sends",
        "7B shape: d = 4096, f = 11008, r = 1024; T = 16,384 tokens, bf16. "
        "Filled: the shard of this rank. Outlined: the whole tensor.",
        "One transformer block under megatron, vanilla, btp and btp-sp, side by side: weights, activations and collectives.",
    )  # fmt: skip
    top = 120.0
    bottom = top + sum(heights)
    sheet._paper(bottom + 172)
    for index, ((words, _, _), parts) in enumerate(zip(SIDE_BY_SIDE, columns, strict=True)):
        x, color = MARGIN + index * COLUMN, COLORS[index]
        sheet._add(
            "rect",
            x=x + 3,
            y=top - 34,
            width=COLUMN - 6,
            height=bottom - top + 40,
            rx=8,
            fill=color,
            fill_opacity=0.055,
        )
        sheet._text(words, x + COLUMN / 2, top - 15, 13, color, "middle", bold=True)
        y = top
        for part, height in zip(parts, heights, strict=True):
            column_part(sheet, part, x, y, height, color)
            y += height
    bytes_chart(sheet, inspections, bottom + 34)
    sheet.finish("layouts.svg")


def rescaled(rows: Sequence[DiagramRow], width: float = 50.0) -> list[DiagramRow]:
    """Rows whose residual stream is `width` pixels wide."""
    scale = width / next(row.pieces[0].width for row in rows if row.residual)
    return [
        replace(row, pieces=tuple(replace(p, width=p.width * scale, height=p.height * scale) for p in row.pieces))
        for row in rows
    ]


def segments(rows: Sequence[DiagramRow]) -> list[list[DiagramRow]]:
    """Rows from one aligned row to before the next: residual stream, attention, gated product."""
    starts = [index for index, row in enumerate(rows) if row.residual or row.boxes]
    return [list(rows[start:stop]) for start, stop in itertools.pairwise([*starts, len(rows)])]


def row_height(row: DiagramRow) -> float:
    """Height of a row in a column: its words above its drawing."""
    if row.bars:
        return len(row.lines) * (BAR + 3) - 3
    words = 15 + 13 * len(row.details)
    return words if row.boxes else words + 2 + row.size[1]


def column_part(sheet: Sheet, rows: Sequence[DiagramRow], x: float, y: float, height: float, color: str) -> None:
    """Rows of one column between two aligned rows; what the column does not need is space after the first of them."""
    middle = x + COLUMN / 2
    spare = (height - sum(row_height(row) + 8 for row in rows)) / max(len(rows), 1)
    for row in rows:
        if row.bars:
            for line, (side, words) in enumerate(row.lines):
                top = y + line * (BAR + 3)
                sheet.box(x + 9, top, COLUMN - 18, BAR, (DARK, LIGHT)[side])
                says = f"{'↓↑'[side]} {words.partition(' · ')[0].replace(' + statistic', ' + stat.')}"
                sheet.text(says, middle, top + 15, 11.5, (PAPER, LIGHT_INK)[side], anchor="middle", room=COLUMN - 26)
        else:
            sheet.text(row.title, middle, y + 11, 11.5, anchor="middle", bold=True)
            for line, detail in enumerate(row.details):
                sheet.text(detail, middle, y + 24 + 13 * line, 10.5, MUTED, anchor="middle", room=COLUMN - 18)
            if row.pieces:
                pieces(sheet, row, middle, y + 17 + 13 * len(row.details), color)
        y += row_height(row) + 8 + spare


def pieces(sheet: Sheet, row: DiagramRow, middle: float, y: float, color: str) -> None:
    """The tensors of a row, centered in its column."""
    left = middle - row.size[0] / 2
    for piece in row.pieces:
        x = middle - piece.width / 2 if row.stacked else left
        sheet._piece(piece, x, y, color, RANK, TP)
        if row.stacked:
            y += piece.height + 3
        else:
            left += piece.width + 3


def sent_per_token(inspection: Inspection) -> float:
    """Bytes that one TP rank sends for a block, forward and backward, per token of the micro-batch."""
    issued = (item.collective for item in inspection.issued if item.micro_batch == 0)
    return sum(c.sent_bytes for c in issued if c.layer == inspection.layer) / inspection.tokens


def bytes_chart(sheet: Sheet, inspections: Sequence[Inspection], y: float) -> None:
    """Bytes per token as bars, and the legend."""
    sheet.text("Sent by one TP rank per token and block, forward and backward:", MARGIN, y, 12.5, bold=True)
    sent = [sent_per_token(inspection) for inspection in inspections]
    for index, (number, (_, layout, _)) in enumerate(zip(sent, SIDE_BY_SIDE, strict=True)):
        top = y + 12 + 19 * index
        sheet.text(layout, MARGIN + 76, top + 11, 12, anchor="end")
        width = 560 * number / max(sent)
        sheet._add("rect", x=MARGIN + 86, y=top, width=width, height=13, rx=2, fill=COLORS[index])
        sheet.text(f"{number / 1000:.1f} kB", MARGIN + 94 + width, top + 11, 12)
    sheet.text("↓ collective of the forward pass · ↑ of the backward pass · hatched: replicated, gradient summed once per step",
               MARGIN, y + 112, 11.5, MUTED)  # fmt: skip


# Online norm against sync.


def online_norm_picture() -> None:
    """The same group of linears with both norms, from left to right, forward."""
    sheet = Sheet(
        "RMSNorm", "of a hidden-sharded residual stream: sync and online",
        "Forward pass of q, k and v on one of p TP ranks; residual x: [T, d/p], A [3r, d/p], B [3d/p, r]. "
        "Dark: a collective, for which every rank waits.",
        "Two chains of operations. Sync: all-reduce of the statistic, norm, GEMM with A, all-reduce of latents, activation, B. "
        "Online: GEMM with A and local statistic, one all-reduce of both, scaling, activation, B.",
    )  # fmt: skip
    sheet._paper(330)
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
        sheet.text(norm, MARGIN, y + 18, 14, COLORS[index * 2], bold=True)
        sheet.text(f"{counts[norm]} collectives", MARGIN, y + 35, 11, MUTED)
        sheet.text("a block, forward", MARGIN, y + 48, 11, MUTED)
        chain(sheet, steps, y, COLORS[index * 2])
    sheet.text("Both compute the same function: the norm scales a whole token by 1 / rms, so it commutes with A. "
               f"The gain {GAIN} scales the columns of A.",
               MARGIN, 300, 12, INK, room=WIDTH - 2 * MARGIN)  # fmt: skip
    sheet.finish("online-norm.svg")


def forward_collectives(norm: str) -> int:
    """Collectives of one block in the forward pass."""
    inspection = inspect(config_of("btp", norm=norm))
    issued = [item.collective for item in inspection.issued if item.micro_batch == 0]
    return sum(c.layer == inspection.layer and c.phase == "forward" for c in issued)


def chain(sheet: Sheet, steps: Sequence[tuple[str, str, int]], y: float, color: str) -> None:
    """Operations from left to right; a collective is dark and wider."""
    left, gap = MARGIN + 104, 8.0
    total = sum(1.35 if collective else 1.0 for _, _, collective in steps)
    unit = min(104.0, (WIDTH - MARGIN - left - gap * (len(steps) - 1)) / total)
    for index, (words, detail, collective) in enumerate(steps):
        width = unit * (1.35 if collective else 1.0)
        if index:
            sheet._add("path", d=f"M{left - gap:g} {y + 28:g}h{gap:g}", stroke=LINE, stroke_width=1.5)
        sheet.box(left, y, width, 56, DARK if collective else PAPER, "none" if collective else color)
        ink, muted = (PAPER, "#d0d5dd") if collective else (INK, MUTED)
        sheet.text(words, left + width / 2, y + 24, 12.5, ink, anchor="middle", bold=True, room=width - 8)
        sheet.text(detail, left + width / 2, y + 42, 11, muted, anchor="middle", room=width - 8)
        left += width + gap


# What recomputation saves and recomputes.

POLICIES = ("none", "low-rank", "low-rank+attention-output", "full-block")


def recomputation_picture() -> None:
    """Tensors of a block by policy: saved, or recomputed in the backward pass; and the bytes that are saved."""
    saved = {policy: saved_tensors(policy) for policy in POLICIES}
    everything = [("residual stream", RESIDUAL), ("latents of q, k, v", LATENTS), ("q, k, v", WIDE), ("attention output", WIDE),
                  ("latents of o", LATENTS), ("residual stream, before the MLP", RESIDUAL), ("latents of gate, up", LATENTS),
                  ("gate, up, their product", WIDE), ("latents of down", LATENTS)]  # fmt: skip
    sheet = Sheet(
        "train.recompute", "what a block saves for its backward pass, under btp",
        "Filled: saved. Striped: recomputed. Tensors from the block's input to its output; 7B shape, TP 4, 16,384 tokens, bf16.",
        "A table of the tensors of a block by recomputation policy: saved or recomputed, and the bytes saved.",
    )  # fmt: skip
    top, line, first, width = 128.0, 27.0, MARGIN + 236, 152.0
    sheet._paper(top + line * len(everything) + 110)
    for column, policy in enumerate(POLICIES):
        x = first + column * width
        sheet.text(policy, x + width / 2, top - 12, 12.5, anchor="middle", bold=True, room=width - 8)
        flags = present(saved[policy])
        for row, (_, category) in enumerate(everything):
            color = {RESIDUAL: COLORS[0], LATENTS: COLORS[1], WIDE: COLORS[2]}[category]
            cell(sheet, x + 8, top + row * line, width - 16, color, flags[row])
        y = top + line * len(everything) + 16
        total = sum(held.bytes for held in saved[policy])
        sheet.text(f"{total / 1e6:,.0f} MB", x + width / 2, y, 13, anchor="middle", bold=True)
        sheet.text(f"{recommunicated(policy)} collectives", x + width / 2, y + 24, 12, anchor="middle")
    for row, (words, _) in enumerate(everything):
        sheet.text(words, MARGIN, top + row * line + 15, 12.5)
    y = top + line * len(everything) + 16
    sheet.text("saved by a block and rank", MARGIN, y, 12.5, bold=True)
    sheet.text("re-communicated", MARGIN, y + 24, 12.5, bold=True)
    key = MARGIN
    for words, color in (
        ("residual stream", COLORS[0]),
        ("latents, width r", COLORS[1]),
        ("wide activations, d or f", COLORS[2]),
    ):
        sheet._add("rect", x=key, y=y + 52, width=14, height=14, rx=2, fill=color)
        sheet.text(words, key + 20, y + 63, 12)
        key += 190
    sheet.finish("recomputation.svg")


def recomputing(policy: str) -> Config:
    """btp with a recomputation policy."""
    config = config_of("btp")
    return config.model_copy(update={"train": config.train.model_copy(update={"recompute": policy})})


def recommunicated(policy: str) -> int:
    """Collectives of one block that the backward pass issues again."""
    inspection = inspect(recomputing(policy))
    issued = [item.collective for item in inspection.issued if item.micro_batch == 0]
    return sum(c.layer == inspection.layer and c.phase == "recompute" for c in issued)


def saved_tensors(policy: str) -> list[Held]:
    """What the second block saves, weights aside, in forward order."""
    held = [item.held for item in memory(recomputing(policy)).saved if item.layer == 1]
    return [tensor for tensor in held if tensor.category in (RESIDUAL, LATENTS, WIDE)]


def present(saved: Sequence[Held]) -> list[bool]:
    """Which of the nine rows of the picture are among the saved tensors, found by category and order."""
    flags = dict.fromkeys(range(9), False)
    order = {RESIDUAL: [0, 5], LATENTS: [1, 4, 6, 8], WIDE: [2, 3, 7]}
    residual = [tensor for tensor in saved if tensor.category == RESIDUAL]
    latents = [tensor for tensor in saved if tensor.category == LATENTS and tensor.bytes > 2**20]  # not statistics
    wide = [tensor for tensor in saved if tensor.category == WIDE and tensor.bytes > 2**20]
    for row in order[RESIDUAL][: len(residual)] + order[LATENTS][: len(latents)]:
        flags[row] = True
    for row in {1: [3], 7: [2, 3, 7], 0: []}[len(wide)]:  # attention's output; q, k, v, output, gate, up, product
        flags[row] = True
    return list(flags.values())


def cell(sheet: Sheet, x: float, y: float, width: float, color: str, saved: bool) -> None:
    """Filled if saved, striped if recomputed."""
    if saved:
        sheet._add("rect", x=x, y=y, width=width, height=20, rx=4, fill=color)
    else:
        sheet._add("rect", x=x, y=y, width=width, height=20, rx=4, fill=color, fill_opacity=0.14)
        for left in range(int(x) + 6, int(x + width) - 8, 12):
            sheet._add("path", d=f"M{left} {y + 17:g}l8 -14", stroke=color, stroke_width=1, stroke_opacity=0.55)


def draw() -> None:
    """Writes all pictures."""
    layouts_picture()
    online_norm_picture()
    recomputation_picture()


if __name__ == "__main__":
    draw()
