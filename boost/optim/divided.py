"""AdamW whose moments are divided over replicas that may be lost: ZeRO-1 with in-step recovery (docs/recovery.md).

Every replica has all weights, and all gradients once they are summed. Moments are divided, by rows of each stored tensor, into as
many pieces as there are replicas. Two replicas hold each piece and make its update, so that either may be lost; then the
replicas exchange the rows that they have updated.

Who holds what is a division: the names of replicas, in order. Replicas may change at any time (`Mesh.members`); the division
follows in the next exchange, when all have made the same updates.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from boost.config import Config
from boost.config.optimizers import OptimConfig
from boost.config.traffic import bucket_lengths
from boost.errors import TrainingError
from boost.models.fused import FusedParam
from boost.optim.adamw import MOMENTS, Optimizer, Part, decays, fresh_state, fused_adamw, zeros
from boost.parallel.membership import share
from boost.parallel.mesh import Axis, Mesh
from boost.parallel.replicas import digest


@dataclass(frozen=True)
class Division:
    """Replicas, in order, among which moments are divided."""

    names: tuple[str, ...] = ()

    def holders(self, piece: int) -> tuple[str, ...]:
        """The two that hold a piece; half of all others lie between them, so that they are seldom on one machine."""
        count = len(self.names)
        second = (piece + max(count // 2, 1)) % count
        return tuple(self.names[each] for each in dict.fromkeys((piece, second)))

    def pieces_of(self, name: str | None) -> list[int]:
        """What a replica holds."""
        return [piece for piece in range(len(self.names)) if name in self.holders(piece)]

    def rows(self, tensor: Tensor, piece: int) -> range:
        """The rows of a stored tensor in a piece."""
        return share(tensor.shape[0], piece, len(self.names))

    def sources(self, members: Sequence[str]) -> list[int]:
        """For each piece, the index of the first of `members` that holds it.

        Raises TrainingError if none does.
        """
        found = [[members.index(name) for name in self.holders(i) if name in members] for i in range(len(self.names))]
        if lost := sum(not each for each in found):
            raise TrainingError(
                f"{lost} of {len(found)} parts of the moments are lost: parallel.shard = 'optimizer' keeps two copies of each, on "
                "replicas that are both gone; resume with --resume auto"
            )
        return [each[0] for each in found]


Pieces = dict[int, dict[Tensor, dict[str, Tensor]]]
"""Moments of the rows of each stored tensor in a piece, by the number of the piece."""


class DividedAdamW(Optimizer):
    """AdamW for every parameter; this process holds the moments of two pieces."""

    def __init__(self, fused_params: Sequence[FusedParam], optim: OptimConfig, mesh: Mesh) -> None:
        self._fused, self._optim, self._mesh = [f for f in fused_params if f.tensor.requires_grad], optim, mesh
        rest = iter(self._fused)
        lengths = bucket_lengths([fused.tensor.nbytes for fused in self._fused])
        self._buckets = [list(islice(rest, length)) for length in lengths]
        self._updates = 0
        self._begun: tuple[Division, Pieces] | None = None
        """A division that is complete on this process, but perhaps not on all."""
        division = Division(mesh.members)
        self._hold(division, self._zeros(division))

    @property
    def _name(self) -> str | None:
        """This replica's, in the current membership."""
        return self._mesh.members[self._mesh.dp.rank] if self._mesh.members else None

    def _zeros(self, division: Division) -> Pieces:
        """Moments of what this replica is to hold."""
        return {
            piece: {
                fused.tensor: zeros(_part(fused.tensor, division.rows(fused.tensor, piece)), MOMENTS)
                for fused in self._fused
            }
            for piece in division.pieces_of(self._name)
        }

    def _hold(self, division: Division, pieces: Pieces) -> None:
        """From now on these are updated. Rows are parameters of their own for torch's AdamW: views of the stored tensors."""
        self.division, self._pieces = division, pieces
        self._rows: list[tuple[nn.Parameter, Tensor, range]] = []
        groups: dict[float, list[nn.Parameter]] = {}
        state: dict[Tensor, dict[str, Tensor]] = {}
        for piece, moments in pieces.items():
            for fused in self._fused:
                rows = division.rows(fused.tensor, piece)
                if not len(rows):
                    continue
                view = nn.Parameter(_part(fused.tensor, rows))
                self._rows.append((view, fused.tensor, rows))
                groups.setdefault(self._optim.weight_decay if decays(fused, self._optim) else 0.0, []).append(view)
                state[view] = fresh_state(view, moments[fused.tensor])
        listed = [{"params": views, "weight_decay": decay} for decay, views in groups.items()]
        # Of a replica that is not in yet: torch wants a parameter.
        adamw = fused_adamw(listed or [{"params": [torch.zeros(0)], "weight_decay": 0.0}], self._optim)
        adamw.state.update(state)
        updates = self._updates
        super().__init__(adamw)
        self.updates = updates

    # A step.

    @torch.no_grad()
    def step(self, number: int, rate: float) -> None:
        """Updates the rows of this replica's pieces, and gets all others."""
        for view, tensor, rows in self._rows:
            assert tensor.grad is not None, "every parameter takes part in every step"
            view.grad = _part(tensor.grad, rows)
        super().step(number, rate)
        for view, _, _ in self._rows:
            view.grad = None
        self._mesh.together(self._exchange)
        self.settle()

    def _exchange(self) -> None:
        """Brings updated rows to all replicas. If these have changed, also moments to those that are to hold them. Collective."""
        self.drop()
        if self._mesh.members != self.division.names:
            self._spread_weights()
            self._divide()
        elif self._mesh.dp.group is not None:
            self._gather(self._mesh.dp)
        # Whoever is behind another one in the sequence of operations has all that the exchange brings, but for this.
        if self._mesh.device.type == "cuda":
            torch.cuda.current_stream(self._mesh.device).synchronize()
        self._mesh.barrier()

    def _gather(self, dp: Axis) -> None:
        """One all-gather for each bucket of weights. Pieces are padded to the longest: by a row of each tensor at most."""
        for bucket in self._buckets:
            pieces = [self._weights(bucket, piece) for piece in range(dp.size)]
            longest = max(sum(part.numel() for part in parts) for parts in pieces)
            own = _flatten_dense_tensors(pieces[dp.rank])
            own = nn.functional.pad(own, (0, longest - own.numel()))
            gathered = own.new_empty(dp.size, longest)
            dist.all_gather(list(gathered.unbind()), own, group=dp.group)
            for piece, parts in enumerate(pieces):
                if piece != dp.rank:
                    torch._foreach_copy_(parts, _unflatten_dense_tensors(gathered[piece], parts))

    def _weights(self, bucket: Sequence[FusedParam], piece: int) -> list[Tensor]:
        return [_part(fused.tensor, self.division.rows(fused.tensor, piece)) for fused in bucket]

    # Replicas change.

    def require_whole(self) -> None:
        """Raises TrainingError if no replica that is left holds some of the moments."""
        self.division.sources(self._mesh.members)

    def facts(self) -> dict[str, Any]:
        """Also the division."""
        return {**super().facts(), "division": list(self.division.names)}

    def take_facts(self, facts: dict[str, Any]) -> None:
        """Of which this replica holds nothing yet."""
        self.division, self._pieces = Division(tuple(facts["division"])), {}
        super().take_facts(facts)

    @torch.no_grad()
    def hand_over(self, mesh: Mesh, donor: int, takes: bool) -> None:
        """Divides anew among the replicas of the mesh, those included that come in. Not before `settle` does it hold."""
        self.drop()
        self._divide()

    def drop(self) -> None:
        """The division that was begun is not made."""
        self._begun = None

    def settle(self) -> None:
        """The division that was begun is complete on all processes."""
        if self._begun is not None:
            self._hold(*self._begun)
            self._begun = None

    def _spread_weights(self) -> None:
        """Each piece from one of those that have updated it to all."""
        for piece, source in enumerate(self.division.sources(self._mesh.members)):
            for bucket in self._buckets:
                parts = self._weights(bucket, piece)
                arrived = self._from(source, parts, parts)
                if self._mesh.dp.rank != source:
                    torch._foreach_copy_(parts, arrived)

    def _divide(self) -> None:
        """Collects the moments that this process is to hold in a division among the current members."""
        old, new = self.division, Division(self._mesh.members)
        pieces = self._zeros(new)
        for piece, source in enumerate(old.sources(self._mesh.members)):
            for bucket in self._buckets:
                like = [part for part in self._weights(bucket, piece) for _ in MOMENTS]
                is_source = self._mesh.dp.rank == source
                own = [self._pieces[piece][f.tensor][name] for f in bucket for name in MOMENTS] if is_source else None
                places = [(fused.tensor, name) for fused in bucket for name in MOMENTS]
                for (tensor, name), value in zip(places, self._from(source, own, like), strict=True):
                    for number, moments in pieces.items():
                        _copy_rows(value, old.rows(tensor, piece), moments[tensor][name], new.rows(tensor, number))
        self._begun = new, pieces

    def _from(self, source: int, own: list[Tensor] | None, like: list[Tensor]) -> list[Tensor]:
        """Tensors of one replica, those of `own` there, in the shapes of `like`. Collective over dp."""
        dp = self._mesh.dp
        if dp.rank == source:
            assert own is not None, "the source holds what it sends"
            flat = _flatten_dense_tensors(own)
        else:
            flat = like[0].new_empty(sum(part.numel() for part in like))
        if dp.group is not None:
            dist.broadcast(flat, group=dp.group, group_src=source)
        return list(_unflatten_dense_tensors(flat, like))

    def digests(self, device: torch.device) -> list[Tensor]:
        """One for each piece: of its moments, 0 if this process does not hold it."""
        division, pieces = self._begun or (self.division, self._pieces)
        nothing = torch.zeros((), dtype=torch.int64, device=device)
        return [
            digest((each for moments in pieces[i].values() for each in moments.values()), device)
            if i in pieces
            else nothing
            for i in range(len(division.names))
        ]

    # Checkpoints.

    def parts(self) -> list[Part]:
        """One for each piece."""
        return [
            {
                tensor: (self.division.rows(tensor, piece).start, values)
                for tensor, values in moments.items()
                if len(self.division.rows(tensor, piece))
            }
            for piece, moments in self._pieces.items()
        ]


def _part(tensor: Tensor, rows: range) -> Tensor:
    """Rows of a stored tensor, as a view."""
    return tensor.detach()[rows.start : rows.stop]


def _copy_rows(source: Tensor, source_rows: range, target: Tensor, target_rows: range) -> None:
    """Those of a stored tensor's rows that both have."""
    begin, end = max(source_rows.start, target_rows.start), min(source_rows.stop, target_rows.stop)
    if begin < end:
        source = source[begin - source_rows.start : end - source_rows.start]
        target[begin - target_rows.start : end - target_rows.start].copy_(source)


def divided_adamw(fused_params: Sequence[FusedParam], config: Config, mesh: Mesh) -> Optimizer:
    """`DividedAdamW`, to be built as other optimizers are."""
    return DividedAdamW(fused_params, config.optim, mesh)
