"""Handles optimizer state when replicas are lost and rejoin (docs/recovery.md).

`transfer_state` sends the whole state to joining replicas, except that of `DividedAdamW`: AdamW with moments sharded over the
replicas (ZeRO-1).

With it, every replica has all weights and, after the all-reduce, all gradients. Moments are split along the rows of each stored
tensor into one piece per replica. Two replicas hold and update each piece, so the run survives the loss of either one.
The replicas then exchange the updated rows.

A division, an ordered list of replica names, determines which replica holds which pieces. Replicas can change at any time
(`ElasticMesh.members`); the division changes in the next exchange, once all replicas have made the same updates.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from boost.config import Config
from boost.config.optimizers import OptimConfig
from boost.config.traffic import bucket_lengths
from boost.elastic.mesh import ElasticMesh
from boost.errors import TrainingError
from boost.models.fused import FusedParam
from boost.optim import adamw
from boost.optim.adamw import MOMENTS, Optimizer, Part, decays, fresh_state, fused_adamw, zeros
from boost.parallel.mesh import share
from boost.train.replicas import digest


@dataclass(frozen=True)
class Division:
    """The ordered replicas over which moments are sharded."""

    names: tuple[str, ...] = ()

    def holders(self, piece: int) -> tuple[str, ...]:
        """The two replicas that hold a piece. The two are half the list apart, so they rarely share a machine."""
        count = len(self.names)
        second = (piece + max(count // 2, 1)) % count
        return tuple(self.names[index] for index in dict.fromkeys((piece, second)))

    def pieces_of(self, name: str | None) -> list[int]:
        return [piece for piece in range(len(self.names)) if name in self.holders(piece)]

    def rows(self, tensor: Tensor, piece: int) -> range:
        """The rows of a stored tensor that are in a piece."""
        return share(tensor.shape[0], piece, len(self.names))

    def sources(self, members: Sequence[str]) -> list[int]:
        """For each piece, the index of the first member in `members` that holds it.

        Raises TrainingError if some piece has no holder among them.
        """
        holders = [[members.index(n) for n in self.holders(i) if n in members] for i in range(len(self.names))]
        if lost := holders.count([]):
            raise TrainingError(
                f"{lost} of {len(holders)} parts of the moments are lost: parallel.shard = 'optimizer' keeps two copies of each, "
                "and both replicas that held them were lost; resume with --resume auto"
            )
        return [first for first, *_ in holders]


Pieces = dict[int, dict[Tensor, dict[str, Tensor]]]
"""For each piece: the moments of its rows in each stored tensor, by name."""


class DividedAdamW(Optimizer):
    """AdamW for every parameter. This process holds the moments of two pieces."""

    division: Division
    """The replicas among which `parts` are divided."""

    def __init__(self, fused_params: Sequence[FusedParam], optim: OptimConfig, mesh: ElasticMesh) -> None:
        self._fused, self._optim, self._mesh = [f for f in fused_params if f.tensor.requires_grad], optim, mesh
        rest = iter(self._fused)
        lengths = bucket_lengths([fused.tensor.nbytes for fused in self._fused])
        self._buckets = [list(islice(rest, length)) for length in lengths]
        self._updates = 0
        self._conflicts: dict[str, None] = {}
        """Replicas that sent rows which differed from this replica's own update of the same rows. Each exchange overwrites one of
        the two, so a later comparison of the weights would find no difference."""
        self._pending: tuple[Division, Pieces] | None = None
        """A division and its pieces, complete on this process but perhaps not yet on all others."""
        division = Division(mesh.members)
        self._adopt(division, self._zeros(division))

    @property
    def _name(self) -> str | None:
        """This replica's name in the current membership."""
        return self._mesh.members[self._mesh.dp.rank] if self._mesh.members else None

    def _zeros(self, division: Division) -> Pieces:
        """Zero moments for the pieces that this replica will hold."""
        return {
            piece: {
                fused.tensor: zeros(_rows_view(fused.tensor, division.rows(fused.tensor, piece)), MOMENTS)
                for fused in self._fused
            }
            for piece in division.pieces_of(self._name)
        }

    def _adopt(self, division: Division, pieces: Pieces) -> None:
        """Assigns pieces to this process. To torch's AdamW, the rows are parameters: views of stored tensors."""
        self.division, self._pieces = division, pieces
        self._rows: list[tuple[nn.Parameter, Tensor, range]] = []
        groups: dict[float, list[nn.Parameter]] = {}
        state: dict[Tensor, dict[str, Tensor]] = {}
        for piece, moments in pieces.items():
            for fused in self._fused:
                rows = division.rows(fused.tensor, piece)
                if not len(rows):
                    continue
                view = nn.Parameter(_rows_view(fused.tensor, rows))
                self._rows.append((view, fused.tensor, rows))
                groups.setdefault(self._optim.weight_decay if decays(fused, self._optim) else 0.0, []).append(view)
                state[view] = fresh_state(view, moments[fused.tensor])
        listed = [{"params": views, "weight_decay": decay} for decay, views in groups.items()]
        # torch requires a parameter, but a replica that has not joined yet has none.
        adamw = fused_adamw(listed or [{"params": [torch.zeros(0)], "weight_decay": 0.0}], self._optim)
        adamw.state.update(state)
        updates = self._updates
        super().__init__(adamw)
        self.updates = updates

    @property
    def conflict(self) -> int | None:  # type: ignore[override]
        """The dp rank of a replica whose update of the same rows has differed from this one's; None if there is none."""
        members = self._mesh.members
        return next((members.index(n) if n in members else self._mesh.dp.rank for n in self._conflicts), None)

    # Step.

    @torch.no_grad()
    def step(self, number: int, rate: float) -> None:
        """Updates the rows in this replica's pieces and receives all other rows."""
        for view, tensor, rows in self._rows:
            assert tensor.grad is not None, "every parameter must have a gradient in every step"
            view.grad = _rows_view(tensor.grad, rows)
        super().step(number, rate)
        for view, _, _ in self._rows:
            view.grad = None
        self._mesh.together(self._exchange)
        self.commit_transfer()

    def _exchange(self) -> None:
        """Sends updated rows to all replicas and, if the replicas have changed, moments to their new holders. Collective."""
        self.discard_transfer()
        differs: dict[int, list[Tensor]] = {}
        """For each source of rows that this replica has updated too: whether they differ, by bucket."""

        def receive(parts: list[Tensor], arrived: list[Tensor], piece: int, source: int) -> None:
            if piece in self._pieces:
                same = zip(parts, arrived, strict=True)
                differs.setdefault(source, []).extend((own != other).any() for own, other in same)
            torch._foreach_copy_(parts, arrived)

        if self._mesh.members != self.division.names:
            # Each piece of the weights comes from a replica that has updated it.
            for piece, source in enumerate(self.division.sources(self._mesh.members)):
                for bucket in self._buckets:
                    parts = self._weights(bucket, piece)
                    arrived = self._broadcast(source, parts, parts)
                    if self._mesh.dp.rank != source:
                        receive(parts, arrived, piece, source)
            self.reshard_moments()
        elif (dp := self._mesh.dp).group is not None:
            # One all-gather per bucket of weights. Pieces are padded to the longest one, by at most a row of each tensor.
            for bucket in self._buckets:
                pieces = [self._weights(bucket, piece) for piece in range(dp.size)]
                longest = max(sum(part.numel() for part in parts) for parts in pieces)
                own = _flatten_dense_tensors(pieces[dp.rank])
                own = nn.functional.pad(own, (0, longest - own.numel()))
                gathered = own.new_empty(dp.size, longest)
                dist.all_gather(list(gathered.unbind()), own, group=dp.group)
                for piece, parts in enumerate(pieces):
                    if piece != dp.rank:
                        receive(parts, list(_unflatten_dense_tensors(gathered[piece], parts)), piece, piece)
        # The barrier comes last: once any process has completed this operation, every process has all data from the exchange.
        if self._mesh.device.type == "cuda":
            torch.cuda.current_stream(self._mesh.device).synchronize()
        self._mesh.barrier()
        for source, found in differs.items():
            if bool(torch.stack(found).any()):
                self._conflicts[self._mesh.members[source]] = None

    def _weights(self, bucket: Sequence[FusedParam], piece: int) -> list[Tensor]:
        return [_rows_view(fused.tensor, self.division.rows(fused.tensor, piece)) for fused in bucket]

    # Changes of replicas.

    def take_division(self, names: Sequence[str]) -> None:
        """Adopts the other replicas' division; this replica holds none of its pieces yet."""
        self.division, self._pieces = Division(tuple(names)), {}

    def discard_transfer(self) -> None:
        """Discards the pending division."""
        self._pending = None

    def commit_transfer(self) -> None:
        """Adopts the pending division, which is complete on all processes."""
        if self._pending is not None:
            self._adopt(*self._pending)
            self._pending = None

    @torch.no_grad()
    def reshard_moments(self) -> None:
        """Collects the moments that this process will hold under a division over the current members, including joining ones;
        `commit_transfer` adopts it."""
        old, new = self.division, Division(self._mesh.members)
        pieces = self._zeros(new)
        for piece, source in enumerate(old.sources(self._mesh.members)):
            for bucket in self._buckets:
                like = [part for part in self._weights(bucket, piece) for _ in MOMENTS]
                is_source = self._mesh.dp.rank == source
                own = [self._pieces[piece][f.tensor][name] for f in bucket for name in MOMENTS] if is_source else None
                places = [(fused.tensor, name) for fused in bucket for name in MOMENTS]
                for (tensor, name), value in zip(places, self._broadcast(source, own, like), strict=True):
                    for number, moments in pieces.items():
                        have, want, target = old.rows(tensor, piece), new.rows(tensor, number), moments[tensor][name]
                        begin, end = max(have.start, want.start), min(have.stop, want.stop)
                        if begin < end:  # rows in both pieces
                            rows = value[begin - have.start : end - have.start]
                            target[begin - want.start : end - want.start].copy_(rows)
        self._pending = new, pieces

    def _broadcast(self, source: int, own: list[Tensor] | None, like: list[Tensor]) -> list[Tensor]:
        """Broadcasts the tensors `own`, shaped like `like`, from replica `source`. Collective over dp."""
        dp = self._mesh.dp
        if dp.rank == source:
            assert own is not None, "the source must hold the tensors that it sends"
            flat = _flatten_dense_tensors(own)
        else:
            flat = like[0].new_empty(sum(part.numel() for part in like))
        if dp.group is not None:
            dist.broadcast(flat, group=dp.group, group_src=source)
        return list(_unflatten_dense_tensors(flat, like))

    def digests(self, device: torch.device) -> list[Tensor]:
        """Digests of the moments in each piece; 0 if this process does not hold the piece."""
        division, pieces = self._pending or (self.division, self._pieces)
        nothing = torch.zeros((), dtype=torch.int64, device=device)
        held = {i: [x for moments in piece.values() for x in moments.values()] for i, piece in pieces.items()}
        return [digest(held[i], device) if i in held else nothing for i in range(len(division.names))]

    # Checkpoints.

    def parts(self) -> list[Part]:
        """One part per piece. Raises TrainingError if some of the moments are on no remaining replica."""
        self.division.sources(self._mesh.members)
        return [
            {
                tensor: (self.division.rows(tensor, piece).start, values)
                for tensor, values in moments.items()
                if len(self.division.rows(tensor, piece))
            }
            for piece, moments in self._pieces.items()
        ]


@torch.no_grad()
def transfer_state(optimizer: Optimizer, mesh: ElasticMesh, donor: int, takes: bool) -> list[Tensor]:
    """Sends the state from replica `donor` to the other replicas where `takes` is true, or shards the moments over the current
    replicas. Collective. Returns digests of the state, which must be equal on all replicas; 0s are ignored."""
    if isinstance(optimizer, DividedAdamW):
        optimizer.reshard_moments()
        return optimizer.digests(mesh.device)
    for tensor in optimizer.state_tensors():
        dist.broadcast(tensor if takes else torch.empty_like(tensor), group=mesh.dp.group, group_src=donor)
    return [digest(optimizer.state_tensors(), mesh.device)]


def divided(optimizer: Optimizer) -> DividedAdamW | None:
    """The optimizer, if its moments are sharded over replicas."""
    return optimizer if isinstance(optimizer, DividedAdamW) else None


def _rows_view(tensor: Tensor, rows: range) -> Tensor:
    return tensor.detach()[rows.start : rows.stop]


def build_optimizer(fused_params: Sequence[FusedParam], config: Config, mesh: ElasticMesh) -> Optimizer:
    """The optimizer that `config.optim` describes; AdamW with sharded moments if parallel.shard is set."""
    if config.divides_moments:
        return DividedAdamW(fused_params, config.optim, mesh)
    return adamw.build_optimizer(fused_params, config, mesh)
