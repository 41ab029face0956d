"""Where each layout cuts each weight, as one table: the runtime stores by it, the performance model counts by it.

Legend: p TP processes. A dim is a tensor dim of the parameter's global shape; shards are equal and contiguous.
"""

from dataclasses import dataclass

from boost.config.architecture import Parameter
from boost.config.schema import LayoutName, ModelConfig, ParallelConfig

LOW_RANK_LAYOUTS: tuple[LayoutName, ...] = ("btp", "btp-sp", "vanilla")
"""Layouts of the families with a bottleneck, the usual one first."""

DENSE_LAYOUTS: tuple[LayoutName, ...] = ("megatron-sp", "megatron")
"""Layouts of the dense family, the usual one first."""

TOKEN_SHARDED = ("megatron-sp", "btp-sp")
"""Layouts whose residual stream is cut along the tokens of a micro-batch."""


@dataclass(frozen=True)
class Cut:
    """Where a parameter is cut over the TP processes, and what its local gradient is."""

    dim: int | None = None
    """Tensor dim along which each process holds an equal, contiguous shard; None: every process holds all of it."""

    partial: bool = False
    """True for a parameter held whole whose local gradient is one term of a sum over TP processes: it is reduced
    once per optimizer step. False: the local gradient is complete."""


WHOLE = Cut()
PARTIAL = Cut(partial=True)

_OUTER = {"embed": Cut(1), "head": Cut(0)}
"""The same under every layout: hidden columns of the embedding, vocabulary rows of the head."""

_TABLE: dict[str, dict[str, Cut]] = {
    "megatron": {**_OUTER, "norm": WHOLE, "final_norm": WHOLE, "enter.W": Cut(0), "kv.W": Cut(0), "leave.W": Cut(1)},
    "megatron-sp": {
        **_OUTER, "norm": PARTIAL, "final_norm": PARTIAL, "enter.W": Cut(0), "kv.W": Cut(0), "leave.W": Cut(1),
    },
    "vanilla": {
        **_OUTER, "norm": WHOLE, "final_norm": WHOLE,
        "enter.A": Cut(0), "enter.B": Cut(1), "kv.B": Cut(1), "leave.A": Cut(0), "leave.B": Cut(1),
        "latent.rows": Cut(0), "latent.whole": PARTIAL,
    },
    "btp": {
        # The final norm is applied whole by every process, to its own part of the vocabulary.
        **_OUTER, "norm": Cut(0), "final_norm": PARTIAL,
        "enter.A": Cut(1), "enter.B": Cut(0), "kv.B": Cut(0), "leave.A": Cut(1), "leave.B": Cut(0),
        "latent.rows": WHOLE, "latent.whole": WHOLE,
    },
    "btp-sp": {
        **_OUTER, "norm": PARTIAL, "final_norm": PARTIAL,
        "enter.A": PARTIAL, "enter.B": Cut(0), "kv.B": Cut(0), "leave.A": Cut(1), "leave.B": PARTIAL,
        "latent.rows": PARTIAL, "latent.whole": PARTIAL,
    },
}  # fmt: skip


def cut_of(role: str, model: ModelConfig, parallel: ParallelConfig) -> Cut:
    """Where a parameter of this role is cut.

    Key/value heads fewer than p cannot be cut into p: every process holds all of them, uses the rows of its own head, and
    the gradients of the copies are summed once per optimizer step.
    """
    if parallel.tp == 1:
        return WHOLE
    cut = _TABLE[parallel.layout][role]
    if role.startswith("kv.") and cut.dim == 0 and model.kv_heads < parallel.tp:
        return PARTIAL
    return cut


def local_shape(parameter: Parameter, cut: Cut, processes: int) -> tuple[int, ...]:
    """Shape of one process's part of a parameter."""
    return tuple(n // processes if i == cut.dim else n for i, n in enumerate(parameter.shape))


def wide_parts(parallel: ParallelConfig) -> int:
    """In how many parts heads and channels are cut: p, or 1 where every process computes all of them."""
    return 1 if parallel.layout == "vanilla" and parallel.vanilla == "published" else parallel.tp
