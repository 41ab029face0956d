"""A table that is both embedding and head: one process against an ordinary module with two uses of one weight, the copies of two
stages, generation, and memory. Layouts, meshes and shardings are in test_options.py."""

import pytest
import torch

from boost.config import Config
from boost.config.architecture import parameter_count
from boost.models.fused import fused_params
from boost.parallel.gradients import GradientReducer
from boost.plan.memory import memory, peak
from boost.train.generate import generate
from boost.train.sampling import Sampling
from tests import toy
from tests.distributed import run_distributed
from tests.fake_memory import measure
from tests.matrices import Row, ids, memory_config

pytestmark = pytest.mark.slow


def config_of(parallel: Row, dtype: str = "float64") -> Config:
    model = {"kv_heads": 4, "layers": parallel.get("pp", 1), "tied": True}
    train = {"micro_batch": 1, "seq_len": 16, "global_batch": max(2, parallel.get("pp", 1))}
    return toy.toy_config(dtype, model=model, parallel=parallel, train=train)


def test_one_table_has_the_sum_of_both_gradients() -> None:
    """Against the same model with two tables, whose weights are equal."""
    config = config_of({})
    decoder, _ = toy.toy_decoder(config)
    apart, _ = toy.toy_decoder(config.changed(model={"tied": False}))
    apart.head.data.copy_(apart.embed.data)
    assert parameter_count(apart.model) - parameter_count(decoder.model) == decoder.embed.numel()
    batch = toy.toy_tokens(config)
    losses = [model(*batch) for model in (decoder, apart)]
    for loss in losses:
        loss.backward()
    assert losses[0] == losses[1]
    ours, theirs = toy.gradients(decoder), toy.gradients(apart)
    torch.testing.assert_close(ours["embed"], theirs["embed"] + theirs["head"], rtol=1e-14, atol=0)
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items() if name != "embed")


def copies_of_the_table(config: Config) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The table and its gradient in fp32, if this stage has them, after a step."""
    model, mesh = toy.toy_model(config)
    params = list(fused_params(model))
    reducer = GradientReducer(params, mesh)
    reducer.begin(2)
    model.prepare(config.parallel, 2, (1, config.train.seq_len))
    model.backward(*toy.toy_tokens(config, batch=2), None, 1)
    reducer.finish()
    table = [fused for fused in params if fused.slices[0].parameter.role == "tied"]
    return (table[0].tensor.detach(), table[0].tensor.grad) if table else None  # type: ignore[return-value]


def test_the_copies_of_both_stages_stay_equal_to_the_last_bit() -> None:
    first_, middle, last = run_distributed(3, copies_of_the_table, config_of({"pp": 3}, "float32"))
    assert middle is None
    assert torch.equal(first_[0], last[0]) and torch.equal(first_[1], last[1]) and first_[1].abs().sum() > 0


def greedy(config: Config) -> list[int]:
    decoder, _ = toy.toy_decoder(config)
    return list(generate(decoder, [1, 2, 3], 8, Sampling(0.0)))


@pytest.mark.parametrize("layout", ["btp", "btp-sp"])
def test_generation(layout: str) -> None:
    config = config_of({"layout": layout, "tp": 2}, "float32")
    assert run_distributed(2, greedy, config) == [greedy(toy.single(config))] * 2


CELLS: list[tuple[str, Row]] = [
    ("cola", {}),
    ("cola", {"layout": "btp"}),
    ("dense", {"layout": "megatron"}),
    ("cola", {"layout": "btp-sp"}),
]


@pytest.mark.parametrize(("family", "parallel"), CELLS, ids=ids(CELLS))
@pytest.mark.parametrize(("vocabulary", "length", "batch"), [(8192, 4, 2), (8192, 4, 4), (2048, 64, 4)])
def test_memory_is_predicted(family: str, parallel: Row, vocabulary: int, length: int, batch: int) -> None:
    """Also where the head's gradient waits for the embedding's. In the dtype of the copies: torch adds the two in place, but not
    while a dispatch mode measures."""
    config = memory_config(family, parallel, "none", "bfloat16", layers=2, vocab_size=vocabulary, tied=True)
    config = config.changed(train={"seq_len": length, "global_batch": batch, "working_copies": True})
    measured = measure(config)
    assert abs(peak(config).total / sum(measured.peak.values()) - 1) < 0.01
    saved = memory(config).saved
    assert measured.activations == {name: size for name, size in saved.items() if size}
