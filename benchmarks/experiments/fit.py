"""The largest batch and longest sequence that fit in a given amount of memory, by recomputation policy.

Measures the peak memory of a whole step on fake tensors (`boost.measure.memory`). Peak memory is linear in the number of blocks
and, beyond one chunk of the loss, in the tokens of a micro-batch. So only small models are measured, and the rest is
extrapolated; tests compare against measurements of whole models.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.experiments.recompute import policies
from boost.config import Config
from boost.config.layouts import layouts_of
from boost.config.load import change_family, from_tree
from boost.config.schema import RecomputeName
from boost.measure.document import Goal, Section, Table
from boost.measure.memory import measure
from boost.measure.results import Facts, as_markdown, facts_of, save_section
from boost.plan.memory import memory
from boost.train.console import progress

SEQUENCE_STEP = 1024
"""Granularity of sequence lengths, in tokens."""

LARGE = 16
"""Beyond this many sequences (or steps), each adds the same memory: larger sizes are extrapolated."""


CONTEXT_SIZES = (1, 2, 4)
"""Context-parallel sizes, in addition to TP."""


@dataclass(frozen=True)
class Fit:
    """The largest sizes that fit under one policy of one layout."""

    layout: str
    policy: RecomputeName
    static_bytes: int
    """Weights, gradients and optimizer states of one process."""
    batch: int
    """Largest micro-batch at the configuration's sequence length; 0: not even one sequence."""
    batch_peak_bytes: int
    seq_len: int
    """Longest sequence at micro-batch 1, a multiple of SEQUENCE_STEP; 0: not even one step."""
    seq_len_peak_bytes: int


def fits(name: str, config: Config, policy: RecomputeName, memory_bytes: int) -> Fit:
    """Finds both sizes for one layout and policy. Gradients of an earlier micro-batch exist, as in all but the smallest steps."""

    def search(batch: int, seq_len: int, longer: bool) -> tuple[int, int]:
        def sized(n: int) -> Config:
            return _sized(config, policy, batch, n * seq_len) if longer else _sized(config, policy, n * batch, seq_len)

        slope = memory(sized(2)).activations - memory(sized(1)).activations

        @functools.cache
        def measured(n: int) -> int:
            return peak(sized(n))

        def size_of(n: int) -> int:
            if n <= LARGE:
                return measured(n)
            half = LARGE // 2
            return measured(LARGE) + (n - LARGE) * (measured(LARGE) - measured(half)) // (LARGE - half)

        return largest(size_of, memory_bytes, slope)

    batch, batch_peak = search(1, config.train.seq_len, longer=False)
    steps, sequence_peak = search(1, SEQUENCE_STEP, longer=True)
    static = sum(memory(config).states.values())
    return Fit(name, policy, static, batch, batch_peak, steps * SEQUENCE_STEP, sequence_peak)


def peak(config: Config) -> int:
    """Peak memory of a step with existing gradients from earlier micro-batches.

    Every block adds the same amount, so this measures two and three blocks and extrapolates. (The peak is at the loss or in the
    backward pass of the last block, when all other blocks hold their saved activations.)
    """
    layers = config.model.layers
    if layers <= 3:
        return sum(measure(config).peak.values())
    two, three = (
        peak(config.model_copy(update={"model": config.model.model_copy(update={"layers": n})})) for n in (2, 3)
    )
    return two + (layers - 2) * (three - two)


def largest(size_of: Callable[[int], int], limit: int, slope: float) -> tuple[int, int]:
    """Returns (n, size) of the largest n within the limit, or (0, 0) if none fits. Sizes grow with n, by about `slope` each."""
    size = size_of(1)
    if size > limit:
        return 0, 0
    fit, too_large = 1, None
    while too_large is None or too_large - fit > 1:
        guess = max(fit + 1, int(fit + (limit - size) / max(slope, 1)))
        guess = guess if too_large is None else min(guess, too_large - 1)
        guessed = size_of(guess)
        slope = (guessed - size) / (guess - fit)
        if guessed <= limit:
            fit, size = guess, guessed
        else:
            too_large = guess
    return fit, size


def fit(config: Config, memory_gb: float, out: Path) -> int:
    """Runs the experiment: every layout with default options, at every context-parallel size, under every policy.

    Writes `out`.json and .md.
    """
    work = [
        (name if cp == 1 else f"{name}, CP {cp}", _shared(variant, cp), policy)
        for cp in CONTEXT_SIZES
        for name, variant in variants(config)
        for policy in policies(variant)
    ]
    rows = [
        fits(name, variant, policy, int(memory_gb * 1e9))
        for name, variant, policy in progress(work, "layouts and policies")
    ]
    facts = facts_of("fit", config, memory_gb=memory_gb, rows=[asdict(row) for row in rows])
    save_section(out, facts, section(facts))
    print(as_markdown(facts, section(facts)))
    return 0


def variants(config: Config) -> Iterator[tuple[str, Config]]:
    """Yields (name, configuration) for every layout with default options, of the model and of its dense counterpart."""
    named = set[str]()
    for family in dict.fromkeys((config.model.family, "dense")):
        tree: dict[str, Any] = config.model_dump()
        change_family(tree["model"], family)
        model = from_tree({"model": tree["model"]}).model
        for layout in layouts_of(model) if config.parallel.tp > 1 else ("single",):
            tree["parallel"] = {"layout": layout, "tp": config.parallel.tp}
            yield f"{layout}, dense" if layout in named else layout, from_tree(tree)
            named.add(layout)


def _shared(config: Config, cp: int) -> Config:
    return config.model_copy(update={"parallel": config.parallel.model_copy(update={"cp": cp})})


def section(facts: Facts) -> Section:
    """The table."""
    config = facts["config"]
    model, train = config["model"], config["train"]
    words = (
        f"{model['layers']} blocks, d {model['dim']}, f {model['ffn_dim']}, r {model['rank']}, TP {config['parallel']['tp']}, "
        f"{train['param_dtype']} weights, {train['compute_dtype']} activations, AdamW; {facts['memory_gb']:g} GB (10^9 bytes) "
        "per process. CP n: n times as many processes, with each sequence sharded over n. Peak memory is that of a whole step with "
        "accumulated gradients, without allocator rounding, the runtime and communication buffers."
    )
    headings: tuple[str, ...] = (
        "layout",
        "policy",
        "weights, gradients, optimizer GB:",
        f"largest batch of {train['seq_len']} tokens:",
    )
    headings += ("peak GB:", "longest sequence, batch 1:", "peak GB:")

    def cells(row: Facts) -> tuple[str, ...]:
        peaks = [f"{row[key] / 1e9:.1f}" for key in ("static_bytes", "batch_peak_bytes", "seq_len_peak_bytes")]
        return row["layout"], row["policy"], peaks[0], str(row["batch"]), peaks[1], f"{row['seq_len']:,}", peaks[2]

    caption = "Measured on fake tensors, independent of the machine: largest sizes that fit in one process."
    rows = tuple(map(cells, facts["rows"]))
    return Section("What fits, by layout and recomputation policy", (words, Table(caption, headings, rows)))


def goals(facts: Facts) -> list[Goal]:
    """None: no performance goal depends on this experiment."""
    return []


def _sized(config: Config, policy: RecomputeName, batch: int, seq_len: int) -> Config:
    tree: dict[str, Any] = config.model_dump()
    tree["train"] |= {"micro_batch": batch, "global_batch": 2 * batch, "seq_len": seq_len, "recompute": policy}
    return from_tree(tree)
