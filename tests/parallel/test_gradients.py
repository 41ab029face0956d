"""Gradient sums: bucket by bucket in the order of arrival, without a second copy, even after an aborted step."""

import functools
import gc
import weakref
from collections import Counter
from typing import Any

import pytest
import torch

from boost.config import Config
from boost.errors import ConfigError
from boost.models.fused import fused_params
from boost.parallel import gradients
from boost.parallel.gradients import GradientReducer
from boost.plan.collectives import step_collectives
from tests import toy
from tests.distributed import run_distributed
from tests.trained import Trained, relative_errors, small_buckets

CONFIG = toy.toy_config(model={"family": "cola"}, parallel={"layout": "btp-sp", "tp": 2, "dp": 2})


def in_small_buckets(test: Any, config: Config) -> Any:
    with small_buckets():
        return test(config)


def backward(config: Config, decoder: Any, seed: int) -> None:
    decoder(*toy.toy_tokens(config, seed=seed)).backward()


def order_of_arrival(config: Config) -> tuple[list[str], list[str]]:
    """Name of the first parameter of each stored tensor, in order of gradient arrival and in bucket order."""
    decoder, mesh = toy.toy_decoder(config)
    params = list(fused_params(decoder))
    names = {id(s.tensor): s.slices[0].parameter.name for s in params}
    arrived: list[str] = []
    for s in params:
        s.tensor.register_post_accumulate_grad_hook(lambda tensor: arrived.append(names[id(tensor)]))
    backward(config, decoder, 1)
    reducer = GradientReducer(params, mesh)
    held = [names[id(p)] for queue in reducer.queues for bucket in queue.buckets for p in bucket.parameters]
    return arrived, held


@pytest.mark.slow
def test_buckets_are_filled_from_the_head_to_the_embedding() -> None:
    def places(names: list[str]) -> list[str]:
        """Blocks, embedding and head in order; the order within a block does not matter."""
        found = [name.rpartition(".")[0].partition(".attn")[0].partition(".mlp")[0] or name for name in names]
        return list(dict.fromkeys(found))

    for arrived, held in run_distributed(4, in_small_buckets, order_of_arrival, CONFIG):
        assert places(arrived) == ["head", "final_norm", "layers.1", "layers.0", "embed"]
        assert places(held) == ["final_norm", "layers.1", "layers.0", "head", "embed"], (
            "partial ones, then complete ones"
        )


def gradients_are_views(config: Config) -> bool:
    decoder, mesh = toy.toy_decoder(config)
    reducer = GradientReducer(list(fused_params(decoder)), mesh)
    reducer.begin()
    backward(config, decoder, 1)
    reducer.finish()
    return all(
        p.grad.untyped_storage().data_ptr() == bucket.parameters[0].grad.untyped_storage().data_ptr()
        for queue in reducer.queues
        for bucket in queue.buckets
        for p in bucket.parameters
    )


def test_a_bucket_replaces_its_gradients() -> None:
    assert all(run_distributed(4, in_small_buckets, gradients_are_views, CONFIG))


def error_after_an_aborted_step(config: Config) -> float:
    """A backward pass that fails after some buckets have been sent, then a normal step."""
    results = []
    for aborted in (False, True):
        decoder, mesh = toy.toy_decoder(config)
        reducer = GradientReducer(list(fused_params(decoder)), mesh)
        if aborted:
            first = next(decoder.blocks[0].parameters())
            handle = first.register_hook(functools.partial(fail_after_launching, reducer))
            reducer.begin()
            with pytest.raises(ZeroDivisionError):
                backward(config, decoder, 9)
            handle.remove()
        reducer.begin(micro_batches=2)
        backward(config, decoder, 1)
        backward(config, decoder, 2)
        reducer.finish()
        results.append(toy.gradients(decoder))
    return toy.worst_error(results[1], results[0])


def fail_after_launching(reducer: GradientReducer, *_: Any) -> None:
    assert any(queue.next_bucket for queue in reducer.queues)
    fail()


def fail(*_: Any) -> None:
    raise ZeroDivisionError


def test_an_aborted_step_leaves_nothing_behind() -> None:
    assert run_distributed(4, in_small_buckets, error_after_an_aborted_step, CONFIG) == [0.0] * 4


REDUCED = [
    {"layout": "btp-sp", "tp": 2},
    {"layout": "btp-sp", "tp": 2, "dp": 2},
    {"layout": "btp", "dp": 2},
    {"layout": "btp", "dp": 2, "shard": "full"},
]


def compare_with_one_process(config: Config) -> dict[str, float]:
    actual = Trained(config, 0)
    sent, table = (Counter(c.on_the_wire for c in side) for side in (actual.collectives(), step_collectives(config)))
    return {"table": 0.0 if sent == table else 1.0, **relative_errors(actual, 1)}


@pytest.mark.parametrize("parallel", REDUCED, ids=str)
@pytest.mark.slow
def test_sums_in_bf16_send_half_of_the_bytes_and_are_off_by_their_rounding(parallel: dict[str, Any]) -> None:
    train = {"reduce_dtype": "bfloat16", "global_batch": 4, "micro_batch": 2}
    config = toy.toy_config("float32", model={"family": "cola"}, parallel=parallel, train=train)
    for errors in run_distributed(config.parallel.world_size, compare_with_one_process, config):
        assert errors["initial"] == errors["table"] == 0
        assert 2**-12 < errors["first gradients"] < 2**-7, errors
        assert errors["loss and norm"] < 1e-3, errors


def test_sums_in_bf16_do_not_add_up_micro_batches() -> None:
    """FSDP accumulates in the reduction dtype if it does not reduce after each micro-batch."""
    for parallel in ({"shard": "optimizer"}, {"shard": "full", "pp": 2}):
        with pytest.raises(ConfigError, match="accumulate gradients in bf16 too; set train.reduce_dtype"):
            toy.toy_config(parallel={"layout": "btp", "dp": 2, **parallel}, train={"reduce_dtype": "bfloat16"})


def parameters_alive(config: Config) -> int:
    decoder, mesh = toy.toy_decoder(config)
    reducer = GradientReducer(list(fused_params(decoder)), mesh)
    alive = [weakref.ref(parameter) for parameter in decoder.parameters()]
    del decoder, reducer
    gc.collect()
    return sum(reference() is not None for reference in alive)


def test_a_dropped_model_leaves_no_parameter_in_memory() -> None:
    assert run_distributed(4, parameters_alive, CONFIG) == [0] * 4


def frozen_stays_out(config: Config) -> bool:
    decoder, mesh = toy.toy_decoder(config)
    decoder.embed.requires_grad_(False)
    reducer = GradientReducer(list(fused_params(decoder)), mesh)
    reducer.begin()
    backward(config, decoder, 1)
    reducer.finish()
    return decoder.embed.grad is None and decoder.head.grad is not None


def test_a_frozen_parameter_has_no_part_in_the_sums() -> None:
    assert all(run_distributed(4, frozen_stays_out, CONFIG))


def test_one_process_has_nothing_to_send(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "start_all_reduce_", fail)
    config = toy.single(CONFIG)
    decoder, mesh = toy.toy_decoder(config)
    reducer = GradientReducer(list(fused_params(decoder)), mesh)
    reducer.begin()
    backward(config, decoder, 1)
    reducer.finish()
    assert isinstance(decoder.embed.grad, torch.Tensor)


@pytest.mark.parametrize(("norm", "limit", "factor"), [(2.0, 1.0, 0.5), (0.5, 1.0, 1.0), (2.0, 0.0, 1.0)])
def test_clipping_only_makes_gradients_smaller(norm: float, limit: float, factor: float) -> None:
    """Gradients are scaled down to the limit, never up; a limit of 0 is no limit. `factor` is applied in addition."""
    for scale in (1.0, 4.0):
        weight = torch.nn.Parameter(torch.zeros(3))
        weight.grad = torch.ones(3)
        gradients.clip_gradients([weight], gradients.StepStats(1.0, norm, scale=scale), limit)
        assert weight.grad.tolist() == [factor * scale] * 3


@pytest.mark.parametrize("limit", [0.0, 0.5, 5.0])
@pytest.mark.parametrize("count", [64, 16, 0])
def test_the_divisor_on_the_device_is_that_of_the_numbers(limit: float, count: int) -> None:
    """Of 64 positions, `count` have a target; the norm of the sums is 2."""
    launched = gradients.LaunchedStats(torch.tensor([3.0, 4.0, count, 0.0], dtype=torch.double), 64)
    divisor, skip = launched.for_update(limit)
    weight = torch.nn.Parameter(torch.zeros(3))
    weight.grad = torch.ones(3)
    gradients.clip_gradients([weight], launched.read(), limit)
    assert (divisor.dtype, skip.dtype, skip.item()) == (torch.float64, torch.float32, float(count == 0))
    assert launched.read().updates == (count > 0)
    assert weight.grad[0].item() == pytest.approx(1 / divisor.item(), rel=1e-6)
    if count == 64 and limit != 0.5:
        assert divisor.item() == 1.0


@pytest.mark.parametrize("sums", [(float("nan"), 4.0), (3.0, float("nan")), (3.0, float("inf")), (float("inf"), 4.0)])
def test_what_is_not_finite_is_skipped_on_the_device_as_on_the_host(sums: tuple[float, float]) -> None:
    launched = gradients.LaunchedStats(torch.tensor([*sums, 64.0, 0.0], dtype=torch.double), 64)
    assert launched.for_update(1.0)[1].item() == 1.0 and not launched.read().is_finite
