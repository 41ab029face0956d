"""Autoregressive text generation with a key/value cache, on one process or on all processes in a mesh.

All processes in a TP group and its pipeline have the same logits and identically seeded generators, so they sample the same tokens
without communication.
"""

import hashlib
from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from boost.errors import ConfigError
from boost.format import format_bytes
from boost.parallel.pipeline import Pipeline
from boost.train.hardware import available_memory
from boost.train.model import Model
from boost.train.sampling import Sampling


def generate(
    model: Model,
    prompt: Sequence[int],
    max_tokens: int,
    sampling: Sampling,
    ends: Collection[int] = (),
    sample: int = 0,
) -> Iterator[int]:
    """Yields up to `max_tokens` new tokens after a non-empty prompt; stops after yielding one of `ends`.

    Every text has random numbers of its own: they depend only on the seed, the prompt and `sample`, the number of the text for this
    prompt. Raises ConfigError if the key/value cache does not fit into memory.
    """
    capacity = len(prompt) + max_tokens - 1  # the last token is not fed back
    require_cache_memory(model, capacity)
    # Weights gathered from replicas and tensors that stages exchange outlive a forward pass, so they need no_grad.
    mode = torch.no_grad if isinstance(model, Pipeline | FSDPModule) else torch.inference_mode
    caches, tokens = model.make_caches(1, capacity), list(prompt)
    digest = hashlib.sha256(f"{sampling.seed}:{sample}:{tokens}".encode()).digest()
    # On the CPU, so that a seed gives the same text on every device.
    stream = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    for _ in range(max_tokens):
        # Compiled blocks have static shapes, so a growing cache would recompile them for each token.
        with mode(), torch.compiler.set_stance("force_eager"):
            logits_1V = model.next_logits(torch.tensor([tokens], device=model.device), caches).cpu()
        yield (token := choose(logits_1V, sampling, stream))
        if token in ends:
            return
        tokens = [token]


def choose(logits_1V: Tensor, sampling: Sampling, stream: torch.Generator) -> int:
    """The next token, drawn from its logits [1, V]."""
    if sampling.temperature == 0:
        return int(logits_1V.argmax())
    return int(torch.multinomial(distribution(logits_1V, sampling), 1, generator=stream))


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


def require_cache_memory(model: Model, capacity: int) -> None:
    """Raises ConfigError if a key/value cache of `capacity` tokens does not fit into the available memory."""
    needed, available = model.cache_bytes(1, capacity), available_memory(model.device)
    if needed > available:
        raise ConfigError(
            f"the key/value cache of {capacity:,} tokens takes {format_bytes(needed)}, but {format_bytes(available)} of memory is "
            f"available; at most {available // model.cache_bytes(1, 1):,} tokens fit, including the prompt; reduce --max-tokens"
        )
