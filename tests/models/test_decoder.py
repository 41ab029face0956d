"""The decoder against a reference written by hand, head by head and token by token, that shares no code with it."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests import toy


def reference_logits(
    w: dict[str, Tensor], config: Any, tokens: list[int], documents: list[int] | None = None
) -> Tensor:
    """Logits [S, V] of one sequence, fp64, from weights by mathematical name."""
    m = config.model
    act = torch.nn.functional.silu if m.latent_act == "silu" else (lambda u: u)

    def linear(name: str, x: Tensor) -> Tensor:
        if m.family == "dense":
            return w[f"{name}.W"] @ x
        return w[f"{name}.B"] @ act(w[f"{name}.A"] @ x)

    def norm(x: Tensor, gamma: Tensor) -> Tensor:
        return x / (x.square().mean() + m.norm_eps).sqrt() * gamma

    def rope(x: Tensor, position: int) -> Tensor:
        half = len(x) // 2
        angle = position * m.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
        a, b = x[:half], x[half:]
        return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()))

    width, share = m.dim // m.heads, m.heads // m.kv_heads
    stream = [w["embed"][t] for t in tokens]
    for layer in range(m.layers):
        name = f"layers.{layer}"
        normed = [norm(x, w[f"{name}.attn_norm"]) for x in stream]
        q, k, v = ([linear(f"{name}.attn.{p}", x).view(-1, width) for x in normed] for p in "qkv")
        for s in range(len(stream)):
            heads = []
            for h in range(m.heads):
                seen = [t for t in range(s + 1) if documents is None or documents[t] == documents[s]]
                query = rope(q[s][h], s)
                scores = torch.stack([query @ rope(k[t][h // share], t) for t in seen]) / width**0.5
                heads.append(sum(p * v[t][h // share] for p, t in zip(scores.softmax(0), seen, strict=True)))
            stream[s] = stream[s] + linear(f"{name}.attn.o", torch.cat(heads))
        for s, x in enumerate(stream):
            z = norm(x, w[f"{name}.mlp_norm"])
            gate, up = linear(f"{name}.mlp.gate", z), linear(f"{name}.mlp.up", z)
            gate = gate * torch.sigmoid(gate) if m.mlp_silu else gate
            stream[s] = x + linear(f"{name}.mlp.down", gate * up)
    return torch.stack([w["head"] @ norm(x, w["final_norm"]) for x in stream])


CASES = [
    {"family": "dense"},
    {"family": "dense", "kv_heads": 1},
    {"family": "svd"},
    {"family": "cola"},
    {"family": "cola", "mlp_silu": False, "rank": 7},
    {"family": "cola", "latent_act": "none"},
]


@pytest.mark.parametrize("grouping", [True, False])
@pytest.mark.parametrize("model", CASES, ids=str)
def test_logits_and_loss_are_those_of_the_reference(model: dict[str, Any], grouping: bool) -> None:
    config = toy.toy_config(model={"norm_eps": 1e-3, **model}, parallel={"grouping": grouping})
    decoder, _ = toy.toy_decoder(config)
    with torch.no_grad():  # norms start at one, where a forgotten gamma would not show
        for name, value in toy.weights(decoder).items():
            if name.endswith("norm"):
                value.copy_(torch.linspace(0.5, 1.5, value.numel()))
    tokens, targets = toy.toy_tokens(config)
    expected = [reference_logits(toy.weights(decoder), config, row.tolist()) for row in tokens]
    losses = [torch.nn.functional.cross_entropy(e, t, reduction="sum") for e, t in zip(expected, targets, strict=True)]
    torch.testing.assert_close(decoder(tokens, targets), sum(losses), rtol=1e-12, atol=0)
    last = decoder.next_logits(tokens, decoder.make_caches(2, 16))
    torch.testing.assert_close(last, torch.stack([e[-1] for e in expected]), rtol=1e-10, atol=1e-12)


def test_documents_do_not_attend_to_each_other_when_asked() -> None:
    config = toy.toy_config(model={"family": "cola"})
    decoder, _ = toy.toy_decoder(config)
    tokens, targets = toy.toy_tokens(config, batch=1)
    documents = [0] * 3 + [1] * 6 + [2] * 7
    expected = reference_logits(toy.weights(decoder), config, tokens[0].tolist(), documents)
    loss = torch.nn.functional.cross_entropy(expected, targets[0], reduction="sum")
    torch.testing.assert_close(decoder(tokens, targets, torch.tensor([documents])), loss, rtol=1e-12, atol=0)
    assert abs(decoder(tokens, targets) - loss) > 1e-3, "without ids all tokens of the sequence are seen"


def test_targets_of_minus_100_do_not_count() -> None:
    config = toy.toy_config()
    decoder, _ = toy.toy_decoder(config)
    tokens, targets = toy.toy_tokens(config)
    parts = []
    for keep in (slice(0, 5), slice(5, 16)):
        masked = torch.full_like(targets, -100)
        masked[:, keep] = targets[:, keep]
        parts.append(decoder(tokens, masked))
    torch.testing.assert_close(sum(parts), decoder(tokens, targets), rtol=1e-12, atol=0)


@pytest.mark.parametrize("model", CASES, ids=str)
def test_cache_gives_the_logits_of_the_whole_sequence(model: dict[str, Any]) -> None:
    config = toy.toy_config(model=model)
    decoder, _ = toy.toy_decoder(config)
    tokens, _ = toy.toy_tokens(config)
    caches = decoder.make_caches(2, 16)
    decoder.next_logits(tokens[:, :5], caches)
    for end in range(6, 17):
        step = decoder.next_logits(tokens[:, end - 1 : end], caches)
        whole = decoder.next_logits(tokens[:, :end], decoder.make_caches(2, end))
        torch.testing.assert_close(step, whole, rtol=1e-10, atol=1e-12)


def test_gradients_are_those_of_finite_differences() -> None:
    config = toy.toy_config(model={"family": "cola"}, train={"seq_len": 5})
    decoder, _ = toy.toy_decoder(config)
    tokens, targets = toy.toy_tokens(config)
    decoder(tokens, targets).backward()
    grads, values = toy.gradients(decoder), toy.weights(decoder)
    for name, value in values.items():
        at = int(grads[name].abs().argmax())
        index = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), value.shape))
        differences = []
        for sign in (1, -1):
            value[index] += sign * 1e-6
            differences.append(decoder(tokens, targets).item())
            value[index] -= sign * 1e-6
        assert (differences[0] - differences[1]) / 2e-6 == pytest.approx(grads[name][index].item(), rel=1e-5), name
