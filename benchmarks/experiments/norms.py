"""RMSNorm over a sharded width (btp): its statistic in a separate all-reduce (sync) or fused into the next collective (online).

Three measurements: a whole block; the norms alone (statistic, scaling and their communication, plus the latent all-reduces
that both forms share); and the error of bf16 gradients relative to one process in fp32.

Legend: T tokens, D = d/p local hidden width, R latent width of an input projection group.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.experiments.blocks import BTP, BlockRun, BlockVariant, block_config
from benchmarks.experiments.blocks_report import (
    RangeBar,
    as_facts,
    batches_of,
    compared_table,
    comparison,
    differences,
    draw_bars,
    middle,
    milliseconds,
    ms_bar,
    row_of,
    shape_words,
    times,
    turns_words,
)
from benchmarks.experiments.contest import Call, Seconds, in_words, ratio, take_turns
from boost.config import Config
from boost.config.architecture import groups
from boost.config.load import from_tree
from boost.measure.document import Figure, Goal, Section, Table
from boost.measure.results import Facts, facts_of
from boost.models.decoder import Decoder
from boost.models.fused import fused_params
from boost.models.init import initialize
from boost.models.interface import local_slice
from boost.models.kernels import inverse_rms
from boost.parallel.collectives import sum_both
from boost.parallel.gradients import GradientReducer
from boost.parallel.mesh import Mesh
from boost.parallel.norms import OnlineSum, measured, scale, sum_of_squares
from boost.plan.published import NORM_MS
from boost.train.model import build_decoder

CONTENDERS: tuple[BlockVariant, ...] = (BTP,)
NORMS = ("sync", "online")
BARE = "latents alone"
"""The latent all-reduces without a norm, which both forms share."""

PASSES = ("forward", "forward and backward")
LEAST_S = 0.02
"""Minimum seconds per timed sample."""

LIMIT = 1.05
"""Maximum ratio of the online error to the sync error (an exactness goal)."""

SEEDS = (0, 1, 2)
SMALL = {"layers": 2, "vocab_size": 1024}
"""Reduced sizes for the precision table, for which only the width matters."""


def measure(config: Config, mesh: Mesh, batches: Sequence[int], rounds: int) -> Facts:
    """Times both norms at every batch and measures their accuracy."""
    rows: list[Facts] = []
    calls: dict[str, Call] = {}

    def add(call: Call, what: str, form: str, batch: int, words: str, **facts: Any) -> None:
        name = f"{what}, {form}, batch {batch}, {words}"
        calls[name] = call
        rows.append({"what": what, "form": form, "batch": batch, "passes": words, "name": name, **facts})

    for batch in batches:
        for norm in NORMS:
            run = BlockRun(block_config(config, BTP, mesh.tp.size, batch, norm=norm), mesh)
            counted = run.collectives()
            for words, call in zip(PASSES, (run.forward, run.both), strict=True):
                theirs = [each for each in counted if words != "forward" or each.phase == "forward"]
                sent = sum(each.sent_bytes for each in theirs)
                add(call, "block", norm, batch, words, collectives=len(theirs), sent_bytes=sent)
        part = NormPart(block_config(config, BTP, mesh.tp.size, batch), mesh)
        for form in (BARE, *NORMS):
            for words in PASSES:
                add(part.call(form, backward=words != "forward"), "norm", form, batch, words)
    turns = take_turns(calls, mesh, rounds, least_s=LEAST_S, words="norms")
    return facts_of(
        "norms",
        config,
        rounds=rounds,
        tp=mesh.tp.size,
        rows=rows,
        turns=asdict(turns),
        precision=list(precision(config, mesh)),
        modeled=as_facts(comparison().norms()),
    )


class NormPart:
    """The two norms of a block without its GEMMs, from residual stream and partial latents to the next operation's input."""

    def __init__(self, config: Config, mesh: Mesh) -> None:
        train, model = config.train, config.model
        self.axis, self.width, self.eps = mesh.tp, model.dim, model.norm_eps
        tokens, dtype = train.micro_batch * train.seq_len, getattr(torch, train.compute_dtype)
        generator = torch.Generator().manual_seed(train.seed)

        def filled(width: int) -> Tensor:
            return torch.randn(tokens, width, generator=generator).to(mesh.device, dtype)

        widths = [sum(group.ranks) for group in groups(model, 0) if group.name in ("qkv", "gate_up")]
        self.inputs = [(filled(model.dim // mesh.tp.size).requires_grad_(), filled(r).requires_grad_()) for r in widths]
        self.returned = {shape: filled(shape) for shape in {model.dim // mesh.tp.size, *widths}}

    def call(self, form: str, backward: bool) -> Call:
        """Returns a call that runs the forward pass, or forward and backward pass, of one form."""
        forms: dict[str, Callable[[Tensor, Tensor], list[Tensor]]] = {
            BARE: self._bare, "sync": self._sync, "online": self._online,
        }  # fmt: skip

        def run() -> list[Tensor]:
            made = []
            for x_TD, u_TR in self.inputs:
                outputs = forms[form](x_TD, u_TR)
                made += outputs
                if backward:
                    inputs = [u_TR] if form == BARE else [x_TD, u_TR]
                    made += torch.autograd.grad(outputs, inputs, [self.returned[y.shape[-1]] for y in outputs])
            return made

        return run

    def _bare(self, x_TD: Tensor, u_TR: Tensor) -> list[Tensor]:
        return [sum_both(u_TR, self.axis)]

    def _sync(self, x_TD: Tensor, u_TR: Tensor) -> list[Tensor]:
        """All-reduces the statistic separately, forward and backward, and scales x."""
        s_T = sum_both(sum_of_squares(x_TD), self.axis)
        return [scale(x_TD, inverse_rms(s_T, self.width, self.eps)), sum_both(u_TR, self.axis)]

    def _online(self, x_TD: Tensor, u_TR: Tensor) -> list[Tensor]:
        """All-reduces the statistic together with the latents, then scales the latents."""
        partial = measured(u_TR, sum_of_squares(x_TD), self.axis)
        u_TR, s_T = OnlineSum(partial, (), self.axis, self.width, self.eps).wait()
        return [scale(u_TR, inverse_rms(s_T, self.width, self.eps))]


def precision(config: Config, mesh: Mesh, small: dict[str, int] | None = None) -> Iterator[Facts]:
    """Mean relative error of bf16 gradients against one process in fp32, by seed and norm."""
    for seed in SEEDS:
        error = {norm: gradient_error(_small(config, mesh, norm, seed, small or SMALL), mesh) for norm in NORMS}
        yield {"seed": seed, **error}


def gradient_error(config: Config, mesh: Mesh) -> float:
    """||g - g_fp32|| / ||g_fp32||, averaged over parameters and processes. Weights are fp32 in both."""
    exact = config.model_copy(
        update={
            "parallel": config.parallel.model_copy(update={"tp": 1}),
            "train": config.train.model_copy(update={"compute_dtype": "float32"}),
        }
    )
    reference, decoder = build_decoder(exact, Mesh(mesh.device)), build_decoder(config, mesh)
    for model in (reference, decoder):
        initialize(model, config.train.seed)
        _backward(model, config)
    GradientReducer(list(fused_params(decoder)), mesh).finish()
    wanted = {p.parameter.name: p.view(_gradient(s.tensor)) for s in fused_params(reference) for p in s.local_slices()}
    errors = []
    for fused in fused_params(decoder):
        for param_slice in fused.local_slices():
            parameter = param_slice.parameter
            own = local_slice(parameter, decoder.layout, wanted[parameter.name]).narrow(
                0, param_slice.offset, param_slice.rows
            )
            errors.append((param_slice.view(_gradient(fused.tensor)) - own).norm() / own.norm())
    mean = torch.stack(errors).mean()
    if mesh.size > 1:
        dist.all_reduce(mean)
    return float(mean) / mesh.size


def _gradient(weight: Tensor) -> Tensor:
    assert weight.grad is not None
    return weight.grad


def _backward(decoder: Decoder, config: Config) -> None:
    train = config.train
    generator = torch.Generator().manual_seed(train.seed)
    tokens = torch.randint(0, config.model.vocab_size, (train.micro_batch, train.seq_len + 1), generator=generator)
    tokens = tokens.to(decoder.device)
    (decoder(tokens[:, :-1], tokens[:, 1:]) / (train.micro_batch * train.seq_len)).backward()


def _small(config: Config, mesh: Mesh, norm: str, seed: int, small: dict[str, int]) -> Config:
    tree = block_config(config, BTP, mesh.tp.size, 2, norm=norm).model_dump()
    tree["model"] |= small
    tree["train"] |= {
        "seq_len": min(config.train.seq_len, 256), "param_dtype": "float32", "compute_dtype": "bfloat16", "seed": seed,
    }  # fmt: skip
    return from_tree(tree)


def goals(facts: Facts) -> list[Goal]:
    """Goal: online is never slower than sync for a whole block. The section and a test cover the precision goal."""
    found = {
        f"batch {batch}, {words}": ratio(*(_seconds(facts, "block", norm, batch, words) for norm in NORMS))
        for batch in batches_of(facts)
        for words in PASSES
    }
    worst = min(found, key=lambda name: found[name].low)
    where = f"{shape_words(facts)}, TP {facts['tp']}, one block; worst of {len(found)}: {worst}"
    shown = f"{in_words(found[worst])} x"
    return [Goal("online norm against sync, measured", "never slower", where, shown, found[worst].low >= 1)]


def section(facts: Facts) -> Section:
    """The block, the norms alone, the paper's numbers, and precision."""
    lead = (
        f"{shape_words(facts)}, TP {facts['tp']}, layout btp. Sync all-reduces the norm's statistic separately, forward and "
        f"backward; online all-reduces it with the latents. Times are {turns_words(facts)}."
    )
    parts: list[str | Table | Figure] = [lead, _block_table(facts), _norm_table(facts)]
    parts += [
        compared_table(
            "The paper's RMSNorm, 7B, TP 4 (the paper does not say which norms), next to the modeled time of both norms of a "
            "block, forward (nothing ran here).",
            facts["modeled"],
        ),
        _precision_table(facts),
        Figure(
            "norms",
            "The norms of a block alone (measured; whiskers are quartiles)",
            lambda path: draw_bars(path, _panels(facts), "ms"),
        ),
    ]
    return Section("RMSNorm across processes: sync against online", tuple(parts))


def _seconds(facts: Facts, what: str, form: str, batch: int, words: str) -> Seconds:
    row = row_of(facts, what=what, form=form, batch=batch, passes=words)
    return cast(Seconds, facts["turns"]["seconds"][row["name"]])


def _block_table(facts: Facts) -> Table:
    cells = []
    for batch in batches_of(facts):
        for words in PASSES:
            cell = [str(batch), words]
            for norm in NORMS:
                row = row_of(facts, what="block", form=norm, batch=batch, passes=words)
                taken = milliseconds(_seconds(facts, "block", norm, batch, words))
                cell += [str(row["collectives"]), f"{row['sent_bytes'] / 1e6:.3f}", taken]
            cells.append((*cell, times(*(_seconds(facts, "block", norm, batch, words) for norm in NORMS))))
    headings = ["batch:", "passes"]
    for norm in NORMS:
        headings += [f"{norm} collectives:", "MB sent:", "ms:"]
    caption = "A whole block (collectives and bytes counted; times measured)."
    return Table(caption, (*headings, "sync / online:"), tuple(cells))


def _norm_table(facts: Facts) -> Table:
    cells = []
    for batch in batches_of(facts):
        for words in PASSES:
            bare, sync, online = (_seconds(facts, "norm", form, batch, words) for form in (BARE, *NORMS))
            added = [milliseconds(differences(taken, bare)) for taken in (sync, online)]
            paper = " / ".join(f"{ms:g}" for ms in NORM_MS.get(batch, ())) if words == "forward" else ""
            cells.append((str(batch), words, milliseconds(bare), *added, times(sync, online), paper))
    caption = (
        "Both norms of a block without its GEMMs (measured): the latent all-reduces alone, and the time that each norm form adds, "
        "as a difference within a round. The ratio includes the latent all-reduces. The paper's numbers are ms on A100s."
    )
    headings = (
        "batch:",
        "passes",
        f"{BARE} ms:",
        "sync adds ms:",
        "online adds ms:",
        "sync / online:",
        "paper, sync / online:",
    )
    return Table(caption, headings, tuple(cells))


def _precision_table(facts: Facts) -> Table:
    rows = facts["precision"]
    cells = [
        (str(row["seed"]), f"{row['sync']:.3e}", f"{row['online']:.3e}", f"{row['online'] / row['sync']:.3f}x")
        for row in rows
    ]
    mean = [middle([row[norm] for row in rows]) for norm in NORMS]
    cells.append(("median", f"{mean[0]:.3e}", f"{mean[1]:.3e}", f"{mean[1] / mean[0]:.3f}x"))
    worst = max(row["online"] / row["sync"] for row in rows)
    caption = (
        f"Relative error of bf16 gradients on {facts['tp']} processes against one process in fp32, mean over parameters "
        f"(measured; {SMALL['layers']} blocks of this width, fp32 weights). Goal: online at most {LIMIT} x sync at every seed; "
        f"{'met' if worst <= LIMIT else 'not met'}."
    )
    return Table(caption, ("seed", "sync:", "online:", "online / sync:"), tuple(cells))


def _panels(facts: Facts) -> dict[str, dict[str, dict[str, RangeBar]]]:
    return {
        words: {
            form: {f"batch {batch}": ms_bar(_seconds(facts, "norm", form, batch, words)) for batch in batches_of(facts)}
            for form in (BARE, *NORMS)
        }
        for words in PASSES
    }
