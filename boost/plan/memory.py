"""Memory of a training step on one process, predicted: what is there all the time, and what each block saves for its backward
pass under each recomputation policy. What is saved is read off a run of the decoder on sizes (`boost.plan.trace`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from boost.config.schema import Config
from boost.config.stages import Stage, stages_of
from boost.config.traffic import ITEMSIZE
from boost.plan.categories import GRADIENTS, KEPT, LATENTS, OPTIMIZER, WEIGHTS
from boost.plan.optimizer import state_bytes
from boost.plan.replicas import StoredTensor, stored_tensors
from boost.plan.tape import Held
from boost.plan.trace import pass_of_block, trace_loss


@dataclass(frozen=True)
class SavedTensor:
    """One tensor that lives from the forward to the backward pass of a micro-batch."""

    held: Held
    layer: int | None = None
    """Number of the block; None: of the loss."""

    @property
    def bytes(self) -> int:
        """Its size."""
        return self.held.bytes


@dataclass(frozen=True)
class Memory:
    """Bytes that one process holds, by category."""

    states: dict[str, int]
    """WEIGHTS, GRADIENTS, OPTIMIZER."""
    kept: tuple[SavedTensor, ...]
    """Between the forward and the backward pass of a micro-batch."""

    @property
    def by_category(self) -> dict[str, int]:
        """STATES and KEPT."""
        sums = {**self.states, **dict.fromkeys(KEPT, 0)}
        for item in self.kept:
            sums[item.held.category] += item.bytes
        return sums

    @property
    def activations(self) -> int:
        """All that is saved for the backward pass."""
        return sum(item.bytes for item in self.kept)

    @property
    def total(self) -> int:
        """Between forward and backward pass, gradients of an earlier micro-batch included."""
        return self.activations + sum(self.states.values())


def memory(config: Config, pp_rank: int = 0) -> Memory:
    """Bytes on one process: the training state of its stages and shards, and what one micro-batch saves in them."""
    stages = stages_of(config, pp_rank)
    kept = [item for stage in stages for layer in stage.numbers for item in _block_keeps(config, layer)]
    if stages[-1].has_head:
        kept += [SavedTensor(held) for held in trace_loss(config).kept]
    stored = [tensor for stage in stages for tensor in stored_tensors(config.model, config.parallel, stage)]
    return Memory(states_of(config, stored, stages), tuple(kept))


def states_of(config: Config, stored: Sequence[StoredTensor], stages: Sequence[Stage]) -> dict[str, int]:
    """STATES of the stored tensors of some stages, in shards where replicas share them."""
    weights = sum(tensor.shard(config.parallel) for tensor in stored) * ITEMSIZE[config.train.param_dtype]
    return {WEIGHTS: weights, GRADIENTS: weights, OPTIMIZER: state_bytes(config, stored, stages)}


def _block_keeps(config: Config, layer: int) -> Iterator[SavedTensor]:
    yield from (SavedTensor(held, layer) for held in pass_of_block(config, layer).kept)
    dtype = config.train.compute_dtype
    for size in prev_latents_kept(config, layer):
        shape = (size // ITEMSIZE[dtype],)
        yield SavedTensor(Held(size, LATENTS, "prev_latents", shape, dtype, ""), layer)


def prev_latents_kept(config: Config, layer: int, fused_norm: bool = False) -> list[int]:
    """Bytes of the previous block's latents that live on because of this block alone."""
    kept = pass_of_block(config, layer, fused_norm).prev_kept
    if not any(kept):
        return []
    before = pass_of_block(config, layer - 1, fused_norm).latents_kept
    return [size for size, already in zip(kept, before, strict=True) if size and not already]
