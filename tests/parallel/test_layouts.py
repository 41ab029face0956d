"""Every layout is one function: loss, every gradient, three optimizer steps and generation against one process; collectives
counted against the table."""

import itertools
from typing import Any

import pytest
import torch

from boost.config import Config
from boost.models.stored import storages
from boost.optim.adamw import build_adamw
from boost.parallel.counting import CollectiveCounter
from boost.parallel.gradients import agree, clip, reduce_gradients
from boost.plan.collectives import micro_batch_collectives, step_collectives
from tests import toy
from tests.distributed import run_distributed

FAMILIES = [
    {"family": "svd"},
    {"family": "cola"},
    {"family": "cola", "mlp_silu": False, "rank": 5, "kv_heads": 4},
]
PARALLEL = [
    {"norm": norm, "grouping": grouping} for norm, grouping in itertools.product(("online", "sync"), (True, False))
]
CELLS = list(itertools.product(FAMILIES, PARALLEL))
IDS = ["-".join(str(v) for part in cell for v in part.values()) for cell in CELLS]


def config_of(model: dict[str, Any], parallel: dict[str, Any], tp: int, dtype: str) -> Config:
    # RMSNorm's epsilon is made to matter: a norm that forgets it, or divides by the wrong width, must fail.
    return toy.toy_config(dtype, model={"norm_eps": 1e-2, **model}, parallel={"tp": tp, **parallel})


def train_steps(decoder: Any, mesh: Any, config: Config, steps: int) -> list[tuple[float, float]]:
    """(loss, gradient norm) of a few steps with clipping and two micro-batches; the last gradients stay."""
    stored = list(storages(decoder))
    optimizer = build_adamw(stored, config.optim)
    result = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = torch.zeros((), dtype=torch.double)
        for micro in range(2):
            share = decoder(*toy.toy_tokens(config, seed=10 * step + micro)) / (2 * config.train.micro_batch * 16)
            share.backward()
            loss += share.detach()
        reduce_gradients(stored, mesh)
        agreement = agree(stored, loss, False, mesh)
        result.append((agreement.loss, agreement.gradient_norm))
        clip((s.tensor for s in stored), agreement.gradient_norm, config.optim.clip)
        optimizer.step()
    return result


def compare_with_single(config: Config) -> dict[str, float]:
    """Relative errors of this process against the whole model in one process."""
    reference, alone = toy.toy_decoder(toy.single(config))
    decoder, mesh = toy.toy_decoder(config)
    bitwise = all(
        torch.equal(v, toy.weights(decoder)[k]) for k, v in toy.local_parts(decoder, toy.weights(reference)).items()
    )
    expected = train_steps(reference, alone, config, 3)
    actual = train_steps(decoder, mesh, config, 3)
    steps = max(abs(a - e) / abs(e) for pair in zip(actual, expected, strict=True) for a, e in zip(*pair, strict=True))
    return {
        "initial": 0.0 if bitwise else 1.0,
        "loss and norm": steps,
        "gradients": toy.worst_error(toy.gradients(decoder), toy.local_parts(decoder, toy.gradients(reference))),
        "weights": toy.worst_error(toy.weights(decoder), toy.local_parts(decoder, toy.weights(reference))),
    }


@pytest.mark.parametrize(("model", "parallel"), CELLS, ids=IDS)
def test_btp_is_the_single_process_function_in_float64(model: dict[str, Any], parallel: dict[str, Any]) -> None:
    for errors in run_distributed(2, compare_with_single, config_of(model, parallel, 2, "float64")):
        assert errors["initial"] == 0
        assert max(errors.values()) <= 1e-10, errors


@pytest.mark.parametrize("parallel", PARALLEL, ids=str)
def test_btp_on_four_processes(parallel: dict[str, Any]) -> None:
    config = config_of({"family": "cola", "kv_heads": 4}, parallel, 4, "float64")
    for errors in run_distributed(4, compare_with_single, config):
        assert max(errors.values()) <= 1e-10, errors


@pytest.mark.parametrize("parallel", PARALLEL, ids=str)
def test_btp_in_float32(parallel: dict[str, Any]) -> None:
    for errors in run_distributed(2, compare_with_single, config_of({"family": "cola"}, parallel, 2, "float32")):
        assert max(errors["loss and norm"], errors["gradients"]) <= 1e-5, errors


def gradient_error_in_bf16(config: Config) -> float:
    """Mean relative error of the gradients in bf16 against fp32 on one process."""
    exact = toy.single(config).model_copy(
        update={"train": config.train.model_copy(update={"compute_dtype": "float32"})}
    )
    reference, _ = toy.toy_decoder(exact)
    decoder, mesh = toy.toy_decoder(config)
    for model in (reference, decoder):
        (model(*toy.toy_tokens(config, batch=16)) / 256).backward()
    reduce_gradients(list(storages(decoder)), mesh)
    expected = toy.local_parts(decoder, toy.gradients(reference))
    errors = [((a - expected[k]).norm() / expected[k].norm()).item() for k, a in toy.gradients(decoder).items()]
    return sum(errors) / len(errors)


def test_online_norm_is_as_exact_as_sync_in_bf16() -> None:
    error = {}
    for norm in ("online", "sync"):
        config = config_of({"family": "cola", "dim": 128, "ffn_dim": 352, "rank": 32}, {"norm": norm}, 2, "bfloat16")
        error[norm] = sum(run_distributed(2, gradient_error_in_bf16, config)) / 2
    assert 0 < error["online"] <= 1.05 * error["sync"], error


def count(config: Config) -> bool:
    """Whether one micro-batch and one whole step issue exactly the collectives of the table, in order."""
    decoder, mesh = toy.toy_decoder(config)
    stored = list(storages(decoder))
    tokens = config.train.micro_batch * config.train.seq_len
    expected = micro_batch_collectives(config.model, config.parallel, tokens, config.train.compute_dtype)
    counter = CollectiveCounter()
    with counter:
        loss = torch.zeros((), dtype=torch.double)
        for _ in range(config.train.global_batch // (config.train.micro_batch * config.parallel.dp)):
            begun = len(counter.collectives)
            counter.phase = "forward"
            share = decoder(*toy.toy_tokens(config))
            counter.phase = "backward"
            share.backward()
            assert counter.collectives[begun:] == expected
            loss += share.detach()
        counter.phase = "step"
        reduce_gradients(stored, mesh)
        agree(stored, loss, False, mesh)
    assert counter.collectives == step_collectives(config)
    return True


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("parallel", PARALLEL, ids=str)
def test_collectives_are_those_of_the_table(parallel: dict[str, Any], dtype: str) -> None:
    run_distributed(2, count, config_of({"family": "cola"}, parallel, 2, dtype))


def test_collectives_with_data_parallelism() -> None:
    run_distributed(4, count, config_of({"family": "cola"}, {"dp": 2}, 2, "float32"))


def test_btp_sends_what_the_paper_says() -> None:
    """7B at TP 4, batch 4, sequence 4096, bf16: 224 MB of all-reduce payload a block and forward (the paper's Table)."""
    from boost.config import load

    config = load("boost-7b")
    table = micro_batch_collectives(config.model, config.parallel, 4 * 4096, "bfloat16", training=False)
    in_blocks = [c for c in table if c.kind == "all-reduce"]
    statistics = 2 * config.model.layers * 3 * 4 * 4 * 4096
    latents = sum(c.elements for c in in_blocks) - statistics
    assert len(in_blocks) == 4 * config.model.layers
    assert latents * 2 / config.model.layers / 2**20 == 224
    assert statistics < 0.004 * latents


def test_one_process_issues_no_collective_and_copies_no_weight() -> None:
    config = toy.toy_config("float32", model={"family": "cola"})
    decoder, mesh = toy.toy_decoder(config)
    assert decoder.layout.name == "single"
    with CollectiveCounter() as counter:
        decoder(*toy.toy_tokens(config)).backward()
        reduce_gradients(list(storages(decoder)), mesh)
    assert counter.collectives == []
    group = decoder.blocks[0].qkv
    for used, stored in ((group.down_weights(group.A.to(torch.float32), True)[0], group.A),):
        assert used.data_ptr() == stored.data_ptr()


def logits_of_prompt(config: Config) -> torch.Tensor:
    decoder, _ = toy.toy_decoder(config)
    tokens, _ = toy.toy_tokens(config)
    caches = decoder.make_caches(2, 16)
    decoder.next_logits(tokens[:, :7], caches)
    return decoder.next_logits(tokens[:, 7:8], caches)


def test_btp_generates_from_the_same_logits() -> None:
    config = config_of({"family": "cola"}, {}, 2, "float64")
    expected = logits_of_prompt(toy.single(config))
    for actual in run_distributed(2, logits_of_prompt, config):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


def documents_loss(config: Config) -> float:
    decoder, _ = toy.toy_decoder(config)
    tokens, targets = toy.toy_tokens(config)
    return decoder(tokens, targets, (torch.arange(16) // 5).expand(2, 16)).item()


def test_documents_stay_apart_under_btp() -> None:
    config = config_of({"family": "cola"}, {}, 2, "float64")
    expected = documents_loss(toy.single(config))
    assert run_distributed(2, documents_loss, config) == pytest.approx([expected, expected], rel=1e-12)
