"""`boost.lowrank`: the linears of any model as factors."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.utils.prune
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
    model: Any = boost.lowrank(mlp(), 2, include="2.*", init="random", activation="silu")
    assert [name for name, m in model.named_modules() if isinstance(m, LowRankLinear)] == ["2.0"]
    assert model[2][0].activation == "silu"
    with pytest.raises(ConfigError, match="the matching linears are already factorized"):
        boost.lowrank(model, 1, include="2.*")
    again: Any = boost.lowrank(model, 1, exclude=["0"])
    assert isinstance(again[3], LowRankLinear) and isinstance(again[2][0].A, nn.Linear), (
        "factors are not factored again"
    )


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_stays_tied_and_counts_once(
    tied: bool, caplog: pytest.LogCaptureFixture, transformers: Any
) -> None:
    config = transformers.LlamaConfig(**{**TINY, "vocab_size": 320}, tie_word_embeddings=tied)
    model, body = transformers.LlamaForCausalLM(config), 17_568
    with caplog.at_level("INFO", logger="boost.api.swap"):
        boost.lowrank(model, 0.25)
    ends = 320 * 32 * (1 if tied else 2)
    assert sum(p.numel() for p in model.parameters()) == ends + 8_096
    assert f"parameters: {format_count(ends + body)} -> {format_count(ends + 8_096)}" in caplog.text
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    if tied:
        with pytest.raises(ConfigError, match=r"'lm_head': .* shares its weight .* tie_word_embeddings"):
            boost.lowrank(model, 0.25, include=["*", "lm_head"])
    else:
        boost.lowrank(model, 0.25, include=["lm_head"])
        assert ranks_of(model)["lm_head"] == 8


def test_conv1d_is_a_linear_with_a_transposed_weight(transformers: Any) -> None:
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
    "Bert": ("ForMaskedLM", TINY, 12),
    "Roberta": ("ForMaskedLM", {**TINY, "pad_token_id": 1}, 12),
    "Electra": ("ForMaskedLM", {**TINY, "embedding_size": 32}, 12),
    "ViT": ("ForImageClassification", {**TINY, "image_size": 8, "patch_size": 4}, 12),
}  # fmt: skip
"""(what follows the name, configuration, linears that become factors)."""


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_any_architecture_trains_is_saved_loaded_and_merged(name: str, tmp_path: Path, transformers: Any) -> None:
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


@pytest.mark.parametrize("way", ["base factorized", "base saved", "compiled"])
def test_ranks_are_those_of_the_model_that_is_saved(way: str, tmp_path: Path, transformers: Any) -> None:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY)).eval()
    factorized = {
        "base factorized": model.model,
        "base saved": model,
        "compiled": torch.compile(model, backend="eager"),
    }
    boost.lowrank(factorized[way], 8)
    saved = model.model if way == "base saved" else model
    saved.save_pretrained(tmp_path)
    tokens = torch.randint(2, 64, (2, 9))
    again = boost.load_lowrank(tmp_path).eval()
    assert torch.equal(again(tokens)[0], saved(tokens)[0]) and ranks_of(again) == ranks_of(saved)


def test_every_model_in_a_wrapper_has_its_ranks(transformers: Any) -> None:
    both: Any = nn.ModuleList(transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY)) for _ in range(2))
    boost.lowrank(both, 8)
    assert [part.config.boost_lowrank["ranks"] for part in both] == [ranks_of(part) for part in both]


def test_factors_that_no_rank_names_are_refused(tmp_path: Path, transformers: Any) -> None:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY))
    boost.lowrank(model, 8, include="lm_head")
    boost.lowrank(model.model, 8)  # the record of the head is lost
    model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="does not name 'lm_head.A.weight'; factorize the whole model"):
        boost.load_lowrank(tmp_path)


def test_a_module_that_is_no_longer_factors_is_refused(tmp_path: Path, transformers: Any) -> None:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY))
    boost.lowrank(model, 8)
    model.model.layers[0].mlp.up_proj = nn.Linear(32, 64, bias=False)
    model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"names a module without 'model\.layers\.0\.mlp\.up_proj\.A\.weight'"):
        boost.load_lowrank(tmp_path)


class Upcasting(nn.Linear):
    """A bf16 weight and a fp32 bias."""

    def __init__(self) -> None:
        super().__init__(16, 16)
        self.weight.data = self.weight.data.bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x.float(), self.weight.float(), self.bias)


def test_linears_of_another_kind_stay() -> None:
    model = nn.Sequential(Upcasting(), nn.Linear(16, 16))
    boost.lowrank(model, 2)
    assert type(model[0]) is Upcasting and type(model[1]) is not nn.Linear


def test_weights_that_are_not_finite_have_no_svd() -> None:
    model = mlp()
    model[0].weight.data[3, 1] = float("nan")
    with pytest.raises(ConfigError, match="'0' has NaN or infinite weights"):
        boost.lowrank(model, 2)
    assert boost.lowrank(model, 2, init="random")(torch.ones(1, 16)).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_quantized_weights_are_refused(dtype: torch.dtype) -> None:
    model = mlp()
    model[0].weight = nn.Parameter(model[0].weight.to(dtype), requires_grad=False)
    with pytest.raises(ConfigError, match=rf"'0' has a weight of type Parameter \({dtype}\).* exclude the linear"):
        boost.lowrank(model, 2)
    assert not ranks_of(model)


def test_a_folder_without_ranks_is_refused(tmp_path: Path, transformers: Any) -> None:
    transformers.LlamaConfig(**TINY).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"its config\.json has no valid boost_lowrank"):
        boost.load_lowrank(tmp_path)


def test_the_ranks_are_those_of_the_folder_with_the_weights(tmp_path: Path, transformers: Any) -> None:
    for folder, activation in ((tmp_path, "none"), (tmp_path / "best", "silu")):
        model = boost.lowrank(transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY)), 4, activation=activation)
        model.save_pretrained(folder)  # type: ignore[operator]
    (tmp_path / "model.safetensors").unlink()
    found = boost.load_lowrank(tmp_path, subfolder="best")
    assert found.model.layers[0].mlp.up_proj.activation == "silu"


def test_linears_that_round_their_weights_are_left() -> None:
    class Rounded(nn.Linear):  # as float8 training and fake quantization do
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x, self.weight.to(torch.float8_e4m3fn).to(x.dtype), self.bias)

    model = nn.Sequential(nn.Linear(32, 32), Rounded(32, 32))
    for part in model:
        part.weight.data.mul_(0.01)
    assert ranks_of(boost.lowrank(model, 4)) == {"0": 4}


def test_ranks_by_pattern_and_subclasses_of_linear() -> None:
    class Same(nn.Linear):
        """As Falcon's."""

    class Other(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    model = nn.Sequential(nn.Linear(16, 32), Same(32, 32), Other(32, 32), nn.Linear(32, 16))
    model.append(nn.MultiheadAttention(16, 2))
    boost.lowrank(model, {"0": 3, "[12]": 0.25})
    assert ranks_of(model) == {"0": 3, "1": 8}


class Adapted(nn.Linear):
    """As loralib's: a weight, and an update that starts at zero."""

    def __init__(self) -> None:
        super().__init__(32, 32)
        self.lora_A, self.lora_B = nn.Parameter(torch.randn(2, 32)), nn.Parameter(torch.zeros(32, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + x @ self.lora_A.T @ self.lora_B.T


def test_a_linear_with_parameters_of_its_own_is_left() -> None:
    """Also one whose weight is computed from others, such as a pruned one."""
    pruned = torch.nn.utils.prune.l1_unstructured(nn.Linear(32, 32), "weight", 0.5)  # type: ignore[no-untyped-call]
    model = nn.Sequential(
        nn.Linear(32, 32), Adapted(), pruned, nn.utils.parametrizations.weight_norm(nn.Linear(32, 32))
    )
    boost.lowrank(model, 4)
    assert ranks_of(model) == {"0": 4}


ATTACHED: dict[str, Any] = {
    "has hooks": lambda linear: linear.register_full_backward_hook(lambda *_: None),
    "has hooks or": lambda linear: linear.register_state_dict_post_hook(lambda *_: None),
    "has hooks or is compiled": lambda linear: linear.compile(backend="eager"),
    "has another forward": lambda linear: setattr(linear, "forward", lambda x: 2 * x),
    "has gradient hooks": lambda linear: linear.bias.register_post_accumulate_grad_hook(lambda _: None),
}


@pytest.mark.parametrize("said", ATTACHED)
def test_what_factors_would_drop_is_refused(said: str) -> None:
    model = mlp()
    ATTACHED[said](model[0])
    with pytest.raises(ConfigError, match=f"^'0' {said}[^\n]*; attach it after boost.lowrank"):
        boost.lowrank(model, 2)
    assert not ranks_of(model), "none is factorized"
    boost.lowrank(model, 2, exclude="0")
    ATTACHED[said](model[3] if "gradient" not in said else model[3].B)
    with pytest.raises(ConfigError, match=f"(linear|factor B) {said}.*, or remove it"):
        boost.merge_lowrank(model)


def test_buffers_and_submodules_are_not_dropped() -> None:
    class Dropped(nn.Linear):
        def __init__(self) -> None:
            super().__init__(32, 32)
            self.dropout = nn.Dropout()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.dropout(super().forward(x))
            return y

    model = nn.Sequential(nn.Linear(32, 32), Dropped().eval(), nn.Linear(32, 32))
    model[2].register_buffer("mean", torch.zeros(32))
    assert ranks_of(boost.lowrank(model, 4)) == {"0": 4}


def test_a_shared_linear_stays_shared() -> None:
    shared = nn.Linear(32, 32)
    model: Any = nn.Sequential(nn.Linear(32, 32), shared, nn.GELU(), nn.Sequential(shared))
    assert ranks_of(boost.lowrank(model, 4)) == {"0": 4} and model[1] is model[3][0]
    with pytest.raises(ConfigError, match="include = '1': this linear shares its weight"):
        boost.lowrank(model, 4, include=["1"])
    model[1] = model[3][0] = LowRankLinear(32, 32, 4)
    x = torch.randn(3, 32)
    before = model(x)
    torch.testing.assert_close(boost.merge_lowrank(model)(x), before)
    assert type(model[1]) is nn.Linear and model[1] is model[3][0]


def test_factors_train_if_their_linear_did(tmp_path: Path) -> None:
    model = mlp()
    model[0].weight.requires_grad_(False)
    model[2].requires_grad_(False)
    boost.lowrank(model, 2, include=["0", "2.*"])
    frozen = {"0.A.weight", "0.B.weight", "2.0.A.weight", "2.0.B.weight"}
    assert {name for name, p in model.named_parameters() if not p.requires_grad} == frozen
    boost.merge_lowrank(model)
    assert {name for name, p in model.named_parameters() if not p.requires_grad} == {"0.weight", "2.0.weight"}


@pytest.mark.slow
def test_frozen_conv1d(transformers: Any) -> None:
    model = nn.Sequential(transformers.pytorch_utils.Conv1D(24, 16)).requires_grad_(False)
    boost.lowrank(model, 4)
    assert not any(p.requires_grad for p in model.parameters())
    assert not any(p.requires_grad for p in boost.merge_lowrank(model).parameters())


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["LlamaForSequenceClassification", "LlamaForQuestionAnswering", "BertForTokenClassification"]
)
def test_heads_stay_dense_and_are_named(kind: str, caplog: pytest.LogCaptureFixture, transformers: Any) -> None:
    def build() -> Any:
        return getattr(transformers, kind)(getattr(transformers, f"{kind[:5].strip('F')}Config")(**TINY, num_labels=3))

    model = build()
    (head,) = (name for name, part in model.named_modules() if isinstance(part, nn.Linear) and "layer" not in name)
    with caplog.at_level("INFO", logger="boost.api.swap"):
        boost.lowrank(model, 0.25)
    assert head not in ranks_of(model) and f"heads left dense: {head}" in caplog.text
    with pytest.raises(ConfigError, match=f"'{head}' are heads, which stay dense"):
        boost.lowrank(build(), 1, include=[f"*{head[1:]}"])
    for options in ({"include": ["*", head]}, {"rank": {head: 1}}):
        assert ranks_of(boost.lowrank(build(), **{"rank": 0.25, **options}))[head] == 1  # type: ignore[arg-type]


class Experts(nn.Module):
    """A mixture of experts: a list, or one weight for all of them."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.router = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 8))
        self.experts: Any = nn.Module() if fused else nn.ModuleList(nn.Linear(32, 32) for _ in range(8))
        if fused:
            self.experts.up = nn.Parameter(torch.randn(8, 32, 32))
        self.shared = nn.Linear(32, 32)


@pytest.mark.parametrize("fused", [False, True])
def test_routers_stay_dense_and_are_named(fused: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Small errors in a router choose other experts."""
    with caplog.at_level("INFO", logger="boost.api.swap"):
        assert ranks_of(boost.lowrank(Experts(fused), 0.25)).keys() == {
            "shared", *(() if fused else (f"experts.{number}" for number in range(8)))
        }  # fmt: skip
    assert "routers left dense: router.1" in caplog.text
    with pytest.raises(ConfigError, match=r"because 'router\.1' are routers, which stay dense unless include names"):
        boost.lowrank(Experts(fused), 0.25, include="router.*")
    assert ranks_of(boost.lowrank(Experts(fused), 0.25, include="router.1")) == {"router.1": 2}


@pytest.mark.slow
def test_fused_experts_stay_dense_and_are_counted(caplog: pytest.LogCaptureFixture, transformers: Any) -> None:
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**GROUPED, num_local_experts=2))
    if not any(p.ndim == 3 for p in model.parameters()):
        pytest.skip("this version of transformers has linears as experts")
    count = sum(p.numel() for p in model.parameters() if p.ndim == 3)
    boost.lowrank(model, 0.25)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert f"4 fused weights with {format_count(count)} parameters stay dense" in warning
    caplog.clear()
    boost.lowrank(transformers.MixtralForCausalLM(model.config), 0.25, include="*.self_attn.*")
    assert "fused" not in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"include": ["*v_proj.base_layer"]}, {"include": "*.v_proj.lora_A.default"}])
def test_a_linear_with_an_adapter_is_refused(options: dict[str, Any], transformers: Any) -> None:
    peft = pytest.importorskip("peft")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY))
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["v_proj"]))
    with pytest.raises(ConfigError, match=r"v_proj' has an adapter.* before get_peft_model"):
        boost.lowrank(adapted, 0.25, **options)
    trainable = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    boost.lowrank(adapted, 0.25, include="*.mlp.*")  # linears without one
    assert sum(p.numel() for p in adapted.parameters() if p.requires_grad) == trainable
    factorized = boost.lowrank(transformers.LlamaForCausalLM(model.config), 0.25)
    ranks = ranks_of(factorized)
    *_, last = ranks
    adapted = peft.get_peft_model(factorized, peft.LoraConfig(r=2, target_modules=[f"{last}.A"]))
    with pytest.raises(ConfigError, match=r"factor A is a peft\..*Linear; merge the adapter first"):
        boost.merge_lowrank(adapted)
    assert ranks_of(adapted.get_base_model()) == ranks, "none is merged"


@pytest.mark.slow
def test_load_reads_safetensors_only_and_runs_no_code(tmp_path: Path, transformers: Any) -> None:
    model = boost.lowrank(transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY)), 0.25)
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    good = json.loads(path.read_text())

    def says(changes: dict[str, Any], message: str) -> None:
        path.write_text(json.dumps({**good, **changes}))
        with pytest.raises(ConfigError, match=message) as caught:
            boost.load_lowrank(tmp_path)
        assert "\n" not in str(caught.value)

    place = "model.layers.0.mlp.up_proj"
    for rank in (True, 0.5, "8", None, [4], -3, 0, 10**9):
        says({"boost_lowrank": {"ranks": {place: rank}}}, rf"rank = {re.escape(repr(rank))}")
    for other in ("model", "model.layers.0", "nothing", ""):
        says(
            {"boost_lowrank": {"ranks": {other: 4}}},
            rf"names module '{other}', which is not a linear of LlamaForCausalLM",
        )
    says({"boost_lowrank": {"ranks": {place: 4}, "activation": "relu"}}, "activation = 'relu' is unknown")
    says({"boost_lowrank": {"ranks": [4]}}, "no valid boost_lowrank entry")
    says({"architectures": [3]}, "the architecture 3 in its config.json is not")
    says(
        {"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}},
        "config.json cannot be read: .*trust_remote_code",
    )
    path.write_text(json.dumps(good))
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").write_bytes(b"1234")
    with pytest.raises(ConfigError, match="has a damaged safetensors file: "):
        boost.load_lowrank(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="has no safetensors weights; pickles are not read"):
        boost.load_lowrank(tmp_path)


@pytest.mark.parametrize(
    ("rank", "options", "said"),
    [
        ("a", {}, "rank = 'a' is not a number"),
        (0, {}, "rank = 0 is too small; smallest valid value: 1"),
        ({"0": 2.0}, {}, r"rank = 2\.0 is not a fraction"),
        ({"0": 2, "attention.*": 2}, {}, r"rank: pattern 'attention\.\*' matches no linear"),
        ({"*": 2, "0": 2}, {}, "rank: pattern '0' matches no linear that is left to it"),
        ({3: 2}, {}, "rank = 3 is not a pattern"),
        (2, {"include": [3]}, "include = 3 is not a pattern"),
        (2, {"include": ["0", "attention.*"]}, r"include: pattern 'attention\.\*' matches no linear"),
        (2, {"exclude": ["0", "attention.*"]}, r"exclude: pattern 'attention\.\*' matches no"),
        (2, {"exclude": ["attention.*"]}, r"exclude: pattern 'attention\.\*' matches no"),
        (float("nan"), {}, "rank = nan is not a fraction"),
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
