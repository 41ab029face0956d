"""`boost.nn.Decoder` matches the trainer's decoder under every layout: same weights, loss and gradients, in separate modules."""

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import boost
from boost.config.layouts import layouts_of
from boost.errors import ConfigError
from boost.layouts.runtime import layout_for
from boost.measure.counting import CollectiveCounter
from boost.models.decoder import Decoder as RunDecoder
from boost.models.fused import fused_params
from boost.models.init import initialize
from boost.nn import Decoder, LowRankLinear
from boost.nn.weights import whole_weight
from boost.parallel.mesh import Mesh
from boost.plan.collectives import micro_batch_collectives
from tests import toy
from tests.distributed import run_distributed
from tests.nn.ways import Wrapped

SIZES = {"vocab_size": 64, "dim": 32, "ffn_dim": 48, "layers": 2, "heads": 8, "dtype": torch.float64}
FAMILIES: dict[str, dict[str, Any]] = {
    "dense": {},
    "svd": {"rank": 8},
    "cola": {"rank": 8},
    "lax": {"rank": 8, "gate": "dense"},
    "lax-tensor": {"rank": 8, "gate": "tensor", "over": "svd"},
    "cola-heads": {"rank": 8, "qk_norm": True, "attn_bias": "qkvo", "nope_layers": [1], "head_dim": 6},
    "dense-heads": {"attn_bias": "qkv", "head_dim": 6},
}


def sizes(name: str, **more: Any) -> dict[str, Any]:
    return {**SIZES, **FAMILIES[name], "family": name.partition("-")[0], **more}


def data(ignored: bool = True) -> tuple[Tensor, Tensor]:
    """(tokens, targets), [2, 16] each; every fifth target is ignored."""
    tokens = torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(1))
    targets = tokens[:, 1:].clone()
    if ignored:
        targets.view(-1)[::5] = -100
    return tokens[:, :-1], targets


def gradients(model: Decoder) -> dict[str, Tensor]:
    """Whole gradients by mathematical name. Collective."""
    gradients = {}
    for fused in fused_params(model):
        (only,) = fused.slices
        assert fused.parameter.grad is not None, only.parameter.name
        gradients[only.parameter.name] = whole_weight(fused.parameter.grad).clone()
    return gradients


def worst(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert actual.keys() == expected.keys()
    return max(float((actual[k] - expected[k]).abs().max() / expected[k].abs().max()) for k in expected)


@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("name", FAMILIES)
def test_it_is_the_decoder_of_a_run(name: str, kv_heads: int) -> None:
    model = Decoder(**sizes(name, kv_heads=kv_heads))
    fused = RunDecoder(model.model, layout_for(model.model, model.spec.parallel, Mesh(toy.CPU)), torch.float64)
    fused.to(torch.float64)
    initialize(fused, 0)
    ours, theirs = dict(model.whole_parameters()), toy.weights(fused)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)
    tokens, targets = data()
    loss, total = model(tokens, targets), fused(tokens, targets)
    loss.backward()
    (total / (targets != -100).sum()).backward()
    assert loss.item() == pytest.approx(total.item() / int((targets != -100).sum()), rel=1e-14)
    assert worst(gradients(model), toy.gradients(fused)) <= 1e-12


def test_a_forward_that_is_put_back_is_no_other_forward() -> None:
    """As accelerate does when it unwraps a model."""
    model = Decoder(**sizes("cola"))
    model.forward = model.forward  # type: ignore[method-assign]
    assert dict(model.whole_parameters()).keys() == dict(copy.deepcopy(model).whole_parameters()).keys()
    model.forward = Decoder(model.spec).forward  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="has another forward"):
        model.stored_parameters()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_initial_weights_do_not_depend_on_torchs_default_dtype(dtype: torch.dtype) -> None:
    for options in ({"family": "lax", "gate": "tensor"}, {"family": "svd", "factor_init": "spectral"}):
        usual = Decoder(dim=32, ffn_dim=48, heads=4, layers=2, vocab_size=64, rank=8, dtype=torch.float32, **options)
        torch.set_default_dtype(dtype)
        try:
            other = Decoder(usual.spec)
        finally:
            torch.set_default_dtype(torch.float32)
        assert all(map(torch.equal, usual.parameters(), other.parameters()))


def test_documents_do_not_see_each_other() -> None:
    model = Decoder(**sizes("svd"))
    tokens, _ = data()
    ids = (torch.arange(16) // 8).expand(2, 16).contiguous()
    torch.testing.assert_close(model(tokens, document_ids=ids)[:, 8:], model(tokens[:, 8:]), rtol=1e-10, atol=1e-12)


def test_parts_are_plain_modules() -> None:
    model = Decoder(**sizes("cola"))
    names = dict(model.named_modules())
    assert isinstance(names["layers.1.attn.q_proj"], LowRankLinear)
    assert type(names["layers.1.mlp.down_proj.A"]) is torch.nn.Linear
    assert {"embedding.weight", "layers.0.attn.norm.weight", "layers.0.attn.k_proj.B.weight", "lm_head.weight"} <= {
        name for name, _ in model.named_parameters()
    }
    other = Decoder(**sizes("cola", seed=1))
    tokens, targets = data()
    assert other(tokens, targets).item() != model(tokens, targets).item()
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(tokens, targets), model(tokens, targets))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.get_parameter("layers.0.attn.q_proj.A.weight").zero_()
    assert torch.equal(other(tokens, targets), model(tokens, targets)), "a copy has weights of its own"
    assert twin(tokens, targets).item() != model(tokens, targets).item(), "and uses them"


class Doubled(torch.nn.Module):
    """Stands in for an adapter: another module in place of a factor."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base_layer, self.out_features = base, base.out_features

    def forward(self, x: Tensor) -> Tensor:
        doubled: Tensor = 2 * self.base_layer(x)
        return doubled


@pytest.mark.parametrize("name", ["svd", "cola", "lax", "dense"])
@pytest.mark.parametrize("grouping", [True, False])
def test_a_module_in_place_of_a_factor_is_called(name: str, grouping: bool) -> None:
    tokens, targets = data()
    expected, model = (Decoder(**sizes(name, grouping=grouping)) for _ in range(2))
    kind = "" if name == "dense" else ".B"
    for layer, linear in itertools.product((0, 1), ("attn.q_proj", "attn.o_proj", "mlp.up_proj", "mlp.down_proj")):
        path = f"layers.{layer}.{linear}{kind}"
        parent, _, child = path.rpartition(".")
        setattr(model.get_submodule(parent), child, Doubled(model.get_submodule(path)))  # type: ignore[arg-type]
        with torch.no_grad():
            expected.get_parameter(f"{path}.weight").mul_(2)
    assert model(tokens, targets).item() == pytest.approx(expected(tokens, targets).item(), rel=1e-13)


@pytest.mark.parametrize("name", ["cola-heads", "dense-heads"])
def test_biases_and_norms_of_heads_are_modules(name: str) -> None:
    """Called, because of their hooks, or read, they compute the same."""
    model = Decoder(**sizes(name))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.linspace(-1, 1, len(parameter), dtype=torch.float64))
    tokens, targets = data()
    called = copy.deepcopy(model)
    read = model(tokens, targets)
    read.backward()
    attn = called.layers[0].attn
    for module in (attn.q_norm, called.layers[1].attn.o_proj.B) if name == "cola-heads" else (attn.k_proj,):
        module.register_forward_hook(lambda *_: None)
    loss = called(tokens, targets)
    loss.backward()
    assert loss.item() == pytest.approx(read.item(), rel=1e-13)
    assert worst(gradients(called), gradients(model)) <= 1e-11
    kind = ".B" if name == "cola-heads" else ""
    called.get_submodule(f"layers.0.attn.v_proj{kind}").bias = None
    with pytest.raises(ConfigError, match=rf"attn\.v_proj{kind} has no bias"):
        called.stored_parameters()


@pytest.mark.parametrize("recompute", ["low-rank", "full-block"])
def test_recomputation_changes_nothing(recompute: str) -> None:
    tokens, targets = data()
    found = []
    for policy in ("none", recompute):
        model = Decoder(**sizes("cola", recompute=policy))
        model(tokens, targets).backward()
        found.append(gradients(model))
    assert worst(found[1], found[0]) <= 1e-13


# Numbers.


@pytest.mark.parametrize("wrong", [64, 1000, -1, -99, -101])
def test_targets_outside_the_vocabulary_raise_as_in_torch(wrong: int) -> None:
    tokens, targets = data()
    targets[1, 2] = wrong
    model = Decoder(**sizes("cola"))
    with pytest.raises(IndexError, match=f"target {wrong} is out of bounds: valid are 0 to 63, and -100"):
        model(tokens, targets)
    with pytest.raises(IndexError, match=f"Target {wrong} is out of bounds"):
        torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("name", ["targets", "document_ids"])
def test_each_token_has_one(name: str) -> None:
    tokens, targets = data()
    with pytest.raises(ConfigError, match=rf"{name} has shape \[2, 3\], but tokens has \[2, 16\]"):
        Decoder(**sizes("cola"))(tokens, **{"targets": targets, name: targets[:, :3]})


@pytest.mark.parametrize("name", ["double", "bfloat16", "half"])
def test_computation_follows_the_weights(name: str) -> None:
    tokens, targets = data()
    model, same = (Decoder(**sizes("cola", dtype=torch.float32)) for _ in range(2))
    dtype = getattr(model, name)().embedding.weight.dtype
    expected = Decoder(**sizes("cola", dtype=dtype))
    with torch.no_grad():
        for ours, theirs in zip(expected.parameters(), same.parameters(), strict=True):
            ours.copy_(theirs)
    for arguments in ((tokens,), (tokens, targets)):
        assert torch.equal(model(*arguments), expected(*arguments))
    assert model(tokens).dtype == model.compute_dtype == dtype
    mixed = Decoder(**sizes("cola", dtype=torch.float32, compute_dtype=torch.bfloat16)).double()
    assert mixed(tokens).dtype == torch.bfloat16, "a dtype that was asked for stays"


@pytest.mark.parametrize("with_targets", [True, False])
def test_second_derivatives_are_refused(with_targets: bool) -> None:
    tokens, targets = data()
    model = Decoder(**sizes("cola"))
    loss = model(tokens, targets if with_targets else None).sum()
    with pytest.raises(ConfigError, match="create_graph = True: boost.nn has no second derivatives"):
        torch.autograd.grad(loss, list(model.parameters()), create_graph=True)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_tied_head_stays_tied_when_parameters_are_replaced(assign: bool, wrapped: bool) -> None:
    trained, made = (boost.nn.Decoder(**SIZES, tied=True, seed=seed) for seed in (0, 1))
    model = nn.Sequential(made) if wrapped else made
    state = {f"0.{name}" if wrapped else name: value for name, value in trained.state_dict().items()}
    state = {name: value.clone() for name, value in state.items()}  # as from a file
    model.to_empty(device="cpu").load_state_dict(state, assign=assign)
    assert made.is_tied and len(list(made.parameters())) == len(list(trained.parameters()))
    tokens = torch.arange(8)[None]
    assert torch.equal(made(tokens), trained(tokens))
    head = next(name for name in state if name.endswith("lm_head.weight"))
    with pytest.raises(RuntimeError, match="differ, but the decoder is tied; build it with tied = False"):
        model.load_state_dict(state | {head: 2 * state[head]}, assign=assign)
    made.lm_head.weight = nn.Parameter(2 * made.embedding.weight)  # untied on purpose
    assert not made.float().is_tied
    model.load_state_dict(state | {head: 2 * state[head]}, assign=assign)
    assert not made.is_tied


def test_no_two_layers_use_one_cache() -> None:
    model = Decoder(**sizes("cola"))
    model.layers[1] = model.layers[0]
    with pytest.raises(ConfigError, match=r"attn\.layer of the layers is \[0, 0\].* copy shared modules"):
        model.make_caches(1, 8)
    model.layers[1] = copy.deepcopy(model.layers[0])
    with pytest.raises(ConfigError, match="set attn.layer to the index in layers"):
        model.make_caches(1, 8)
    model.layers[1].attn.layer = 1
    model.layers[0] = Wrapped(model.layers[0])
    assert len(model.make_caches(1, 8)) == 2
    del model.layers[0]
    with pytest.raises(ConfigError, match=r"the layers is \[1\]"):
        model.make_caches(1, 8)


def test_a_module_in_place_of_a_sublayer_is_named() -> None:
    model, (tokens, _) = Decoder(**sizes("cola")), data()
    model.layers[1].mlp = torch.nn.Identity()
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp is a .*Identity, not a LowRankMLP"):
        model(tokens)


def test_generation_calls_modules() -> None:
    """With hooks that change a prompt's hidden states, the tokens after it are those of whole passes."""
    model, (tokens, _) = Decoder(**sizes("cola")), data()
    ends = (model.embedding, model.norm, model.lm_head, model.layers[0].attn.q_proj, model.layers[1].mlp)
    before = model(tokens)
    for module in ends:
        module.register_forward_hook(lambda _module, _x, y: y + 0.5 * y.abs())
    logits = model(tokens)
    assert (logits - before).abs().max() > 0.1 * before.abs().max()
    caches = model.make_caches(2, 16)
    torch.testing.assert_close(model.next_logits(tokens[:, :9], caches), logits[:, 8], rtol=1e-10, atol=1e-12)
    for place in range(9, 16):
        new = model.next_logits(tokens[:, place : place + 1], caches)
        torch.testing.assert_close(new, logits[:, place], rtol=1e-10, atol=1e-12)


def test_hooks_of_all_modules_see_whole_sequences() -> None:
    """Such as those of profilers and of tools that capture activations: [B, S, width] from every module."""
    model, (tokens, targets) = Decoder(**sizes("cola")), data()
    names, seen = {module: name for name, module in model.named_modules()}, {}
    expected = model(tokens, targets)

    def see(module: Any, _x: Any, y: Any) -> None:
        seen[names[module]] = y.shape

    with torch.nn.modules.module.register_module_forward_hook(see):
        assert model(tokens, targets).item() == pytest.approx(expected.item(), rel=1e-13)
    assert seen.keys() == set(names.values()) - {"layers"}
    assert seen.pop("") == ()
    assert {name: shape[:2] for name, shape in seen.items()} == dict.fromkeys(seen, (2, 16))


def test_tensors_without_data() -> None:
    with FakeTensorMode():
        model, tokens = Decoder(**sizes("cola"), initialized=False), torch.zeros(2, 8, dtype=torch.int64)
        assert model(tokens, tokens).shape == () and model(tokens).shape == (2, 8, 64)
    model, tokens = Decoder(**sizes("cola"), device="meta"), torch.zeros(2, 8, dtype=torch.int64, device="meta")
    model(tokens, tokens).backward()  # as tools that count FLOPs do
    model.norm.register_forward_hook(lambda _module, _x, y: 2 * y)
    assert model(tokens).shape == (2, 8, 64)


@pytest.mark.slow
@pytest.mark.parametrize("hooked", [False, True])
def test_it_can_be_exported(hooked: bool) -> None:
    model, (tokens, _) = Decoder(**sizes("cola")), data()
    if hooked:
        model.layers[0].attn.register_forward_hook(lambda _module, _x, y: 2 * y)
    with torch.no_grad():
        exported = torch.export.export(model, (tokens,)).module()
        torch.testing.assert_close(exported(tokens), model(tokens), rtol=1e-12, atol=1e-14)


# Under TP.

ALL = [
    (name, layout, size, kv_heads)
    for name in FAMILIES
    for layout in layouts_of(boost.nn.Spec(**sizes(name)).model)
    for size, kv_heads in ((2, 8), (4, 2))
    if (name, layout, size) != ("lax-tensor", "vanilla", 4)  # the gate has two rows
]
CELLS = [pytest.param(*cell, marks=pytest.mark.nightly if number % 7 else ()) for number, cell in enumerate(ALL)]


def under_tp(name: str, layout: str, kv_heads: int) -> dict[str, float]:
    """Errors against one process, and how many collectives a pass issues beyond the table and the partial gradients."""
    tokens, targets = data()
    single, model = (
        Decoder(**sizes(name, kv_heads=kv_heads, mesh=mesh, layout=layout)) for mesh in (None, dist.group.WORLD)
    )
    single(tokens, targets).backward()
    counter = CollectiveCounter()
    with counter:
        loss = model(tokens, targets)
        loss.backward()
    partial = sum(fused.placement.partial for fused in fused_params(model))
    parallel = {"tp": dist.get_world_size(), "layout": layout}
    model_fields = {k: v for k, v in sizes(name, kv_heads=kv_heads).items() if k != "dtype"}
    config = toy.toy_config(model=model_fields, parallel=parallel, train={"micro_batch": 2, "global_batch": 2})
    table = micro_batch_collectives(config.model, config.parallel, tokens.numel(), "float64")
    expected = gradients(single)
    logits = single(tokens)
    weights, whole = dict(model.whole_parameters()), dict(single.whole_parameters())
    return {
        "weights": 0.0 if all(torch.equal(weights[k], whole[k]) for k in whole) else 1.0,
        "loss": abs(loss.item() / single(tokens, targets).item() - 1),
        "gradients": worst(gradients(model), expected),
        "logits": float((model(tokens) - logits).abs().max() / logits.abs().max()),
        "collectives": float(abs(len(counter.collectives) - len(table) - partial)),
    }


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout", "size", "kv_heads"), CELLS)
def test_under_a_layout_it_is_the_same_function(name: str, layout: str, size: int, kv_heads: int) -> None:
    for errors in run_distributed(size, under_tp, name, layout, kv_heads):
        assert errors["weights"] == errors["collectives"] == 0, errors
        assert max(errors.values()) <= 1e-10, errors


def logit_gradients(layout: str) -> float:
    """Of a loss on logits, such as distillation's."""
    tokens, _ = data()
    found = []
    for mesh in (None, dist.group.WORLD):
        model = Decoder(**sizes("cola", mesh=mesh, layout=layout))
        model(tokens).square().mean().backward()
        found.append(gradients(model))
    return worst(found[1], found[0])


@pytest.mark.parametrize("layout", ["btp", "btp-sp", "vanilla"])
def test_logits_have_complete_gradients(layout: str) -> None:
    assert max(run_distributed(2, logit_gradients, layout)) <= 1e-10


def accumulate(layout: str) -> tuple[float, int, int]:
    """(error of two accumulated passes, collectives of a pass, of one without sums of partial gradients)."""
    tokens, targets = data(ignored=False)
    model, single = (Decoder(**sizes("cola", mesh=mesh, layout=layout)) for mesh in (dist.group.WORLD, None))
    counts = []
    with model.no_sync(), CollectiveCounter() as counter:
        model(tokens, targets).backward()
    counts.append(len(counter.collectives))
    with CollectiveCounter() as counter:
        model(tokens.flip(0), targets.flip(0)).backward()
    counts.append(len(counter.collectives))
    for each in (tokens, tokens.flip(0)):
        single(each, targets if each is tokens else targets.flip(0)).backward()
    return worst(gradients(model), gradients(single)), counts[1], counts[0]


def test_accumulation_sums_partial_gradients_once() -> None:
    for error, with_sums, without in run_distributed(2, accumulate, "btp-sp"):
        assert error <= 1e-10
        assert without < with_sums


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"heads": 7}, r"model\.heads = 7"),
        ({"rank": 0}, r"model\.rank = 0"),
        ({"wide": 3}, r"model\.wide"),
        ({"layout": "btq"}, r"parallel\.layout = 'btq'.*did you mean 'btp'"),
        ({"family": "colla"}, r"model\.family = 'colla'.*did you mean 'cola'"),
        ({"recompute": "some"}, r"recompute = 'some' is not a policy; valid values: none"),
        ({"dtype": "bfloat16"}, r"dtype = 'bfloat16' is not a torch\.dtype; pass one, such as torch\.bfloat16"),
        ({"dp": 2}, r"dp = 2 does not apply to a module"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        Decoder(**{**sizes("cola"), **wrong})
    assert "\n" not in str(error.value)


def refuse() -> str:
    try:
        Decoder(**sizes("cola", heads=8, ffn_dim=49, mesh=dist.group.WORLD))
    except ConfigError as error:
        return str(error)
    return ""


def test_sizes_must_suit_the_mesh() -> None:
    assert all("model.ffn_dim = 49" in said for said in run_distributed(2, refuse))
