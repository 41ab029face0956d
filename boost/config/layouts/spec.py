"""The specification of a layout, without torch: its families, placements, collectives and constraints.

Configuration rules, the planner, `boost inspect` and the runtime all read this one description. A layout is a subclass of
`LayoutSpec` in a file of its own beside this one, and a runtime class (`boost.parallel.layouts`) that its `runtime` names.

Legend: T tokens of one micro-batch, p TP processes. A dim is a tensor dim of a parameter's global shape; shards are equal and
contiguous. A width is elements a token of a whole payload.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from boost.config.architecture import GroupSpec, Parameter
from boost.config.schema import ModelConfig, ParallelConfig
from boost.config.traffic import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER


@dataclass(frozen=True)
class Placement:
    """Placement of a parameter on TP processes, and the kind of its local gradient."""

    dim: int | None = None
    """Tensor dim along which each process holds an equal, contiguous shard; None: every process holds all of it."""

    partial: bool = False
    """True for a parameter held whole whose local gradient is one term of a sum over TP processes: it is reduced
    once per optimizer step. False: the local gradient is complete."""


WHOLE = Placement()
PARTIAL = Placement(partial=True)


@dataclass(frozen=True)
class Comm:
    """One differentiable collective: its kind forward and backward; None for no communication.

    `boost.parallel.collectives` says what each of the constants below does, and runs it.
    """

    forward: str | None
    backward: str | None


SUM_FORWARD = Comm(ALL_REDUCE, None)
SUM_BACKWARD = Comm(None, ALL_REDUCE)
SUM_BOTH = Comm(ALL_REDUCE, ALL_REDUCE)
GATHER = Comm(ALL_GATHER, REDUCE_SCATTER)
GATHER_REPLICATED = Comm(ALL_GATHER, None)
SCATTER_SUM = Comm(REDUCE_SCATTER, ALL_GATHER)
EXCHANGE = Comm(ALL_TO_ALL, ALL_TO_ALL)


@dataclass(frozen=True)
class PlannedComm:
    """One differentiable collective that a layout issues for a group of linears, for the embedding or for the head."""

    comm: Comm
    width: int
    """Elements per token of the whole payload."""
    forward_only: int = 0
    """Additional elements per token in the forward payload only."""
    dtype: str = ""
    """Empty: that of the activations."""
    place: str = ""
    """embed | qkv | o | gate_up | down | head."""
    layer: int | None = None
    axis: str = "tp"
    """tp, or cp: of the tokens and the heads that each process of it holds."""


@dataclass(frozen=True)
class GroupContext:
    """What the collectives of a group of linears depend on."""

    group: GroupSpec
    model: ModelConfig
    parallel: ParallelConfig
    dtype: str
    """Of the activations."""
    has_latent_gate: bool
    """Whether this block has latent gates (LaX)."""

    def merged(self, comm: Comm, widths: Sequence[int], **facts: Any) -> Iterator[PlannedComm]:
        """One collective for all slots of the group, or one a slot without grouping."""
        for width in [sum(widths)] if self.parallel.grouping else widths:
            yield PlannedComm(comm, width, **facts)


ResidualKind = Literal["replicated", "tokens", "hidden"]
"""How the residual stream [T, d] lies on the processes: all of it on each, sharded along tokens, or along the width."""

_USUAL = {"q": "enter", "o": "leave"}
"""Whose placement a role has that has none of its own."""

_ENDS = {"embed": Placement(1), "head": Placement(0)}
"""The same under every layout: hidden columns of the embedding, vocabulary rows of the head."""


class LayoutSpec:
    """One way to shard a decoder over TP processes, as data."""

    config: ClassVar[type[ParallelConfig]]
    """Its choice of [parallel]: the name, what it is in a phrase, options of its own, and what it refuses beyond what its
    placements say (`problems`)."""
    runtime: ClassVar[str]
    """`module:Class` of the code that runs it; imported when a model is built."""
    low_rank: ClassVar[bool | None]
    """Whether it shards factor pairs (svd, cola, lax), or dense linears; None: either."""
    residual: ClassVar[ResidualKind]
    placements: ClassVar[Mapping[str, Placement]]
    """By role (`boost.config.architecture.Parameter.role`); the embedding and the head have theirs already, and q and o by default
    those of enter and leave."""
    embed_comms: ClassVar[tuple[Comm, ...]] = ()
    """Of width d, after the embedding."""
    head_comms: ClassVar[tuple[Comm, ...]] = ()
    """Of width d, before the head."""
    searched: ClassVar[Mapping[str, Sequence[Any]]] = {}
    """Options of its own that the planner chooses, with their values; it leaves the others as they are."""
    scaled: ClassVar[frozenset[str]] = frozenset()
    """Roles of weights that the runtime multiplies before it casts them: a working copy (train.working_copies) would round them
    twice, so they have none."""
    gathers_latents: ClassVar[bool] = False
    """Whether latents can be saved before they are gathered (train.recompute = "low-rank-sharded")."""
    mlp_stays: ClassVar[bool] = False
    """Whether the MLP runs where the tokens of the residual stream are, all channels of them, with whole weights."""
    single_process: ClassVar[bool] = False
    """Whether every layout becomes this one with tp = 1."""

    @property
    def name(self) -> str:
        """As `parallel.layout` has it."""
        name: str = self.config.model_fields["layout"].default
        return name

    @property
    def options(self) -> tuple[str, ...]:
        """Fields of [parallel] that not every layout has."""
        return tuple(field for field in self.config.model_fields if field not in ParallelConfig.model_fields)

    # What follows from the placements.

    def placement(self, role: str, model: ModelConfig, parallel: ParallelConfig) -> Placement:
        """Placement of a parameter of this role.

        Key/value heads fewer than p cannot be sharded p ways: every process holds all of them, uses the rows of its own
        head, and the gradients of the copies are summed once per optimizer step.
        """
        placements = {**_ENDS, **self.placements}
        side, _, factor = role.partition(".")
        placement = placements[role if role in placements else f"{_USUAL.get(side, side)}.{factor}"]
        if role.startswith("kv.") and placement.dim == 0 and model.kv_heads < parallel.tp:
            return PARTIAL
        return placement

    @property
    def shards_rank(self) -> bool:
        """Whether latents are sharded along the bottleneck rank."""
        return self.placements.get("enter.A", WHOLE).dim == 0

    @property
    def communicates_at_bottleneck(self) -> bool:
        """Whether what the groups communicate are latents: the inner factors are sharded along heads and channels."""
        return self.placements.get("enter.B", WHOLE).dim == 0

    @property
    def has_whole_factors(self) -> bool:
        """Whether every TP process holds all of some factors (which parallel.shard_outer can share out)."""
        return any(role.endswith((".A", ".B")) and placement.partial for role, placement in self.placements.items())

    @property
    def ends_with_comm(self) -> bool:
        """Whether nothing that the backward pass needs comes after a block's last collective."""
        return not self.mlp_stays and self.placements["leave.B" if self.low_rank else "leave.W"].dim == 1

    def residual_shape(self, model: ModelConfig, parallel: ParallelConfig, tokens: int) -> tuple[int, int]:
        """Shape of the residual stream of `tokens` tokens on one process."""
        p = parallel.tp
        return (
            tokens // p if self.residual == "tokens" else tokens,
            model.dim // p if self.residual == "hidden" else model.dim,
        )

    def latent_shape(self, parallel: ParallelConfig, tokens: int, rank: int) -> tuple[int, int]:
        """Shape of latents of whole width `rank`, as one process holds those that cross to the next block."""
        p = parallel.tp
        return tokens // p if self.residual == "tokens" else tokens, rank // p if self.shards_rank else rank

    def suits(self, model: ModelConfig) -> bool:
        """Whether it shards models of this family."""
        return self.low_rank in (None, model.low_rank)

    def outdone_by(self, model: ModelConfig) -> str:
        """A layout that never sends more for this model, and does the same work: the planner tries that one. Or empty."""
        return ""

    def channels_shape(self, model: ModelConfig, parallel: ParallelConfig, tokens: int) -> tuple[int, int]:
        """Shape of gate, of up and of their product on one process."""
        if self.mlp_stays:
            return tokens // parallel.tp, model.ffn_dim
        return tokens, model.ffn_dim // self.num_shards(parallel)

    # Defined by each layout.

    def num_shards(self, parallel: ParallelConfig) -> int:
        """Number of shards of heads, and of channels unless the MLP stays: p, or 1 where they are replicated."""
        return parallel.tp

    def group_comms(self, context: GroupContext) -> Iterator[PlannedComm]:
        """The collectives of one group of linears, in forward order."""
        raise NotImplementedError

    def notes(self, model: ModelConfig, parallel: ParallelConfig) -> Iterator[str]:
        """What tables do not show, a sentence each."""
        if self.placement("kv.B" if model.low_rank else "kv.W", model, parallel).partial:
            yield (
                f"model.kv_heads = {model.kv_heads} is less than parallel.tp = {parallel.tp}: each process holds the weights of "
                "all key/value heads and uses the rows of its own"
            )

    def norm_note(self, parallel: ParallelConfig) -> str:
        """Where the statistic of a block's RMSNorm comes from, in a few words."""
        return "of whole rows, local"

    def variant(self, parallel: ParallelConfig) -> list[str]:
        """What distinguishes this form of the layout from its default, in words (for titles)."""
        return []

    def rank_fields(self, model: ModelConfig) -> dict[str, int]:
        """Ranks that p must divide, by their key."""
        if not self.shards_rank:
            return {}
        return {"model.rank": model.rank or 0, **{f"model.ranks.{name}": rank for name, rank in model.ranks.items()}}

    # The table of collectives.

    def comms(self, context: GroupContext) -> list[PlannedComm]:
        """`group_comms` with the place that they belong to."""
        return [replace(each, place=context.group.name) for each in self.group_comms(context)]

    def backward(
        self, comms: Sequence[PlannedComm], policy: str, to_the_end: bool = False
    ) -> Iterator[tuple[str, PlannedComm]]:
        """(phase, collective) of one block in the order in which its backward pass meets them, with those that it repeats.

        A whole block is repeated when the backward pass first needs something of it, up to the last thing that it needs: a
        collective at its very end comes before that in the backward pass, and is not repeated unless it goes `to_the_end`.
        """
        rest = list(comms)
        if policy == "full-block":
            if self.ends_with_comm and not to_the_end:
                yield "backward", rest.pop()
            yield from (("recompute", comm) for comm in rest)
        for _, alike in itertools.groupby(rest[::-1], lambda comm: comm.place):
            group = list(alike)
            if policy == "low-rank-sharded" and group[0].comm == GATHER and group[0].axis == "tp":
                yield from (("recompute", comm) for comm in group[::-1])
            yield from (("backward", comm) for comm in group)


def local_shape(parameter: Parameter, placement: Placement, processes: int) -> tuple[int, ...]:
    """Shape of one TP rank's shard of a parameter."""
    return tuple(n // processes if i == placement.dim else n for i, n in enumerate(parameter.shape))
