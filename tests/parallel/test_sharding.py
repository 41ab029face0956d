"""Sharding over replicas: the reductions that torch would issue on backends that are not available here."""

import dataclasses

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import _get_gradient_divide_factors

from boost.errors import ConfigError
from boost.parallel import sharding
from boost.parallel.sharding import shard
from tests import toy
from tests.distributed import run_distributed


def reductions_of(device: str, dtype: str) -> list[tuple[bool, object, object]]:
    """(whether it is a plain sum, factor before, factor after) of each unit's gradients, as torch would reduce them on this
    device type."""
    config = toy.toy_config("bfloat16", parallel={"dp": 2, "shard": "full"}, train={"param_dtype": dtype})
    decoder, mesh = toy.toy_decoder(config)
    shard(decoder, decoder, config.parallel, dataclasses.replace(mesh, device=torch.device(device)))
    found = []
    for unit in decoder.modules():
        if isinstance(unit, FSDPModule):
            state = unit._get_fsdp_state()
            for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]:  # torch before 2.13
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


def test_what_an_older_torch_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    outer = toy.toy_config(parallel={"tp": 2, "layout": "btp-sp", "shard": "full", "shard_outer": True})
    if sharding.SHARDS_OVER_SEVERAL_MESHES:  # torch 2.13
        sharding.require_torch(outer)
    monkeypatch.setattr(sharding, "SHARDS_OVER_SEVERAL_MESHES", False)
    with pytest.raises(ConfigError, match="shard_outer = true needs a newer torch than .*; set it to false"):
        sharding.require_torch(outer)
    monkeypatch.setattr(sharding, "COMPILES_REPEATED_COLLECTIVES", False)
    sharded = {"recompute": "low-rank-sharded", "compile": "blocks"}
    with pytest.raises(ConfigError, match="'low-rank-sharded' with train.compile = 'blocks' needs a newer torch than"):
        sharding.require_torch(toy.toy_config(parallel={"tp": 2, "layout": "btp-sp"}, train=sharded))
    sharding.require_torch(toy.toy_config(parallel={"pp": 2, "dp": 2, "shard": "full"}, train={"global_batch": 8}))
