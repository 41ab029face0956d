"""The sets that `python -m benchmarks wire` measures, as data.

Steps are short (0.2 to 0.8 s without a limit), because all sets together must fit into 103 minutes on two cores. Models therefore
have at most two blocks, batches have few tokens, and a small vocabulary keeps the head a small fraction of a step. Comparing
layouts requires the right ratio of communication to computation in a block, so the wire's rates are derived from that ratio. With
few tokens, the gradient sums of replicated weights (`btp-sp`, `btp-cp`, `ulysses`), once per step, weigh more than in the paper's
steps; the set of many tokens shows the opposite case. Even fewer tokens would favor the baselines, because the activations that
they replicate would fit into caches.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.experiments.contest import Ratio, ratio, spread
from benchmarks.experiments.results import Facts, MeasurementError
from benchmarks.experiments.steps import BTP, BTP_SP, BTP_SYNC, MEGATRON, MEGATRON_SP, PARALLEL, PUBLISHED, VANILLA
from boost.config import Config, load
from boost.measure.steps import flags, shape

ULYSSES, BTP_CP = "ulysses", "btp-cp"
BTP_UNGROUPED = "btp, sync, ungrouped"
DENSE, LOW_RANK = "dense", "low-rank"
"""Contenders without TP, for which all layouts of a model are the same."""

FORMS: dict[str, Mapping[str, Any]] = {
    **PARALLEL,
    ULYSSES: {"layout": "ulysses"},
    BTP_UNGROUPED: {"layout": "btp", "norm": "sync", "grouping": False},
    BTP_CP: {"layout": "btp-cp"},
    DENSE: {"layout": "single"},
    LOW_RANK: {"layout": "single"},
}
"""[parallel] of every layout that a set may name, without the mesh and overlap."""

FULL_RANK = (MEGATRON, MEGATRON_SP, ULYSSES, DENSE)
"""Forms that run the dense model."""

NO_LIMIT = "no limit"
MARKED = {"share-matched": 0.17, "slow": 0.5}
"""Fraction of a btp step that communication takes on each marked wire. The first matches the paper's 7B row on A100s."""


@dataclass(frozen=True)
class WireContender:
    """A layout, with or without overlap and compiled kernels."""

    form: str
    overlap: str = "none"
    """parallel.overlap."""
    compile: str = "none"
    """train.compile."""

    @property
    def name(self) -> str:
        """Name in results and tables."""
        return name_of(self.form, self.overlap) + (", compiled" if self.compile != "none" else "")


def name_of(form: str, overlap: str) -> str:
    """Name of a contender without compiled kernels."""
    return form if overlap == "none" else f"{form}, {overlap}"


def plain_and_halved(*forms: str) -> tuple[WireContender, ...]:
    """Every form, without and with overlap."""
    return tuple(WireContender(form, overlap) for form in forms for overlap in ("none", "halves"))


@dataclass(frozen=True)
class WireGroup:
    """Contenders that are interleaved in every launch, with one mesh, size, family and batch."""

    name: str
    """Unique within a set."""
    size: tuple[int, int, int, int]
    """d, blocks, f, heads."""
    batch: Mapping[str, int]
    """Vocabulary, sequence length, micro-batch and global batch."""
    contenders: tuple[WireContender, ...]
    mesh: Mapping[str, int] = field(default_factory=lambda: {"tp": 2})
    """Sizes of tp, pp and dp; sizes that are left out are 1."""
    family: str = "cola"
    reference: str = BTP
    """The contender whose step determines the rates, and with which the others are compared."""
    recorded: tuple[WireContender, ...] = ()
    """Contenders with a timeline of one step on the slow wire."""
    collectives: bool = False
    """Whether to time bare collectives too."""

    @property
    def processes(self) -> int:
        """Number of hosts, with one process each."""
        return self.mesh.get("tp", 1) * self.mesh.get("pp", 1) * self.mesh.get("dp", 1)

    def configs(self, source: str, overrides: Sequence[str]) -> dict[str, Config]:
        """Configurations by contender. Raises ConfigError."""
        found = {}
        for each in self.contenders:
            family = "dense" if each.form in FULL_RANK else self.family
            mesh = {"tp": 1, "pp": 1, "dp": 1, **self.mesh}
            words = {**FORMS[each.form], **mesh, "overlap": each.overlap}
            parallel = [f"--parallel.{name}={str(value).lower()}" for name, value in words.items()]
            usual = ["--run.device=cpu", "--optim.lr=1e-6", f"--train.compile={each.compile}"]
            config = [*usual, *shape(*self.size, family=family), *flags(**self.batch), *parallel]
            found[each.name] = load(source, [*config, *overrides])
        return found


@dataclass(frozen=True)
class WireSet:
    """Groups that one command measures into one result."""

    name: str
    groups: tuple[WireGroup, ...]
    launches: int
    """Launches on every marked wire."""
    rounds: int
    """Rounds per launch."""
    free_launches: int = 1
    """Launches without a limit."""
    marked: Mapping[str, float] = field(default_factory=lambda: MARKED)
    """Fraction of a step of the group's reference that communication takes on each marked wire."""


MEGATRONS = plain_and_halved(MEGATRON, MEGATRON_SP)
VANILLAS = (WireContender(PUBLISHED), *plain_and_halved(VANILLA))
"""The published baseline has no overlap, as in the paper."""

BTPS = (WireContender(BTP_UNGROUPED), WireContender(BTP_SYNC), *plain_and_halved(BTP, BTP_SP, BTP_CP))
COMPILED = WireContender(BTP_SP, "halves", "kernels")

FEW = (
    WireContender(MEGATRON_SP, "halves"),
    WireContender(PUBLISHED),
    WireContender(VANILLA, "halves"),
    WireContender(BTP),
    WireContender(BTP_SP, "halves"),
)
"""The baselines and the best low-rank layouts, each in the form that is faster on the marked wires. `btp` without overlap sets the
rates."""

_SMALL: dict[str, Any] = {"size": (512, 2, 1376, 8)}
_SHORT: dict[str, Any] = {"batch": {"vocab_size": 512, "seq_len": 512, "micro_batch": 2, "global_batch": 2}}

# A step takes 0.8 s for the dense model and 0.5 s for btp, without a limit. 13 launches on two cores take 65 minutes, half of that
# on the slow wire.
MAIN = WireSet(
    "main",
    (
        WireGroup(
            "TP 2",
            size=(1024, 2, 2736, 16),
            batch={"vocab_size": 1024, "seq_len": 320, "micro_batch": 2, "global_batch": 2},
            contenders=(*MEGATRONS, *VANILLAS, *BTPS, COMPILED),
            recorded=(
                *plain_and_halved(BTP),
                WireContender(BTP_SP, "halves"),
                WireContender(BTP_CP, "halves"),
                WireContender(VANILLA, "halves"),
                WireContender(MEGATRON_SP, "halves"),
            ),
            collectives=True,
        ),
    ),
    launches=5,
    rounds=15,
    free_launches=2,
)

# Four processes share two cores, so a step takes twice as long as each process computes. The set takes 7 minutes.
MESHES = WireSet(
    "meshes",
    (
        WireGroup(
            "TP 2 x PP 2",
            **_SMALL,
            batch={"vocab_size": 512, "seq_len": 128, "micro_batch": 2, "global_batch": 8},
            contenders=FEW,
            mesh={"tp": 2, "pp": 2},
        ),
        WireGroup(
            "TP 2 x DP 2",
            **_SMALL,
            batch={"vocab_size": 512, "seq_len": 256, "micro_batch": 2, "global_batch": 4},
            contenders=FEW,
            mesh={"tp": 2, "dp": 2},
        ),
        WireGroup(
            "DP 2",
            **_SMALL,
            batch={"vocab_size": 512, "seq_len": 256, "micro_batch": 2, "global_batch": 4},
            contenders=(WireContender(DENSE), WireContender(LOW_RANK)),
            mesh={"dp": 2},
            reference=LOW_RANK,
        ),
    ),
    launches=2,
    rounds=7,
)

# d 1024 is in the main set. This set takes 6 minutes.
SIZES = WireSet(
    "sizes",
    (
        WireGroup("d 512", **_SMALL, **_SHORT, contenders=FEW),
        WireGroup(
            "d 2048",
            size=(2048, 1, 5472, 32),
            batch={"vocab_size": 2048, "seq_len": 128, "micro_batch": 2, "global_batch": 2},
            contenders=FEW,
        ),
    ),
    launches=2,
    rounds=7,
)

# cola at d 512 is in the set of sizes. This set takes 5 minutes.
FAMILIES = WireSet(
    "families",
    tuple(WireGroup(family, **_SMALL, **_SHORT, contenders=FEW, family=family) for family in ("svd", "lax")),
    launches=2,
    rounds=7,
)

# Matches 131k tokens per step at d 4096, relative to d, so that gradient sums of replicated weights are a small fraction of
# communication here, too. The set takes 9 minutes.
MANY = WireSet(
    "many",
    (
        WireGroup(
            "many tokens",
            size=(256, 2, 688, 4),
            batch={"vocab_size": 512, "seq_len": 512, "micro_batch": 2, "global_batch": 16},
            contenders=(*plain_and_halved(ULYSSES), WireContender(BTP), *plain_and_halved(BTP_SP, BTP_CP)),
        ),
    ),
    launches=3,
    rounds=7,
)

# Where overlapped halves pay: their GEMMs have half the tokens, and twice as many operations start. The set takes 3 minutes.
HALVES = WireSet(
    "halves",
    (
        WireGroup(
            "one sequence",
            size=(1024, 2, 2736, 16),
            batch={"vocab_size": 1024, "seq_len": 512, "micro_batch": 1, "global_batch": 1},
            contenders=plain_and_halved(BTP),
        ),
    ),
    launches=2,
    rounds=9,
    marked={f"{share:.0%} of a step": share for share in (0.1, 0.17, 0.3, 0.5, 0.7)},
)

SETS = {each.name: each for each in (MAIN, MESHES, SIZES, FAMILIES, MANY, HALVES)}
"""Sets by name, in the order in which `--set all` measures them."""


def groups_of(facts: Facts) -> list[str]:
    """Names of the groups that have results, in order."""
    return list(dict.fromkeys(launch["group"] for launch in facts["groups"]))


def launches_of(facts: Facts, group: str) -> list[Facts]:
    """All launches of a group, on all wires."""
    return [launch for launch in facts["groups"] if launch["group"] == group]


def wires(facts: Facts, group: str) -> dict[str, float | None]:
    """Mbit/s of every wire of a group by name, fastest first; None: no limit. Unmarked wires are named by their rate."""
    rates = {launch["wire"]: launch["mbit"] for launch in launches_of(facts, group)}
    return dict(sorted(rates.items(), key=lambda wire: -(wire[1] or float("inf"))))


def wire_name(mbit: float | None) -> str:
    """Name of an unmarked wire."""
    return NO_LIMIT if mbit is None else f"{mbit:g} Mbit/s"


def on_wire(facts: Facts, group: str, wire: str) -> list[Facts]:
    """Launches of a group on one wire."""
    return [launch for launch in launches_of(facts, group) if launch["wire"] == wire]


def row_of(launch: Facts, name: str) -> Facts:
    """The row of a contender. Raises MeasurementError if the launch has none."""
    for row in launch["rows"]:
        if row["name"] == name:
            return dict(row)
    raise MeasurementError(f"'{name}' was not measured; contenders: {', '.join(row['name'] for row in launch['rows'])}")


def names_of(facts: Facts, group: str) -> list[str]:
    """Names of a group's contenders, in order."""
    return [row["name"] for row in launches_of(facts, group)[0]["rows"]]


def seconds_of(facts: Facts, group: str, wire: str, name: str) -> list[list[float]]:
    """Step seconds of a contender: launches with their rounds."""
    return [row_of(launch, name)["seconds"] for launch in on_wire(facts, group, wire)]


def collective_seconds(facts: Facts, group: str, wire: str, name: str) -> list[list[float]]:
    """Seconds of a bare collective or a copy: launches with their rounds."""
    return [launch["collectives"][name] for launch in on_wire(facts, group, wire)]


def faster(facts: Facts, group: str, wire: str, ours: str, theirs: str) -> Ratio:
    """Speed-up of `ours` over `theirs`."""
    return ratio(seconds_of(facts, group, wire, theirs), seconds_of(facts, group, wire, ours))


def fastest(facts: Facts, group: str, wire: str, names: Sequence[str]) -> str:
    """The measured contender with the shortest median step."""
    measured = set(names_of(facts, group))
    found = [name for name in names if name in measured]
    return min(found, key=lambda name: spread(seconds_of(facts, group, wire, name)).median)
