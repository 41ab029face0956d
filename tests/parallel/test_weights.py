"""Working copies: bitwise the results of weights cast at each use, with half of the memory accesses, and nothing left behind.
Sharding over replicas: the reductions that torch would issue on backends that are not available here."""

import dataclasses
import gc
import weakref

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import _get_gradient_divide_factors

from boost.config import Config
from boost.models.fused import fused_params
from boost.parallel.gradients import GradientReducer
from boost.parallel.weights import WorkingCopies, shard
from tests import toy
from tests.distributed import run_distributed
from tests.matrices import DENSE, LOW_RANK, Row, first, ids, one_in, policies
from tests.trained import Trained, matches_table, small_buckets

BF16 = {"compute_dtype": "bfloat16", "param_dtype": "float32", "micro_batch": 2}


def without(config: Config) -> Config:
    return config.model_copy(update={"train": config.train.model_copy(update={"working_copies": False})})


def differences(config: Config) -> list[str]:
    """Tensors that differ in any bit after two steps from a run with weights cast at each use."""
    assert config.has_working_copies, "otherwise this compares a thing with itself"
    with small_buckets():
        copied, cast = Trained(config), Trained(without(config))
    found = [] if copied.numbers == cast.numbers else [f"loss or norm {copied.numbers} {cast.numbers}"]
    for number, (ours, theirs) in enumerate(zip(copied.gradients, cast.gradients, strict=True)):
        found += [f"{number} {name}" for name in theirs if not torch.equal(ours[name], theirs[name])]
    ours, theirs = toy.weights(copied.model), toy.weights(cast.model)
    return found + [name for name in theirs if not torch.equal(ours[name], theirs[name])]


# Every layout once, some with grouping and some without.
CELLS: list[tuple[str, Row, str]] = [
    ("lax", {"layout": "btp-sp", "grouping": False}, "none"),
    *(("cola", layout, policies("cola", layout)[n % 3] if n % 2 else "none") for n, layout in enumerate(LOW_RANK[::2])),
    ("svd", {"layout": "btp-sp"}, "low-rank-sharded"),
    *(("dense", layout, "full-block" if n % 2 else "none") for n, layout in enumerate(DENSE[::2])),
    ("lax", {"layout": "btp"}, "low-rank"),
]


@pytest.mark.parametrize(
    ("family", "layout", "policy"),
    one_in(2, CELLS, ids(CELLS)),
)
@pytest.mark.slow
def test_bitwise_equal_to_weights_cast_at_each_use(family: str, layout: Row, policy: str) -> None:
    """Two micro-batches, fewer key/value heads than processes; each weight is used once per micro-batch."""
    train = {**BF16, "global_batch": 4, "recompute": policy}
    model = {"family": family, "kv_heads": 1, **({"gate": "tensor", "rank": 16} if family == "lax" else {})}
    config = toy.toy_config("bfloat16", model=model, parallel={**layout, "tp": 2}, train=train)
    assert run_distributed(2, differences, config) == [[], []]


def test_fp32_over_fp64_weights() -> None:
    train = {**BF16, "compute_dtype": "float32", "param_dtype": "float64", "global_batch": 4}
    for parallel in ({}, {"layout": "btp", "tp": 2}):
        config = toy.toy_config("float64", parallel=parallel, train=train)
        assert run_distributed(config.parallel.tp, differences, config) == [[]] * config.parallel.tp


def test_the_same_on_one_process() -> None:
    for model in ({"family": "cola"}, {"family": "dense", "kv_heads": 1}, {"family": "svd"}):
        assert differences(toy.toy_config("bfloat16", model=model, train={**BF16, "global_batch": 6})) == []


def test_a_tied_table_adds_two_gradients_in_compute_dtype() -> None:
    """As train.working_copies says: the only difference, and one of rounding."""
    config = toy.toy_config("bfloat16", model={"tied": True}, train={**BF16, "global_batch": 4}, optim={"clip": 0.0})
    copied, cast = Trained(config), Trained(without(config))
    ours, theirs = copied.gradients[0], cast.gradients[0]
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == ["embed"]
    assert (ours["embed"] - theirs["embed"]).abs().max() <= 2**-8 * theirs["embed"].abs().max()


MESHES = [
    ({"pp": 2, "schedule": "interleaved-1f1b"}, 2),
    ({"layout": "btp", "tp": 2, "dp": 2}, 4),
    ({"pp": 2, "schedule": "1f1b"}, 2),
    ({"layout": "btp-sp", "tp": 2, "pp": 2}, 4),
    ({"pp": 2, "schedule": "gpipe"}, 2),
]


@pytest.mark.parametrize(("parallel", "size"), first(2, MESHES))
@pytest.mark.slow
def test_in_pipelines_and_replicas_too(parallel: Row, size: int) -> None:
    train = {**BF16, "global_batch": 4 * parallel.get("dp", 1)}
    config = toy.toy_config("bfloat16", model={"layers": 2 * parallel.get("pp", 1)}, parallel=parallel, train=train)
    assert run_distributed(size, differences, config) == [[]] * size


@pytest.mark.parametrize(
    ("parallel", "train"),
    [
        ({}, {"param_dtype": "bfloat16"}),
        ({}, {"working_copies": False}),
        ({"dp": 2, "shard": "full"}, {}),
        ({"dp": 2, "shard": "optimizer"}, {}),
    ],
    ids=str,
)
def test_no_copies_without_a_benefit(parallel: Row, train: Row) -> None:
    config = toy.toy_config(
        "bfloat16", model={"layers": 4}, parallel=parallel, train={**BF16, "global_batch": 8, **train}
    )
    assert not config.has_working_copies
    model = torch.nn.Module()
    with WorkingCopies(model, config, lambda _: None).in_use():
        pass


def copied(config: Config) -> set[str]:
    """First parameter of each tensor that modules hold in another dtype during forward and backward passes."""
    decoder, _ = toy.toy_decoder(config)
    before = list(fused_params(decoder))
    with WorkingCopies(decoder, config, lambda _: None).in_use():
        during = list(fused_params(decoder))
    after = list(fused_params(decoder))
    assert all(a.parameter is b.parameter for a, b in zip(before, after, strict=True))
    for old, new in zip(before, during, strict=True):
        assert torch.equal(old.parameter.to(new.parameter.dtype), new.parameter)
    return {s.slices[0].parameter.role for s in during if s.parameter.dtype == torch.bfloat16}


def test_weights_scaled_before_the_cast_have_no_copy() -> None:
    """Under btp this is A of norm(x): rounded twice, the online norm would be less accurate than sync."""
    config = toy.toy_config("bfloat16", parallel={"layout": "btp", "tp": 2}, train=BF16)
    others = {"enter.outer", "q.outer", "kv.outer", "o.inner", "leave.inner", "leave.outer", "head"}
    assert run_distributed(2, copied, config) == [others] * 2
    assert copied(toy.single(config)) == others | {"enter.inner"}


def test_a_failed_pass_leaves_the_weights_in_place() -> None:
    config = toy.toy_config("bfloat16", train=BF16)
    decoder, mesh = toy.toy_decoder(config)
    params = list(fused_params(decoder))
    reducer = GradientReducer(params, mesh)
    copies = WorkingCopies(decoder, config, reducer.accumulated)
    gone: list[weakref.ref[torch.nn.Parameter]] = []

    def fail() -> None:
        with copies.in_use():
            reducer.begin()
            during = [s.parameter for s in fused_params(decoder) if s.parameter.dtype == torch.bfloat16]
            gone.extend(map(weakref.ref, during))
            decoder(*toy.toy_tokens(config)).backward()
            assert all(copy.grad is None for copy in during), "only the weights' own gradients stay"
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert [s.parameter for s in fused_params(decoder)] == [s.parameter for s in params]
    assert all(s.parameter.grad.dtype == torch.float32 for s in params)  # type: ignore[union-attr]
    gc.collect()
    assert gone and all(reference() is None for reference in gone)


def test_a_frozen_weight_is_copied_and_has_no_gradient() -> None:
    config = toy.toy_config("bfloat16", train=BF16)
    decoder, _ = toy.toy_decoder(config)
    decoder.head.requires_grad_(False)
    with WorkingCopies(decoder, config, lambda _: None).in_use():
        assert decoder.head.dtype == torch.bfloat16
        decoder(*toy.toy_tokens(config)).backward()
    assert decoder.head.grad is None
    assert all(p.grad is not None for p in decoder.parameters() if p.requires_grad)


def launched_during_backward(config: Config) -> tuple[int, int, bool]:
    """(buckets launched by the end of the last backward pass, all buckets, whether collectives match the table)."""
    with small_buckets():
        trained = Trained(config, 0)
        launched: list[int] = []
        finish = trained.reducer.finish

        def at_the_end() -> None:
            launched.append(sum(queue.next_bucket for queue in trained.reducer.queues))
            finish()

        trained.reducer.finish = at_the_end  # type: ignore[method-assign]
        counted = trained.collectives()
        return launched[0], sum(len(queue.buckets) for queue in trained.reducer.queues), matches_table(config, counted)


def test_buckets_are_launched_while_the_last_backward_pass_runs() -> None:
    config = toy.toy_config(
        "bfloat16", parallel={"layout": "btp-sp", "tp": 2, "dp": 2}, train={**BF16, "global_batch": 8}
    )
    assert config.has_working_copies
    for launched, of, as_the_table in run_distributed(4, launched_during_backward, config):
        assert launched == of > 4
        assert as_the_table


def errors_of_halves(config: Config) -> tuple[float, float]:
    """(with copies, with weights cast at each use): relative error of the whole gradient in bf16 against fp64."""
    wide = {"param_dtype": "float64", "compute_dtype": "float64"}
    exact = Trained(config.model_copy(update={"train": config.train.model_copy(update=wide)}), 1).gradients[0]
    norm = sum(g.square().sum() for g in exact.values()) ** 0.5

    def error(other: Config) -> float:
        found = Trained(other, 1).gradients[0]
        return float(sum((found[k].double() - exact[k]).square().sum() for k in exact) ** 0.5 / norm)

    return error(config), error(without(config))


def test_halves_add_up_in_bf16_what_one_pass_uses_twice() -> None:
    parallel = {"layout": "btp-sp", "tp": 2, "overlap": "halves"}
    config = toy.toy_config("bfloat16", parallel=parallel, train={**BF16, "global_batch": 4})
    for copied, cast in run_distributed(2, errors_of_halves, config):
        assert copied < 1.05 * cast


def compiled_difference(config: Config) -> float:
    """Largest relative difference of gradients over two micro-batches between copies and casts, with compiled blocks."""
    results: list[dict[str, torch.Tensor]] = []
    for each in (config, without(config)):
        torch._dynamo.reset()
        decoder, _ = toy.toy_decoder(config)
        for block in decoder.blocks:
            block.compile(fullgraph=True, backend="aot_eager")
        with WorkingCopies(decoder, each, lambda _: None).in_use():
            for seed in range(2):
                decoder(*toy.toy_tokens(config, seed)).backward()
        results.append(toy.gradients(decoder))
    return toy.worst_error(*results)


@pytest.mark.slow
def test_compiled_blocks_use_copies() -> None:
    assert run_distributed(1, compiled_difference, toy.toy_config("bfloat16", model={"layers": 1}, train=BF16)) == [0.0]


def reductions_of(device: str, dtype: str) -> list[tuple[bool, object, object]]:
    """(whether it is a plain sum, factor before, factor after) of each unit's gradients, as torch would reduce them on this
    device type."""
    config = toy.toy_config("bfloat16", parallel={"dp": 2, "shard": "full"}, train={"param_dtype": dtype})
    decoder, mesh = toy.toy_decoder(config)
    shard(decoder, decoder, config.parallel, dataclasses.replace(mesh, device=torch.device(device)))
    found: list[tuple[bool, object, object]] = []
    for unit in decoder.modules():
        if isinstance(unit, FSDPModule):
            state = unit._get_fsdp_state()
            for group in state._fsdp_param_groups:
                before, after, reduce_scatter, _ = _get_gradient_divide_factors(
                    group._reduce_scatter_process_group,
                    None,
                    getattr(torch, dtype),
                    device,
                    group.gradient_divide_factor,
                    group.force_sum_reduction_for_comms,
                )
                found.append((reduce_scatter == torch.distributed.ReduceOp.SUM, before, after))
    return found


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_gradients_are_plain_sums_on_every_backend(device: str, dtype: str) -> None:
    """NCCL multiplies bf16 by a scale of 0 in PREMUL_SUM (pytorch issue 190745): gradients would vanish without an error."""
    for units in run_distributed(2, reductions_of, device, dtype):
        assert len(units) == 3 and all(plain for plain, *_ in units)
        assert {factor or 1.0 for _, *factors in units for factor in factors} == {1.0}
