"""Held-out loss: every token once, for any batch size, number of replicas and sharding."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from boost.data.mixture import Corpus, MixedSplit
from boost.data.store import TokenStore
from boost.train.evaluate import Evaluation, evaluate
from tests import toy
from tests.distributed import run_distributed


def make_config(**parallel: Any) -> Any:
    train = {"micro_batch": 1, "global_batch": 4}
    return toy.toy_config("float64", model={"vocab_size": 300}, parallel=parallel, train=train)


def evaluation(store: Path, config: Any, batch: int, max_tokens: int | None = None) -> Evaluation:
    model, mesh = toy.toy_model(config)
    return evaluate(model, TokenStore.open(store).split("heldout"), 32, batch, False, mesh, max_tokens)


def test_it_is_the_mean_over_every_token(store: Path) -> None:
    config = make_config()
    split = TokenStore.open(store).split("heldout")
    decoder, _ = toy.toy_decoder(config)
    nats = 0.0
    for start in range(0, split.n_tokens - 1, 32):
        window = torch.from_numpy(split.window(start, min(33, split.n_tokens - start)))
        nats += decoder(window[None, :-1], window[None, 1:]).item()
    result = evaluation(store, config, batch=5)
    assert result.tokens == split.n_tokens - 1
    assert result.loss == pytest.approx(nats / result.tokens, rel=1e-12)
    assert result.perplexity == pytest.approx(math.exp(result.loss))
    assert result.bits_per_byte == pytest.approx(result.loss / math.log(2) * split.n_tokens / split.n_bytes)
    assert evaluation(store, config, batch=2, max_tokens=320).tokens == 320


@pytest.mark.slow
def test_neither_batch_nor_mesh_matters(store: Path) -> None:
    expected = evaluation(store, make_config(), batch=1)
    assert evaluation(store, make_config(), batch=64).loss == pytest.approx(expected.loss, rel=1e-12)
    meshes: list[dict[str, Any]] = [
        {"tp": 2, "dp": 2},
        {"pp": 2, "dp": 2},
        {"tp": 2, "dp": 2, "shard": "full"},
        {"cp": 2, "pp": 2},
        {"cp": 2, "dp": 2, "shard": "full"},
    ]
    for parallel in meshes:
        for result in run_distributed(4, evaluation, store, make_config(**parallel), 30):
            assert result.tokens == expected.tokens
            assert result.loss == pytest.approx(expected.loss, rel=1e-10)


def test_a_mixture_is_the_weighted_mean_of_its_stores(store: Path, mixture: dict[str, float]) -> None:
    model, mesh = toy.toy_model(make_config())
    corpus = Corpus.open(mixture)
    split = corpus.split("heldout")
    assert isinstance(split, MixedSplit)
    result = evaluate(model, split, 32, 8, False, mesh)
    parts = {
        name: evaluation(Path(path), make_config(), 8) for name, path in zip(("store", "other"), mixture, strict=True)
    }
    assert result.sources == parts
    assert result.loss == pytest.approx(0.7 * parts["store"].loss + 0.3 * parts["other"].loss, rel=1e-14)
    assert result.tokens == sum(part.tokens for part in parts.values())
    bytes_per_token = sum(
        float(w) * part.n_bytes / part.n_tokens for w, part in zip(split.weights, split.parts, strict=True)
    )
    assert result.bits_per_byte == pytest.approx(result.loss / math.log(2) / bytes_per_token)
    some = evaluate(model, split, 32, 8, False, mesh, 320)
    assert {name: each.tokens for name, each in some.sources.items()} == {"store": 224, "other": 96}
