"""Embedding lookup with an accurate gradient.

Legend: T tokens, V rows of the table, D width of the table on this process.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from boost.models.kernels import statistic_dtype


class _Lookup(torch.autograd.Function):
    """forward: tokens [T], table [V, D] -> rows [T, D]; wgrad: dtable [V, D] = sum of dy over the tokens of each row,
    accumulated in fp32 and rounded once. No collective.

    In a bf16 accumulation, the gradient of a token that occurs a thousand times stops growing after a few hundred of them.
    """

    @staticmethod
    def forward(ctx: Any, tokens_T: Tensor, table_VD: Tensor) -> Tensor:
        ctx.save_for_backward(tokens_T)
        ctx.rows, ctx.dtype = table_VD.shape[0], table_VD.dtype
        return F.embedding(tokens_T, table_VD)

    @staticmethod
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[None, Tensor]:
        (tokens_T,) = ctx.saved_tensors
        dy_acc_TD = dy_TD.to(statistic_dtype(dy_TD.dtype))
        return None, torch.ops.aten.embedding_dense_backward(dy_acc_TD, tokens_T, ctx.rows, -1, False).to(ctx.dtype)


def lookup(tokens_T: Tensor, table_VD: Tensor, dtype: torch.dtype) -> Tensor:
    """Differentiable lookup: rows [T, D] of a table, cast to `dtype`."""
    if table_VD.dtype == statistic_dtype(table_VD.dtype):
        return F.embedding(tokens_T, table_VD).to(dtype)
    rows: Tensor = _Lookup.apply(tokens_T, table_VD)
    return rows.to(dtype)
