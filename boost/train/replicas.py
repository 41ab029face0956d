"""Replica check: requires that copies of weights and moments are bitwise equal on all processes, and that all weights are finite.

After a bit flip in memory or a wrong result on one device, a replica trains a different model, but summing gradients
hides this from the loss. So every process computes a digest of its weights, and all digests are compared.

Weights that are not sharded over replicas have copies on every process of the dp axis, and on every TP rank if the layout
replicates them there. Over TP, only weights whose updates are equal by construction are compared, that is, those whose
gradients one collective sums over dp x tp. Rows that ZeRO-1 or FSDP assigns to one process have no copy; the only check
is that they are finite.
"""

import socket
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from boost.errors import TrainingError
from boost.models.fused import FusedParam
from boost.parallel.mesh import Mesh
from boost.train.agreement import run_on_all

_CHUNK = 1 << 20
"""Elements digested at a time. Each temporary takes 8 MB."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD = 0x1E3779B97F4A7C15
"""An odd number with well-mixed bits. Multiplying by an odd number modulo 2^64 loses no bits."""
_COPIES = ("replicas", "dp", "tp")
"""Sets of processes across which weights are compared, named after the axes that they span."""


@dataclass(frozen=True)
class Mismatch:
    """Processes whose weights differ from those on other processes."""

    processes: tuple[int, ...]
    """Global ranks, ascending."""
    copies: int
    """Number of processes that should hold the same weights, including these."""
    certain: bool
    """Whether a majority agrees on other weights. Otherwise `processes` lists all copies, any of which may be right."""


@dataclass(frozen=True)
class ReplicaReport:
    """The result of a check, the same on all processes."""

    mismatches: tuple[Mismatch, ...] = ()
    not_finite: tuple[tuple[int, str], ...] = ()
    """(global rank, name of its first weight that holds NaN or Inf) per affected process."""
    hosts: tuple[str, ...] = ()
    """Host of each global rank; empty if the check passed."""


@torch.no_grad()
def check_replicas(
    fused_params: Sequence[FusedParam],
    mesh: Mesh,
    moments: Mapping[Tensor, Mapping[str, Tensor]] | None = None,
    conflict: int | None = None,
) -> ReplicaReport:
    """Compares digests of this process's weights, and of its part of their `moments`, with the digests of all copies. Collective.

    `conflict`: rank on the dp axis of a process whose copies are already known to have differed from this process's.

    Reads every weight about three times without copying or communicating it.
    """
    moments = moments or {}
    digests = []
    for over in _COPIES:
        weights = [p.tensor for p in fused_params if _copies(p, mesh) == over]
        digests.append(digest([*weights, *(m for w in weights for m in moments.get(w, {}).values())], mesh.device))
    held = [p.tensor.detach() for p in fused_params]
    # A maximum preserves NaN and Inf and is a single number; a mask would be as large as the weight.
    largest = [x.abs().amax() if x.numel() else torch.zeros((), device=mesh.device) for x in held]
    finite = torch.stack([x.isfinite() for x in largest]).tolist()
    strange = [p.slices[0].parameter.name for p, is_finite in zip(fused_params, finite, strict=True) if not is_finite]
    facts = torch.stack(digests).tolist(), conflict, strange[:1], socket.gethostname()
    seen = run_on_all(mesh, lambda: facts)
    mismatches = compare([row for row, *_ in seen], (mesh.pp.size, mesh.dp_cp.size, mesh.tp.size))
    stride = mesh.size // mesh.pp.size // mesh.dp.size
    for rank, (_, other, *_) in enumerate(seen):
        if other is not None:
            source = rank + (other - rank // stride % mesh.dp.size) * stride
            mismatches.append(Mismatch(tuple(sorted({rank, source})), 2, certain=False))
    not_finite = tuple((rank, name) for rank, (*_, names, _) in enumerate(seen) for name in names)
    hosts = tuple(host for *_, host in seen) if mismatches or not_finite else ()
    return ReplicaReport(tuple(dict.fromkeys(mismatches)), not_finite, hosts)


def require_sound(report: ReplicaReport, step: int, latest: Path | None) -> None:
    """Raises TrainingError if replicas differ or a weight is not finite. `latest`: the newest checkpoint that passed this check."""
    if not report.mismatches and not report.not_finite:
        return
    faults = []
    for mismatch in report.mismatches[:3]:
        who, agreeing = _named(mismatch.processes, report.hosts), mismatch.copies - len(mismatch.processes)
        if mismatch.certain:
            has = "has" if len(mismatch.processes) == 1 else "have"
            faults.append(f"{who} {has} weights or moments that differ from those of {agreeing} replicas that agree")
        else:
            faults.append(
                f"{who} should have the same weights and moments but do not (without a majority, it is unknown which are right)"
            )
    faults += [
        f"weight '{name}' of {_named([rank], report.hosts)} is not finite" for rank, name in report.not_finite[:3]
    ]
    more = len(report.mismatches) + len(report.not_finite) - len(faults)
    cause = "memory or arithmetic failed there" if report.mismatches else "optim.lr is too high, or memory failed there"
    advice = f"resume from '{latest}' with --resume auto" if latest else "there is no checkpoint: start over"
    raise TrainingError(
        f"at step {step}, {'; '.join(faults)}{f' (and {more} more)' if more else ''}: {cause}; these weights were not "
        f"saved; {advice}, and exclude the machine if this happens again"
    )


def _named(ranks: tuple[int, ...] | list[int], hosts: tuple[str, ...]) -> str:
    """'process 3 (host a)', 'processes 0 (host a) and 1 (host b)'."""
    *others, last = [f"{rank} (host {hosts[rank]})" for rank in ranks]
    return f"processes {', '.join(others)} and {last}" if others else f"process {last}"


def digest(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Digest of the bits in these tensors, in order: an int64 scalar tensor, computed without leaving the device.

    It is sum_i w_i b_i modulo 2^64, where b_i is element i's bit pattern as an integer and w_i an odd weight for position i. A
    change in one element always changes it. Other changes, and permutations, are very unlikely to cancel.
    """
    held = list(tensors)
    longest = min(_CHUNK, max((tensor.numel() for tensor in held), default=0))
    weights = torch.arange(longest, device=device) * _ODD | 1
    result = torch.zeros((), dtype=torch.int64, device=device)
    for tensor in held:
        bits = tensor.detach().reshape(-1).view(_INTEGERS[tensor.element_size()])
        for part in bits.split(_CHUNK):
            result = result * _ODD + (part * weights[: len(part)]).sum()
    return result


def compare(rows: Sequence[Sequence[int]], sizes: tuple[int, int, int]) -> list[Mismatch]:
    """Compares digests. `rows` holds one digest per set in `_COPIES` for each global rank; `sizes` is the mesh (pp, dp, tp)."""
    ranks = torch.arange(len(rows)).view(sizes)
    groups = {"replicas": ranks.flatten(1), "dp": ranks.transpose(1, 2).flatten(0, 1), "tp": ranks.flatten(0, 1)}
    mismatches = []
    for column, over in enumerate(_COPIES):
        for group in groups[over].tolist():
            digests = [rows[rank][column] for rank in group]
            common, count = Counter(digests).most_common(1)[0]
            if count == len(group):
                continue
            certain = 2 * count > len(group)
            odd = [rank for rank, own in zip(group, digests, strict=True) if not certain or own != common]
            mismatches.append(Mismatch(tuple(odd), len(group), certain))
    return list(dict.fromkeys(mismatches))


def _copies(fused: FusedParam, mesh: Mesh) -> str | None:
    """Which set in `_COPIES` holds the same rows and updates them identically; None if only this process holds them."""
    whole, partial = fused.placement.dim is None, fused.placement.partial
    if fused.shard is None:
        # Each TP rank's group sums the complete gradients of a weight over dp separately, possibly in a different order.
        return "replicas" if whole and (partial or mesh.dp_cp.size == 1) else "dp"
    return "tp" if fused.shard.over == "dp" and whole and partial else None
