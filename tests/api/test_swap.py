"""`boost.lowrank`: the linears of any model as factors."""

import pytest
import torch
from torch import nn

import boost
from boost.errors import ConfigError
from boost.nn import LowRankLinear


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Sequential(nn.Linear(32, 32, bias=False)), nn.Linear(32, 4))


def test_a_fraction_of_each_width() -> None:
    model = mlp()
    before = sum(p.numel() for p in model.parameters())
    assert boost.lowrank(model, 0.25) is model
    assert [(m.rank, m.activation) for m in model.modules() if isinstance(m, LowRankLinear)] == [
        (4, "none"), (8, "none"), (1, "none"),
    ]  # fmt: skip
    assert sum(p.numel() for p in model.parameters()) < before
    model(torch.randn(3, 16)).sum().backward()


def test_singular_values_that_are_not_there_cost_nothing() -> None:
    model, x = mlp(), torch.randn(5, 16)
    with torch.no_grad():
        for linear in (model[0], model[2][0]):
            u, s, v = torch.linalg.svd(linear.weight, full_matrices=False)
            linear.weight.copy_((u[:, :3] * s[:3]) @ v[:3])
    expected = model(x)
    boost.lowrank(model, 3, exclude=["3"])
    assert type(model[3]) is nn.Linear
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)


def test_patterns_choose() -> None:
    model = boost.lowrank(mlp(), 2, include=["2.*"], init="random", activation="silu")
    assert [name for name, m in model.named_modules() if isinstance(m, LowRankLinear)] == ["2.0"]
    assert model[2][0].activation == "silu"
    again = boost.lowrank(model, 1, exclude=["0"])
    assert isinstance(again[3], LowRankLinear) and isinstance(again[2][0].A, nn.Linear), (
        "factors are not factored again"
    )


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_transformers_models(name: str) -> None:
    import transformers

    torch.manual_seed(0)
    if name == "llama":
        config = transformers.LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
        )
        model: nn.Module = transformers.LlamaForCausalLM(config)
        inside, count = ["*.q_proj", "*.mlp.*"], 8
    else:
        model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=4)
        )
        inside, count = ["*"], 8
    tokens = torch.randint(64, (2, 9))
    boost.lowrank(model, 0.25, include=inside)
    assert sum(isinstance(m, LowRankLinear) for m in model.modules()) == count
    assert type(model.get_output_embeddings()) is nn.Linear, "the head is left alone"  # type: ignore[operator]
    out = model(input_ids=tokens, labels=tokens)
    out.loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_conv1d_is_a_linear_with_a_transposed_weight() -> None:
    import transformers

    conv = transformers.pytorch_utils.Conv1D(24, 16)
    with torch.no_grad():
        u, s, v = torch.linalg.svd(conv.weight, full_matrices=False)
        conv.weight.copy_((u[:, :4] * s[:4]) @ v[:4])
        conv.bias.normal_()
    model, x = nn.Sequential(conv), torch.randn(3, 16)
    expected = model(x)
    torch.testing.assert_close(boost.lowrank(model, 4)(x), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("rank", "options", "said"),
    [
        (1.5, {}, r"rank = 1\.5 is no fraction of a linear's width; nearest valid value: 1\.0"),
        (30, {}, "its factors would not be smaller"),
        (2, {"include": ["attention.*"]}, "no linear has such a name"),
        (2, {"activation": "relu"}, "activation = 'relu' is unknown"),
    ],
)
def test_what_is_wrong_is_said(rank: float, options: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        boost.lowrank(mlp(), rank, **options)  # type: ignore[arg-type]
