"""The specification of a layout, without torch: its families, placements, collectives and constraints.

Configuration rules, the planner, `boost inspect` and the runtime all read this description. A layout is a subclass of
`LayoutSpec` in a file of its own, and the runtime class that its `runtime` attribute names (`boost.layouts`).

Legend: T tokens in one micro-batch; p TP ranks. A dim is a tensor dim of a parameter's global shape; shards are equal and
contiguous. A width is the number of elements per token in a whole payload.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from boost.config.architecture import GroupSpec, Parameter, linears
from boost.config.schema import ModelConfig, ParallelConfig
from boost.config.traffic import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER


@dataclass(frozen=True)
class Placement:
    """Placement of a parameter over TP ranks, and whether its local gradient is partial."""

    dim: int | None = None
    """Tensor dim along which each rank holds an equal, contiguous shard; None: replicated."""

    partial: bool = False
    """True for a replicated parameter whose local gradient is a partial sum, reduced over TP ranks once per optimizer step.
    False: the local gradient is complete."""


WHOLE = Placement()
PARTIAL = Placement(partial=True)


@dataclass(frozen=True)
class Comm:
    """One differentiable collective: its kind in the forward pass and in the backward pass; None: no communication.

    `boost.parallel.collectives` implements and documents each of the constants below.
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
    """Elements per token in the whole payload."""
    forward_only: int = 0
    """Additional elements per token in the forward payload only."""
    dtype: str = ""
    """Dtype of the payload; empty: the dtype of the activations."""
    place: str = ""
    """What the collective is for: embed | qkv | o | gate_up | down | head | attention."""
    layer: int | None = None
    axis: str = "tp"
    """Mesh axis: tp or cp. Over cp, widths refer to the tokens and heads that each CP rank holds."""


@dataclass(frozen=True)
class GroupContext:
    """The properties of a group of linears that determine its collectives."""

    group: GroupSpec
    model: ModelConfig
    parallel: ParallelConfig
    dtype: str
    """Dtype of the activations."""
    prev: GroupSpec | None
    """The same group of the previous block, if it carries anything to this one."""

    def merged(self, comm: Comm, widths: Sequence[int], **facts: Any) -> Iterator[PlannedComm]:
        """One collective for all slots in the group; without grouping, one per slot."""
        for width in [sum(widths)] if self.parallel.grouping else widths:
            yield PlannedComm(comm, width, **facts)


ResidualKind = Literal["replicated", "tokens", "hidden"]
"""Sharding of the residual stream [T, d]: replicated, along tokens, or along the hidden dim."""

_USUAL = {"q": "enter", "o": "leave"}
"""Roles whose placement defaults to that of another role."""

_ENDS = {"embed": Placement(1), "head": Placement(0), "tied": Placement(0)}
"""Placements shared by all layouts: the embedding is sharded along the hidden dim, the head and a tied table along the
vocabulary."""


class LayoutSpec:
    """Declarative description of one way to shard a decoder over TP ranks."""

    config: ClassVar[type[ParallelConfig]]
    """The class that `parallel.layout` selects. Defines the name, a one-phrase description, the options, and any `problems`
    beyond those that follow from the placements."""
    runtime: ClassVar[str]
    """`module:Class` of the implementation; imported when a model is built."""
    low_rank: ClassVar[bool | None]
    """True: supports low-rank factors; False: dense linears; None: both."""
    residual: ClassVar[ResidualKind]
    placements: ClassVar[Mapping[str, Placement]]
    """Placements by role (`boost.config.architecture.Parameter.role`). Those of the embedding and the head are fixed; q and o
    default to those of enter and leave."""
    embed_comms: ClassVar[tuple[Comm, ...]] = ()
    """Collectives of width d after the embedding."""
    head_comms: ClassVar[tuple[Comm, ...]] = ()
    """Collectives of width d before the head."""
    searched: ClassVar[Mapping[str, Sequence[Any]]] = {}
    """Options of this layout that the planner searches, with their candidate values. The planner leaves other options unchanged."""
    scaled: ClassVar[frozenset[str]] = frozenset()
    """Roles of weights that the runtime scales before casting them."""
    gathers_latents: ClassVar[bool] = False
    """Whether latents can be saved before they are all-gathered (train.recompute = "low-rank-sharded")."""
    mlp_token_local: ClassVar[bool] = False
    """Whether the MLP runs on the local tokens of the residual stream, with all channels and replicated weights."""
    single_process: ClassVar[bool] = False
    """Whether this is the layout in effect if tp = 1."""

    @property
    def name(self) -> str:
        """The value of `parallel.layout` that selects this layout."""
        name: str = self.config.model_fields["layout"].default
        return name

    @property
    def options(self) -> tuple[str, ...]:
        """Fields of [parallel] that belong to this layout only."""
        return tuple(field for field in self.config.model_fields if field not in ParallelConfig.model_fields)

    # Derived from the placements.

    def placement(self, role: str, model: ModelConfig, parallel: ParallelConfig) -> Placement:
        """Placement of parameters with this role.

        Fewer than p key/value heads cannot be sharded over p ranks. Instead, every rank holds all of them and uses its
        own head's rows; the gradients of the copies are summed once per optimizer step.

        Biases of q, k and v and the norms of queries and keys act on this process's heads of all tokens, the bias of o on the
        residual stream. The index of selected inputs is sharded where latents are. A number for outputs is the same for all.
        """
        if role.startswith("select."):
            return Placement(0) if self.placement(f"{role[7:]}.inner", model, parallel).dim == 0 else WHOLE
        if role in ("bias.q", "bias.kv", "qk_norm", "output.enter") and self.num_shards(parallel) == 1:
            return WHOLE
        if role in ("qk_norm", "output.enter") or (role == "bias.kv" and model.kv_heads < parallel.tp):
            return PARTIAL
        if role == "output.leave":
            return WHOLE if self.residual == "replicated" else PARTIAL
        if role in ("bias.q", "bias.kv"):
            return Placement(0)
        if role == "bias.o":
            return {"hidden": Placement(0), "tokens": PARTIAL, "replicated": WHOLE}[self.residual]
        placements = {**_ENDS, **self.placements}
        side, _, kind = role.partition(".")
        placement = placements[role if role in placements else f"{_USUAL.get(side, side)}.{kind}"]
        if role.startswith("kv.") and placement.dim == 0 and model.kv_heads < parallel.tp:
            return PARTIAL
        return placement

    @property
    def shards_rank(self) -> bool:
        """Whether latents are sharded along the bottleneck rank."""
        return self.placements.get("enter.inner", WHOLE).dim == 0

    @property
    def communicates_at_bottleneck(self) -> bool:
        """Whether groups communicate latents, because the inner factors are sharded along heads and channels."""
        return self.placements.get("enter.outer", WHOLE).dim == 0

    @property
    def has_whole_factors(self) -> bool:
        """Whether some factors are replicated over TP ranks (parallel.shard_outer can shard them)."""
        return any(
            role.endswith((".inner", ".outer")) and placement.partial for role, placement in self.placements.items()
        )

    def ends_with_comm(self, group: GroupSpec) -> bool:
        """Whether a block that ends with this group ends with a collective, whose result the backward pass does not need."""
        if self.mlp_token_local or self.single_process:
            return False
        last = next((f"leave.{kind}" for kind in ("outer", "weight") if getattr(group.kind, kind)), "")
        return not last or self.placements[last].dim == 1

    def may_have_copy(self, role: str) -> bool:
        """Whether weights with this role can have a working copy (train.working_copies). Factors, dense weights and the head can,
        except `scaled` weights, which a copy would round twice. The embedding has no copy because a step casts only some of its
        rows, unless it is also the head; norms and extra parameters are too small to need one."""
        return role.endswith((".inner", ".outer", ".weight", "head", "tied")) and role not in self.scaled

    def residual_shape(self, model: ModelConfig, parallel: ParallelConfig, tokens: int) -> tuple[int, int]:
        """Local shape of the residual stream for `tokens` tokens."""
        p = parallel.tp
        return (
            tokens // p if self.residual == "tokens" else tokens,
            model.dim // p if self.residual == "hidden" else model.dim,
        )

    def carried_shapes(
        self, group: GroupSpec, model: ModelConfig, parallel: ParallelConfig, tokens: int
    ) -> list[tuple[int, int]]:
        """Local shapes of the tensors that a group carries to the next block: its latents, or one output per slot."""
        residual = self.residual_shape(model, parallel, tokens)
        if group.kind.carries == "latents":
            return [(residual[0], sum(group.up_widths) // (parallel.tp if self.shards_rank else 1))]
        if group.side == "leave":
            return [residual]
        if group.name != "qkv":
            return [self.channels_shape(model, parallel, tokens)] * len(group.slots)
        return [(tokens, max(slot.d_out // self.num_shards(parallel), model.head_dim)) for slot in group.slots]

    def suits(self, model: ModelConfig) -> bool:
        """Whether the layout supports this model's family."""
        return self.low_rank in (None, model.low_rank)

    def superseded_by(self, model: ModelConfig) -> str:
        """Name of the layout that the planner tries instead, because it does the same work and never sends more for this
        model; empty if there is none."""
        return ""

    def channels_shape(self, model: ModelConfig, parallel: ParallelConfig, tokens: int) -> tuple[int, int]:
        """Local shape of gate, up and their product."""
        if self.mlp_token_local:
            return tokens // parallel.tp, model.ffn_dim
        return tokens, model.ffn_dim // self.num_shards(parallel)

    # Defined by each layout.

    def num_shards(self, parallel: ParallelConfig) -> int:
        """Number of shards of heads and, unless `mlp_token_local`, of channels: p, or 1 if they are replicated."""
        return parallel.tp

    def table_comms(self, model: ModelConfig) -> tuple[Comm, ...]:
        """`embed_comms`, or those of a tied table: each rank looks up its own rows of the vocabulary, and the sum goes to the
        shards of the residual stream."""
        if not model.tied or self.single_process:
            return self.embed_comms
        return (SUM_FORWARD if self.residual == "replicated" else SCATTER_SUM,)

    def group_comms(self, context: GroupContext) -> Iterator[PlannedComm]:
        """The collectives for one group of linears, in forward order."""
        raise NotImplementedError

    def notes(self, model: ModelConfig, parallel: ParallelConfig) -> Iterator[str]:
        """Notes about what the tables do not show, one sentence each."""
        if self.placement("kv.outer" if model.low_rank else "kv.weight", model, parallel).partial:
            yield (
                f"model.kv_heads = {model.kv_heads} is less than parallel.tp = {parallel.tp}: each process holds the weights of "
                "all key/value heads and uses those of its own head"
            )

    def norm_note(self, parallel: ParallelConfig) -> str:
        """How a block's RMSNorm statistic is computed, in a few words."""
        return "of whole rows, local"

    def variant(self, parallel: ParallelConfig) -> list[str]:
        """Phrases for titles that describe the layout's options."""
        return []

    def rank_fields(self, model: ModelConfig) -> dict[str, int]:
        """Widths of latents that p must divide, by configuration key; those of a family's own by map."""
        if not self.shards_rank:
            return {}
        named = {"model.rank": model.rank or 0, **{f"model.ranks.{name}": rank for name, rank in model.ranks.items()}}
        maps = (
            (slot, part)
            for slot in linears(model)
            for part in (*slot.linear.inner, *slot.linear.select, *slot.linear.outer)
        )
        own = {f"{slot.name}.{part.name}": part.width for slot, part in maps if part.width not in named.values()}
        extra = ((f"{slot.name}.{e.name}", e) for slot in linears(model) for e in slot.linear.extra)
        return named | own | {name: e.shape[0] for name, e in extra if not (e.is_whole or e.is_output)}

    # The table of collectives.

    def comms(self, context: GroupContext) -> list[PlannedComm]:
        """`group_comms`, with `place` set to the name of the group."""
        return [replace(comm, place=context.group.name) for comm in self.group_comms(context)]

    def backward(
        self, comms: Sequence[PlannedComm], policy: str, ends_with_comm: bool = False
    ) -> Iterator[tuple[str, PlannedComm]]:
        """Yields (phase, collective) for one block in backward order, including collectives that are recomputed.

        With policy "full-block", the block is recomputed when the backward pass first needs one of its tensors, and only up to
        the last tensor needed: without the last collective if it `ends_with_comm`.
        """
        rest = list(comms)
        if policy == "full-block":
            if ends_with_comm:
                yield "backward", rest.pop()
            yield from (("recompute", comm) for comm in rest)
        for _, alike in itertools.groupby(rest[::-1], lambda comm: comm.place):
            group = list(alike)
            if policy == "low-rank-sharded" and group[0].comm == GATHER and group[0].axis == "tp":
                yield from (("recompute", comm) for comm in group[::-1])
            yield from (("backward", comm) for comm in group)


class SingleConfig(ParallelConfig):
    """No tensor parallelism; in effect for any layout with tp = 1."""

    layout: Literal["single"] = "single"


class SingleSpec(LayoutSpec):
    """No collectives and no sharding."""

    config = SingleConfig
    runtime = "boost.layouts.single:Single"
    low_rank = False
    residual = "replicated"
    placements: ClassVar[dict[str, Placement]] = {}
    single_process = True

    def placement(self, role: str, model: ModelConfig, parallel: ParallelConfig) -> Placement:
        return WHOLE

    def num_shards(self, parallel: ParallelConfig) -> int:
        return 1

    def group_comms(self, context: GroupContext) -> Iterator[PlannedComm]:
        return iter(())

    shards_rank = communicates_at_bottleneck = False


def local_shape(parameter: Parameter, placement: Placement, processes: int) -> tuple[int, ...]:
    """Shape of a parameter's shard on one TP rank."""
    return tuple(n // processes if i == placement.dim else n for i, n in enumerate(parameter.shape))
