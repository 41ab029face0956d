"""Predicts the memory of one process: training state, and the activations saved for the backward pass under a recomputation policy.

Saved activations come from a trace of the decoder (`boost.plan.trace`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from boost.config.copies import has_working_copies
from boost.config.schema import Config
from boost.config.stages import Stage, stages_of
from boost.config.traffic import ITEMSIZE
from boost.plan.categories import COPIES, GRADIENTS, LATENTS, OPTIMIZER, SAVED, WEIGHTS
from boost.plan.optimizer import state_bytes
from boost.plan.replicas import StoredTensor, moments_share, stored_tensors, with_whole_weights
from boost.plan.tape import Held
from boost.plan.trace import pass_of_block, trace_loss


@dataclass(frozen=True)
class SavedTensor:
    """One tensor saved in the forward pass of a micro-batch for its backward pass."""

    held: Held
    layer: int | None = None
    """Index of the block; None for the loss."""

    @property
    def bytes(self) -> int:
        """Size of the tensor in bytes."""
        return self.held.bytes


@dataclass(frozen=True)
class Memory:
    """Memory of one process in bytes, by category."""

    states: dict[str, int]
    """Bytes of WEIGHTS, GRADIENTS and OPTIMIZER."""
    saved: tuple[SavedTensor, ...]
    """Tensors saved between the forward and the backward pass of a micro-batch. Working copies of weights are included; they are
    shared by all micro-batches."""

    @property
    def by_category(self) -> dict[str, int]:
        """Bytes of STATES and SAVED, and of the attention masks that CPUs save."""
        sums = {**self.states, **dict.fromkeys(SAVED, 0)}
        for item in self.saved:
            sums[item.held.category] = sums.get(item.held.category, 0) + item.bytes
        return sums

    @property
    def activations(self) -> int:
        """Total bytes saved for the backward pass."""
        return sum(item.bytes for item in self.saved)

    @property
    def total(self) -> int:
        """Total bytes between forward and backward pass, including gradients of an earlier micro-batch."""
        return self.activations + sum(self.states.values())


def memory(config: Config, pp_rank: int = 0) -> Memory:
    """Memory of one process: the training state of its stages, and the activations that one micro-batch saves."""
    config, share = with_whole_weights(config), moments_share(config)
    stages = stages_of(config, pp_rank)
    saved = [item for stage in stages for layer in stage.numbers for item in _block_saved_tensors(config, layer)]
    if stages[-1].has_head:
        saved += [SavedTensor(held) for held in trace_loss(config).saved]
    stored = [tensor for stage in stages for tensor in stored_tensors(config.model, config.parallel, stage)]
    saved += [SavedTensor(held, tensor.unit) for tensor in stored if (held := _copy(config, tensor))]
    states = states_of(config, stored, stages)
    return Memory(states | {OPTIMIZER: int(states[OPTIMIZER] * share)}, tuple(saved))


def states_of(config: Config, stored: Sequence[StoredTensor], stages: Sequence[Stage]) -> dict[str, int]:
    """Bytes of STATES for this process's shards of the stored tensors of these stages."""
    weights = sum(tensor.shard(config.parallel) for tensor in stored) * ITEMSIZE[config.train.param_dtype]
    copies = 2 if config.run.recovery == "in-step" else 1  # local gradients, in addition to their sums
    return {WEIGHTS: weights, GRADIENTS: copies * weights, OPTIMIZER: state_bytes(config, stored, stages)}


def copies_bytes(config: Config, stored: Sequence[StoredTensor]) -> int:
    """Bytes of the working copies of these stored tensors."""
    return sum(held.bytes for tensor in stored if (held := _copy(config, tensor)))


def _copy(config: Config, tensor: StoredTensor) -> Held | None:
    """The working copy of a stored tensor; None if it has none."""
    if not (tensor.may_have_copy and has_working_copies(config)):
        return None
    dtype = config.train.compute_dtype
    return Held(tensor.elements * ITEMSIZE[dtype], COPIES, "copy_", (tensor.rows, tensor.columns), dtype, "")


def _block_saved_tensors(config: Config, layer: int) -> Iterator[SavedTensor]:
    yield from (SavedTensor(held, layer) for held in pass_of_block(config, layer).saved)
    dtype = config.train.compute_dtype
    for size in prev_latents_saved(config, layer):
        shape = (size // ITEMSIZE[dtype],)
        yield SavedTensor(Held(size, LATENTS, "prev_latents", shape, dtype, ""), layer)


def prev_latents_saved(config: Config, layer: int, on_gpu: bool = False) -> list[int]:
    """Bytes of each latent of the previous block that only this block keeps alive."""
    saved = pass_of_block(config, layer, on_gpu).prev_saved
    if not any(saved):
        return []
    before = pass_of_block(config, layer - 1, on_gpu).latents_saved
    return [size for size, already in zip(saved, before, strict=True) if size and not already]
