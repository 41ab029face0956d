"""Autoregressive text generation with a key/value cache, on one process or on all processes in a mesh.

Sequences are generated in batches: when one ends, the next takes its place (continuous batching). Prompts are packed without
padding. Every sequence has its own length and random generator, so the result is as if it were generated alone, up to rounding.

All processes in a TP group and its pipeline have the same logits and identically seeded generators, so they sample the same tokens
without communication.
"""

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from boost.errors import ConfigError
from boost.format import format_bytes
from boost.layouts.ungrouped import Ungrouped
from boost.models.attention import CacheRows, NextTokenRows, PromptRows
from boost.models.decoder import Decoder
from boost.models.group import FusedLinearGroup
from boost.parallel.pipeline import Pipeline
from boost.train.hardware import available_memory
from boost.train.model import Model
from boost.train.sampling import Sampling

PREFILL_TOKENS = 4096
"""Prompts that share a forward pass have at most this many tokens in total. A longer prompt gets a pass of its own."""


def choose(logits_BV: Tensor, sampling: Sampling, generators: Sequence[torch.Generator]) -> list[int]:
    """The next token for each sequence, drawn from logits [B, V] with the sequence's own generator."""
    if sampling.temperature == 0:
        greedy: list[int] = logits_BV.argmax(-1).tolist()
        return greedy
    rows = zip(distribution(logits_BV, sampling).split(1), generators, strict=True)
    return [int(torch.multinomial(row_1V, 1, generator=generator)) for row_1V, generator in rows]


def distribution(logits_BV: Tensor, sampling: Sampling) -> Tensor:
    """Probabilities [B, V] (fp32) after temperature, then top-k, then top-p (the smallest set of tokens with a total probability of
    at least p)."""
    logits_BV = logits_BV.float() / sampling.temperature
    if 0 < sampling.top_k < logits_BV.shape[-1]:
        smallest = logits_BV.topk(sampling.top_k).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < smallest, float("-inf"))
    probabilities_BV = logits_BV.softmax(-1)
    if sampling.top_p < 1:
        ordered, order = probabilities_BV.sort(descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered
        ordered = ordered.masked_fill(before >= sampling.top_p, 0.0)
        probabilities_BV = torch.zeros_like(ordered).scatter_(-1, order, ordered)
        probabilities_BV /= probabilities_BV.sum(-1, keepdim=True)
    return probabilities_BV


class NewToken(NamedTuple):
    """A generated token."""

    prompt: int
    """Index of the prompt."""
    sample: int
    """Index of the sample for this prompt."""
    token: int
    is_last: bool
    """Whether this token ends its sequence."""


def generate(
    model: Model, prompt: Sequence[int], max_tokens: int, sampling: Sampling, ends: Collection[int] = ()
) -> Iterator[int]:
    """Yields up to `max_tokens` new tokens after a non-empty prompt; stops after yielding one of `ends`."""
    for new in generate_batch(model, [prompt], max_tokens, sampling, ends):
        yield new.token


def generate_batch(
    model: Model,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    sampling: Sampling,
    ends: Collection[int] = (),
    *,
    samples: int = 1,
    batch: int = 1,
) -> Iterator[NewToken]:
    """Yields up to `max_tokens` new tokens for each of `samples` samples per non-empty prompt, as they are generated.

    Runs up to `batch` sequences at a time, in the order of the prompts. A sequence stops after yielding one of `ends`.
    Sample j is drawn with the seed `sampling.seed` + j, no matter how it is batched. Raises ConfigError if the batch's
    key/value cache does not fit into memory.
    """
    sequences = [
        _Sequence(number, sample, tuple(prompt), sampling.seed + sample)
        for number, prompt in enumerate(prompts)
        for sample in range(samples)
    ]
    batch = min(batch, len(sequences))
    # The last token is not fed back.
    capacity = max((len(prompt) for prompt in prompts), default=0) + max_tokens - 1
    require_cache_memory(model, batch, capacity)
    if batch and max_tokens:
        yield from _Batch(model, sampling, batch, capacity).run(sequences, max_tokens, set(ends))


def require_cache_memory(model: Model, batch: int, capacity: int) -> None:
    """Raises ConfigError if key/value caches for `batch` sequences of `capacity` tokens do not fit into the available memory."""
    needed, available = model.cache_bytes(batch, capacity), available_memory(model.device)
    if needed <= available:
        return
    fits = int(available // model.cache_bytes(1, capacity))
    if fits:
        fix = f"largest valid value of --batch: {fits}"
    else:
        fix = f"at most {available // model.cache_bytes(1, 1):,} tokens fit, including the prompt; reduce --max-tokens"
    raise ConfigError(
        f"--batch = {batch}: the key/value cache of {batch} x {capacity:,} tokens takes {format_bytes(needed)}, but "
        f"{format_bytes(available)} of memory is available; {fix}"
    )


@dataclass
class _Sequence:
    """A sequence that is being generated."""

    prompt: int
    sample: int
    tokens: tuple[int, ...]
    """Tokens in the prompt."""
    seed: int
    cached: int = 0
    """Tokens in the key/value cache."""
    new: int = 0
    """Tokens generated so far."""
    last: int = -1
    """The newest token, which is not cached yet."""


class _Batch:
    """Sequences that are generated together: sequence i is in row i of the key/value caches."""

    def __init__(self, model: Model, sampling: Sampling, size: int, capacity: int) -> None:
        self._model, self._sampling, self._size = model, sampling, size
        # Weights gathered from replicas and tensors that stages exchange outlive a forward pass, so they need no_grad.
        lasting = isinstance(model, Pipeline | FSDPModule)
        self._mode = torch.no_grad if lasting else torch.inference_mode
        self._caches = model.make_caches(size, capacity)
        self._sequences: list[_Sequence] = []
        self._generators: list[torch.Generator] = []

    def run(self, sequences: Sequence[_Sequence], max_tokens: int, ends: Collection[int]) -> Iterator[NewToken]:
        """Generates all sequences. Starts them in order, as rows become free."""
        waiting = deque(sequences)
        while waiting or self._sequences:
            first = len(self._sequences)
            while waiting and len(self._sequences) < self._size:
                sequence = waiting.popleft()
                self._sequences.append(sequence)
                # Sample on the CPU, so that a seed gives the same text on every device.
                self._generators.append(torch.Generator().manual_seed(sequence.seed))
            # Sequences that have just started get their first token now; all sequences then get their next one together.
            logits_BV = self._prefill(first) if first < len(self._sequences) else self._decode()
            started = range(first if first < len(self._sequences) else 0, len(self._sequences))
            yield from self._advance(started, logits_BV, max_tokens, ends)

    def _advance(self, rows: range, logits_BV: Tensor, max_tokens: int, ends: Collection[int]) -> Iterator[NewToken]:
        """Chooses the next token for the sequences in `rows`, and removes finished sequences."""
        sequences = [self._sequences[row] for row in rows]
        chosen = choose(logits_BV, self._sampling, [self._generators[row] for row in rows])
        for sequence, token in zip(sequences, chosen, strict=True):
            sequence.last, sequence.new = token, sequence.new + 1
        ended = [sequence.last in ends or sequence.new == max_tokens for sequence in sequences]
        for row, is_over in reversed(list(zip(rows, ended, strict=True))):
            if is_over:
                last, generator = self._sequences.pop(), self._generators.pop()
                if row < len(self._sequences):  # the last sequence moves to the free row, so that rows stay consecutive
                    for cache in self._caches:
                        cache.copy(len(self._sequences), row, last.cached)
                    self._sequences[row], self._generators[row] = last, generator
        for sequence, is_over in zip(sequences, ended, strict=True):
            yield NewToken(sequence.prompt, sequence.sample, sequence.last, is_over)

    def _prefill(self, first: int) -> Tensor:
        """Runs the model on the prompts in rows `first` and up. Returns the logits for their next tokens, on the CPU."""
        # Samples of one prompt start from the same cache.
        rows_of: dict[int, list[int]] = {}
        for row in range(first, len(self._sequences)):
            rows_of.setdefault(self._sequences[row].prompt, []).append(row)
        logits: list[Tensor] = []
        for group in self._groups([rows[0] for rows in rows_of.values()]):
            prompts = [self._sequences[row].tokens for row in group]
            packed = [token for prompt in prompts for token in prompt]
            logits += self._next_logits([packed], PromptRows(tuple(group), tuple(map(len, prompts)))).split(1)
        for row, *others in rows_of.values():
            length = len(self._sequences[row].tokens)
            for other in others:
                for cache in self._caches:
                    cache.copy(row, other, length)
            for filled in (row, *others):
                self._sequences[filled].cached = length
        pairs = zip(rows_of.values(), logits, strict=True)
        return torch.cat([logits_1V for rows, logits_1V in pairs for _ in rows])

    def _groups(self, rows: Sequence[int]) -> Iterator[list[int]]:
        """Consecutive rows whose prompts share a forward pass."""
        group: list[int] = []
        tokens = 0
        for row in rows:
            length = len(self._sequences[row].tokens)
            if group and tokens + length > PREFILL_TOKENS:
                yield group
                group, tokens = [], 0
            group.append(row)
            tokens += length
        yield group

    def _decode(self) -> Tensor:
        """Runs the model on the newest token of every sequence. Returns the logits for the next tokens, on the CPU."""
        lengths = [sequence.cached for sequence in self._sequences]
        dtype = self._caches[0].keys.dtype if self._caches else torch.float32
        rows = NextTokenRows.of(lengths, self._model.device, dtype)
        logits_BV = self._next_logits([[sequence.last] for sequence in self._sequences], rows)
        for sequence in self._sequences:
            sequence.cached += 1
        return logits_BV

    def _next_logits(self, tokens: list[list[int]], rows: CacheRows) -> Tensor:
        # Compiled blocks have static shapes, so a growing cache would recompile them for each token.
        with self._mode(), torch.compiler.set_stance("force_eager"):
            tokens_BS = torch.tensor(tokens, device=self._model.device)
            return self._model.next_logits(tokens_BS, self._caches, rows=rows).cpu()


# Weights on one process, in the fastest format for generation.


@torch.no_grad()
def prepare_inference(decoder: Decoder, batch: int) -> None:
    """Converts a model's weights on one process to the fastest format for generating `batch` sequences.

    Afterwards, the weights cannot be trained or saved. Matrices are cast to the activations' dtype, as every forward pass
    would otherwise do; vectors (gains, biases) keep their dtype, because they are multiplied in a wider one. On a CPU,
    linear weights are packed or, for single tokens in fp32, stored in column-major order if this is faster.
    """
    dtype = decoder.compute_dtype
    for parameter in decoder.parameters():
        if parameter.ndim > 1:
            parameter.data = parameter.data.to(dtype)
    if not PackedWeight.is_supported(decoder.device, dtype):
        return
    groups = [
        group for group in decoder.modules() if isinstance(group, FusedLinearGroup) and not isinstance(group, Ungrouped)
    ]
    if decoder.head_name == "embed":  # lookups need rows
        decoder.head_name = "head"
        decoder.register_parameter("head", nn.Parameter(decoder.embed.detach()))
    for module, name in [*((group, name) for group in groups for name in group.slices), (decoder, "head")]:
        weight = module.get_parameter(name)
        if weight.ndim == 1:  # a bias
            continue
        if batch > 1 or dtype != torch.float32:
            del module._parameters[name]
            setattr(module, name, PackedWeight(weight))
        elif name == "head" or name.startswith("B"):
            # In column-major order, a weight's product with one token adds O numbers at a time. In row-major order with short
            # rows, such as the r numbers in a row of B, it reaches only half of a CPU's memory bandwidth in fp32.
            weight.data = weight.data.t().contiguous().t()


class PackedWeight:
    """A copy of a weight [O, I] in the order in which oneDNN reads it on a CPU. `F.linear` accepts it as a tensor.

    torch's own products use weights in row-major order, which takes 1.5 to 1.9 times as long for 16 tokens (in bf16, also for one).
    """

    def __init__(self, weight: Tensor) -> None:
        self.shape, self.dtype = weight.shape, weight.dtype
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), None)

    @staticmethod
    def is_supported(device: torch.device, dtype: torch.dtype) -> bool:
        """Whether this build of torch and this machine can multiply packed weights."""
        if device.type != "cpu" or not torch.backends.mkldnn.is_available():
            return False
        if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False
        return dtype in (torch.float32, torch.bfloat16) and hasattr(torch.ops.mkldnn, "_linear_pointwise")

    def to(self, dtype: torch.dtype) -> "PackedWeight":
        """Returns itself, because a packed weight already has the dtype of the activations."""
        assert dtype == self.dtype, "a packed weight has the dtype of the activations"
        return self

    @classmethod
    def __torch_function__(
        cls, function: object, types: Sequence[type], args: Sequence[Any], kwargs: object = None
    ) -> Tensor:
        x, weight, *_ = args
        assert function is F.linear, "a packed weight can only be multiplied"
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight._packed, None, "none", [], "")
        return y
