"""Enumerates the legal ways to train a model on N GPUs: meshes, layouts, sharding, schedules, micro-batches, recomputation.

TP stays within a node, as in every published run that we compare with (docs/results.md), because the cost of TP across nodes
has never been validated against measurements. To use a larger TP size, set --parallel.tp.

A configuration is legal if it passes the rules of `boost train` (`boost.config.rules`). Choices that are never better than an
alternative are skipped:

- `gpipe`: like 1F1B, but with more micro-batches in flight.
- Ungrouped linears: the same work in more, smaller operations.
- Layouts that do the same work as another layout and never send less (`LayoutSpec.superseded_by`).
- Casting weights at each use (`train.working_copies` off): never faster.

Tests check these claims, including at realistic model sizes. A choice that the user fixed is always kept.
"""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from boost.config import rules
from boost.config.layouts import layout_spec, layouts_of, spec_of
from boost.config.schema import Config, ParallelConfig, RecomputeName, TrainConfig
from boost.errors import ConfigError
from boost.plan.hardware import Hardware
from boost.plan.structure import altered

SCHEDULES = {"1f1b": (1,), "interleaved-1f1b": (2, 3, 4, 6, 8, 12, 16)}
"""Pipeline schedules, with the candidate numbers of stages per process. Combinations with more stages than layers are skipped."""

POLICIES: tuple[RecomputeName, ...] = (
    "none", "low-rank+attention-output", "low-rank", "low-rank-sharded", "full-block",
)  # fmt: skip
"""Recomputation policies, from the most to the fewest saved activations."""

EVERY = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16)
"""Candidate values of train.recompute_every: 1 recomputes every block, 2 every second one, and so on. Omitting the values
between these costs less than 1% of the step time."""

LONG_SEQUENCE = 16_384
"""Sequence length in tokens at or above which CP is always tried."""

LEAST_SHARE = 1024
"""Minimum number of tokens of each sequence on a CP rank."""


@dataclass(frozen=True)
class Request:
    """What to plan: a model and the GPUs to train it on."""

    base: Config
    """The model, every field that is not searched, and the values of fixed choices."""
    gpus: int
    """Number of GPUs, one process each."""
    hardware: Hardware
    fixed: frozenset[str] = frozenset()
    """Dotted keys that the user fixed, such as 'parallel.tp'."""
    margin: float = 0.0
    """Fraction of usable memory that must stay free."""

    _by_layout: dict[str, ParallelConfig | None] = field(default_factory=dict, init=False, compare=False, repr=False)
    _trains: dict[tuple[object, ...], TrainConfig] = field(default_factory=dict, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        assert self.gpus >= 1

    def allowed_in(self, parallel: ParallelConfig) -> int:
        """Memory budget for tensors on one device in this mesh, in bytes."""
        return int(self.hardware.usable_in(parallel) * (1 - self.margin))

    def choices(self, key: str, usual: Sequence[Any]) -> Sequence[Any]:
        """Values to try for a field: its fixed value, or `usual` if it is not fixed."""
        if key not in self.fixed:
            return usual
        section, name = key.split(".")
        return (getattr(getattr(self.base, section), name),)

    def variant(
        self, parallel: ParallelConfig, micro_batch: int, policy: RecomputeName = "none", every: int = 1
    ) -> Config:
        """Returns a variant of the configuration, without validating it. All variants share the model object, because caches look
        it up fastest by identity."""
        key = micro_batch, policy, every
        if key not in self._trains:
            train = altered(self.base.train, micro_batch=micro_batch, recompute=policy, recompute_every=every)
            self._trains[key] = train
        return altered(self.base, parallel=parallel, train=self._trains[key])

    def under(self, layout: str) -> ParallelConfig | None:
        """Returns the [parallel] section for a layout, with the fixed options; None if the layout lacks one of them."""
        if layout not in self._by_layout:
            base = self.base.parallel
            of_layout = base.model_copy(update={"layout": layout})
            fixed = [field for section, _, field in (key.partition(".") for key in self.fixed) if section == "parallel"]
            lost = any(getattr(of_layout, field) != getattr(base, field) for field in fixed if field != "layout")
            self._by_layout[layout] = None if lost else of_layout
        return self._by_layout[layout]


@functools.cache
def divisors(number: int) -> list[int]:
    """All divisors of `number`, ascending."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]


def legal(config: Config) -> bool:
    """Whether `boost train` accepts this configuration."""
    try:
        rules.check(config)
    except ConfigError:
        return False
    return True


def structures(request: Request) -> Iterator[ParallelConfig]:
    """Yields combinations of mesh, layout, sharding and schedule. Some are illegal, depending on the micro-batch."""
    inside = [tp for tp in divisors(request.gpus) if tp <= request.hardware.per_node]
    for tp in request.choices("parallel.tp", inside):
        for pp in request.choices("parallel.pp", divisors(request.gpus)):
            for cp in request.choices("parallel.cp", context_sizes(request, tp * pp)):
                for dp in request.choices("parallel.dp", [request.gpus // (tp * pp * cp)]):
                    if tp * pp * cp * dp == request.gpus and pp <= request.base.model.layers:
                        mesh = request.base.parallel.model_copy(update={"tp": tp, "pp": pp, "dp": dp, "cp": cp})
                        yield from _structures_of_mesh(request, mesh)


def context_sizes(request: Request, others: int) -> Sequence[int]:
    """CP sizes to try if a replica without CP has `others` processes: powers of two.

    CP is tried only for long sequences (LONG_SEQUENCE), or if the global batch has fewer sequences than there would be replicas
    without CP. Otherwise DP does the same work with less communication.
    """
    train, replicas = request.base.train, request.gpus // others
    few = train.global_batch < replicas
    if (train.seq_len < LONG_SEQUENCE and not few) or request.gpus % others:
        return [1]
    sizes = [1 << n for n in range(replicas.bit_length()) if replicas % (1 << n) == 0]
    return [cp for cp in sizes if cp == 1 or train.seq_len // cp >= LEAST_SHARE]


def _structures_of_mesh(request: Request, mesh: ParallelConfig) -> Iterator[ParallelConfig]:
    model = request.base.model
    layouts = [name for name in layouts_of(model) if not layout_spec(name).superseded_by(model)]
    usual = layouts if mesh.tp > 1 else (spec_of(mesh).name,)
    usual_schedules = SCHEDULES if mesh.pp > 1 else {"1f1b": (1,)}
    schedules = [
        (schedule, virtual)
        for schedule in request.choices("parallel.schedule", list(usual_schedules))
        for virtual in request.choices("parallel.virtual", usual_schedules.get(schedule, (1,)))
        if mesh.pp * virtual <= model.layers or "parallel.virtual" in request.fixed
    ]
    keeps = "parallel.virtual" in request.fixed or request.base.run.recovery != "restart"
    most = model.layers if keeps else rules.MOST_GATHERED  # stages per process with sharded weights
    overlaps = request.choices("parallel.overlap", ("none", "halves") if mesh.tp * mesh.cp > 1 else ("none",))
    for layout in request.choices("parallel.layout", usual):
        of_layout = request.under(layout)
        if of_layout is None:
            continue
        searched = layout_spec(layout).searched
        options = [request.choices(f"parallel.{name}", values) for name, values in searched.items()]
        has_outer = mesh.tp > 1 and layout_spec(layout).has_whole_factors
        shards: list[tuple[str, bool]] = []
        for outer in request.choices("parallel.shard_outer", (False, True) if has_outer else (False,)):
            # With a single replica, only outer factors can be sharded.
            whole = ["none"] * (not outer) + ["optimizer", "full"] * (mesh.dp_cp > 1 or outer)
            shards += [(shard, outer) for shard in request.choices("parallel.shard", whole)]
        for shard, outer in shards:
            for schedule, virtual in schedules:
                changes: dict[str, object] = {**mesh.axes, "cp": mesh.cp, "shard": shard, "shard_outer": outer}
                changes |= {"schedule": schedule, "virtual": virtual}
                for overlap in overlaps:
                    for values in itertools.product(*options):
                        own = dict(zip(searched, values, strict=True))
                        made = altered(of_layout, **changes, overlap=overlap, **own)
                        if virtual <= most or not made.sharded:
                            yield made


def micro_batches(request: Request, dp: int) -> Sequence[int]:
    """Micro-batch sizes in sequences, ascending: the divisors of a replica's batch."""
    batch = request.base.train.global_batch
    usual = [] if batch % dp else divisors(batch // dp)
    return request.choices("train.micro_batch", usual)


def policies(request: Request, parallel: ParallelConfig) -> Iterator[tuple[RecomputeName, int]]:
    """Yields (recompute, recompute_every), from the most to the fewest saved activations."""
    low_rank = request.base.model.low_rank
    usual = [
        name
        for name in POLICIES
        if (low_rank or not name.startswith("low-rank"))
        and (name != "low-rank-sharded" or layout_spec(parallel.layout).gathers_latents)
    ]
    for policy in request.choices("train.recompute", usual):
        every = [n for n in EVERY if n <= request.base.model.layers] if policy != "none" else EVERY[:1]
        for n in reversed(request.choices("train.recompute_every", every)):
            yield policy, n
