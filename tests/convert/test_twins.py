"""The factorized copy against the dense model on the same text: moments of its inputs, by hand."""

import torch
from torch import Tensor

from boost.config.load import from_tree
from boost.convert.calibration import Batch
from boost.convert.compress import new_decoder, slices_by_name
from boost.convert.spectrum import low_rank_table
from boost.convert.twins import Twins
from boost.models.decoder import Decoder
from boost.models.init import initialize
from tests import toy


def decoders() -> tuple[Decoder, Decoder]:
    """A dense model, and a low-rank one with the same embedding and norms but other blocks."""
    model = toy.toy_config(model={"family": "dense", "init_std": 0.3}).model
    dense = new_decoder(model, torch.double, toy.CPU)
    low = new_decoder(from_tree({"model": low_rank_table(model, 8, {})}).model, torch.double, toy.CPU)
    initialize(dense, 0)
    initialize(low, 1)
    with torch.no_grad():
        theirs = slices_by_name(low)
        for name, tensor in slices_by_name(dense).items():
            if name in theirs:
                theirs[name].copy_(tensor)
    return dense, low


def batches() -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(0, 64, (rows, 8), generator=generator) for rows in (2, 3)]
    return [Batch(each, each) for each in tokens]


def inputs(twins: Twins, index: int) -> tuple[Tensor, Tensor]:
    x, low = zip(*twins._inputs(index), strict=True)
    return torch.cat(x), torch.cat(low)


def test_moments_are_those_of_weighted_tokens_and_halves_add_up() -> None:
    twins = Twins(*decoders(), batches())
    twins.advance()  # in the first block both have the same inputs
    s = [torch.rand(each.tokens.numel(), generator=torch.Generator().manual_seed(3)) for each in batches()]
    halves = twins.moments(1, s)
    x, low = inputs(twins, 1)
    assert (x - low).abs().max() > 0.01
    weight = torch.cat(s).double()[:, None]
    whole = halves[0] + halves[1]
    torch.testing.assert_close(whole.low, low.T @ (weight * low) / 40, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(whole.cross, x.T @ (weight * low) / 40, rtol=1e-6, atol=1e-9)
    first = torch.tensor([*range(8), *range(16, 28)])  # half of the tokens of either batch
    torch.testing.assert_close(halves[0].low, low[first].T @ (weight * low)[first] / 40, rtol=1e-6, atol=1e-9)
