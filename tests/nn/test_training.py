"""Training loops of one's own over TP and dp: gradients and two optimizer steps match one process, whatever torch offers is used.

Every public module, under every layout, on the meshes tp 1, tp 2 and dp 2 x tp 2. Each way to train below is what a page or a
habit of PyTorch users suggests: data parallelism, accumulation, clipping, compilation, copies, and replaced parameters.
"""

import contextlib
import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

import boost
from boost.config.layouts import layouts_of
from boost.errors import ConfigError
from boost.nn import Decoder, functional
from boost.nn.weights import whole_weight
from tests.distributed import run_distributed
from tests.nn.plain import Loss, batch, summed

SIZES: dict[str, Any] = {"vocab_size": 64, "dim": 32, "ffn_dim": 48, "layers": 2, "heads": 8, "kv_heads": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "dense": {"family": "dense", "tied": True},
    "cola": {"family": "cola", "rank": 8},
    "lax": {"family": "lax", "rank": 8, "gate": "tensor"},
}
LAYOUTS = [
    (family, layout) for family in FAMILIES for layout in layouts_of(boost.nn.Spec(**SIZES, **FAMILIES[family]).model)
]
ON_EACH_COMMIT = [("dense", "megatron"), ("cola", "btp"), ("cola", "btp-sp")]
"""One for each kind of residual stream."""


def on_commit(chosen: list[tuple[str, str]]) -> list[Any]:
    """Parameters of a test: every layout, of which all but the chosen ones run by night."""
    return [
        pytest.param(*cell, marks=() if cell in chosen else pytest.mark.nightly, id="-".join(cell)) for cell in LAYOUTS
    ]


CELLS = on_commit(ON_EACH_COMMIT)
OVER_TP, OVER_REPLICAS = on_commit(ON_EACH_COMMIT[1:2]), on_commit(ON_EACH_COMMIT[2:])
"""The tests that take longest. The third kind of stream is that of vanilla, whose smaller modules run over replicas."""


def make(family: str, layout: str | None = None, mesh: DeviceMesh | None = None, **more: Any) -> Decoder:
    fields = {"dtype": torch.float64, **SIZES, **FAMILIES[family], **more}
    return Decoder(layout=layout, mesh=mesh, **fields)


def train(
    model: nn.Module,
    *,
    loss: Loss = summed,
    replica: int = 0,
    replicas: int = 1,
    clip: float = 0.0,
    before_step: Callable[[nn.Module, Tensor, Tensor], None] | None = None,
    divide: int = 1,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(gradients of the first step, weights after the second), whole, by name. `divide`: what data parallelism averages over."""
    tokens, targets = (x.chunk(replicas)[replica] for x in batch())
    count = int((batch()[1] != -100).sum())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    first: dict[str, Tensor] = {}
    for step in range(2):
        if before_step:
            before_step(model, tokens, targets)
        (loss(model, tokens, targets) * divide / count).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        if step == 0:
            first = {name: whole_weight(p.grad).clone() for name, p in named(model)}  # type: ignore[arg-type]
        optimizer.step()
        optimizer.zero_grad()
    return first, {name: whole_weight(p.detach()).clone() for name, p in named(model)}


def named(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(n.removeprefix("_orig_mod.").removeprefix("module."), p) for n, p in model.named_parameters()]


def error(actual: tuple[dict[str, Tensor], ...], expected: tuple[dict[str, Tensor], ...]) -> float:
    """The largest relative error of any gradient or weight, on the worst rank: replicated weights may differ between ranks."""
    worst = 0.0
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.keys() == theirs.keys()
        worst = max([worst, *(float((ours[n] - theirs[n]).abs().max() / theirs[n].abs().max()) for n in theirs)])
    return worst


# Ways to train a model of one process, or of TP ranks.


def in_parts(model: Any, tokens: Tensor, targets: Tensor) -> None:
    """All sequences but the last as micro-batches of an accumulated step."""
    with model.no_sync():
        for row in range(len(tokens) - 1):
            (summed(model, tokens[row : row + 1], targets[row : row + 1]) / int((batch()[1] != -100).sum())).backward()


def last_row(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return summed(model, tokens[-1:], targets[-1:])


def abandon(model: Any, tokens: Tensor, targets: Tensor) -> None:
    """Two steps that are given up in the middle: a pass that is not finite, and an exception."""
    with model.no_sync():
        (summed(model, tokens, targets) * float("nan")).backward()
    model.zero_grad()
    with contextlib.suppress(KeyError), model.no_sync():
        summed(model, tokens, targets).backward()
        raise KeyError
    assert all(p.grad is None for p in model.parameters())


def with_assigned_weights(model: Decoder) -> Decoder:
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    return model


def called_with_parameters(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """The loss through `functional_call`, on parameters that are not the module's own objects."""
    replaced = {name: parameter * 1.0 for name, parameter in model.named_parameters()}
    loss: Tensor = torch.func.functional_call(model, replaced, (tokens, targets), {"reduction": "sum"})
    return loss


def copied(model: Decoder, tokens: Tensor, targets: Tensor) -> Decoder:
    """A copy of a model with gradients, as for an average of weights, which it leaves alone."""
    summed(model, tokens, targets).backward()
    twin = copy.deepcopy(model)
    model.zero_grad()
    twin.zero_grad()
    with torch.no_grad():
        for ours, theirs in zip(twin.parameters(), model.parameters(), strict=True):
            ours.lerp_(theirs, 0.5)
    return twin


def every_way(family: str, layout: str | None, size: int) -> dict[str, float]:
    """Errors of each way to train over TP ranks."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",)) if size > 1 else None

    def new() -> Decoder:
        return make(family, layout, mesh)

    plain, clipped = train(make(family)), train(make(family), clip=0.1)
    parallelized: Any = boost.parallelize(make(family), mesh, layout=layout)
    return {
        "plain": error(train(new()), plain),
        "no_sync, clip": error(train(new(), before_step=in_parts, loss=last_row, clip=0.1), clipped),
        "assign, abandoned": error(train(with_assigned_weights(new()), before_step=abandon), plain),
        "functional_call": error(train(new(), loss=called_with_parameters), plain),
        "parallelize, deepcopy": error(train(copied(parallelized, *batch())), plain),
    }


@pytest.mark.slow
@pytest.mark.parametrize(("family", "layout"), OVER_TP)
def test_each_way_to_train_over_tp_ranks(family: str, layout: str) -> None:
    for errors in run_distributed(2, every_way, family, layout, 2):
        assert max(errors.values()) <= 1e-9, errors


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", [*(pytest.param(each, marks=pytest.mark.nightly) for each in ("dense", "cola")), "lax"]
)
def test_each_way_to_train_on_one_process(family: str) -> None:
    (errors,) = run_distributed(1, every_way, family, None, 1)
    assert max(errors.values()) <= 1e-9, errors


def compiled_error(family: str, layout: str | None, size: int) -> float:
    torch._dynamo.reset()  # one graph of the whole model: half the blocks, half the time
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",)) if size > 1 else None
    layers = 2 if family == "lax" else 1
    model: Any = torch.compile(make(family, layout, mesh, layers=layers), backend="aot_eager")
    return error(train(model), train(make(family, layers=layers)))


COMPILED = [("cola", None), *(pytest.param(*cell, marks=pytest.mark.nightly) for cell in LAYOUTS)]
"""Every layout's block is compiled on every commit (tests/parallel/test_compile.py)."""


@pytest.mark.slow
@pytest.mark.parametrize(("family", "layout"), COMPILED)
def test_a_compiled_model_trains_alike(family: str, layout: str | None) -> None:
    size = 1 if layout is None else 2
    assert max(run_distributed(size, compiled_error, family, layout, size)) <= 1e-9


def autocast_error(family: str, layout: str) -> tuple[float, float]:
    """(error of the loss under autocast, of its gradients) against a model that computes in bfloat16."""
    tokens, targets = batch()
    model = make(family, layout, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), dtype=torch.float32)
    single = make(family, dtype=torch.float32, compute_dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(tokens, targets)
        assert model(tokens).dtype == torch.bfloat16
    assert model(tokens).dtype == torch.float32, "autocast ends with its context"
    assert model.compute_dtype == torch.float32, "which generation reads"
    loss.backward()
    expected = single(tokens, targets)
    expected.backward()
    apart, norm = 0.0, 0.0
    for ours, theirs in zip(model.parameters(), single.parameters(), strict=True):
        assert theirs.grad is not None
        apart += float((whole_weight(ours.grad) - theirs.grad).square().sum())  # type: ignore[arg-type]
        norm += float(theirs.grad.square().sum())
    return abs(loss.item() / expected.item() - 1), (apart / norm) ** 0.5


@pytest.mark.slow
@pytest.mark.parametrize(("family", "layout"), CELLS)
def test_autocast_computes_in_its_dtype(family: str, layout: str) -> None:
    for loss, gradients in run_distributed(2, autocast_error, family, layout):
        assert loss <= 1e-3
        assert gradients <= 0.15, "bfloat16 rounds 8 bits"


# Over replicas too.


def over_replicas(family: str, layout: str, folder: str) -> dict[str, float]:
    """Errors of FSDP2 over dp 2 x tp 2, with what can be combined with it, and of a model that is saved under it."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    on_dp: Any = {"replica": mesh["dp"].get_local_rank(), "replicas": 2, "divide": 2}

    def sharded(model: Any = None) -> Any:
        model = model or make(family, layout, mesh)
        for block in model.layers:
            fully_shard(block, mesh=mesh["dp"])
        return fully_shard(model, mesh=mesh["dp"])

    def without_reduction(model: Any, tokens: Tensor, targets: Tensor) -> None:
        """FSDP2's own form of `no_sync`, inside ours."""
        model.set_requires_gradient_sync(False)
        with model.no_sync():
            (summed(model, tokens[:1], targets[:1]) * 2 / int((batch()[1] != -100).sum())).backward()
        model.set_requires_gradient_sync(True)

    plain, clipped = train(make(family)), train(make(family), clip=0.1)
    assigned = with_assigned_weights(make(family, layout, mesh))
    errors = {
        "no_sync, clip": error(
            train(sharded(), before_step=without_reduction, loss=last_row, clip=0.1, **on_dp), clipped
        ),
        "assign, abandoned": error(train(sharded(assigned), before_step=abandon, **on_dp), plain),
    }
    if layout == "btp-sp":
        tree = {"model": {**SIZES, **FAMILIES[family]}}
        model = boost.Model.from_config(tree, layout=layout, mesh=mesh, dtype=torch.float64)
        sharded(model.decoder)
        model.save(Path(folder) / "saved")
        again = boost.Model.from_pretrained(Path(folder) / "saved")
        errors["save"] = abs(again(*batch()).item() / make(family)(*batch()).item() - 1)
    return errors


@pytest.mark.slow
@pytest.mark.parametrize(("family", "layout"), OVER_REPLICAS)
def test_fsdp2_over_replicas_of_tp_ranks(family: str, layout: str, tmp_path: Path) -> None:
    for errors in run_distributed(4, over_replicas, family, layout, str(tmp_path)):
        assert max(errors.values()) <= 1e-9, errors


def data_parallel() -> dict[str, float]:
    """Errors of both kinds of data parallelism on one TP rank, for a decoder and for a swapped model."""
    on_dp: Any = {"replica": dist.get_rank(), "replicas": 2, "divide": 2}
    expected = train(make("cola"))
    ddp = DistributedDataParallel(make("cola"))

    def swapped() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 48), nn.SiLU(), nn.Linear(48, 64)).double()
        return boost.lowrank(model, 8)

    def ce(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum")

    for change in (partial(boost.lowrank, rank=8), boost.merge_lowrank):
        with pytest.raises(ConfigError, match="is wrapped in DistributedDataParallel.* wrap it afterwards"):
            change(DistributedDataParallel(swapped()))
    plain = train(swapped(), loss=ce)
    return {
        "ddp": error(train(ddp, **on_dp), expected),
        "fsdp2": error(train(fully_shard(make("cola")), clip=0.1, **on_dp), train(make("cola"), clip=0.1)),
        "lowrank ddp": error(train(DistributedDataParallel(swapped()), loss=ce, **on_dp), plain),
        "lowrank fsdp2": error(train(fully_shard(swapped()), loss=ce, **on_dp), plain),
        "lowrank compile": error(train(torch.compile(swapped(), backend="aot_eager"), loss=ce), plain),  # type: ignore[arg-type]
    }


@pytest.mark.slow
def test_data_parallelism_on_one_tp_rank() -> None:
    for errors in run_distributed(2, data_parallel):
        assert max(errors.values()) <= 1e-9, errors


# Modules by themselves.

PARTS = (boost.nn.Block, boost.nn.LowRankAttention, boost.nn.LowRankMLP)


def parts_alone(layout: str) -> dict[str, float]:
    """Errors of each smaller module on dp 2 x tp 2: FSDP2 over dp, clipped, two steps on a fixed residual stream."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    rank, replica = mesh["tp"].get_local_rank(), mesh["dp"].get_local_rank()
    fields: dict[str, Any] = {key: value for key, value in SIZES.items() if key != "layers"}
    fields |= {"rank": 8, "dtype": torch.float64}
    x = torch.randn(4, 6, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def run(module: Any, x: Tensor, residual: str) -> Any:
        if residual == "hidden":
            x = x.chunk(2, dim=-1)[rank]
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        for _ in range(2):
            if residual == "tokens":
                module(x.flatten(0, 1).chunk(2)[rank], batch=x.shape[0]).square().sum().backward()
            else:
                module(x).square().sum().backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1)
            optimizer.step()
            first = {name: whole_weight(p.grad).clone() for name, p in module.named_parameters()}
            optimizer.zero_grad()
        return first, {name: whole_weight(p.detach()).clone() for name, p in module.named_parameters()}

    errors = {}
    for kind in PARTS:
        module = kind(layout=layout, mesh=mesh, **fields)
        residual = module.spec.layout.spec.residual
        fully_shard(module, mesh=mesh["dp"]).set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        errors[kind.__name__] = error(run(module, x.chunk(2)[replica], residual), run(kind(**fields), x, "replicated"))
    return errors


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [*(pytest.param(each, marks=pytest.mark.nightly) for each in ("btp", "btp-sp")), "vanilla"]
)
def test_smaller_modules_over_replicas_of_tp_ranks(layout: str) -> None:
    for errors in run_distributed(4, parts_alone, layout):
        assert max(errors.values()) <= 1e-9, errors


class Functional(nn.Module):
    """A sublayer of one's own from `boost.nn.functional`, with weights as DTensors."""

    a_up: Tensor

    def __init__(self, mesh: DeviceMesh | None) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        shapes = {
            "norm": ((32,), 0),
            "a_up": ((8, 32), 1),
            "b_up": ((48, 8), 0),
            "a_down": ((8, 48), 1),
            "b_down": ((32, 8), 0),
        }
        self.mesh = mesh["tp"] if mesh is not None else None
        for name, (shape, dim) in shapes.items():
            weight = torch.randn(shape, dtype=torch.float64, generator=draw)
            if self.mesh is not None:
                own = weight.chunk(2, dim)[self.mesh.get_local_rank()].contiguous()
                weight = DTensor.from_local(own, self.mesh, [Shard(dim)], run_check=False)
            self.register_parameter(name, nn.Parameter(weight))

    def forward(self, x: Tensor) -> Tensor:
        (u,) = functional.norm_down_proj(x, self.norm, [self.a_up], mesh=self.mesh)
        h = functional.up_proj(u, self.b_up, activation="silu").tanh()
        return x + functional.up_proj(functional.down_proj(h, self.a_down, mesh=self.mesh), self.b_down)


def functions() -> float:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x = torch.randn(4, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    results = []
    for over in (None, mesh):
        model = Functional(over)
        own = x.chunk(2, dim=-1)[mesh["tp"].get_local_rank()] if over else x
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(2):
            model(own).square().sum().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            first = {name: whole_weight(p.grad).clone() for name, p in model.named_parameters()}  # type: ignore[arg-type]
            optimizer.zero_grad()
        results.append((first, {name: whole_weight(p.detach()).clone() for name, p in model.named_parameters()}))
    return error(results[1], results[0])


def test_functions_take_dtensors() -> None:
    assert max(run_distributed(4, functions)) <= 1e-9


def functions_under_autocast() -> tuple[torch.dtype, float]:
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = Functional(mesh).float()
    with torch.autocast("cpu", torch.bfloat16):
        y = functional.down_proj(x.chunk(2, dim=-1)[dist.get_rank()], model.a_up, mesh=mesh)
        model(x.chunk(2, dim=-1)[dist.get_rank()]).square().sum().backward()
    whole = whole_weight(model.a_up.detach())
    assert all(parameter.grad is not None for parameter in model.parameters())
    return y.dtype, float((y.float() - x @ whole.T).norm() / (x @ whole.T).norm())


def test_functions_compute_in_autocasts_dtype() -> None:
    for dtype, apart in run_distributed(2, functions_under_autocast):
        assert dtype == torch.bfloat16
        assert apart <= 0.02


# What cannot work is said.


def refusals() -> list[str]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = make("cola", "btp-sp", mesh)
    tokens, targets = batch()
    plain = {name: whole_weight(parameter) for name, parameter in model.named_parameters()}
    wrong: list[Callable[[], Any]] = [
        lambda: model(tokens[:1, :5], targets[:1, :5]),
        lambda: torch.func.functional_call(model, plain, (tokens, targets)),
        lambda: model(tokens, targets, reduction="none"),
    ]
    said = []
    for call in wrong:
        try:
            call()
        except ConfigError as caught:
            said.append(str(caught))
    with pytest.raises(Exception, match="sharding strategy|being sharded"):
        DistributedDataParallel(model)
    return said


def test_what_cannot_work_is_said() -> None:
    for tokens, plain, reduction in run_distributed(2, refusals):
        assert "tokens = 1 x 5: layout btp-sp cannot shard 5 tokens" in tokens
        assert "fully_shard(model, mesh=mesh['dp'])" in plain
        assert "reduction = 'none' is unknown; valid values: mean, sum" in reduction
