"""Second moments of every linear's inputs and output gradients in a dense model, over calibration text. `Twins` adds joint moments
of the inputs in the dense model and in its factorized copy, one block at a time.

Legend: T tokens in a batch; I input width of a group of linears, O output width of one of them; x input of a group in the dense
model, x' in the factorized one, [T, I]; s importance of a token (`GroupMoments`).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from boost.config.architecture import IGNORED, groups
from boost.config.layouts import layout_spec
from boost.config.schema import ModelConfig, ParallelConfig
from boost.data.batches import EvaluationBatches
from boost.data.store import TokenStore
from boost.layouts.single import Single
from boost.models.attention import make_context
from boost.models.block import TransformerBlock, interleave
from boost.models.decoder import Decoder
from boost.models.group import LinearGroup, Outputs
from boost.models.interface import Arrived, Flow, Stream
from boost.models.kernels import STATISTIC_DTYPE
from boost.parallel.mesh import Mesh
from boost.train.progress import progress

BATCH_TOKENS = 4096
"""Tokens per forward pass: enough for large GEMMs, but few enough to limit memory use."""

Observer = Callable[[LinearGroup, Tensor, Sequence[Tensor]], None]
"""Called with a group of linears, its input [T, I] and its outputs, one [T, O] per slot (none if low-rank)."""


class ObservedLayout(Single):
    """A whole model in one process. Calls `observers` with the input of every group and, for dense linears, its outputs."""

    def __init__(self, model: ModelConfig, device: torch.device) -> None:
        parallel = ParallelConfig(layout="single")
        super().__init__(layout_spec(parallel.layout), model, parallel, Mesh(device))
        self.observers: list[Observer] = []

    def enter(self, flow: Flow, gamma: Tensor, group: LinearGroup) -> Iterable[None]:
        if group.low_rank and self.observers:
            self._observe(group, self.norm(flow.x, gamma), ())
        return super().enter(flow, gamma, group)

    def up(self, arrived: Arrived, group: LinearGroup) -> Outputs:
        outputs, latents = super().up(arrived, group)
        if not group.low_rank:
            self._observe(group, arrived[0], outputs)
        return outputs, latents

    def down(self, hidden: Tensor, group: LinearGroup) -> Tensor:
        output = super().down(hidden, group)
        self._observe(group, hidden, () if group.low_rank else [output])
        return output

    def _observe(self, group: LinearGroup, x_TI: Tensor, outputs: Sequence[Tensor]) -> None:
        for observer in self.observers:
            observer(group, x_TI, outputs)


@dataclass
class GroupMoments:
    """fp64 moments of one group of linears: means over tokens of s x x^T, and of g g^T for each slot."""

    inputs: Tensor
    outputs: dict[str, Tensor] = field(default_factory=dict)
    """Keyed by slot, such as attn.q; g is the gradient of a batch's summed loss with respect to one token's output."""
    importance: list[Tensor] = field(default_factory=list)
    """s, one [T] fp32 tensor per batch: |g|^2 summed over all slots, relative to its mean over tokens. Errors at tokens with large
    inputs and small gradients hardly matter; in many trained models, the first token of a sequence is such a token."""


def observers_of(decoder: Decoder) -> list[Observer]:
    """The observers of a decoder's `ObservedLayout`; callers add and remove their own."""
    layout = decoder.layout
    assert isinstance(layout, ObservedLayout)
    return layout.observers


def group_name(layer: int, name: str) -> str:
    """Key of a group, such as layers.3.qkv."""
    return f"layers.{layer}.{name}"


def read_batches(store: TokenStore, tokens: int, seq_len: int, device: torch.device) -> list[Tensor]:
    """Reads about `tokens` tokens of the training split, in evenly spaced windows, into batches [B, S] int64 of `BATCH_TOKENS`
    tokens. There is no padding, which would count in every moment: a shorter last window is a batch of its own."""
    split, rows, batches = store.split("train"), max(BATCH_TOKENS // seq_len, 1), list[Tensor]()
    for padded in EvaluationBatches(split, seq_len, rows, max_tokens=tokens, documents=False):
        has_target = padded.targets != IGNORED  # padding has none, and stands at the end of a row
        lengths = np.where(has_target.any(1), seq_len - has_target[:, ::-1].argmax(1), 0)
        for length in sorted({*lengths.tolist()} - {0}, reverse=True):
            batches.append(torch.from_numpy(padded.tokens[lengths == length, :length]).to(device))
    return batches


def collect(decoder: Decoder, batches: Sequence[Tensor], seed: int = 0) -> dict[str, GroupMoments]:
    """Returns the moments of every group, keyed by `group_name`, from one pass over the batches.

    Uses gradients for targets that are sampled from the model itself (with `seed`), not for the text's own targets. Their second
    moment is therefore the Fisher matrix: the curvature of the divergence from this model, even if the model has not converged.
    """
    device, names, moments = decoder.device, dict[LinearGroup, str](), dict[str, GroupMoments]()
    for layer, block in enumerate(block for block in decoder.blocks if isinstance(block, TransformerBlock)):
        for group in block.groups:
            widths = [group.shape.slots[0].d_in, *(slot.d_out for slot in group.shape.slots)]
            inputs, *outputs = (torch.zeros(width, width, dtype=torch.double, device=device) for width in widths)
            names[group] = name = group_name(layer, group.shape.name)
            slots = [slot.name for slot in group.shape.slots]
            moments[name] = GroupMoments(inputs, dict(zip(slots, outputs, strict=True)))
    generator = torch.Generator(device).manual_seed(seed)

    def observe(group: LinearGroup, x_TI: Tensor, outputs: Sequence[Tensor]) -> None:
        if x_TI.requires_grad:  # false in the pass that samples targets
            _watch_gradients(moments[names[group]], x_TI.detach(), group, outputs)

    trained = [parameter for parameter in decoder.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(parameter is decoder.embed)  # activations need gradients; weights do not
    observers_of(decoder).append(observe)
    try:
        for tokens_BS in progress(batches, "calibrate"):
            decoder(tokens_BS, _sampled(decoder, tokens_BS, generator)).backward()
            decoder.embed.grad = None
    finally:
        observers_of(decoder).remove(observe)
        for parameter in trained:
            parameter.requires_grad_(True)
    total = sum(tokens_BS.numel() for tokens_BS in batches)
    for of_group in moments.values():
        mean = float(sum(s_T.double().sum() for s_T in of_group.importance)) / total
        of_group.importance = [s_T / mean for s_T in of_group.importance]
        of_group.inputs /= total * mean
        for moment in of_group.outputs.values():
            moment /= total
    return moments


def _watch_gradients(into: GroupMoments, x_TI: Tensor, group: LinearGroup, outputs: Sequence[Tensor]) -> None:
    """Adds one batch to the moments of a group, as the gradients of its outputs arrive."""
    squares_T = torch.zeros(len(x_TI), device=x_TI.device)
    missing = len(outputs)

    def arrived(g_TO: Tensor, moment_OO: Tensor) -> None:
        nonlocal missing
        add_moment(moment_OO, g_TO)
        squares_T.add_(g_TO.double().square().sum(1).float())
        missing -= 1
        if missing == 0:
            # In a model with zero weights, all gradients are zero, so all tokens are equally important.
            s_T = squares_T if bool(squares_T.any()) else torch.ones_like(squares_T)
            add_moment(into.inputs, weigh(x_TI, s_T))
            into.importance.append(s_T)

    for slot, y_TO in zip(group.shape.slots, outputs, strict=True):
        y_TO.register_hook(lambda g_TO, moment=into.outputs[slot.name]: arrived(g_TO, moment))


def weigh(x_TN: Tensor, s_T: Tensor) -> Tensor:
    """sqrt(s) x: the product of two such tensors weights tokens by s."""
    return x_TN * s_T.to(x_TN.dtype).sqrt()[:, None]


def add_moment(into_NN: Tensor, x_TN: Tensor, y_TN: Tensor | None = None) -> None:
    """Adds x^T y of one batch (x^T x if `y_TN` is None) to an fp64 sum. Sums over one batch's tokens in the inputs' dtype, but
    at least fp32: the rounding error is far below `boost.convert.spectrum.DAMPING`, and fp64 would take most of the time."""
    dtype = STATISTIC_DTYPE[x_TN.dtype]
    x_TN = x_TN.to(dtype)
    into_NN += x_TN.T @ (x_TN if y_TN is None else y_TN.to(dtype))


@torch.no_grad()
def _sampled(decoder: Decoder, tokens_BS: Tensor, generator: torch.Generator) -> Tensor:
    """Targets [B, S] drawn from the model's own predictions."""
    all_T = torch.arange(tokens_BS.numel(), device=decoder.device)
    logits_TV = decoder.logits_of(tokens_BS, all_T)
    drawn_T1 = torch.multinomial(logits_TV.float().softmax(-1), 1, generator=generator)
    return drawn_T1.view_as(tokens_BS)


def moment_bytes(model: ModelConfig) -> int:
    """Returns the memory for all moments, in bytes."""
    widths = [
        width for group in groups(model, 0) for width in (group.slots[0].d_in, *(slot.d_out for slot in group.slots))
    ]
    return 8 * model.layers * sum(width**2 for width in widths)


# The dense model and its factorized copy.


@dataclass(frozen=True)
class InputMoments:
    """Moments of a group's inputs, [I, I] fp64, divided by the total number of tokens so that moments of subsets add up."""

    low: Tensor
    """E[s x' x'^T]."""
    cross: Tensor
    """E[s x x'^T]."""

    def __add__(self, other: "InputMoments") -> "InputMoments":
        return InputMoments(self.low + other.low, self.cross + other.cross)


class Twins:
    """The residual streams of both models at the current block. Weights of the factorized block may change between calls."""

    def __init__(self, dense: Decoder, low: Decoder, batches: Sequence[Tensor]) -> None:
        """Both models must have an `ObservedLayout` and the same embedding."""
        self.dense, self.low = dense, low
        self._models, self._batches = (dense, low), batches
        self._layer = 0
        self._tokens = sum(tokens_BS.numel() for tokens_BS in batches)
        with torch.no_grad():
            flows = [Flow(tokens_BS.reshape(-1)) for tokens_BS in batches]
            for flow in flows:
                interleave([dense.layout.embed(flow, dense.embed, dense.compute_dtype)])
            self._streams = [(flow.x, flow.x) for flow in flows]

    def moments(self, index: int, importance: Sequence[Tensor]) -> list[InputMoments]:
        """Returns the moments of group `index` in the current block, separately for the first and second halves of every batch.

        `importance`: s for every token, one [T] per batch.
        """
        width = self._blocks()[0].groups[index].shape.slots[0].d_in
        zeros = torch.zeros(width, width, dtype=torch.double, device=self.dense.device)
        halves = [InputMoments(zeros.clone(), zeros.clone()) for _ in range(2)]
        for (x_TI, low_TI), s_T in zip(self._inputs(index), importance, strict=True):
            x_halves, low_halves = weigh(x_TI, s_T).tensor_split(2), weigh(low_TI, s_T).tensor_split(2)
            for half, x, low in zip(halves, x_halves, low_halves, strict=True):
                add_moment(half.low, low)
                add_moment(half.cross, x, low)
        for half in halves:
            half.low.div_(self._tokens)
            half.cross.div_(self._tokens)
        return halves

    def advance(self) -> None:
        """Moves both streams to the next block."""
        self._streams = [self._run(number) for number in range(len(self._batches))]
        self._layer += 1

    def _blocks(self) -> list[TransformerBlock]:
        blocks = [model.blocks[self._layer] for model in self._models]
        return [block for block in blocks if isinstance(block, TransformerBlock)]

    def _inputs(self, index: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields (x, x') of a group, one batch at a time."""
        groups = [block.groups[index] for block in self._blocks()]

        def observe(group: LinearGroup, x_TI: Tensor, _: Sequence[Tensor]) -> None:
            if any(group is own for own in groups):
                raise _Found(x_TI)  # the rest of the block is not needed

        for model in self._models:
            observers_of(model).append(observe)
        try:
            for number in range(len(self._batches)):
                yield self._run(number)
        finally:
            for model in self._models:
                observers_of(model).remove(observe)

    @torch.no_grad()
    def _run(self, number: int) -> tuple[Tensor, Tensor]:
        """Returns both streams of a batch after the current block, or the inputs that an observer finds in the block."""
        rows, length = self._batches[number].shape
        streams = []
        for model, block, x in zip(self._models, self._blocks(), self._streams[number], strict=True):
            positions_S = torch.arange(length, device=model.device)
            context = make_context(rows, positions_S, model.model, model.compute_dtype)
            try:
                streams.append(block(model.layout, [Stream(x)], [context])[0].x)
            except _Found as stopped:
                streams.append(stopped.x)
        return streams[0], streams[1]


class _Found(Exception):
    """Ends a pass through a block once the requested input is found."""

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.x = x
