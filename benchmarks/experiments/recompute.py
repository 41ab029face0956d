"""Measures the memory that each recomputation policy saves and the time it adds (the paper's Table 3).

Uses one model per layout and batch and switches its policy between steps, so all policies are timed in one interleaved run
with the same weights. Added time is relative to policy `none` in the same round.
"""

import argparse
import functools
import itertools
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from benchmarks.commands import LEAST_ROUNDS, add_config, add_rounds, require_least, run_processes, tp_config
from benchmarks.experiments import colors
from benchmarks.experiments.contest import Call, Ratio, Seconds, bootstrap, launches, rounds_words, spread, take_turns
from benchmarks.experiments.published import SAVED_PER_ADDED
from benchmarks.experiments.results import Facts, Figure, Goal, Section, Table, facts_of, machine
from benchmarks.experiments.sections import save
from benchmarks.experiments.steps import MEGATRON, MEGATRON_SP, PARALLEL
from boost import drawing
from boost.config import Config
from boost.config.layouts import layout_spec
from boost.config.load import change, from_tree
from boost.config.schema import Family, RecomputeName
from boost.measure.memory import MemoryTracker
from boost.models.block import TransformerBlock
from boost.models.decoder import Decoder
from boost.models.fused import fused_params
from boost.models.init import initialize
from boost.models.kernels import BACKENDS, using
from boost.models.recompute import POLICIES
from boost.parallel.mesh import Mesh
from boost.parallel.weights import WorkingCopies
from boost.plan.categories import LOGITS, SAVED, WEIGHTS, short_role
from boost.plan.memory import memory
from boost.train.model import build_decoder
from boost.train.progress import progress
from boost.train.rendezvous import close_mesh, open_mesh


@dataclass(frozen=True)
class Timed:
    """One policy under one layout at one batch size, on one process."""

    layout: str
    batch: int
    """Sequences per micro-batch."""
    policy: RecomputeName
    kept_bytes: int
    """Activation memory between forward and backward pass, measured."""
    predicted_bytes: int
    seconds: list[float]
    """Time of the forward and backward pass of a micro-batch, one per round."""


@dataclass(frozen=True)
class AddedTime:
    """The memory that one policy saves and the time that it adds, computed from a row of the result."""

    layout: str
    batch: int
    policy: RecomputeName
    kept_bytes: int
    predicted_bytes: int
    saved_bytes: int
    """Memory saved relative to policy none."""
    step_s: float
    """Median of `seconds`."""
    added_s: float
    """Median time added relative to policy none in the same round."""
    added_quartiles_s: tuple[float, float]
    saved_per_added: float
    """Bytes saved per second added; 0 for policy none, or if no added time is measurable."""
    against_full_block: float
    """saved_per_added relative to full-block at the same layout and batch; 0 for policy none, or if no ratio is measurable."""
    against_full_block_interval: tuple[float, float | None] | None
    """Bootstrap interval of `against_full_block`. The upper end is None (unbounded) if some draws have no measurable
    added time. None if there is nothing to compare."""


def variants(config: Config, batches: Sequence[int]) -> Iterator[tuple[str, Config]]:
    """Yields (name, configuration) for every layout of the model and its dense counterpart at every batch.

    On one process, the only layout is `single`. Raises ConfigError if the configuration is invalid.
    """
    families: list[Family] = [config.model.family, "dense"] if config.model.low_rank else ["dense"]
    for family in families:
        choices = [
            (name, parallel)
            for name, parallel in PARALLEL.items()
            if (name in (MEGATRON, MEGATRON_SP)) == (family == "dense")
        ]
        if config.parallel.tp == 1:
            choices = [("single, dense" if family == "dense" else "single", {})]
        for name, parallel in choices:
            for batch in batches:
                tree = config.model_dump()
                change(tree, {"model.family": family})
                tree["parallel"] = {**parallel, "tp": config.parallel.tp}
                tree["train"] |= {
                    "micro_batch": batch,
                    "global_batch": batch,
                    "recompute": "none",
                    "recompute_every": 1,
                }
                yield name, from_tree(tree)


def policies(config: Config) -> list[RecomputeName]:
    """The policies of the configuration's layout, with none first and full-block last."""
    if not config.model.low_rank:
        return ["none", "full-block"]
    sharded: list[RecomputeName] = ["low-rank-sharded"] if layout_spec(config.parallel.layout).gathers_latents else []
    return ["none", "low-rank", "low-rank+attention-output", *sharded, "full-block"]


def time_variant(name: str, config: Config, mesh: Mesh, rounds: int) -> list[Timed]:
    """Times every policy of one layout and batch in `rounds` interleaved rounds."""
    decoder = build_decoder(config, mesh)
    initialize(decoder, config.train.seed)
    generator = torch.Generator().manual_seed(config.train.seed)
    shape = (config.train.micro_batch, config.train.seq_len + 1)
    tokens = torch.randint(0, config.model.vocab_size, shape, generator=generator).to(mesh.device)
    batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    kept, predicted = {}, {}
    for policy in policies(config):
        _choose(decoder, policy)
        kept[policy] = _kept_bytes(decoder, config, batch)
        train = config.train.model_copy(update={"recompute": policy})
        predicted[policy] = memory(config.model_copy(update={"train": train})).activations
    calls: dict[str, Call] = {policy: functools.partial(_pass, decoder, policy, batch) for policy in kept}
    turns = take_turns(calls, mesh, rounds, warm_up=1, words=f"{name}, batch {config.train.micro_batch}")
    return [
        Timed(
            layout=name,
            batch=config.train.micro_batch,
            policy=policy,
            kept_bytes=kept[policy],
            predicted_bytes=predicted[policy],
            seconds=turns.seconds[policy],
        )
        for policy in kept
    ]


def _kept_bytes(decoder: Decoder, config: Config, batch: tuple[Tensor, Tensor]) -> int:
    """Bytes that a forward pass saves for the backward pass, excluding the loss."""
    tracker = MemoryTracker()
    for fused in fused_params(decoder):
        tracker.watch(
            fused.tensor, WEIGHTS, short_role(fused.slices[0].parameter.role, fused.slices[0].parameter.makes_outputs)
        )

    def loss(*arguments: Any) -> Any:
        tracker.scope = LOGITS
        return usual(*arguments)

    usual, copies = decoder.layout.loss, WorkingCopies(decoder, config, lambda _: None)
    with mock.patch.object(decoder.layout, "loss", loss), tracker, using(BACKENDS["eager"]), copies.in_use():
        total = decoder(*batch)  # keeps its saved activations alive
        before = None
        while before != tracker.live:  # gloo's threads release sent tensors after a delay
            before = +tracker.live
            time.sleep(0.1)
        kept = sum(size for category, size in tracker.live.items() if category in SAVED)
    del total
    return kept


def recompute_process(config: Config, batches: Sequence[int], rounds: int, out: Path) -> int:
    """Runs the experiment on this process. The main process writes `out`.json, .md and .svg."""
    mesh = open_mesh(config.parallel, config.run.device, config.run.timeout_s)
    work = list(variants(config, batches))
    rows = [
        row
        for name, variant in progress(work, "layouts and batches", enabled=mesh.is_main)
        for row in time_variant(name, variant, mesh, rounds)
    ]
    if mesh.is_main:
        facts = facts_of("recompute", config, rounds=rounds, rows=[asdict(row) for row in rows])
        save(out, facts)
    mesh.barrier()
    close_mesh()
    return 0


def _choose(decoder: Decoder, policy: RecomputeName) -> None:
    for block in decoder.blocks:
        cast(TransformerBlock, block).recompute(POLICIES[policy])


def _pass(decoder: Decoder, policy: RecomputeName, batch: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Runs a forward and backward pass under a policy. Returns the loss and a gradient."""
    _choose(decoder, policy)
    decoder.zero_grad(set_to_none=True)
    loss: Tensor = decoder(*batch)
    loss.backward()
    return [loss.detach(), *(p.grad for p in itertools.islice(decoder.parameters(), 1) if p.grad is not None)]


def added_times(rows: Iterable[Facts]) -> list[AddedTime]:
    """The memory that each policy saves and the time it adds, relative to none at the same layout and batch, in `rows` order."""
    together: dict[tuple[str, int], list[Facts]] = {}
    for row in rows:
        together.setdefault((row["layout"], row["batch"]), []).append(row)
    result = []
    for of_variant in together.values():
        kept: dict[RecomputeName, int] = {row["policy"]: row["kept_bytes"] for row in of_variant}
        seconds: dict[RecomputeName, Seconds] = {row["policy"]: row["seconds"] for row in of_variant}
        for row in of_variant:
            policy = row["policy"]
            added = spread(launches(seconds[policy]) - launches(seconds["none"]))
            saved, against = kept["none"] - kept[policy], against_full_block(kept, seconds, policy)
            result.append(
                AddedTime(
                    **{key: row[key] for key in ("layout", "batch", "policy", "kept_bytes", "predicted_bytes")},
                    saved_bytes=saved,
                    step_s=spread(seconds[policy]).median,
                    added_s=added.median,
                    added_quartiles_s=(added.low, added.high),
                    saved_per_added=saved / added.median if added.median > 0 else 0.0,
                    against_full_block=_seen(against) if policy != "full-block" else float(added.median > 0),
                    against_full_block_interval=_interval(against),
                )
            )
    return result


def _seen(ratio: Ratio | None) -> float:
    return ratio.value if ratio and math.isfinite(ratio.value) else 0.0


def _interval(ratio: Ratio | None) -> tuple[float, float | None] | None:
    return None if ratio is None else (ratio.low, ratio.high if math.isfinite(ratio.high) else None)


def against_full_block(
    kept: Mapping[RecomputeName, int], seconds: Mapping[RecomputeName, Seconds], policy: RecomputeName
) -> Ratio | None:
    """Memory saved per added time relative to full-block; None for policies none and full-block.

    Added time is a median of small differences. If it is not positive in a draw, the ratio is infinite. If full-block's added time
    is not positive, no claim is possible, and the ratio is 0.
    """
    if policy in ("none", "full-block"):
        return None
    saved = (kept["none"] - kept[policy]) / (kept["none"] - kept["full-block"])

    def quotient(none: np.ndarray, ours: np.ndarray, full: np.ndarray) -> np.ndarray:
        added, added_full = (np.median(each - none, axis=-1) for each in (ours, full))
        with np.errstate(divide="ignore", invalid="ignore"):
            found: np.ndarray = np.where(added > 0, saved * added_full / added, np.inf)
        return np.where(added_full > 0, found, 0.0)

    return bootstrap(quotient, seconds["none"], seconds[policy], seconds["full-block"])


def section(facts: Facts) -> Section:
    """Memory saved and time added by each policy, next to the paper's numbers, and a figure."""
    config = facts["config"]
    model, train = config["model"], config["train"]
    words = (
        f"{model['layers']} blocks, d {model['dim']}, f {model['ffn_dim']}, r {model['rank']}, {train['seq_len']} tokens per "
        f"sequence, {train['compute_dtype']}, TP {config['parallel']['tp']}; low-rank and dense models have the same d and f. "
        f"Times are for the forward and backward pass of a micro-batch: medians of {rounds_words(facts)}, with quartiles in "
        "parentheses; ratios have 95% bootstrap intervals. Bytes are per process (1 MB is 10^6 bytes). Added time is relative "
        "to policy `none` in the same round."
    )
    headings: tuple[str, ...] = (
        "layout",
        "batch:",
        "policy",
        "activations MB:",
        "predicted:",
        "step ms:",
        "added ms:",
        "saved MB:",
        "MB/ms:",
    )
    parts: list[str | Table | Figure] = [
        words,
        Table(
            "Measured times, and counted activation bytes next to the memory model's prediction.",
            (*headings, "x full-block:"),
            tuple(map(_cells, added_times(facts["rows"]))),
        ),
    ]
    beside = [_beside_paper(batch, rows) for batch, rows in _headline(facts).items() if batch in SAVED_PER_ADDED]
    if beside:
        caption = (
            "Ours (measured, `low-rank` against `full-block`) next to the paper's 7B on A100s; the paper calls its baseline "
            "vanilla. Only the ratios are comparable."
        )
        headings = ("batch:", "low-rank MB/ms:", "full-block MB/ms:", "ratio:", "paper, low-rank MB/ms:")
        parts.append(Table(caption, (*headings, "paper, vanilla MB/ms:", "paper, ratio:"), tuple(beside)))
    caption = (
        "Memory saved per added time by layout and policy, one panel per batch (measured); longer bars are better."
    )
    parts.append(Figure("recompute", caption, lambda path: draw(facts, path)))
    return Section("Memory saved per added time, by layout and recomputation policy", tuple(parts))


GOAL, LEAST = 1.7, 1.4
"""Minimum memory saved per added time of low-rank checkpointing relative to full-block recomputation, and minimum lower end of its
interval."""


def goals(facts: Facts) -> list[Goal]:
    """Goal: low-rank checkpointing under BOOST's layout, at every batch."""
    config, found = facts["config"], _headline(facts)
    ratios = {batch: of_batch["low-rank"].against_full_block for batch, of_batch in found.items()}
    lows = [(of_batch["low-rank"].against_full_block_interval or (0.0,))[0] for of_batch in found.values()]
    met = bool(ratios) and min(ratios.values()) >= GOAL and min(lows) > LEAST
    layout = next((of_batch["low-rank"].layout for of_batch in found.values()), "")
    where = (
        f"`{layout}`, TP {config['parallel']['tp']}, d {config['model']['dim']}, {config['train']['seq_len']} tokens, "
        f"{config['train']['compute_dtype']}; {machine(facts['environment'])}"
    )
    summary = "; ".join(f"batch {batch}: {_ratio_words(of_batch['low-rank'])}" for batch, of_batch in found.items())
    remark = ""
    if ratios and not met:
        short = ", ".join(str(batch) for batch, ratio in ratios.items() if ratio < GOAL)
        remark = f"Below the goal at batch {short}. " if short else ""
        remark += "The paper reports 1.70 and 1.56."
    return [
        Goal(
            "low-rank checkpointing, memory saved per added time",
            f">= {GOAL}x that of full-block, interval above {LEAST}",
            where,
            summary,
            met if ratios else None,
            remark=remark,
        )
    ]


def _headline(facts: Facts) -> dict[int, dict[str, AddedTime]]:
    """Rows of BOOST's layout (`single` on one process) by batch and policy."""
    rows = added_times(facts["rows"])
    chosen = next((row.layout for row in rows if row.policy == "low-rank"), None)
    result: dict[int, dict[str, AddedTime]] = {}
    for row in rows:
        if row.layout == chosen:
            result.setdefault(row.batch, {})[row.policy] = row
    return result


def _beside_paper(batch: int, rows: Mapping[str, AddedTime]) -> tuple[str, ...]:
    low_rank, vanilla = SAVED_PER_ADDED[batch]
    ours = [f"{rows[policy].saved_per_added / 1e9:.2f}" for policy in ("low-rank", "full-block")]
    theirs = (f"{low_rank:g}", f"{vanilla:g}", f"{low_rank / vanilla:.2f}")
    return (str(batch), *ours, _ratio_words(rows["low-rank"]), *theirs)


def _ratio_words(row: AddedTime) -> str:
    """Formats memory saved per added time relative to full-block."""
    words = f"{row.against_full_block:.2f}" if row.against_full_block else "not measurable"
    if row.against_full_block_interval:
        low, high = row.against_full_block_interval
        words += f" ({low:.2f} to {high:.2f})" if high is not None else f" ({low:.2f} or more)"
    return words


def _cells(row: AddedTime) -> tuple[str, ...]:
    low, high = (1e3 * q for q in row.added_quartiles_s)
    cells: tuple[str, ...] = (row.layout, str(row.batch), row.policy)
    cells += (f"{row.kept_bytes / 1e6:.1f}", f"{row.predicted_bytes / 1e6:.1f}", f"{1e3 * row.step_s:.0f}")
    if row.policy == "none":
        return (*cells, "", "", "", "")
    cells += (f"{1e3 * row.added_s:.0f} ({low:.0f} to {high:.0f})", f"{row.saved_bytes / 1e6:.1f}")
    return (*cells, f"{row.saved_per_added / 1e9:.2f}", _ratio_words(row))


def draw(facts: Facts, path: Path) -> None:
    """Draws memory saved per added time by layout and policy, one panel per batch."""
    pyplot = drawing.pyplot()
    rows = [row for row in added_times(facts["rows"]) if row.policy != "none"]
    batches = sorted({row.batch for row in rows})
    policies = list(dict.fromkeys(row.policy for row in rows))
    layouts = list(dict.fromkeys(row.layout for row in rows))
    places, labels = dict[tuple[str, str], int](), list[str]()
    for layout in layouts:
        for policy in policies:
            if any((row.layout, row.policy) == (layout, policy) for row in rows):
                places[layout, policy] = len(labels)
                labels.append(f"{layout}: {policy}")
    figure, axes = pyplot.subplots(
        1, len(batches), figsize=(7.4, 0.8 + 0.25 * len(labels)), sharey=True, squeeze=False, layout="constrained"
    )
    for axis, batch in zip(axes[0], batches, strict=True):
        of_batch = [row for row in rows if row.batch == batch]
        # If recomputation adds less time than noise, memory per time is meaningless.
        sound = [row for row in of_batch if row.added_quartiles_s[0] > 0 and row.saved_per_added > 0]
        for row in sound:
            value, y = row.saved_per_added / 1e9, places[row.layout, row.policy]
            axis.barh(y, value, 0.7, color=colors.color_of(row.layout))
            axis.annotate(f"{value:.2f}", (value, y), (4, 0), textcoords="offset points", va="center")
        for row in of_batch:
            if row not in sound:
                where = (0, places[row.layout, row.policy])
                axis.annotate(
                    "within noise", where, (4, 0), textcoords="offset points", va="center", color=drawing.MUTED
                )
        most = max((row.saved_per_added / 1e9 for row in sound), default=1.0)
        axis.set(title=f"batch {batch}, MB/ms", xlim=(0, 1.22 * most))
        axis.grid(visible=True, axis="x")
    axes[0][0].set_yticks(range(len(labels)), labels)
    axes[0][0].invert_yaxis()
    drawing.write(figure, path)


def arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser, "recompute")
    words = "micro-batch sizes, in sequences (default 4 8)"
    parser.add_argument("--batches", type=int, nargs="+", default=[4, 8], metavar="B", help=words)
    add_rounds(parser, 15)


def run(args: argparse.Namespace) -> int:
    config = tp_config(args)
    require_least("--rounds", [args.rounds], LEAST_ROUNDS)
    require_least("--batches", args.batches)
    list(variants(config, args.batches))  # validate before starting any process
    return run_processes(recompute_process, (config, args.batches, args.rounds, args.out), args.tp)
