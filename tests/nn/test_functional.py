"""BTP as functions: a custom sublayer is the same on one process and on several, with two all-reduces in each direction."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from boost.errors import ConfigError
from boost.measure.counting import CollectiveCounter
from boost.nn.functional import down_proj, norm_down_proj, up_proj
from boost.parallel import collectives
from boost.parallel.mesh import Axis
from tests.distributed import run_distributed


def weights() -> dict[str, Tensor]:
    """Two projections of a residual stream of 16 into 24 channels, and one back."""
    draw = torch.Generator().manual_seed(0)
    shapes = {"norm": (16,), "A1": (4, 16), "B1": (24, 4), "A2": (6, 16), "B2": (24, 6), "A3": (4, 24), "B3": (16, 4)}
    return {k: torch.randn(v, dtype=torch.float64, generator=draw).requires_grad_() for k, v in shapes.items()}


SHARDED = {"norm": 0, "A1": 1, "B1": 0, "A2": 1, "B2": 0, "A3": 1, "B3": 0}


def sublayer(x: Tensor, w: dict[str, Tensor], mesh: dist.ProcessGroup | None) -> Tensor:
    one, two = norm_down_proj(x, w["norm"], [w["A1"], w["A2"]], eps=1e-5, mesh=mesh)
    product = up_proj(one, w["B1"], activation="silu") * up_proj(two, w["B2"])
    return x + up_proj(down_proj(product, w["A3"], mesh=mesh), w["B3"], activation="silu")


def test_on_one_process_it_is_the_formula() -> None:
    w, x = weights(), torch.randn(2, 5, 16, dtype=torch.float64)
    z = w["norm"] * x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5)
    silu = torch.nn.functional.silu
    product = (silu(z @ w["A1"].T) @ w["B1"].T) * (z @ w["A2"].T @ w["B2"].T)
    expected = x + silu(product @ w["A3"].T) @ w["B3"].T
    torch.testing.assert_close(sublayer(x, w, None), expected, rtol=1e-12, atol=1e-12)


def under_tp(dtype: torch.dtype) -> tuple[float, list[str]]:
    """(largest relative error of output, input gradient and weight gradients; kinds of the collectives)."""
    rank, size = dist.get_rank(), dist.get_world_size()
    axis = Axis(rank, size, dist.group.WORLD)
    whole = {name: value.detach().to(dtype).requires_grad_() for name, value in weights().items()}
    own = {k: v.detach().chunk(size, dim=SHARDED[k])[rank].clone().requires_grad_() for k, v in whole.items()}
    x = torch.randn(2, 5, 16, dtype=dtype, generator=torch.Generator().manual_seed(1)).requires_grad_()
    part = x.detach().chunk(size, dim=-1)[rank].clone().requires_grad_()
    expected = sublayer(x, whole, None)
    expected.square().sum().backward()
    with CollectiveCounter() as counter:
        found = sublayer(part, own, dist.group.WORLD)
        found.square().sum().backward()
    pairs = [(found, expected, -1), (part.grad, x.grad, -1), *((own[k].grad, whole[k].grad, SHARDED[k]) for k in own)]
    errors = []
    for actual, reference, dim in pairs:
        assert actual is not None and reference is not None
        gathered = torch.cat(collectives.all_gather(actual.detach(), axis).chunk(size), dim=dim)
        errors.append(float((gathered - reference).abs().max() / reference.abs().max()))
    return max(errors), [each.kind for each in counter.collectives]


@pytest.mark.parametrize(
    ("size", "dtype", "limit"), [(2, torch.float64, 1e-12), (4, torch.float64, 1e-12), (2, torch.float32, 1e-5)]
)
def test_on_several_it_is_the_same_function(size: int, dtype: torch.dtype, limit: float) -> None:
    for error, kinds in run_distributed(size, under_tp, dtype):
        assert error <= limit
        assert kinds == ["all-reduce"] * 4, "two forward, two backward"


def test_an_unknown_activation_is_named() -> None:
    with pytest.raises(ConfigError, match=r"activation = 'gelu' is unknown; valid values: none, silu"):
        up_proj(torch.zeros(1, 4), torch.zeros(8, 4), activation="gelu")
