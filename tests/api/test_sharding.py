"""`boost.parallelize`: the same function on the same weights, over TP ranks."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import boost
from boost.errors import ConfigError
from boost.nn.weights import whole_weight
from tests.distributed import run_distributed
from tests.nn import ways

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


def keep_traits() -> tuple[float, bool, bool, list[str]]:
    """(largest difference of losses and gradients, whether frozen and shared parameters are those of the module, refusals)."""
    mesh = dist.group.WORLD if dist.is_initialized() else None
    model = ways.share(".mlp.up_proj", ways.freeze(boost.nn.Decoder(**SIZES)))
    model.layers[1].eval()
    sharded, tokens = boost.parallelize(model, mesh), torch.arange(32).view(2, 16)
    errors = []
    for each in (model, sharded):
        each(tokens, tokens).backward()
    pairs = zip(model.parameters(), sharded.parameters(), strict=True)
    for ours, theirs in pairs:
        assert ours.requires_grad == theirs.requires_grad and (ours.grad is None) == (theirs.grad is None)
        if ours.grad is not None:
            errors.append(float((whole_weight(theirs.grad) - ours.grad).abs().max()))
    up = [block.mlp.up_proj.B.weight for block in sharded.layers]
    modes = [{path: m.training for path, m in each.named_modules(remove_duplicate=False)} for each in (sharded, model)]
    tied = boost.parallelize(ways.tie(boost.nn.Decoder(**SIZES)), mesh)
    said = ["tied" if tied.lm_head.weight is tied.embedding.weight else "untied"]
    return max(errors), up[0] is up[1], modes[0] == modes[1], said


def test_frozen_and_shared_parameters_stay_so() -> None:
    error, shared, modes, said = keep_traits()
    assert error <= 1e-12 and shared and modes and said == ["tied"]
    for error, shared, modes, said in run_distributed(2, keep_traits):
        assert error <= 1e-12 and shared and modes and said == ["tied"]


ATTACHED = {
    "LoRA": r"layers\.0\.attn\.q_proj\.A is a peft\.tuners\.lora\.layer\.Linear",
    "bias lm_head": "lm_head has a bias",
    "LayerNorm": r"layers\.1\.mlp\.norm is a torch.*LayerNorm",
    "RMSNorm with another eps": r"norm has eps = 0\.1",
    "max_norm": r"embedding has max_norm = 0\.5",
    "forward layers.1": r"layers\.1 has hooks",
    "backward embedding table": "embedding has hooks",
    "gradient hooks": r"embedding\.weight has gradient hooks",
    "activation layers.1.mlp.up_proj": r"layers\.1\.mlp\.up_proj has activation = none",
    "own forward layers.0.mlp": r"layers\.0\.mlp has another forward",
    f"prune {ways.Q}.A": r"layers\.1\.attn\.q_proj\.A has hooks",
    "buffer": "mean is no weight of boost.nn",
    "module": r"value_head is a torch\.nn\.modules\.linear\.Linear",
    "rank": r"layers\.0\.attn\.q_proj\.A\.weight has shape \(4, 32\)",
    "dtype": r"norm\.weight is torch\.float32, not torch\.float64",
}
MORE = {
    "backward embedding table": lambda model: ways.backward_pre_hook("embedding", model),
    "buffer": lambda model: model.register_buffer("mean", torch.zeros(1)) or model,
    "module": lambda model: model.add_module("value_head", torch.nn.Linear(32, 1)) or model,
    "rank": lambda model: ways.put("layers.0.attn.q_proj.A", lambda _: torch.nn.Linear(32, 4, False).double(), model),
    "dtype": lambda model: model.norm.float() and model,
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "LoRA" else ()) for name in ATTACHED]
)
def test_what_would_be_lost_is_refused(name: str) -> None:
    if name == "LoRA":
        pytest.importorskip("peft")
    model = {**ways.ways("cola"), **MORE}[name](boost.nn.Decoder(**SIZES))
    with pytest.raises(ConfigError, match=f"^{ATTACHED[name]}.*, but boost.parallelize copies") as error:
        boost.parallelize(model, None)
    assert "\n" not in str(error.value)
    kept_out_of_checkpoints = "forward layers.1", "backward embedding table", "gradient hooks"
    if name in kept_out_of_checkpoints:
        list(model.whole_parameters())
    else:
        with pytest.raises(ConfigError, match="but a checkpoint holds only weights"):
            list(model.whole_parameters())


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
    with pytest.raises(ConfigError, match=r"model is a Linear; only .* can be sharded"):
        boost.parallelize(torch.nn.Linear(4, 4), None)
    for twice, unknown in run_distributed(2, misuse):
        assert "already sharded over 2 TP ranks" in twice
        assert "did you mean 'btp'?" in unknown
