"""`boost.parallelize`: the same function on the same weights, over TP ranks."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import boost
from boost.errors import ConfigError
from tests.distributed import run_distributed

SIZES: dict[str, Any] = {
    "vocab_size": 64, "dim": 32, "ffn_dim": 48, "layers": 2, "heads": 8, "rank": 8, "dtype": torch.float64
}  # fmt: skip


def shard(layout: str | None, options: dict[str, Any]) -> tuple[float, float, str]:
    """(error of the loss, error of parameters, layout)."""
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "tp"))
    model = boost.nn.Decoder(**SIZES, seed=3)
    with torch.no_grad():  # not what a new model has
        for parameter in model.parameters():
            parameter.mul_(1.5)
    sharded = boost.parallelize(model, mesh, layout=layout, **options)
    tokens = torch.arange(32).view(2, 16)
    whole, own = dict(model.whole_parameters()), dict(sharded.whole_parameters())
    difference = max(float((whole[name] - own[name]).abs().max()) for name in whole)
    error = abs(sharded(tokens, tokens).item() / model(tokens, tokens).item() - 1)
    block = boost.parallelize(model.layers[1], mesh["tp"], layout="megatron" if layout == "megatron" else "btp-sp")
    x = torch.randn(12, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mine = x.chunk(dist.get_world_size())[dist.get_rank()]
    expected = model.layers[1](x.view(2, 6, 32)).flatten(0, 1).chunk(dist.get_world_size())[dist.get_rank()]
    error = max(error, float((block(mine, batch=2) - expected).abs().max()))
    return error, difference, sharded.spec.parallel.layout


@pytest.mark.parametrize(
    ("layout", "options"), [(None, {}), ("btp-sp", {"grouping": False}), ("vanilla", {}), ("btp", {"norm": "sync"})]
)
def test_it_is_the_same_function(layout: str | None, options: dict[str, Any]) -> None:
    for error, difference, used in run_distributed(2, shard, layout, options):
        assert error <= 1e-10
        assert difference == 0
        assert used == (layout or "btp")


def misuse() -> list[str]:
    said = []
    model = boost.nn.Decoder(**SIZES)
    sharded = boost.parallelize(model, dist.group.WORLD)
    for wrong in (
        lambda: boost.parallelize(sharded, dist.group.WORLD),
        lambda: boost.parallelize(model, dist.group.WORLD, layout="btq"),
    ):
        try:
            wrong()
        except ConfigError as error:
            said.append(str(error))
    return said


def test_what_is_wrong_is_said() -> None:
    with pytest.raises(ConfigError, match=r"model is a Linear; only boost\.nn.s Decoder, .* can be sharded"):
        boost.parallelize(torch.nn.Linear(4, 4), None)
    for twice, unknown in run_distributed(2, misuse):
        assert "already sharded over 2 TP ranks" in twice
        assert "did you mean 'btp'?" in unknown
