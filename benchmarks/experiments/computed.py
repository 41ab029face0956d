"""Performance goals that need no run: bytes from the collective table and the operator trace, and predictions.

All are for boost-7b in bf16 with 4,096-token sequences, the size that the goals specify.
"""

from collections.abc import Iterator, Sequence

from benchmarks.experiments.document import Goal, Table
from benchmarks.experiments.published import STEPS, configuration
from benchmarks.experiments.results import Facts
from boost.config import load
from boost.config.schema import Config
from boost.plan.collectives import step_collectives
from boost.plan.hardware import load_hardware
from boost.plan.memory import memory
from boost.plan.step import elementwise_bytes
from boost.plan.timing import Predictor

SHAPES = ((4, 32, 0.60), (8, 32, 0.33), (4, 8, 0.40))
"""(TP, KV heads, maximum ratio of btp-cp bytes to btp-sp bytes)."""

SUMS = ("param_dtype", "bfloat16")
"""train.reduce_dtype."""

ELEMENTWISE = {"btp": 5.0, "btp-sp": 2.7}
"""Maximum GB per block and micro-batch."""

MFU = {"btp": 0.36, "btp-sp": 0.40}
"""Minimum predicted model FLOPs utilization on MFU_HARDWARE."""

MFU_HARDWARE = "h100-80g"
NORM_HARDWARE = ("a100-80g", MFU_HARDWARE)
NORMS = ("sync", "online")
OVERLAPS = ("none", "halves")


def seven(*overrides: str) -> Config:
    """boost-7b, TP 4, one micro-batch of 4 x 4,096 tokens."""
    mesh = ["--parallel.tp=4", "--parallel.pp=1", "--parallel.dp=1"]
    batch = ["--train.micro_batch=4", "--train.global_batch=4", "--train.seq_len=4096"]
    return load("boost-7b", [*mesh, *batch, "--train.compute_dtype=bfloat16", "--train.compile=kernels", *overrides])


def compute() -> Facts:
    """Computes all figures."""
    predictor = Predictor(load_hardware(MFU_HARDWARE))
    return {
        "crossings": list(_crossings()),
        "elementwise": {
            layout: elementwise_bytes(seven(f"--parallel.layout={layout}")) / 1e9 for layout in ELEMENTWISE
        },
        "latents": _latents(),
        "mfu": {
            layout: {
                overlap: predictor.predict(seven(f"--parallel.layout={layout}", f"--parallel.overlap={overlap}")).mfu
                for overlap in OVERLAPS
            }
            for layout in MFU
        },
        "norms": list(_norms()),
    }


def _crossings() -> Iterator[Facts]:
    """Bytes sent by one process for the blocks in a step of 262,144 tokens."""
    for tp, kv_heads, _ in SHAPES:
        for dtype in SUMS:
            words = [f"--parallel.tp={tp}", f"--model.kv_heads={kv_heads}", f"--train.reduce_dtype={dtype}"]
            sent = {layout: step_bytes(layout, words) for layout in ("btp-sp", "btp-cp")}
            yield {"tp": tp, "kv_heads": kv_heads, "reduce_dtype": dtype, **sent}


def step_bytes(layout: str, words: Sequence[str] = ()) -> int:
    """Bytes sent by one process for the blocks of boost-7b in a step of 16 x 4 x 4,096 = 262,144 tokens, including gradient
    all-reduces."""
    batch = ["--train.seq_len=4096", "--train.micro_batch=4", "--train.global_batch=64"]
    config = load("boost-7b", [f"--parallel.layout={layout}", *batch, *words])
    return sum(c.sent_bytes for c in step_collectives(config) if c.layer is not None or c.place == "gradients")


def _latents() -> Facts:
    """Bytes of latents saved without recomputation, and bytes of exactly 7 latents per token and block."""
    config = seven()
    model, train = config.model, config.train
    once = model.layers * train.micro_batch * train.seq_len * 7 * (model.rank or 0) * 2
    return {"kept": memory(config).by_category["latents"], "once": once}


def _norms() -> Iterator[Facts]:
    """Predicted step seconds of the paper's sizes with each norm, with compiled kernels."""
    for hardware in NORM_HARDWARE:
        predictor = Predictor(load_hardware(hardware))
        for row in STEPS:
            if row.tp == 1:
                continue
            seconds = {
                norm: predictor.predict(
                    configuration("BOOST", row, 1, [f"--parallel.norm={norm}", "--train.compile=kernels"])
                ).seconds
                for norm in NORMS
            }
            yield {"hardware": hardware, "size": row.size, "tp": row.tp, "pp": row.pp, **seconds}


def goals(facts: Facts) -> list[Goal]:
    """The goals that these figures answer."""
    return [_fewest_bytes(facts), _elementwise(facts), _kept_once(facts), _utilization(facts), _norm(facts)]


def table(facts: Facts) -> Table:
    """Table of all figures."""
    return Table(
        "Figures that need no run, next to their goals: bytes counted from the collective table, and predictions (modeled).",
        ("what", "where", "found", "goal"),
        tuple((goal.what, goal.where, goal.found, goal.figure) for goal in goals(facts)),
    )


WHERE = "7B, TP 4, micro-batch 4 x 4,096, bf16"


def _fewest_bytes(facts: Facts) -> Goal:
    found = {
        dtype: [row["btp-cp"] / row["btp-sp"] for row in facts["crossings"] if row["reduce_dtype"] == dtype]
        for dtype in SUMS
    }
    words = {dtype: ", ".join(f"{each:.2f}" for each in ratios) for dtype, ratios in found.items()}
    return Goal(
        "btp-cp against btp-sp, bytes",
        "0.60x (TP 4), 0.33x (TP 8), 0.40x (TP 4, 8 kv heads)",
        "blocks of the 7B, a step of 262,144 tokens, gradients reduced in bf16",
        words["bfloat16"],
        all(ratio <= most for ratio, (_, _, most) in zip(found["bfloat16"], SHAPES, strict=True)),
        "counted",
        f"with gradients reduced in fp32, the default: {words['param_dtype']}",
    )


def _elementwise(facts: Facts) -> Goal:
    found = facts["elementwise"]
    return Goal(
        "bytes of element-wise work, a block",
        ", ".join(f"{layout} <= {most:g} GB" for layout, most in ELEMENTWISE.items()),
        WHERE,
        ", ".join(f"{layout} {found[layout]:.2f} GB" for layout in ELEMENTWISE),
        all(found[layout] <= most for layout, most in ELEMENTWISE.items()),
        "counted",
    )


def _kept_once(facts: Facts) -> Goal:
    kept, once = facts["latents"]["kept"], facts["latents"]["once"]
    return Goal(
        "latents kept without recomputation",
        "once",
        WHERE,
        f"{kept / 1e9:.2f} GB; once is {once / 1e9:.2f} GB",
        kept <= 1.02 * once,
        "counted",
        "including the norm statistics",
    )


def _utilization(facts: Facts) -> Goal:
    best = {layout: max(facts["mfu"][layout].values()) for layout in MFU}
    words = ", ".join(
        f"{layout} {best[layout]:.0%} ({' and '.join(f'{mfu:.0%} {name}' for name, mfu in facts['mfu'][layout].items())})"
        for layout in MFU
    )
    return Goal(
        "low-rank MFU on an H100, predicted",
        ", ".join(f"{layout} >= {least:.0%}" for layout, least in MFU.items()),
        WHERE,
        words,
        all(best[layout] >= least for layout, least in MFU.items()),
        "modeled",
    )


def _norm(facts: Facts) -> Goal:
    gains = {f"{row['size']} {row['hardware']}": row["sync"] / row["online"] for row in facts["norms"]}
    worst = min(gains, key=lambda name: gains[name])
    return Goal(
        "online norm against sync, predicted",
        "never slower, at every published size",
        f"the paper's steps on {' and '.join(NORM_HARDWARE)}, compiled kernels",
        f"{gains[worst]:.3f} x in the worst of {len(gains)} cases ({worst})",
        gains[worst] >= 1,
        "modeled",
    )
