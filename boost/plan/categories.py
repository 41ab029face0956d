"""Memory categories of a training step, and the rule that assigns a tensor to one.

Predictions (`boost.plan.trace`) and measurements (`boost.measure.memory`) share the rule.
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
"""Tokens, positions, masks."""

STATES = (WEIGHTS, GRADIENTS, OPTIMIZER)
"""Persistent across steps."""
SAVED = (RESIDUAL, LATENTS, WIDE, COPIES, LOGITS)
"""Saved in the forward pass of a micro-batch for its backward pass."""
CATEGORIES = {
    WEIGHTS: "parameters, in train.param_dtype",
    GRADIENTS: "accumulated over one optimizer step",
    OPTIMIZER: "moments: two per weight (Muon: one per factor)",
    RESIDUAL: "inputs of attention and MLP",
    LATENTS: "width r, including online RMSNorm's statistic",
    WIDE: "normed inputs, q, k, v, gate, up, products",
    COPIES: "weights cast once a step, or cast or scaled for a GEMM",
    LOGITS: "gradients of the head and of its input",
    BUFFERS: "activations received and sent, and their gradients",
    GATHERED: "all-gathered weights of sharded units in use",
    WORK: "temporaries at the peak, in addition to what is saved",
}
"""All categories, with a description."""

_MADE_BY = {"embed": RESIDUAL, "A": LATENTS, "enter.B": WIDE, "q.B": WIDE, "kv.B": WIDE, "leave.B": RESIDUAL}
_MADE_BY |= {"enter.W": WIDE, "q.W": WIDE, "kv.W": WIDE, "o.W": RESIDUAL, "leave.W": RESIDUAL}
_MADE_BY |= {"latent.rows": LATENTS, "latent.whole": LATENTS}
"""Category of the output, by the role of the weight."""

_MULTIPLIES = frozenset(("mm", "addmm", "bmm", "linear", "matmul", "embedding"))
_SENT = "all_reduce all_gather_into_tensor all_gather reduce_scatter_tensor reduce_scatter all_to_all_single all_to_all wait_tensor"
_MOVES = frozenset(f"add clone contiguous _to_copy to copy_ cat detach {_SENT}".split())
"""Operations on the residual stream whose output is still the residual stream."""


def category_of(operation: str, roles: Sequence[str], categories: Sequence[str]) -> tuple[str, str]:
    """(category, role) of the output of an operation on weights with these `roles` and tensors of these `categories`.

    The output of a factor A is a latent. The output of a factor B or weight W is a wide activation in an input projection and
    the residual stream in an output projection, as is that of the embedding. Other operations keep the category of their
    inputs; of several, the widest. Only tensors made from weights alone have a role.
    """
    if roles and not categories and operation != "embedding":
        return COPIES, next((role for role in roles if "norm" not in role), roles[0])
    if roles and operation in _MULTIPLIES:
        return _MADE_BY[roles[0]], ""
    made_of = next((category for category in (WIDE, LATENTS, RESIDUAL) if category in categories), OTHER)
    return WIDE if made_of == RESIDUAL and operation not in _MOVES else made_of, ""


def short_role(role: str) -> str:
    """A weight's role as `category_of` expects it: factors A give latents on either side."""
    return "A" if role.endswith(".A") else role
