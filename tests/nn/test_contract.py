"""What is attached to a module, frozen, tied or replaced trains as in plain PyTorch, or is refused: never dropped.

Every way (`tests/nn/ways.py`) is applied to `boost.nn.Decoder` and to the same decoder in plain PyTorch. Both are trained for three
steps in float64: on one process, on two TP ranks, and on dp 2 x tp 2.
"""

import re
import warnings
from functools import cache
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import boost
from boost.config.layouts import layouts_of
from boost.errors import ConfigError
from tests.distributed import run_distributed
from tests.nn import ways
from tests.nn.plain import FAMILIES, SIZES, make, plain, three_steps

WAYS = {family: ways.ways(family) for family in FAMILIES}
UNUSUAL = {
    "dense": ("LoRA", "DoRA", "q_proj"),
    "lax": ("gate", f"{ways.Q}.A", f"forward {ways.Q}", f"subclass {ways.Q}", "activation", "backward layers.0"),
    "dense-heads": ("forward layers.1.attn.q_", "no bias", "LoRA on"),
    "cola-heads": ("forward ", "no bias", "LoRA on"),
    "lax-heads": ("backward layers.1.attn.q_norm", "no bias", "LoRA on"),
}
"""Ways that run on every commit for other families than cola, for which most do."""


@cache
def expected(family: str, name: str) -> list[Tensor]:
    """What plain PyTorch makes of a way."""
    return three_steps(WAYS[family][name](plain(family)))


def error(actual: list[Tensor], family: str, name: str) -> float:
    plain = expected(family, name)
    return max(float((a - e).abs().max()) for a, e in zip(actual, plain, strict=True))


def marks(family: str, name: str) -> Any:
    if family == "cola":
        on_commit = not name.endswith((f"{ways.Q}.B", f"{ways.OUT}.A", ways.OUT, ways.UP))
    else:
        on_commit = any(part in name for part in UNUSUAL[family])
    uses_peft = "LoRA" in name or "DoRA" in name  # which imports transformers
    return () if on_commit and not uses_peft else pytest.mark.slow if on_commit else pytest.mark.nightly


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize(
    ("family", "name"),
    [pytest.param(family, name, marks=marks(family, name)) for family in FAMILIES for name in WAYS[family]],
)
def test_one_process(family: str, name: str) -> None:
    model = WAYS[family][name](make(family))
    if family.startswith("lax") and name in REFUSED_BY_LAX:
        with pytest.raises(ConfigError, match=r"_proj .*, but its block computes with its latents"):
            three_steps(model)
    else:
        assert error(three_steps(model), family, name) <= 1e-9


REFUSED_BY_LAX = {
    *ways.hooks(ways.LINEARS),
    *(f"{change} {path}" for change in ("own forward", "subclass", "activation") for path in ways.LINEARS),
}
"""Changes of whole linears, of which LaX uses the factors."""


# Over TP ranks and replicas.

HONORED = {*ways.MODEL, *ways.WRAPPERS, *ways.hooks(ways.STREAMS), "share q_proj", "share attn"}
"""Ways for a whole model, and for what takes and returns the residual stream."""
NOT_OVER_TP = {"pickle": "cannot pickle '.*ProcessGroup' object"}
BY_TOOLS = "prune", "spectral norm", "DoRA"
"""Tools that refuse DTensors themselves, when they are applied."""
NOT_BY_FSDP2 = {"gradient hooks", "share q_proj", "share attn", "selective checkpoint model"}
"""torch's FSDP2 replaces parameters, and shards shared ones once. Selective checkpointing around its units raises torch's error, in
plain models, too: recomputing them records other profiler ranges."""


def over_tp(family: str, layout: str, dp: int, names: list[str]) -> dict[str, float | str]:
    """For each way, the error of the three steps, or how it is refused."""
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (dp, dist.get_world_size() // dp), mesh_dim_names=("dp", "tp"))
    made: dict[str, float | str] = {}
    for name in names:
        try:
            model: Any = WAYS[family][name](make(family, layout=layout, mesh=mesh))
            if dp > 1:
                for block in getattr(model, "layers", ()):
                    fully_shard(block, mesh=mesh["dp"])
                fully_shard(model, mesh=mesh["dp"])
            actual = three_steps(model, replica=mesh["dp"].get_local_rank(), replicas=dp)
            for loss in actual[:3]:
                dist.all_reduce(loss, group=mesh["dp"].get_group())
            made[name] = error(actual, family, name)
        except (ConfigError, RuntimeError, TypeError) as refused:
            made[name] = f"{type(refused).__name__}: {refused}"
    return made


ALL = [(f, layout) for f in FAMILIES for layout in layouts_of(boost.nn.Spec(**SIZES, **FAMILIES[f]).model)]
A_FEW = ["freeze", "gradient hooks", "deepcopy", "DCP state", "functional_call", "selective checkpoint model", "pickle"]
A_FEW += [
    "forward layers.1",
    "backward layers.1.attn",
    "pre layers.0.mlp",
    "share attn",
    "tie",
    "LayerNorm",
    "max_norm",
]
A_FEW += ["checkpoint_wrapper layers.0.mlp", "bias lm_head", "forward norm", "backward pre embedding"]
A_FEW += [f"{change} {ways.Q}.A" for change in ("forward", "backward", "bias", "subclass", "parametrize")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "layout", "dp", "names"),
    [
        ("cola", "btp", 1, A_FEW),
        *(
            pytest.param(family, layout, dp, None, marks=pytest.mark.nightly, id=f"{family}-{layout}-{dp}")
            for family, layout in ALL
            for dp in ((1,) if family.endswith("-heads") else (1, 2))
        ),
    ],
)
def test_tp_ranks(family: str, layout: str, dp: int, names: list[str] | None) -> None:
    chosen = [n for n in WAYS[family] if (names is None or n in names) and not (dp > 1 and n in NOT_BY_FSDP2)]
    for made in run_distributed(2 * dp, over_tp, family, layout, dp, chosen):
        for name, outcome in made.items():
            if name in HONORED - NOT_OVER_TP.keys():
                assert isinstance(outcome, float) and outcome <= 1e-9, (name, outcome)
            elif not name.startswith(BY_TOOLS):
                said = NOT_OVER_TP.get(name, "layouts shard them differently|over several TP ranks, only the decoder")
                assert isinstance(outcome, str) and "\n" not in outcome and re.search(said, outcome), (name, outcome)
            else:
                assert isinstance(outcome, str), (name, outcome)
