"""Draws one block as an SVG: the shard of every tensor on each TP process, and the collectives between them.

Placements come from the layout, collectives from the collective table. A layout that communicates at the bottleneck has its
collectives between A and B. Any other layout gathers (forward) and reduces (backward) at a group's input, and vice versa at its
output.

Legend: T tokens of one micro-batch, p TP processes; d, f, r widths of the residual stream, the MLP and the bottleneck.
"""

import itertools
from collections.abc import Iterator

from boost.config.architecture import GroupSpec, groups
from boost.config.layouts import Placement, local_shape, num_shards, placement_of
from boost.config.traffic import ALL_TO_ALL, Collective, statistic_columns
from boost.format import format_bytes
from boost.plan.inspection import Inspection
from boost.plan.svg import DiagramRow, DiagramTensor, DiagramText, Page, panel_width

UNIT = 70.0
"""Maximum width of d in pixels."""


def block_picture(inspection: Inspection, name: str) -> str:
    """Returns the SVG document of one block. `name`: model name in the title. Output is deterministic, byte for byte."""
    config = inspection.config
    model, parallel = config.model, config.parallel
    label = printable(name)
    title = [label if len(label) <= 30 else f"{label[:29]}…", f"TP {parallel.tp}"]
    if parallel.tp > 1:
        title += inspection.spec.variant(parallel)
        title += ["ungrouped"] * (not parallel.grouping)
    bottleneck = "B A x" if model.latent_act == "none" else f"B {model.latent_act}(A x)"
    if model.has_latent_gates:
        bottleneck += ", latents gated with those of the previous block"
    words = DiagramText(
        layout=inspection.layout,
        model=" · ".join(title),
        subtitle=f"One of {model.layers} blocks, every linear y = {bottleneck if model.low_rank else 'W x'}; d = {model.dim}, "
        f"f = {model.ffn_dim}{f', r = {model.rank}' if model.low_rank else ''}; T = {inspection.tokens} tokens per "
        f"micro-batch; {config.train.compute_dtype}",
        description=f"One block of a {model.title} decoder on {parallel.tp} processes, from top to bottom: the shard of "
        "each weight and activation on every process, and the collectives between them.",
        summary=_summary(inspection),
    )
    return Page(words, parallel.tp).draw(list(block_rows(inspection)))


def printable(name: str) -> str:
    """Replaces the unprintable characters of a file name."""
    return "".join(c if c.isprintable() else "?" for c in name)


def _summary(inspection: Inspection) -> str:
    sent = dict.fromkeys(("forward", "recompute", "backward"), 0)
    for issued in inspection.issued:
        if issued.micro_batch == 0 and issued.collective.layer == inspection.layer:
            sent[issued.collective.phase] += issued.collective.sent_bytes
    total = sum(sent.values())
    if not total:
        return "One process, no collectives."
    parts = " + ".join(f"{format_bytes(number)} {phase}" for phase, number in sent.items() if number)
    return f"Bytes sent by one process per block and micro-batch: {parts} = {format_bytes(total)}"


def block_rows(inspection: Inspection) -> Iterator[DiagramRow]:
    """Yields the rows of the picture, from the block's input to its output."""
    config = inspection.config
    yield _residual(inspection, "Residual stream")
    for group in groups(config.model, inspection.layer):
        if group.side == "enter":
            yield _norm(inspection, group)
            yield from _group(inspection, group)
            yield _wide(inspection, group)
        else:
            yield from _group(inspection, group)
            yield _residual(inspection, "Residual + update")


def _length(n: int, inspection: Inspection) -> float:
    """Width in pixels: proportional up to d, compressed beyond, and never too thin to show shards."""
    model, p = inspection.config.model, inspection.config.parallel.tp
    panel = panel_width(p)
    relative = [_relative(slot.rank or slot.d_in, model.dim) for slot in groups(model, inspection.layer)[0].slots]
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


def _norm(inspection: Inspection, group: GroupSpec) -> DiagramRow:
    model, parallel = inspection.config.model, inspection.config.parallel
    placement = placement_of("norm", model, parallel)
    piece = DiagramTensor(_length(model.dim, inspection), 8.0, "x" if placement.dim == 0 else "", placement.partial)
    return DiagramRow("RMSNorm", (inspection.spec.norm_note(parallel),), (piece,))


def _wide(inspection: Inspection, group: GroupSpec) -> DiagramRow:
    """Attention or the gated product, with the heads or channels of each process."""
    model, parts = inspection.config.model, num_shards(inspection.config.parallel)
    p = inspection.config.parallel.tp
    word, n, title, width = "heads", model.heads, "Attention", "d"
    if group.name == "gate_up":
        word, n, title, width = "channels", model.ffn_dim, "silu(gate) x up" if model.mlp_silu else "gate x up", "f"
        if inspection.spec.mlp_token_local:
            return DiagramRow(title, (f"{_share('T', p)} x f",), boxes=("all channels",) * p)
    share = n // parts
    boxes = []
    for rank in range(p):
        first = rank * share if parts > 1 else 0
        boxes.append(f"{word} {first}-{first + share - 1}" if share > 1 else f"{word[:-1]} {first}")
    same = " on every process" if parts == 1 < p else ""
    return DiagramRow(title, (f"T x {_share(width, parts)}{same}",), boxes=tuple(boxes))


def _group(inspection: Inspection, group: GroupSpec) -> Iterator[DiagramRow]:
    """Yields the weights, latents and collectives of one group, in forward order."""
    model, parallel = inspection.config.model, inspection.config.parallel
    bars = _bars(inspection, group)
    yield from bars["norm"]
    yield from bars["entry"]
    if not model.low_rank:
        yield _weights(inspection, group, "W")
        yield from bars["exit"]
        return
    placement_a = placement_of(group.parameters("", "A")[0].role, model, parallel)
    axis = "x" if placement_a.dim == 0 else "y" if inspection.spec.residual == "tokens" else ""
    pieces = tuple(DiagramTensor(_length(r, inspection), 20.0, axis, activation=True) for r in group.ranks)
    k, p = len(group.ranks), parallel.tp
    width = "r" if k == 1 else f"{k}r"
    rows, columns = _share("T", p if axis == "y" else 1), _share(width, p if axis == "x" else 1)
    whole = " on every process" if not axis and p > 1 else ""
    title = "Latents" if model.latent_act == "none" else f"{model.latent_act} on the latents"
    details = [f"{rows} x {columns}{whole}"]
    if inspection.has_latent_gate:
        title = "Gated latents"
        act = "" if model.latent_act == "none" else f"{model.latent_act} "
        gate = "h" if model.gate == "identity" else f"{model.gate} gate(h)"
        details.append(f"{act}LayerNorm(u + {gate})")
    latents = DiagramRow(title, tuple(details), pieces)
    yield _weights(inspection, group, "A")
    # A factor sharded along its input gives partial sums, so the latents follow the collective. Gating latents that are sharded
    # along the rank takes collectives of its own.
    latents_last = placement_a.dim == 1 or (inspection.has_latent_gate and axis == "x")
    yield from [*bars["between"], latents] if latents_last else [latents, *bars["between"]]
    yield _weights(inspection, group, "B")
    yield from bars["exit"]


def _weights(inspection: Inspection, group: GroupSpec, factor: str) -> DiagramRow:
    model, parallel = inspection.config.model, inspection.config.parallel
    pieces, shapes = [], []
    for slot, parameter in zip(group.slots, group.parameters("", factor), strict=True):
        placement = placement_of(parameter.role, model, parallel)
        rows, columns = parameter.shape
        axis = {None: "", 0: "y", 1: "x"}[placement.dim]
        pieces.append(DiagramTensor(_length(columns, inspection), _length(rows, inspection), axis, placement.partial))
        shapes.append(
            (_sizes(parameter.shape, local_shape(parameter, placement, parallel.tp), placement, parallel.tp), slot.name)
        )
    details = []
    for text, same in itertools.groupby(shapes, key=lambda item: item[0]):
        names = ", ".join(name.partition(".")[2] for _, name in same)
        details.append(text if text == shapes[0][0] == shapes[-1][0] else f"{names}: {text}")
    names = ", ".join(slot.name.partition(".")[2] for slot in group.slots)
    return DiagramRow(f"{factor} of {names}", tuple(details), tuple(pieces), stacked=factor == "A")


def _sizes(shape: tuple[int, ...], local: tuple[int, ...], placement: Placement, processes: int) -> str:
    whole = " x ".join(str(n) for n in shape)
    if placement.dim is None:
        return whole if processes == 1 else f"{whole}, replicated"
    return f"{whole}, here {' x '.join(str(n) for n in local)}"


def _bars(inspection: Inspection, group: GroupSpec) -> dict[str, list[DiagramRow]]:
    """Collectives of a group by position: before the norm, at its input, between the factors, at its output."""
    found: dict[tuple[str, str], list[str]] = {}
    for issued in inspection.issued:
        c = issued.collective
        if issued.micro_batch == 0 and c.layer == inspection.layer and c.place == group.name:
            found.setdefault((_position(inspection, group, c), c.phase), []).append(_label(inspection, group, c))
    bars: dict[str, list[DiagramRow]] = {}
    for position in ("norm", "entry", "between", "exit"):
        # The backward pass issues collectives in reverse order.
        sides = found.get((position, "forward"), []), found.get((position, "backward"), [])[::-1]
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
    if _at_bottleneck(inspection) or _is_for_latent_gate(inspection, group, c.shape[-1]):
        return "between"
    leaves = ("all-reduce", "reduce-scatter") if c.phase == "forward" else ("all-gather",)
    return "exit" if c.kind in leaves else "entry"


def _is_for_latent_gate(inspection: Inspection, group: GroupSpec, width: int) -> bool:
    """Whether a collective belongs to gated latents that are sharded along the bottleneck rank."""
    if not inspection.has_latent_gate or not inspection.spec.shards_rank:
        return False
    return width in (2, 2 * len(group.slots), sum(group.ranks), *group.ranks)


def _is_statistic(inspection: Inspection, group: GroupSpec, width: int) -> bool:
    """Whether a collective sends only the RMSNorm statistic."""
    return width == 1 and group.side == "enter" and inspection.config.parallel.norm == "sync"


def _label(inspection: Inspection, group: GroupSpec, c: Collective) -> str:
    """Label such as 'all-reduce T x (3r + statistic) · 152 MB', with the bytes sent by one process."""
    return f"{c.kind} T x {_symbol(inspection, group, c.shape[-1])} · {format_bytes(c.sent_bytes)}"


def _symbol(inspection: Inspection, group: GroupSpec, width: int) -> str:
    """Expresses a width as a multiple of r, d or f, plus the statistic of online RMSNorm if included."""
    config = inspection.config
    model, parallel = config.model, config.parallel
    units = {"d": model.dim, "f": model.ffn_dim}
    if group.name in ("gate_up", "down"):
        units = {"f": model.ffn_dim, "d": model.dim}
    crossing = _is_for_latent_gate(inspection, group, width)
    if crossing and width in (2, 2 * len(group.slots)):
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
