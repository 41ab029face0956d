"""Autoregressive text generation with a key/value cache, on one process or on all processes of a mesh.

All processes of a TP group and its pipeline have the same logits and the same seeded generator, so they sample the same token
without communication.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from boost.errors import ConfigError
from boost.train.model import Model

MIN_TEMPERATURE = 1e-4
"""At lower temperatures logits overflow, and sampling is greedy anyway."""


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters. temperature 0 is greedy; top_k 0 and top_p 1 are off."""

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def check(self) -> None:
        """Raises ConfigError naming the field, its value and the nearest valid one."""
        if not (self.temperature == 0 or MIN_TEMPERATURE <= self.temperature < float("inf")):
            raise ConfigError(
                f"--temperature = {self.temperature} must be 0 (greedy) or at least {MIN_TEMPERATURE}; the usual value is 0.8"
            )
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"--seed = {self.seed} must be from 0 to {2**63 - 1}; the usual value is 0")
        if self.top_k < 0:
            raise ConfigError(f"--top-k = {self.top_k} must be 0 (off) or more; nearest valid value: 0")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"--top-p = {self.top_p} must be in (0, 1]; nearest valid value: 1.0 (off)")


def choose(logits_BV: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """The next token of each sequence, [B] int64, from logits [B, V]."""
    if sampling.temperature == 0:
        return logits_BV.argmax(-1)
    return torch.multinomial(distribution(logits_BV, sampling), 1, generator=generator).squeeze(-1)


def distribution(logits_BV: Tensor, sampling: Sampling) -> Tensor:
    """Probabilities [B, V] (fp32) after temperature, then top-k, then top-p (the smallest set of tokens with total probability of
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


@torch.no_grad()
def generate(
    model: Model, prompt: list[int], max_tokens: int, sampling: Sampling, eos: int | None = None
) -> Iterator[int]:
    """Yields up to `max_tokens` new tokens after a non-empty prompt; stops after yielding `eos`."""
    device = model.device
    # Sample on the CPU, so that a seed gives the same text on every device.
    generator = torch.Generator().manual_seed(sampling.seed)
    caches = model.make_caches(1, len(prompt) + max_tokens)
    tokens_BS = torch.tensor([prompt], device=device)
    for _ in range(max_tokens):
        # Compiled blocks have static shapes: a growing cache would recompile them for each token.
        with torch.compiler.set_stance("force_eager"):
            logits_BV = model.next_logits(tokens_BS, caches)
        chosen = choose(logits_BV.cpu(), sampling, generator)
        yield int(chosen)
        if int(chosen) == eos:
            return
        tokens_BS = chosen.to(device).view(1, 1)
