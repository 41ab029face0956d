"""Performance goals that need no run: bytes from the collective table and the operator trace, and predictions.

They use boost-7b in bf16 with 4,096-token sequences, as the goals specify; the norm's goal covers every published size.
"""

import itertools
from collections.abc import Iterator

from benchmarks.experiments.published import EAGER_US, STEPS, configuration, launching
from benchmarks.experiments.results import Facts, Goal, Table
from boost.config import load
from boost.config.schema import Config
from boost.config.stages import Stage, stages_of
from boost.plan.collectives import step_collectives
from boost.plan.hardware import load_hardware
from boost.plan.memory import memory
from boost.plan.timing import Predictor, block_work, predict, step_work
from boost.plan.work import ATTENTION, ATTENTION_BACKWARD, GEMM

SHAPES = ((4, 32, 0.60), (8, 32, 0.33), (4, 8, 0.40))
"""(TP, KV heads, maximum ratio of btp-cp bytes to btp-sp bytes)."""

ELEMENTWISE = {"btp": 5.0, "btp-sp": 2.7}
"""Maximum GB per block and micro-batch."""

MFU = {"btp": 0.36, "btp-sp": 0.40}
"""Minimum predicted model FLOPs utilization on MFU_HARDWARE."""

MFU_HARDWARE = "h100-80g"
NORM_HARDWARE = ("a100-80g", MFU_HARDWARE)
WHERE = "7B, TP 4, micro-batch 4 x 4,096, bf16"


def seven(*overrides: str) -> Config:
    """boost-7b, TP 4, one micro-batch of 4 x 4,096 tokens."""
    mesh = ["--parallel.tp=4", "--parallel.pp=1", "--parallel.dp=1"]
    batch = ["--train.micro_batch=4", "--train.global_batch=4", "--train.seq_len=4096"]
    return load("boost-7b", [*mesh, *batch, "--train.compute_dtype=bfloat16", "--train.compile=kernels", *overrides])


def compute() -> Iterator[Goal]:
    """Computes all figures, each with its goal."""
    ratios: dict[str, list[float]] = {}
    for dtype, (tp, kv_heads, _) in itertools.product(("param_dtype", "bfloat16"), SHAPES):
        flags = [f"--parallel.tp={tp}", f"--model.kv_heads={kv_heads}", f"--train.reduce_dtype={dtype}"]
        ratios.setdefault(dtype, []).append(step_bytes("btp-cp", flags) / step_bytes("btp-sp", flags))
    words = {dtype: ", ".join(f"{ratio:.2f}" for ratio in of_dtype) for dtype, of_dtype in ratios.items()}
    yield Goal(
        "btp-cp against btp-sp, bytes",
        "0.60x (TP 4), 0.33x (TP 8), 0.40x (TP 4, 8 kv heads)",
        "blocks of the 7B, a step of 262,144 tokens, gradients reduced in bf16",
        words["bfloat16"],
        all(ratio <= most for ratio, (_, _, most) in zip(ratios["bfloat16"], SHAPES, strict=True)),
        "counted",
        f"with gradients reduced in fp32, the default: {words['param_dtype']}",
    )
    moved = {layout: elementwise_bytes(seven(f"--parallel.layout={layout}")) / 1e9 for layout in ELEMENTWISE}
    yield Goal(
        "bytes of element-wise work, a block",
        ", ".join(f"{layout} <= {most:g} GB" for layout, most in ELEMENTWISE.items()),
        WHERE,
        ", ".join(f"{layout} {gigabytes:.2f} GB" for layout, gigabytes in moved.items()),
        all(moved[layout] <= most for layout, most in ELEMENTWISE.items()),
        "counted",
    )
    config = seven()
    model, train = config.model, config.train
    once = model.layers * train.micro_batch * train.seq_len * 7 * (model.rank or 0) * 2
    kept = memory(config).by_category["latents"]
    yield Goal(
        "latents kept without recomputation",
        "once",
        WHERE,
        f"{kept / 1e9:.2f} GB; once is {once / 1e9:.2f} GB",
        kept <= 1.02 * once,
        "counted",
        "including the norm statistics",
    )
    predictor = Predictor(load_hardware(MFU_HARDWARE))
    mfu = {
        layout: {
            overlap: predictor.predict(
                seven(f"--parallel.layout={layout}", f"--parallel.overlap={overlap}", "--train.compile=auto")
            ).mfu
            for overlap in ("none", "halves")
        }
        for layout in MFU
    }
    yield Goal(
        "low-rank MFU on an H100, predicted",
        ", ".join(f"{layout} >= {least:.0%}" for layout, least in MFU.items()),
        WHERE,
        ", ".join(
            f"{layout} {max(by.values()):.0%} ({' and '.join(f'{value:.0%} {name}' for name, value in by.items())})"
            for layout, by in mfu.items()
        ),
        all(max(mfu[layout].values()) >= least for layout, least in MFU.items()),
        "modeled",
    )
    yield norm_goal(dict(_norm_gains()))


def norm_goal(gains: dict[str, float]) -> Goal:
    """The online norm's goal. `gains`: seconds with sync over seconds with online, by case."""
    worst = min(gains, key=lambda name: gains[name])
    return Goal(
        "online norm against sync, predicted",
        "never slower, at every published size",
        f"the paper's steps on {' and '.join(NORM_HARDWARE)}",
        f"{gains[worst]:.3f} x in the worst of {len(gains)} cases ({worst})",
        gains[worst] >= 1,
        "modeled",
    )


def step_bytes(layout: str, words: list[str] | None = None) -> int:
    """Bytes sent by one process for the blocks of boost-7b in a step of 16 x 4 x 4,096 = 262,144 tokens, including gradient
    all-reduces."""
    batch = ["--train.seq_len=4096", "--train.micro_batch=4", "--train.global_batch=64"]
    config = load("boost-7b", [f"--parallel.layout={layout}", *batch, *(words or [])])
    return sum(c.sent_bytes for c in step_collectives(config) if c.layer is not None or c.place == "gradients")


def _norm_gains() -> Iterator[tuple[str, float]]:
    """Yields (case, gain of online over sync) at the paper's sizes."""
    for hardware in NORM_HARDWARE:
        # A slower host would hide the difference.
        predictor = Predictor(load_hardware(hardware).model_copy(update={"host_us": launching(EAGER_US)}))
        for row in STEPS:
            if row.tp > 1:
                sync, online = (
                    predictor.predict(configuration("BOOST", row, 1, [f"--parallel.norm={norm}"])).seconds
                    for norm in ("sync", "online")
                )
                yield f"{row.size} {hardware}", sync / online


def goals(facts: Facts) -> list[Goal]:
    """The goals that these figures decide."""
    return [Goal(**goal) for goal in facts["computed"]]


def table(facts: Facts) -> Table:
    """Table of all figures."""
    return Table(
        "Figures that need no run, next to their goals: bytes counted from the collective table, and predictions (modeled).",
        ("what", "where", "found", "goal"),
        tuple((goal.what, goal.where, goal.found, goal.figure) for goal in goals(facts)),
    )


def elementwise_bytes(config: Config) -> float:
    """Bytes that a GPU moves for the element-wise work of a block and micro-batch, without recomputation. Casts of weights and
    gradients, and gradient accumulation, are included."""
    train = config.train
    train = train.model_copy(update={"working_copies": False, "global_batch": train.micro_batch * config.parallel.dp})
    bare = config.model_copy(update={"train": train})  # its step neither casts nor accumulates
    work = block_work(config, 0, "none", on_gpu=True)
    inside = sum(w.bytes * n for w, n in work.items() if w.kernel not in (GEMM, ATTENTION, ATTENTION_BACKWARD))
    own, others = (
        sum(w.bytes * n for w, n in step_work(c, [Stage(1, 3, 0, 1)]).items() if w.place == "weights")
        for c in (config, bare)
    )
    return inside + (own - others) * train.global_batch / config.train.global_batch


SUMMED = {"btp": "cola", "btp-sp": "cola", "megatron-sp": "dense"}
"""Layouts, each with a family, whose gradient accumulation is predicted."""

SUMMED_SEQUENCES = (1, 2, 4, 8)
"""Sequences per micro-batch; a step has 32."""


def accumulation() -> Iterator[Facts]:
    """Yields the fractions of a step spent adding gradients to those of earlier micro-batches, which adding in GEMMs could save."""
    for profile, (layout, family) in itertools.product(NORM_HARDWARE, SUMMED.items()):
        hardware = load_hardware(profile)
        shares = []
        for size in SUMMED_SEQUENCES:
            words = (
                f"--parallel.layout={layout}",
                f"--model.family={family}",
                f"--train.micro_batch={size}",
                "--train.compile=auto",
            )
            one, two, whole = (seven(*words, f"--train.global_batch={n}") for n in (size, 2 * size, 32))
            work = step_work(two, stages_of(two, 0)) - step_work(one, stages_of(one, 0))
            seconds = sum(times * hardware.speeds.seconds(each) for each, times in work.items())
            shares.append((32 // size - 1) * seconds / predict(whole, hardware).seconds)
        yield {"gpu": profile, "layout": layout, "shares": shares}


def accumulation_table(facts: Facts) -> Table:
    """Table of `accumulation`."""
    return Table(
        f"Gradient accumulation, fraction of a step, modeled: {WHERE.partition(',')[0]}, TP 4, 32 x 4,096 tokens, fp32 gradients.",
        ("GPU", "layout", *(f"{size} per micro-batch:" for size in SUMMED_SEQUENCES)),
        tuple(
            (each["gpu"].partition("-")[0].upper(), each["layout"], *(f"{share:.1%}" for share in each["shares"]))
            for each in facts["accumulation"]
        ),
    )
