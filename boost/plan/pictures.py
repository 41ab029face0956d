"""The picture of a block under a layout, drawn with matplotlib.

Placements in a block come from the layout, and collectives from the collective table. A layout that communicates at the
bottleneck has its collectives between A and B. Any other layout gathers (forward) and reduces (backward) at a group's
input, and does the reverse at its output.

Legend: T tokens in one micro-batch, p TP processes; d, f, r widths of the residual stream, the MLP and the bottleneck. Lengths are
in pixels; y runs downward.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from boost.config.architecture import GroupSpec, MapKind, Parameter, groups
from boost.config.layouts import local_shape, num_shards, placement_of
from boost.config.traffic import ALL_TO_ALL, Collective, statistic_columns
from boost.drawing import MARGIN, MUTED, PAPER, WIDTH, Canvas
from boost.format import format_bytes
from boost.plan.inspection import Inspection

COLORS = ("#3b6cb3", "#23877a", "#a8690f", "#a44f80")
PATH = "#c3cad5"
"""Color of the lines between tensors."""
FORWARD, BACKWARD = ("#344054", PAPER), ("#dde3ec", "#344054")
"""(fill color, text color) for a collective."""

GUTTER, ROW_GAP, PIECE_GAP, ELLIPSIS = 208.0, 9.0, 3.0, 26.0
BAR, MAX_PANELS = 22.0, 4

UNIT = 70.0
"""Maximum width drawn for d."""


@dataclass(frozen=True)
class DiagramTensor:
    """A tensor drawn as a rectangle, with the process's shard."""

    width: float
    height: float
    axis: str = ""
    """The sharded axis, 'x' or 'y'; '' if replicated."""
    partial: bool = False
    activation: bool = False


@dataclass(frozen=True)
class DiagramRow:
    """One row in the picture of a block, across all processes."""

    title: str
    details: tuple[str, ...] = ()
    pieces: tuple[DiagramTensor, ...] = ()
    stacked: bool = False
    """Whether pieces are stacked vertically, like the factors A in a group, instead of side by side."""
    boxes: tuple[str, ...] = ()
    """One label per process, instead of pieces."""
    bars: tuple[tuple[str, str], ...] = ()
    """(forward, backward) collectives across all processes, instead of pieces; '' for none."""
    residual: bool = False

    @property
    def lines(self) -> tuple[tuple[int, str], ...]:
        """The bars from top to bottom, as (0 for forward or 1 for backward, text)."""
        return tuple((side, text) for sides in self.bars for side, text in enumerate(sides) if text)

    @property
    def size(self) -> tuple[float, float]:
        """Width and height of the drawing for one process."""
        if self.boxes:
            return 0.0, 24.0
        widths, heights = [piece.width for piece in self.pieces], [piece.height for piece in self.pieces]
        gaps = PIECE_GAP * (len(self.pieces) - 1)
        return (max(widths), sum(heights) + gaps) if self.stacked else (sum(widths) + gaps, max(heights))

    @property
    def height(self) -> float:
        """Height of the row, including text."""
        if self.bars:
            return BAR * len(self.lines) + PIECE_GAP * (len(self.lines) - 1)
        return max(self.size[1], 16.0 + 14.0 * len(self.details))


class BlockCanvas(Canvas):
    """A page with tensors and collectives."""

    def tensor(self, piece: DiagramTensor, x: float, y: float, color: str, rank: int, parts: int) -> None:
        """Draws the outline of the whole tensor, and fills shard `rank` of `parts`, hatched if its gradient is a partial sum."""
        self.box(x, y, piece.width, piece.height, PAPER)
        at, size = [x, y], [piece.width, piece.height]
        if piece.axis:
            side = "xy".index(piece.axis)
            # Shards that are too thin to see are drawn thicker.
            whole, size[side] = size[side], max(size[side] / parts, 3.0)
            at[side] += min(rank * whole / parts, whole - size[side])
        hatch = PAPER if piece.partial else ""
        self.box(at[0], at[1], size[0], size[1], color, alpha=0.5 if piece.activation else 1.0, hatch=hatch)
        self.box(x, y, piece.width, piece.height, "none", color)

    def tensors(self, row: DiagramRow, middle: float, y: float, color: str, rank: int, parts: int) -> None:
        """Draws the tensors in a row, centered at `middle`."""
        left = middle - row.size[0] / 2
        for piece in row.pieces:
            self.tensor(piece, middle - piece.width / 2 if row.stacked else left, y, color, rank, parts)
            y, left = (y + piece.height + PIECE_GAP, left) if row.stacked else (y, left + piece.width + PIECE_GAP)

    def collective(self, side: int, words: str, x: float, y: float, width: float) -> None:
        """Draws a collective: dark for forward (side 0), light for backward (1)."""
        fill, ink = (FORWARD, BACKWARD)[side]
        self.box(x, y, width, BAR, fill, radius=5)
        self.text(words, x + width / 2, y + 15, 12, ink, "center", room=width - 12)


# One block.


def draw_block(inspection: Inspection, name: str, path: Path) -> None:
    """Draws one block: each TP process's shard of every tensor, and the collectives between processes. `name`: the model's name."""
    config = inspection.config
    model, processes = config.model, config.parallel.tp
    label = name if len(name) <= 30 else f"{name[:29]}…"
    title = [inspection.layout, label, f"TP {processes}"]
    if processes > 1:
        title += inspection.spec.variant(config.parallel)
        title += ["ungrouped"] * (not config.parallel.grouping)
    subtitle = (
        f"One of {model.layers} blocks, every linear y = {model.equation}; d = {model.dim}, "
        f"f = {model.ffn_dim}{f', r = {model.rank}' if model.low_rank else ''}; T = {inspection.tokens} tokens per "
        f"micro-batch; {config.train.compute_dtype}"
    )
    rows, top = list(block_rows(inspection)), 128.0
    tops = list(itertools.accumulate((row.height + ROW_GAP for row in rows[:-1]), initial=top))
    bottom = tops[-1] + rows[-1].height
    canvas = BlockCanvas(bottom + 94, " · ".join(title), subtitle)
    last = [processes - 1] if processes > MAX_PANELS else []
    panels, width = [*range(min(processes, MAX_PANELS) - len(last)), *last], panel_width(processes)
    middles = [
        MARGIN + GUTTER + (index + 0.5) * width + (ELLIPSIS if last and index == len(panels) - 1 else 0.0)
        for index in range(len(panels))
    ]
    for rank, middle, color in zip(panels, middles, COLORS, strict=False):
        canvas.box(middle - width / 2 + 3, top - 36, width - 6, bottom - top + 46, color, radius=8, alpha=0.055)
        canvas.text(f"process {rank}", middle, top - 17, 13, color, "center", bold=True)
        _paths(canvas, middle, width, color, rows, tops)
    if last:
        canvas.text("…", middles[-1] - width / 2 - ELLIPSIS / 2, top - 17, 16, MUTED, "center")
    for row, y in zip(rows, tops, strict=True):
        if row.bars:
            for position, (side, words) in enumerate(row.lines):
                says = f"{('forward', 'backward')[side]}: {words}"
                canvas.collective(
                    side, says, MARGIN + GUTTER, y + position * (BAR + PIECE_GAP), WIDTH - 2 * MARGIN - GUTTER
                )
            continue
        words_y = y + (row.height - 16 - 14 * len(row.details)) / 2
        canvas.text(row.title, MARGIN, words_y + 12, 13, bold=True)
        for line, detail in enumerate(row.details):
            canvas.text(detail, MARGIN, words_y + 27 + 14 * line, 11.5, MUTED, room=GUTTER - 8)
        drawn_y = y + (row.height - row.size[1]) / 2
        for rank, middle, color in zip(panels, middles, COLORS, strict=False):
            if row.boxes:
                wide = min(width - 36, 160.0)
                canvas.box(middle - wide / 2, drawn_y, wide, 24, PAPER, color, radius=12, line=1.2)
                # The longest label in the row sets the size of all labels.
                size = min(11.5, (wide - 14) / (0.58 * max(map(len, row.boxes))))
                canvas.text(row.boxes[rank], middle, drawn_y + 16, size, color, "center")
            else:
                canvas.tensors(row, middle, drawn_y, color, rank, processes)
    legend = {
        "weight: shard of this process": DiagramTensor(22, 12, "x"),
        "activation: shard of this process": DiagramTensor(22, 12, "x", activation=True),
    }
    if any(piece.partial for row in rows for piece in row.pieces):
        legend["replicated: gradient summed once per step"] = DiagramTensor(22, 12, partial=True)
    for position, (words, piece) in enumerate(legend.items()):
        canvas.tensor(piece, MARGIN + 284 * position, bottom + 34, COLORS[0], 0, 3)
        canvas.text(words, MARGIN + 284 * position + 30, bottom + 44.5, 12)
    sent = dict.fromkeys(("forward", "recompute", "backward"), 0)
    for c in inspection.of_micro_batch:
        if c.layer == inspection.layer:
            sent[c.phase] += c.sent_bytes
    summary = "One process, no collectives."
    if total := sum(sent.values()):
        parts = " + ".join(f"{format_bytes(number)} {phase}" for phase, number in sent.items() if number)
        summary = f"Bytes sent by one process per block and micro-batch: {parts} = {format_bytes(total)}"
    canvas.text(summary, MARGIN, bottom + 74, 12.5, room=WIDTH - 2 * MARGIN)
    canvas.write(path)


def panel_width(processes: int) -> float:
    """Width of one process's panel. Up to 4 panels are drawn: all processes, or the first three and the last."""
    gap = ELLIPSIS if processes > MAX_PANELS else 0.0
    return (WIDTH - 2 * MARGIN - GUTTER - gap) / min(processes, MAX_PANELS)


def _paths(
    canvas: Canvas, middle: float, width: float, color: str, rows: Sequence[DiagramRow], tops: Sequence[float]
) -> None:
    """Draws lines for a process from row to row, and the residual stream around each half of the block."""
    sizes = [row.height if row.bars else row.size[1] for row in rows]
    ends = [
        (y + (row.height - size) / 2, y + (row.height + size) / 2)
        for row, y, size in zip(rows, tops, sizes, strict=True)
    ]
    for (_, start), (stop, _) in itertools.pairwise(ends):
        canvas.line([(middle, start), (middle, stop)], PATH)
    edge = middle + min(width / 2 - 11, 145)
    stops = [(row, y) for row, y in zip(rows, tops, strict=True) if row.residual]
    for (row, y), (_, end) in itertools.pairwise(stops):
        side = middle + row.size[0] / 2
        start, stop = y + row.height / 2 + 6, end + row.height / 2 - 6
        canvas.line([(side, start), (edge, start), (edge, stop), (side + 5, stop)], color, arrow=True, alpha=0.5)


def block_rows(inspection: Inspection) -> Iterator[DiagramRow]:
    """Yields the rows of the picture, from the block's input to its output."""
    config = inspection.config
    yield _residual(inspection, "Residual stream")
    for group in groups(config.model, inspection.layer):
        if group.side == "enter":
            norm = placement_of("norm", config.model, config.parallel)
            width = _length(config.model.dim, inspection)
            piece = DiagramTensor(width, 8.0, "x" if norm.dim == 0 else "", norm.partial)
            yield DiagramRow("RMSNorm", (inspection.spec.norm_note(config.parallel),), (piece,))
            yield from _group(inspection, group)
            yield _wide(inspection, group)
        else:
            yield from _group(inspection, group)
            yield _residual(inspection, "Residual + update")


def _length(n: int, inspection: Inspection) -> float:
    """Width in pixels: proportional up to d, compressed beyond it, and never too thin to show shards."""
    model, p = inspection.config.model, inspection.config.parallel.tp
    panel = panel_width(p)
    relative = [
        _relative(slot.linear.down_width or slot.d_in, model.dim) for slot in groups(model, inspection.layer)[0].slots
    ]
    unit = min(UNIT if p > 2 else UNIT * 1.15, (panel - 40) / sum(relative))
    return round(unit * _relative(n, model.dim), 2)


def _relative(n: int, dim: int) -> float:
    share = n / dim
    return max(share, 0.16) if share <= 1 else 1 + min(0.2 * (share - 1), 0.5)


def _share(word: str, parts: int) -> str:
    return word if parts == 1 else f"{word}/{parts}"


def _residual(inspection: Inspection, title: str) -> DiagramRow:
    p, kind = inspection.config.parallel.tp, inspection.spec.residual
    detail = {
        "hidden": f"T x {_share('d', p)}: sharded along hidden",
        "tokens": f"{_share('T', p)} x d: sharded along tokens",
        "replicated": "T x d" if p == 1 else "T x d on every process",
    }[kind]
    axis = {"hidden": "x", "tokens": "y", "replicated": ""}[kind]
    width = _length(inspection.config.model.dim, inspection)
    return DiagramRow(title, (detail,), (DiagramTensor(width, 28.0, axis, activation=True),), residual=True)


def _wide(inspection: Inspection, group: GroupSpec) -> DiagramRow:
    """Attention or the gated product, with the heads or channels on each process."""
    model, parts = inspection.config.model, num_shards(inspection.config.parallel)
    p = inspection.config.parallel.tp
    word, n, title, width = "heads", model.heads, "Attention", "d"
    if group.name == "gate_up":
        word, n, title, width = "channels", model.ffn_dim, "silu(gate) x up" if model.mlp_silu else "gate x up", "f"
        if inspection.spec.mlp_token_local:
            return DiagramRow(title, (f"{_share('T', p)} x f",), boxes=("all channels",) * p)
    share = n // parts
    firsts = [rank * share if parts > 1 else 0 for rank in range(p)]
    boxes = [f"{word} {first}-{first + share - 1}" if share > 1 else f"{word[:-1]} {first}" for first in firsts]
    same = " on every process" if parts == 1 < p else ""
    return DiagramRow(title, (f"T x {_share(width, parts)}{same}",), boxes=tuple(boxes))


def _group(inspection: Inspection, group: GroupSpec) -> Iterator[DiagramRow]:
    """Yields the weights, latents and collectives for one group, in forward order."""
    model, parallel = inspection.config.model, inspection.config.parallel
    bars = _bars(inspection, group)
    yield from bars["norm"]
    yield from bars["entry"]
    if not model.low_rank:
        yield from _weights(inspection, group, "weight")
        yield from bars["exit"]
        return
    placement_a = placement_of(group.maps("", "inner")[0].role, model, parallel)
    axis = "x" if placement_a.dim == 0 else "y" if inspection.spec.residual == "tokens" else ""
    pieces = tuple(DiagramTensor(_length(r, inspection), 20.0, axis, activation=True) for r in group.up_widths)
    k, p = len(group.slots), parallel.tp
    width = "r" if k == 1 else f"{k}r"
    rows, columns = _share("T", p if axis == "y" else 1), _share(width, p if axis == "x" else 1)
    whole = " on every process" if not axis and p > 1 else ""
    title = "Latents" if model.latent_act == "none" else f"{model.latent_act} on the latents"
    details = [f"{rows} x {columns}{whole}"]
    if inspection.takes_latents:
        title = "Mixed latents"
        details.append(model.mixing)
    latents = DiagramRow(title, tuple(details), pieces)
    yield from _weights(inspection, group, "inner")
    # A factor sharded along its input produces partial sums, so the latents follow the collective. Mixing latents that are sharded
    # along the rank needs separate collectives, which the latents follow too.
    latents_last = placement_a.dim == 1 or (inspection.takes_latents and axis == "x")
    yield from [*bars["between"], latents] if latents_last else [latents, *bars["between"]]
    yield from _weights(inspection, group, "outer")
    yield from bars["exit"]


def _weights(inspection: Inspection, group: GroupSpec, kind: MapKind) -> Iterator[DiagramRow]:
    """Yields one row per map of this kind."""
    maps = group.maps("", kind)
    for first in range(0, len(maps), len(group.slots)):
        yield _map(inspection, group, maps[first : first + len(group.slots)], kind == "inner")


def _map(inspection: Inspection, group: GroupSpec, parameters: Sequence[Parameter], stacked: bool) -> DiagramRow:
    model, parallel = inspection.config.model, inspection.config.parallel
    pieces, shapes = [], []
    for slot, parameter in zip(group.slots, parameters, strict=True):
        placement = placement_of(parameter.role, model, parallel)
        rows, columns = parameter.shape
        axis = {None: "", 0: "y", 1: "x"}[placement.dim]
        pieces.append(DiagramTensor(_length(columns, inspection), _length(rows, inspection), axis, placement.partial))
        whole = " x ".join(str(n) for n in parameter.shape)
        if placement.dim is not None:
            whole += f", here {' x '.join(str(n) for n in local_shape(parameter, placement, parallel.tp))}"
        elif parallel.tp > 1:
            whole += ", replicated"
        shapes.append((whole, slot.name))
    details = []
    for text, same in itertools.groupby(shapes, key=lambda item: item[0]):
        names = ", ".join(name.partition(".")[2] for _, name in same)
        details.append(text if text == shapes[0][0] == shapes[-1][0] else f"{names}: {text}")
    names = ", ".join(slot.name.partition(".")[2] for slot in group.slots)
    name = parameters[0].name.rpartition(".")[2]
    return DiagramRow(f"{name} of {names}", tuple(details), tuple(pieces), stacked=stacked)


def _bars(inspection: Inspection, group: GroupSpec) -> dict[str, list[DiagramRow]]:
    """Collectives for a group by position: for the norm, at the group's input, between the factors, at its output.

    Labels look like 'all-reduce T x (3r + statistic) · 152 MB', with the bytes sent by one process.
    """
    labels: dict[tuple[str, str], list[str]] = {}
    for c in inspection.of_micro_batch:
        if c.layer == inspection.layer and c.place == group.name:
            label = f"{c.kind} T x {_symbol(inspection, group, c.shape[-1])} · {format_bytes(c.sent_bytes)}"
            labels.setdefault((_position(inspection, group, c), c.phase), []).append(label)
    bars: dict[str, list[DiagramRow]] = {}
    for position in ("norm", "entry", "between", "exit"):
        # The backward pass issues collectives in reverse order.
        sides = labels.get((position, "forward"), []), labels.get((position, "backward"), [])[::-1]
        pairs = tuple(itertools.zip_longest(*sides, fillvalue=""))
        bars[position] = [DiagramRow("", bars=pairs)] if pairs else []
    return bars


def _at_bottleneck(inspection: Inspection) -> bool:
    """Whether the layout communicates only latents, apart from attention heads."""
    spec = inspection.spec
    return inspection.config.model.low_rank and (spec.communicates_at_bottleneck or spec.mlp_token_local)


def _position(inspection: Inspection, group: GroupSpec, c: Collective) -> str:
    if _is_statistic(inspection, group, c.shape[-1]):
        return "norm"
    if c.kind == ALL_TO_ALL:  # of heads
        return "exit" if group.side == "enter" else "entry"
    if _at_bottleneck(inspection) or _is_for_mixing(inspection, group, c.shape[-1]):
        return "between"
    leaves = ("all-reduce", "reduce-scatter") if c.phase == "forward" else ("all-gather",)
    return "exit" if c.kind in leaves else "entry"


def _is_for_mixing(inspection: Inspection, group: GroupSpec, width: int) -> bool:
    """Whether a collective belongs to mixed latents that are sharded along the bottleneck rank."""
    if not inspection.takes_latents or not inspection.spec.shards_rank:
        return False
    return width in (*_sums(group), sum(group.up_widths), *group.up_widths)


def _sums(group: GroupSpec) -> tuple[int, int]:
    """Widths of the sums over whole latents, of one slot and of all."""
    return group.kind.sums, group.kind.sums * len(group.slots)


def _is_statistic(inspection: Inspection, group: GroupSpec, width: int) -> bool:
    """Whether a collective sends only the RMSNorm statistic."""
    return width == 1 and group.side == "enter" and inspection.config.parallel.norm == "sync"


def _symbol(inspection: Inspection, group: GroupSpec, width: int) -> str:
    """Expresses a width as a multiple of r, d or f, plus the statistic of online RMSNorm if the width includes it."""
    config = inspection.config
    model, parallel = config.model, config.parallel
    units = {"d": model.dim, "f": model.ffn_dim}
    if group.name in ("gate_up", "down"):
        units = {"f": model.ffn_dim, "d": model.dim}
    crossing = _is_for_mixing(inspection, group, width)
    if crossing and width in _sums(group):
        return "sums"
    if crossing or _at_bottleneck(inspection):
        units = {"r": model.rank or 0}
    if _is_statistic(inspection, group, width):
        return "statistic"
    for word, unit in units.items():
        for factor in (1, len(group.slots)):
            symbol = word if factor == 1 else f"{factor}{word}"
            if width == factor * unit:
                return symbol
            if word == "r" and width == factor * unit + statistic_columns(config.train.compute_dtype, parallel.tp):
                return f"({symbol} + statistic)"
    return str(width)
