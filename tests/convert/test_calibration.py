"""Second moments over calibration text, of a dense model and of its factorized copy, against what is computed by hand."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from boost.config.load import from_tree
from boost.convert.calibration import ObservedLayout, Twins, _sampled, add_moment, collect, moment_bytes, read_batches
from boost.convert.compress import new_decoder, slices_by_name
from boost.convert.spectrum import low_rank_table
from boost.data.store import TokenStore
from boost.models.decoder import Decoder
from boost.models.fused import fused_params
from boost.models.init import initialize
from tests import toy


@pytest.fixture
def decoder() -> Decoder:
    model = toy.toy_config(model={"family": "dense", "init_std": 0.3}).model
    decoder = new_decoder(model, torch.double, toy.CPU)
    initialize(decoder, 0)
    return decoder


def batch(rows: int, length: int) -> Tensor:
    return torch.randint(0, 64, (rows, length), generator=torch.Generator().manual_seed(rows))


def test_inputs_are_those_of_the_linears(decoder: Decoder) -> None:
    batches = [batch(2, 8), batch(3, 8)]
    weighted = collect(decoder, batches)
    s = torch.cat(weighted["layers.0.qkv"].importance)
    x = torch.cat([decoder.embed[each.reshape(-1)] for each in batches]).detach()
    x = x * (x.square().mean(-1, keepdim=True) + decoder.model.norm_eps).rsqrt()
    x = x * slices_by_name(decoder)["layers.0.attn_norm"]
    assert [len(s_T) for s_T in weighted["layers.0.qkv"].importance] == [16, 24] and float(s.mean()) == pytest.approx(1)
    assert float(s.std()) > 0.1
    torch.testing.assert_close(weighted["layers.0.qkv"].inputs, x.T @ (x * s[:, None]) / len(x), rtol=1e-6, atol=1e-6)
    assert weighted.keys() == {f"layers.{n}.{g}" for n in range(2) for g in ("qkv", "o", "gate_up", "down")}
    assert all(p.grad is None and p.requires_grad for p in decoder.parameters())


def test_gradients_are_those_of_targets_drawn_from_the_model(decoder: Decoder) -> None:
    """Of a single token, dW = g x^T, so g g^T = dW dW^T / |x|^2."""
    one = batch(1, 1)
    moments = collect(decoder, [one], seed=7)
    targets = _sampled(decoder, one, torch.Generator().manual_seed(7))
    decoder(one, targets).backward()
    for name, group in (("attn.v", "qkv"), ("attn.o", "o"), ("mlp.up", "gate_up"), ("mlp.down", "down")):
        found = moments[f"layers.1.{group}"]
        fused = next(f for f in fused_params(decoder) for s in f.slices if s.parameter.name == f"layers.1.{name}.W")
        view = next(s for s in fused.slices if s.parameter.name == f"layers.1.{name}.W")
        assert fused.parameter.grad is not None
        dw = view.view(fused.parameter.grad)
        torch.testing.assert_close(found.outputs[name], dw @ dw.T / found.inputs.trace())


def test_importance_is_the_squared_gradient_of_all_slots(decoder: Decoder) -> None:
    """Of a single token, |g|^2 = |dW|^2 / |x|^2."""
    ones = [batch(1, 1), batch(2, 1)[1:]]
    moments, generator, squares = collect(decoder, ones, seed=7), torch.Generator().manual_seed(7), []
    for one in ones:
        targets = _sampled(decoder, one, generator)
        decoder(one, targets).backward()
        dw = torch.cat([
            s.view(f.parameter.grad).reshape(-1)
            for f in fused_params(decoder)
            for s in f.slices
            if s.parameter.name in [f"layers.1.mlp.{name}.W" for name in ("gate", "up")] and f.parameter.grad is not None
        ])  # fmt: skip
        # With a single token its importance is 1, whatever its gradient.
        squares.append(float(dw.square().sum()) / float(collect(decoder, [one])["layers.1.gate_up"].inputs.trace()))
        decoder.zero_grad()
    found = [float(each) for each in moments["layers.1.gate_up"].importance]
    assert found == pytest.approx([each / (sum(squares) / 2) for each in squares])


def test_batches_hold_only_tokens_of_the_store(store: Path) -> None:
    """33 windows are two forward passes of 32; the whole split ends in a shorter window."""
    opened = TokenStore.open(store)
    train = opened.split("train")
    some = read_batches(opened, 33 * 128, 128, toy.CPU)
    assert [tuple(tokens_BS.shape) for tokens_BS in some] == [(32, 128), (1, 128)]
    whole = torch.cat([tokens_BS.reshape(-1) for tokens_BS in read_batches(opened, 2 * train.n_tokens, 128, toy.CPU)])
    n_inputs = train.n_tokens - 1  # the last token is only a target
    assert n_inputs % 128 and whole.tolist() == train.window(0, n_inputs).tolist()


def test_a_model_without_gradients_has_tokens_of_equal_importance(decoder: Decoder) -> None:
    with torch.no_grad():
        slices_by_name(decoder)["layers.1.mlp.down.W"].zero_()
    found = collect(decoder, [batch(2, 8)])["layers.1.gate_up"]
    assert float(found.outputs["mlp.up"].abs().max()) == 0
    assert found.importance[0].tolist() == [1.0] * 16 and bool(found.inputs.diagonal().gt(0).all())


def test_targets_follow_the_predictions(decoder: Decoder) -> None:
    tokens = torch.full((400, 1), 3)
    drawn = _sampled(decoder, tokens, torch.Generator().manual_seed(0)).reshape(-1)
    expected = decoder.logits_of(tokens[:1], torch.tensor([0])).softmax(-1)[0]
    frequencies = torch.bincount(drawn, minlength=64) / 400
    assert (frequencies - expected).abs().max() < 0.1


def test_sums_over_batches_are_double() -> None:
    into = torch.zeros(1, 1, dtype=torch.double)
    for value in (1e4, 1e-1):
        add_moment(into, torch.full((1, 1), value))
    assert float(into) == pytest.approx(1e8 + 1e-2, rel=1e-12, abs=0)


def test_memory_of_the_moments(decoder: Decoder) -> None:
    found = collect(decoder, [batch(1, 4)])
    held = sum(m.nbytes for each in found.values() for m in (each.inputs, *each.outputs.values()))
    assert moment_bytes(decoder.model) == held
    assert isinstance(decoder.layout, ObservedLayout)


def low_rank(dense: Decoder) -> Decoder:
    """A low-rank model with the same embedding and norms but other blocks."""
    low = new_decoder(from_tree({"model": low_rank_table(dense.model, 8, {})}).model, torch.double, toy.CPU)
    initialize(low, 1)
    with torch.no_grad():
        theirs = slices_by_name(low)
        for name, tensor in slices_by_name(dense).items():
            if name in theirs:
                theirs[name].copy_(tensor)
    return low


def test_moments_are_those_of_weighted_tokens_and_halves_add_up(decoder: Decoder) -> None:
    batches = [batch(2, 8), batch(3, 8)]
    twins = Twins(decoder, low_rank(decoder), batches)
    twins.advance()  # in the first block both have the same inputs
    s = [torch.rand(one.numel(), generator=torch.Generator().manual_seed(3)) for one in batches]
    halves = twins.moments(1, s)
    x, low = (torch.cat(parts) for parts in zip(*twins._inputs(1), strict=True))
    assert (x - low).abs().max() > 0.01
    weight = torch.cat(s).double()[:, None]
    whole = halves[0] + halves[1]
    torch.testing.assert_close(whole.low, low.T @ (weight * low) / 40, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(whole.cross, x.T @ (weight * low) / 40, rtol=1e-6, atol=1e-9)
    first = torch.tensor([*range(8), *range(16, 28)])  # half of the tokens of either batch
    torch.testing.assert_close(halves[0].low, low[first].T @ (weight * low)[first] / 40, rtol=1e-6, atol=1e-9)
