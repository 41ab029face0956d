"""What the bytes of a training step are for, in words, and how that follows from what a tensor is made of.

One rule for predictions (`boost.plan.trace`) and measurements (`boost.measure.memory`).
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
WORK = "at work"
OTHER = "other"
"""Tokens, positions, masks."""

STATES = (WEIGHTS, GRADIENTS, OPTIMIZER)
"""There from step to step."""
KEPT = (RESIDUAL, LATENTS, WIDE, COPIES, LOGITS)
"""Saved in the forward pass of a micro-batch for its backward pass."""
CATEGORIES = {
    WEIGHTS: "as the optimizer changes them",
    GRADIENTS: "of one optimizer step",
    OPTIMIZER: "moments: two a weight (Muon: one of a factor)",
    RESIDUAL: "what enters attention and MLP",
    LATENTS: "width r, with online RMSNorm's statistic",
    WIDE: "normed inputs, q, k, v, gate, up, products",
    COPIES: "cast or scaled for a GEMM",
    LOGITS: "gradients of the head and its input",
    BUFFERS: "received, to be sent, and their gradients",
    GATHERED: "of what replicas share, while it is used",
    WORK: "temporaries at the peak, in addition to what is saved",
}
"""Everything that a step holds, in words."""

_MADE_BY = {"embed": RESIDUAL, "A": LATENTS, "enter.B": WIDE, "kv.B": WIDE, "leave.B": RESIDUAL}
_MADE_BY |= {"enter.W": WIDE, "kv.W": WIDE, "leave.W": RESIDUAL}
_MADE_BY |= {"latent.rows": LATENTS, "latent.whole": LATENTS}
"""What the weights of a role make."""

_MULTIPLIES = frozenset(("mm", "addmm", "bmm", "linear", "matmul", "embedding"))
_SENT = "all_reduce all_gather_into_tensor reduce_scatter reduce_scatter_tensor all_to_all_single wait_tensor"
_MOVES = frozenset(f"add clone contiguous _to_copy to copy_ cat detach {_SENT}".split())
"""Operations after which the residual stream is the residual stream."""


def category_of(operation: str, roles: Sequence[str], categories: Sequence[str]) -> tuple[str, str]:
    """(category, role) of what an operation makes of weights with these `roles` and of tensors of these `categories`.

    What a factor A makes is a latent; what a factor B or W of a group that projects in makes is wide; what one of a group that
    projects back makes, and the embedding, is the residual stream; what is made of wide activations is wide, of
    latents a latent. Only what is made of weights alone has a role.
    """
    if roles and not categories and operation != "embedding":
        return COPIES, next((role for role in roles if "norm" not in role), roles[0])
    if roles and operation in _MULTIPLIES:
        return _MADE_BY[roles[0]], ""
    made_of = next((category for category in (LATENTS, WIDE, RESIDUAL) if category in categories), OTHER)
    return WIDE if made_of == RESIDUAL and operation not in _MOVES else made_of, ""


def short_role(role: str) -> str:
    """A weight's role, as `category_of` speaks of it: factors A make latents on either side."""
    return "A" if role.endswith(".A") else role
