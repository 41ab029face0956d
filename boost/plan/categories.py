"""Memory categories in a training step, and the rule that assigns a category to each tensor.

Predictions (`boost.plan.trace`) and measurements (`boost.measure.memory`) use the same rule.
"""

from collections.abc import Sequence

WEIGHTS = "weights"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer"
RESIDUAL = "residual stream"
LATENTS = "latents"
WIDE = "wide activations"
COPIES = "weight copies"
LOGITS = "logits and loss"
BUFFERS = "pipeline buffers"
GATHERED = "gathered weights"
WORK = "workspace"
OTHER = "other"
"""Token ids, positions, masks."""

SAVED = (RESIDUAL, LATENTS, WIDE, COPIES, LOGITS)
"""Saved in the forward pass of a micro-batch for its backward pass."""
CATEGORIES = {
    WEIGHTS: "parameters, in train.param_dtype",
    GRADIENTS: "accumulated over one optimizer step",
    OPTIMIZER: "moments, two per weight (Muon: one per factor)",
    RESIDUAL: "inputs of attention and MLP",
    LATENTS: "width r, including online RMSNorm's statistic",
    WIDE: "normalized inputs, q, k, v, gate, up, products",
    COPIES: "weights cast once per step, or cast or scaled for a GEMM",
    LOGITS: "gradients of the head and of its input",
    BUFFERS: "activations received and sent, and their gradients",
    GATHERED: "all-gathered weights of sharded units in use",
    WORK: "temporaries at the peak, in addition to saved tensors",
}
"""Every category and its description."""

_MADE_BY = {
    **dict.fromkeys(("embed", "tied", "leave.outer", "leave.weight", "o.weight"), RESIDUAL),
    **dict.fromkeys(("inner", "latent.rows", "latent.whole"), LATENTS),
    **dict.fromkeys((f"{side}.{kind}" for side in ("enter", "q", "kv") for kind in ("outer", "weight")), WIDE),
}
"""Category of a GEMM's output, by its weight's role."""

_MULTIPLIES = frozenset(("mm", "addmm", "bmm", "linear", "matmul", "embedding", "index_select"))
_SENT = "all_reduce all_gather_into_tensor all_gather reduce_scatter_tensor reduce_scatter all_to_all_single all_to_all wait_tensor"
_MOVES = frozenset(f"add pad constant_pad_nd clone contiguous _to_copy to copy_ cat detach masked_fill {_SENT}".split())
"""Operations that take a residual stream and return one."""


def category_of(operation: str, roles: Sequence[str], categories: Sequence[str]) -> tuple[str, str]:
    """Returns (category, role) of an operation's output. The inputs are weights with `roles` and tensors with `categories`.

    An inner map produces latents. An outer map or a whole weight produces wide activations in an input projection, and the
    residual stream in an output projection. The embedding produces the residual stream. Any other operation keeps the category of
    its inputs (wide activations take precedence over latents, and latents over the residual stream), except that operations outside
    _MOVES, but for scaling by a linear's number, turn it into wide activations. Only tensors computed from weights have a role.
    """
    if roles and not categories and operation != "embedding":
        return COPIES, next((role for role in roles if "norm" not in role), roles[0])
    if roles and operation in _MULTIPLIES:
        return _MADE_BY[roles[0]], ""
    made_of = next((category for category in (WIDE, LATENTS, RESIDUAL) if category in categories), OTHER)
    is_moved = operation in _MOVES or any(role.startswith("output.") for role in roles)
    return WIDE if made_of == RESIDUAL and not is_moved else made_of, ""


def short_role(role: str, makes_outputs: bool = False) -> str:
    """Maps a weight's role to the form that `category_of` expects: every index and every inner map becomes 'inner', unless it makes
    a linear's outputs, as a whole weight does."""
    is_inner = role.endswith(".inner") or role.startswith("select.")
    return role.replace(".inner", ".weight") if makes_outputs else "inner" if is_inner else role
