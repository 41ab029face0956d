"""`boost.lowrank`: the linears of any model as factors."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import boost
from boost.api.swap import ranks_of
from boost.errors import ConfigError
from boost.format import format_count
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


def test_patterns_choose() -> None:
    model = boost.lowrank(mlp(), 2, include="2.*", init="random", activation="silu")
    assert [name for name, m in model.named_modules() if isinstance(m, LowRankLinear)] == ["2.0"]
    assert model[2][0].activation == "silu"
    with pytest.raises(ConfigError, match="the matching linears are already factorized"):
        boost.lowrank(model, 1, include="2.*")
    again = boost.lowrank(model, 1, exclude=["0"])
    assert isinstance(again[3], LowRankLinear) and isinstance(again[2][0].A, nn.Linear), (
        "factors are not factored again"
    )


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_stays_tied_and_counts_once(tied: bool, caplog: pytest.LogCaptureFixture) -> None:
    import transformers

    config = transformers.LlamaConfig(**{**TINY, "vocab_size": 320}, tie_word_embeddings=tied)
    model, body = transformers.LlamaForCausalLM(config), 17_568
    with caplog.at_level("INFO", logger="boost.api.swap"):
        boost.lowrank(model, 0.25)
    ends = 320 * 32 * (1 if tied else 2)
    assert sum(p.numel() for p in model.parameters()) == ends + 8_096
    assert f"parameters: {format_count(ends + body)} -> {format_count(ends + 8_096)}" in caplog.text
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    if tied:
        with pytest.raises(ConfigError, match=r"'lm_head': this linear shares its weight .* tie_word_embeddings"):
            boost.lowrank(model, 0.25, include=["*", "lm_head"])
    else:
        boost.lowrank(model, 0.25, include=["lm_head"])
        assert ranks_of(model)["lm_head"] == 8


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


TINY = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = {**TINY, "num_key_value_heads": 2}
GPT = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
SIDES = {
    f"{side}_{field}": n
    for side in ("encoder", "decoder")
    for field, n in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 48))
}
T5 = {
    "vocab_size": 64,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any], int]] = {
    "Llama": ("ForCausalLM", TINY, 14),
    "Mistral": ("ForCausalLM", GROUPED, 14),
    "Qwen2": ("ForCausalLM", GROUPED, 14),
    "Qwen3": ("ForCausalLM", {**GROUPED, "head_dim": 8}, 14),
    "Gemma2": ("ForCausalLM", {**GROUPED, "head_dim": 8}, 14),
    "Phi3": ("ForCausalLM", {**TINY, "pad_token_id": 0}, 8),
    "Mixtral": ("ForCausalLM", {**GROUPED, "num_local_experts": 2}, 8),
    "Olmo": ("ForCausalLM", TINY, 14),
    "StableLm": ("ForCausalLM", {**TINY, "num_key_value_heads": 4}, 14),
    "GPT2": ("LMHeadModel", GPT, 8),
    "GPTNeo": ("ForCausalLM", {**TINY, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}, 12),
    "GPTNeoX": ("ForCausalLM", TINY, 8),
    "GPTJ": ("ForCausalLM", {**GPT, "rotary_dim": 4}, 12),
    "OPT": ("ForCausalLM", {**TINY, "ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 32}, 12),
    "Bloom": ("ForCausalLM", {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4}, 8),
    "Falcon": ("ForCausalLM", TINY, 8),
    "Mamba": ("ForCausalLM", {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}, 8),
    "T5": ("ForConditionalGeneration", T5, 32),
    "Bart": ("ForConditionalGeneration", {"vocab_size": 64, "d_model": 32, "max_position_embeddings": 32, **SIDES}, 32),
    "Bert": ("ForMaskedLM", TINY, 13),
    "Roberta": ("ForMaskedLM", {**TINY, "pad_token_id": 1}, 13),
    "Electra": ("ForMaskedLM", {**TINY, "embedding_size": 32}, 13),
    "ViT": ("ForImageClassification", {**TINY, "image_size": 8, "patch_size": 4}, 13),
}  # fmt: skip
"""(what follows the name, configuration, linears that become factors)."""


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_any_architecture_trains_is_saved_loaded_and_merged(name: str, tmp_path: Path) -> None:
    import transformers

    kind, fields, count = ARCHITECTURES[name]
    torch.manual_seed(0)
    model = getattr(transformers, name + kind)(getattr(transformers, f"{name}Config")(**fields)).eval()
    inputs = {"input_ids": torch.randint(2, 64, (2, 9)), "labels": torch.randint(2, 64, (2, 9))}
    if name == "ViT":
        inputs = {"pixel_values": torch.randn(2, 3, 8, 8), "labels": torch.tensor([0, 1])}
    boost.lowrank(model, 0.25)
    loss = model(**inputs).loss
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    model.save_pretrained(tmp_path)
    again = boost.load_lowrank(tmp_path).eval()
    assert type(again) is type(model) and ranks_of(again) == ranks_of(model) and len(ranks_of(model)) == count
    assert again(**inputs).loss == loss
    boost.merge_lowrank(again).save_pretrained(tmp_path / "merged")
    assert not ranks_of(again)
    merged = type(model).from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(merged(**inputs).loss, loss, rtol=1e-5, atol=1e-6)


def test_a_folder_without_ranks_is_refused(tmp_path: Path) -> None:
    import transformers

    transformers.LlamaConfig(**TINY).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"its config\.json has no valid boost_lowrank"):
        boost.load_lowrank(tmp_path)


def test_ranks_by_pattern_and_subclasses_of_linear() -> None:
    class Same(nn.Linear):
        """As Falcon's."""

    class Other(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    model = nn.Sequential(nn.Linear(16, 32), Same(32, 32), Other(32, 32), nn.Linear(32, 16))
    model.append(nn.MultiheadAttention(16, 2))
    boost.lowrank(model, {"0": 3, "[12]": 0.25, "4.*": 2})
    assert ranks_of(model) == {"0": 3, "1": 8}


@pytest.mark.parametrize(
    ("rank", "options", "said"),
    [
        ("a", {}, "rank = 'a' is not a number"),
        (0, {}, "rank = 0 is too small; smallest valid value: 1"),
        ({"0": 2.0}, {}, r"rank = 2\.0 is not a fraction"),
        ({"attention.*": 2}, {}, "no pattern in rank matches a linear, such as"),
        (2, {"include": "attention.*"}, "include = .'attention.*',.: nothing to replace"),
        (1.5, {}, r"rank = 1\.5 is not a fraction of a linear's width; nearest valid value: 1\.0"),
        (30, {}, "no factors would be smaller"),
        (2, {"include": ["attention.*"]}, "no replaceable linear matches these patterns"),
        (2, {"activation": "relu"}, "activation = 'relu' is unknown"),
    ],
)
def test_what_is_wrong_is_said(rank: float, options: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        boost.lowrank(mlp(), rank, **options)  # type: ignore[arg-type]
