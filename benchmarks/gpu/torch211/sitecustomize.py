"""Lets the scripts in the folder above run on torch 2.11, which the machine of a borrowed GPU may have, although boost needs 2.13.

Python imports a module of this name when it starts, if its folder is on PYTHONPATH (pieces.sh), so this also reaches the processes
that boost starts. Each patch below is applied to its module right after the module's own code has run. Sharding over several
meshes (parallel.shard_outer) and recomputed collectives in compiled blocks need several GPUs, and have no patch.
"""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


def kernels(module: Any) -> None:
    """Kernels without operations in place. In code compiled by torch 2.11, a custom autograd function silently loses its gradients
    if its result comes from an operation that returns its own operand."""
    import torch
    import torch.nn.functional as F

    def normed(x_TD: Any, gamma_D: Any, eps: float) -> Any:
        norm_T1 = torch.linalg.vector_norm(x_TD, dim=-1, keepdim=True, dtype=module.STATISTIC_DTYPE[x_TD.dtype])
        c_T1 = torch.rsqrt(norm_T1.square() / x_TD.shape[-1] + eps)
        y_TD = x_TD * c_T1 * gamma_D
        return y_TD if y_TD.dtype == x_TD.dtype else y_TD.to(x_TD.dtype), c_T1

    module.normed.function = normed
    module.gated.function = lambda gate_TO, up_TO: F.silu(gate_TO) * up_TO


def documents(module: Any) -> None:
    """A mask instead of variable-length attention, which has no window and no grouped heads in torch 2.11."""
    usual = module.document_form
    module.document_form = lambda *arguments: form if (form := usual(*arguments)) != "varlen" else "mask"


def plain(module: Any) -> None:
    """The loss of the plain decoder in chunks that the backward pass recomputes, because torch 2.11 has no fused loss."""
    import torch
    import torch.nn.functional as F
    from torch.utils.checkpoint import checkpoint

    def fused_loss(x_BSD: Any, weight_VD: Any, targets_BS: Any, chunk_tokens: int = 4096) -> Any:
        x_TD, targets_T, weight_VD = x_BSD.flatten(0, 1), targets_BS.flatten(), weight_VD.to(x_BSD.dtype)

        def part(x: Any, targets: Any) -> Any:
            return F.cross_entropy(F.linear(x, weight_VD).float(), targets, reduction="sum")

        chunks = zip(x_TD.split(chunk_tokens), targets_T.split(chunk_tokens), strict=True)
        parts = [checkpoint(part, *chunk, use_reentrant=False) for chunk in chunks]
        return torch.stack(parts).sum() / targets_T.numel()

    module.fused_loss = fused_loss


PATCHES: dict[str, Callable[[Any], None]] = {
    "boost.models.kernels": kernels,
    "boost.models.documents": documents,
    "benchmarks.experiments.plain": plain,
}


class Patcher(MetaPathFinder):
    """Finds the modules above as usual, and patches them when they are loaded."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in PATCHES or (spec := PathFinder.find_spec(name, path)) is None or spec.loader is None:
            return None
        usual = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            usual(module)
            PATCHES[name](module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, Patcher())
