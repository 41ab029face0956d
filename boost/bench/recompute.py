"""Activation checkpointing, measured: how much memory each policy saves, and what time it costs (the paper's Table 3).

One model a layout and batch; its policy is exchanged from step to step, so that all of them are timed in one interleaved run
on the same weights. Added time is the difference to policy `none` in the same round.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from boost.bench.curves import contenders
from boost.bench.memory import measure_step
from boost.bench.results import facts_of, markdown, save
from boost.config import Config
from boost.config.load import change_family, from_tree
from boost.config.schema import Family, RecomputeName
from boost.models.decoder import Block, Decoder
from boost.models.init import initialize
from boost.parallel.mesh import Mesh, close_mesh, open_mesh
from boost.parallel.recompute import POLICIES
from boost.plan.memory import memory
from boost.train.console import progress
from boost.train.model import build_decoder


@dataclass(frozen=True)
class Timed:
    """One policy of one layout, at one batch, on one process."""

    layout: str
    batch: int
    """Sequences of the micro-batch."""
    policy: RecomputeName
    kept_bytes: int
    """Seen to be kept between forward and backward pass."""
    predicted_bytes: int
    step_s: float
    """Forward and backward pass of a micro-batch, median."""
    step_quartiles_s: tuple[float, float]
    added_s: float
    """More than policy none in the same round, median."""
    added_quartiles_s: tuple[float, float]
    saved_bytes: int
    """Less than policy none keeps."""
    saved_per_added: float
    """Bytes a second; 0 for policy none, and where no added time could be seen."""
    against_full_block: float
    """saved_per_added over that of full-block, the same layout and batch; 0 for policy none."""


def variants(config: Config, batches: Sequence[int]) -> Iterator[tuple[str, Config]]:
    """(name, configuration) of every layout that carries a low-rank or dense model, at every batch.

    With one process there is one layout, `single`. Raises ConfigError where a cut is not legal.
    """
    families: list[Family] = [config.model.family, "dense"] if config.model.low_rank else ["dense"]
    for family in families:
        choices = [(c.name, dict(c.parallel)) for c in contenders(family) if c.parallel.get("grouping", True)]
        if config.parallel.tp == 1:
            choices = [("single, dense" if family == "dense" else "single", {})]
        for name, parallel in choices:
            for batch in batches:
                tree = config.model_dump()
                change_family(tree["model"], family)
                tree["parallel"] = {**parallel, "tp": config.parallel.tp}
                tree["train"] |= {
                    "micro_batch": batch,
                    "global_batch": batch,
                    "recompute": "none",
                    "recompute_every": 1,
                }
                yield name, from_tree(tree)


def policies(config: Config) -> list[RecomputeName]:
    """What a configuration's layout can do, none first and full-block last."""
    if not config.model.low_rank:
        return ["none", "full-block"]
    sharded: list[RecomputeName] = ["low-rank-sharded"] if config.parallel.layout == "btp-sp" else []
    return ["none", "low-rank", "low-rank+attention-output", *sharded, "full-block"]


def with_policy(config: Config, policy: RecomputeName) -> Config:
    """The configuration under another policy."""
    return config.model_copy(update={"train": config.train.model_copy(update={"recompute": policy})})


def time_variant(name: str, config: Config, mesh: Mesh, rounds: int) -> list[Timed]:
    """Every policy of one layout and batch, in `rounds` interleaved rounds."""
    decoder = build_decoder(config, mesh)
    initialize(decoder, config.train.seed)
    batch = _tokens(config, mesh)
    kept, seconds = {}, {policy: list[float]() for policy in policies(config)}
    for policy in seconds:  # also warms up every path
        _choose(decoder, policy)
        kept[policy] = sum(measure_step(decoder, config, batch, mesh).activations.values())
        _step(decoder, batch, mesh)
    for number in range(rounds):
        order = list(seconds)
        for policy in order[number % len(order) :] + order[: number % len(order)]:
            _choose(decoder, policy)
            seconds[policy].append(_step(decoder, batch, mesh))
    return _rows(name, config, kept, seconds)


def recompute_process(config: Config, batches: Sequence[int], rounds: int, out: Path) -> int:
    """One process of the experiment. The main one writes `out`.json, .md and .svg."""
    mesh = open_mesh(config.parallel, config.run.device, config.run.timeout_s)
    work = list(variants(config, batches))
    rows = [
        row
        for name, variant in progress(work, "layouts and batches", enabled=mesh.is_main)
        for row in time_variant(name, variant, mesh, rounds)
    ]
    if mesh.is_main:
        facts = facts_of("recompute", config, rounds=rounds, rows=[asdict(row) for row in rows])
        save(out, facts, as_markdown, draw)
        print(as_markdown(facts))
    mesh.barrier()
    close_mesh()
    return 0


def _choose(decoder: Decoder, policy: RecomputeName) -> None:
    for block in decoder.blocks:
        cast(Block, block).policy = POLICIES[policy]


def _tokens(config: Config, mesh: Mesh) -> tuple[Tensor, Tensor]:
    shape = (config.train.micro_batch, config.train.seq_len + 1)
    generator = torch.Generator().manual_seed(config.train.seed)
    tokens = torch.randint(0, config.model.vocab_size, shape, generator=generator).to(mesh.device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _step(decoder: Decoder, batch: tuple[Tensor, Tensor], mesh: Mesh) -> float:
    """Seconds of a forward and a backward pass, from the moment when all processes begin to that when all are done."""
    decoder.zero_grad(set_to_none=True)
    _all_here(mesh)
    begun = time.perf_counter()
    decoder(*batch).backward()
    _all_here(mesh)
    return time.perf_counter() - begun


def _all_here(mesh: Mesh) -> None:
    if mesh.device.type == "cuda":
        torch.cuda.synchronize()
    mesh.barrier()


def _rows(
    name: str, config: Config, kept: dict[RecomputeName, int], seconds: dict[RecomputeName, list[float]]
) -> list[Timed]:
    def rate(policy: RecomputeName) -> float:
        saved, added = kept["none"] - kept[policy], statistics.median(_added(seconds, policy))
        return saved / added if added > 0 else 0.0

    return [
        Timed(
            layout=name,
            batch=config.train.micro_batch,
            policy=policy,
            kept_bytes=kept[policy],
            predicted_bytes=memory(with_policy(config, policy)).activations,
            step_s=statistics.median(times),
            step_quartiles_s=_quartiles(times),
            added_s=statistics.median(_added(seconds, policy)),
            added_quartiles_s=_quartiles(_added(seconds, policy)),
            saved_bytes=kept["none"] - kept[policy],
            saved_per_added=rate(policy),
            against_full_block=rate(policy) / rate("full-block") if rate("full-block") else 0.0,
        )
        for policy, times in seconds.items()
    ]


def _added(seconds: dict[RecomputeName, list[float]], policy: RecomputeName) -> list[float]:
    return [ours - none for ours, none in zip(seconds[policy], seconds["none"], strict=True)]


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def as_markdown(facts: dict[str, Any]) -> str:
    """The table for people, with its command and machine."""
    config, environment = facts["config"], facts["environment"]
    model, train = config["model"], config["train"]
    caption = (
        f"{model['layers']} blocks, d {model['dim']}, f {model['ffn_dim']}, r {model['rank']}, {train['seq_len']} tokens a "
        f"sequence, {train['compute_dtype']}, TP {config['parallel']['tp']}; {machine(environment)}; torch "
        f"{environment['torch']}. Medians of {facts['rounds']} interleaved rounds, quartiles in brackets; forward and "
        "backward pass of a micro-batch, bytes of one process (MB = 10^6), dense beside low-rank of the same d and f."
    )
    headings = ["layout", "batch:", "policy", "kept MB:", "predicted:", "step ms:", "added ms:", "saved MB:", "MB/ms:"]
    title = "Memory saved per added time, by layout and recomputation policy"
    return markdown(facts, title, caption, [*headings, "x full-block:"], map(_cells, facts["rows"]))


def _cells(row: dict[str, Any]) -> list[str]:
    low, high = (1e3 * q for q in row["added_quartiles_s"])
    cells = [row["layout"], str(row["batch"]), row["policy"]]
    cells += [f"{row['kept_bytes'] / 1e6:.1f}", f"{row['predicted_bytes'] / 1e6:.1f}", f"{1e3 * row['step_s']:.0f}"]
    if row["policy"] == "none":
        return [*cells, "", "", "", ""]
    cells += [f"{1e3 * row['added_s']:.0f} ({low:.0f} to {high:.0f})", f"{row['saved_bytes'] / 1e6:.1f}"]
    return [*cells, f"{row['saved_per_added'] / 1e9:.2f}", f"{row['against_full_block']:.2f}"]


def machine(environment: dict[str, Any]) -> str:
    """The hardware of a result in words."""
    gpus = environment["gpus"]
    return f"{len(gpus)} x {gpus[0]}" if gpus else f"{environment['cpu']}, {environment['cores']} cores"


def draw(facts: dict[str, Any], path: Path) -> None:
    """Memory saved over time added, a panel a batch: what lies on a steeper line is the better bargain."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "boost"  # the same bytes for the same numbers
    from matplotlib import pyplot

    rows = [row for row in facts["rows"] if row["policy"] != "none"]
    batches = sorted({row["batch"] for row in rows})
    layouts, names = list(dict.fromkeys(r["layout"] for r in rows)), list(dict.fromkeys(r["policy"] for r in rows))
    figure, axes = pyplot.subplots(1, len(batches), figsize=(5.5 * len(batches), 4.5), squeeze=False)
    colours = pyplot.get_cmap("tab10")
    for axis, batch in zip(axes[0], batches, strict=True):
        for row in rows:
            if row["batch"] != batch:
                continue
            x, y = 1e3 * row["added_s"], row["saved_bytes"] / 1e6
            spread = [[x - 1e3 * row["added_quartiles_s"][0]], [1e3 * row["added_quartiles_s"][1] - x]]
            axis.errorbar(
                x, y, xerr=spread, marker="osD^v"[names.index(row["policy"])], markersize=7, linewidth=0.8,
                color=colours(layouts.index(row["layout"])),
            )  # fmt: skip
        axis.set(xlim=(0, None), ylim=(0, None), title=f"batch {batch}", xlabel="added time, ms", ylabel="saved, MB")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.2)
    marks = [pyplot.Line2D([], [], color=colours(i), linewidth=3, label=name) for i, name in enumerate(layouts)]
    marks += [
        pyplot.Line2D([], [], color="black", marker="osD^v"[i], linewidth=0, label=n) for i, n in enumerate(names)
    ]
    figure.legend(handles=marks, loc="outside right center", fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0, 0.78, 1))
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
