"""`boost import`: the same function, the same bytes, and one-line errors."""

import itertools
import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, processors
from torch import Tensor

import boost
from boost.convert.export import export
from boost.data.store import TokenStore
from boost.errors import BoostError, CheckpointError, ConfigError
from boost.train.checkpoint import open_checkpoint
from tests import references, toy
from tests.convert.toys import (
    CASES,
    LLAMA,
    all_logits,
    bring,
    cases,
    exported,
    give,
    llama_folder,
    loaded,
    save,
    write_folder,
)


def there_and_back(source: Path, folder: Path, dtype: str | None = None) -> dict[str, Tensor]:
    """Imports and exports a folder, with a different shard size."""
    bring(source, folder / "imported")
    export(open_checkpoint(folder / "imported"), folder / "back", dtype, False, 10**9)
    return load_file(folder / "back" / "model.safetensors")


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype
        assert torch.equal(actual[name], tensor), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_llama_comes_back_to_the_byte(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = llama_folder(tmp_path / "theirs", dtype)
    named = "float16" if dtype == torch.float16 else None
    assert_same(there_and_back(tmp_path / "theirs", tmp_path, named), tensors)
    said = json.loads((tmp_path / "back" / "config.json").read_text())
    for field in LLAMA:
        assert said[field] == LLAMA[field], field


def test_a_dense_model_that_no_class_of_transformers_computes_is_not_exported(tmp_path: Path, store: Path) -> None:
    model = {"family": "dense", "attn_bias": "qkv", "qk_norm": True}
    with pytest.raises(ConfigError, match="have no common class for dense models in transformers"):
        exported(tmp_path, model, store / "tokenizer.json")
    assert not (tmp_path / "out").exists()


LLAMA_3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_act": "linear"},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}, "rope_scaling": LLAMA_3_ROPE},
        {"rope_parameters": {**LLAMA_3_ROPE, "rope_theta": 50.0}, "rope_theta": 7.0},
        {"rope_scaling": {**LLAMA_3_ROPE, "rope_theta": 50.0}, "rope_parameters": {"rope_type": "default"}},
        {"rope_scaling": LLAMA_3_ROPE, "rope_theta": 50.0},
        {"rope_scaling": LLAMA_3_ROPE, "rope_parameters": {"rope_type": "default"}, "rope_theta": 50.0},
        {"rope_scaling": {k: v for k, v in LLAMA_3_ROPE.items() if not k.startswith("original")}, "rope_theta": 50.0},
    ],
    ids=["act", "both", "new", "theta in the old one", "old", "theta at the top", "no original length"],
)
def test_settings_are_read_as_transformers_does(tmp_path: Path, changes: dict[str, Any], transformers: Any) -> None:
    """Those with two spellings, too; and a folder of transformers itself, in several files and its own form of config.json."""
    config = {key: value for key, value in LLAMA.items() if key != "rope_theta"} | changes
    write_folder(tmp_path / "theirs", config, llama_folder(tmp_path / "theirs"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
    theirs.save_pretrained(tmp_path / "saved", max_shard_size="20KB")
    tokens, _ = toy.toy_tokens(toy.toy_config())
    for folder, files in (("theirs", 1), ("saved", 3)):
        assert len(list((tmp_path / folder).glob("*.safetensors"))) >= files
        bring(tmp_path / folder, tmp_path / f"of {folder}", file_bytes=9000)
        assert len(list((tmp_path / f"of {folder}" / "tensors").iterdir())) > 2
        with torch.no_grad():
            actual = all_logits(loaded(tmp_path / f"of {folder}")[0], tokens)
            torch.testing.assert_close(actual, theirs(tokens).logits, rtol=1e-4, atol=1e-5)


TIED = ["llama", "llama with a stored head", "cola", "cola-gqa", "lax-tensor"]
"""Folders of every form: LLaMA, the official CoLA class, and our modeling file."""


@pytest.mark.parametrize("form", TIED)
def test_a_tied_folder_stays_tied_unless_asked(form: str, tmp_path: Path, store: Path, transformers: Any) -> None:
    theirs, head = tmp_path / "theirs", "lm_head.weight"
    if form.startswith("llama"):
        tensors, config = llama_folder(theirs), dict(LLAMA)
    else:
        theirs = exported(tmp_path, CASES[form][0], store / "tokenizer.json")
        tensors, config = load_file(theirs / "model.safetensors"), json.loads((theirs / "config.json").read_text())
    tensors[head] = tensors["model.embed_tokens.weight"].clone()
    if form != "llama with a stored head":
        del tensors[head]
    write_folder(theirs, {**config, "tie_word_embeddings": True}, tensors)
    more, other = config["vocab_size"] * 32, theirs.parent
    done = bring(theirs, other / "tied", untie=False)
    decoder, _ = loaded(done.path)
    model = boost.Model.from_pretrained(theirs)
    assert decoder.model.tied and done.untied == 0 and model.decoder.lm_head.weight is model.decoder.embedding.weight
    assert "head" not in toy.weights(decoder)
    back = load_file(give(done.path, other / "back") / "model.safetensors")
    assert_same(back, {name: tensor for name, tensor in tensors.items() if name != head})
    with torch.no_grad():
        tokens, _ = toy.toy_tokens(toy.toy_config())
        again = transformers.AutoModelForCausalLM.from_pretrained(other / "back", trust_remote_code=True)
        assert again.lm_head.weight is again.model.embed_tokens.weight
        torch.testing.assert_close(all_logits(decoder, tokens), again(tokens).logits, rtol=1e-4, atol=1e-5)
    done = bring(theirs, other / "two", untie=True)
    assert done.untied == more
    decoder, _ = loaded(done.path)
    model = boost.Model.from_pretrained(theirs, untie=True)
    for weights in (toy.weights(decoder), dict(model.decoder.whole_parameters())):
        assert torch.equal(weights["head"], weights["embed"])
        assert weights["head"].data_ptr() != weights["embed"].data_ptr()
    # A head of its own is none that shares the embedding, whatever config.json says.
    write_folder(
        theirs, {**config, "tie_word_embeddings": True}, {**tensors, head: torch.zeros(config["vocab_size"], 32)}
    )
    apart = bring(theirs, tmp_path / "apart", untie=False)
    assert not apart.model.tied and any("lm_head.weight differs" in note for note in apart.notes)
    boost.Model.from_pretrained(theirs)


def official_cola(path: Path, only_lr_act: bool | None) -> dict[str, Tensor]:
    """A folder as the official CoLA class would save it."""
    d, f, r = 32, 48, 8
    widths = {f"self_attn.{p}": (d, d) for p in "qkvo"}
    widths |= {"mlp.gate": (d, f), "mlp.up": (d, f), "mlp.down": (f, d)}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (64, d), "lm_head.weight": (64, d)}
    for layer in range(2):
        for name, (d_in, d_out) in widths.items():
            shapes |= {f"model.layers.{layer}.{name}_proj.cola_a": (d_in, r)}
            shapes |= {f"model.layers.{layer}.{name}_proj.cola_b": (r, d_out)}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"model.layers.{layer}.{norm}.weight"] = (d,)
    shapes["model.norm.weight"] = (d,)
    generator = torch.Generator().manual_seed(3)
    tensors = {name: torch.randn(shape, generator=generator).mul(0.4) for name, shape in shapes.items()}
    config = {**LLAMA, "model_type": "cola", "architectures": ["ColaForCausalLM"], "rank": r, "lr_act_type": "silu"}
    config["num_key_value_heads"] = 4  # fewer are in the configuration only: the class makes k and v of full width
    config |= {} if only_lr_act is None else {"only_lr_act": only_lr_act}
    write_folder(path, config, tensors)
    return tensors


def by_our_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """For the reference of the family: the official class stores factors transposed."""
    ours = {"embed": tensors["model.embed_tokens.weight"], "head": tensors["lm_head.weight"]}
    ours["final_norm"] = tensors["model.norm.weight"]
    for layer in range(2):
        at, to = f"model.layers.{layer}", f"layers.{layer}"
        ours[f"{to}.attn_norm"] = tensors[f"{at}.input_layernorm.weight"]
        ours[f"{to}.mlp_norm"] = tensors[f"{at}.post_attention_layernorm.weight"]
        for theirs, part, names in (("self_attn", "attn", "qkvo"), ("mlp", "mlp", ("gate", "up", "down"))):
            for name, factor in itertools.product(names, "AB"):
                ours[f"{to}.{part}.{name}.{factor}"] = tensors[f"{at}.{theirs}.{name}_proj.cola_{factor.lower()}"].T
    return ours


@pytest.mark.parametrize(("only_lr_act", "silu"), [(True, False), (False, True), (None, False)])
@pytest.mark.slow
def test_an_official_cola_checkpoint(tmp_path: Path, only_lr_act: bool | None, silu: bool) -> None:
    """The official class omits SwiGLU's silu unless only_lr_act is false; export writes it explicitly."""
    tensors = official_cola(tmp_path / "theirs", only_lr_act)
    assert_same(there_and_back(tmp_path / "theirs", tmp_path), tensors)
    decoder, _ = loaded(tmp_path / "imported")
    tokens, _ = toy.toy_tokens(toy.toy_config())
    shape = references.Shape(4, 4, LLAMA["rms_norm_eps"], LLAMA["rope_theta"], silu)
    expected = references.cola(by_our_names(tensors), shape, tokens)
    actual = all_logits(decoder, tokens)
    assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max()
    theirs, back = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("theirs", "back"))
    for field in ("model_type", "architectures", "rank", "hidden_act", "lr_act_type"):
        assert back[field] == theirs[field], field
    assert back["only_lr_act"] is not silu


@pytest.mark.parametrize("case", cases(case for case in CASES if case != "svd-merged"))
@pytest.mark.slow
def test_our_own_exports_come_back_to_the_byte(case: str, tmp_path: Path, store: Path) -> None:
    model, merge, _ = CASES[case]
    first = exported(tmp_path, model, store / "tokenizer.json", merge)
    assert_same(there_and_back(first, tmp_path), load_file(first / "model.safetensors"))
    ours, imported = open_checkpoint(tmp_path / "c"), open_checkpoint(tmp_path / "imported")
    same = set(type(ours.config.model).model_fields) - {"factor_init"}
    assert {f: getattr(ours.config.model, f) for f in same} == {f: getattr(imported.config.model, f) for f in same}
    said, back = (json.loads((folder / "config.json").read_text()) for folder in (first, tmp_path / "back"))
    assert said == back


@pytest.mark.slow
def test_what_transformers_saved_again_comes_in(tmp_path: Path, store: Path, transformers: Any) -> None:
    """Such as after fine-tuning elsewhere: our fields are still there, in transformers' form of config.json."""
    first = exported(tmp_path, CASES["lax-tensor"][0], store / "tokenizer.json")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(first, trust_remote_code=True)
    with torch.no_grad():
        theirs.model.norm.weight.mul_(2)
    theirs.save_pretrained(tmp_path / "tuned")
    bring(tmp_path / "tuned", tmp_path / "imported")
    tokens, _ = toy.toy_tokens(toy.toy_config())
    with torch.no_grad():
        expected = theirs(tokens).logits
    torch.testing.assert_close(all_logits(loaded(tmp_path / "imported")[0], tokens), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("narrow", "wide"), [("bfloat16", "float32"), ("float16", "bfloat16")])
def test_mixed_precision_loses_nothing(narrow: str, wide: str, tmp_path: Path) -> None:
    tensors = llama_folder(tmp_path / "theirs", getattr(torch, narrow))
    norm = torch.linspace(0.9, 1.1, 32).to(getattr(torch, wide))
    write_folder(tmp_path / "theirs", LLAMA, tensors | {"model.norm.weight": norm})
    assert bring(tmp_path / "theirs", tmp_path / "out").dtype == "float32"
    weights = toy.weights(loaded(tmp_path / "out")[0])
    assert torch.equal(weights["final_norm"], norm.float())
    assert torch.equal(weights["embed"], tensors["model.embed_tokens.weight"].float())
    assert bring(tmp_path / "theirs", tmp_path / "named", dtype="bfloat16").dtype == "bfloat16"


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_a_dtype_that_runs_do_not_know_is_refused_by_tensor(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = llama_folder(tmp_path / "theirs")
    name = "model.layers.1.mlp.up_proj.weight"
    write_folder(tmp_path / "theirs", LLAMA, tensors | {name: tensors[name].to(dtype)})
    with pytest.raises(CheckpointError, match=rf"'{name}' has dtype (I8|F8_E4M3), which is not supported") as caught:
        bring(tmp_path / "theirs", tmp_path / "out")
    assert "\n" not in str(caught.value)


def test_half_precision_that_would_overflow_is_refused(tmp_path: Path) -> None:
    tensors = llama_folder(tmp_path / "theirs")
    tensors["lm_head.weight"][3, 3] = 7e4
    write_folder(tmp_path / "theirs", LLAMA, tensors)
    with pytest.raises(ConfigError, match=r"float16 overflows in 'lm_head\.weight'"):
        there_and_back(tmp_path / "theirs", tmp_path, "float16")


def test_the_tokenizer_is_that_of_a_store_made_with_it(tmp_path: Path, store: Path) -> None:
    llama_folder(tmp_path / "theirs", vocab_size=300)
    (tmp_path / "theirs" / "tokenizer.json").write_text((store / "tokenizer.json").read_text())
    bring(tmp_path / "theirs", tmp_path / "out")
    found = open_checkpoint(tmp_path / "out")
    assert found.require_tokenizer() == TokenStore.open(store).fingerprint
    assert (found.data["eos"], found.data["bos"]) == (2, None), "the tokenizer adds none, whatever config.json names"
    bring(tmp_path / "theirs", tmp_path / "named", tokenizer=store)
    assert open_checkpoint(tmp_path / "named").require_tokenizer() == TokenStore.open(store).fingerprint


@pytest.mark.parametrize("adds", [True, False])
def test_a_prompt_starts_as_the_tokenizer_does(adds: bool, tmp_path: Path, store: Path, transformers: Any) -> None:
    """Whatever bos_token config.json and tokenizer_config.json name, as in transformers; and so it does after an export."""
    tokenizer = Tokenizer.from_file(str(store / "tokenizer.json"))
    tokenizer.add_special_tokens(["<s>"])
    start = tokenizer.token_to_id("<s>")
    if adds:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", start)])
    theirs = tmp_path / "theirs"
    llama_folder(theirs, vocab_size=tokenizer.get_vocab_size(), bos_token_id=start, eos_token_id=0)
    tokenizer.save(str(theirs / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>"}
    (theirs / "tokenizer_config.json").write_text(json.dumps(settings))
    bring(theirs, tmp_path / "c")
    assert open_checkpoint(tmp_path / "c").data["bos"] == (start if adds else None)
    out = give(tmp_path / "c", tmp_path / "out")
    before, after = (transformers.AutoTokenizer.from_pretrained(path) for path in (theirs, out))
    assert before("def main").input_ids == after("def main").input_ids
    assert (before("def main").input_ids[0] == start) == adds
    assert (after.bos_token, json.loads((out / "config.json").read_text())["bos_token_id"]) == ("<s>", start)
    bring(out, tmp_path / "again")
    first, again = (open_checkpoint(tmp_path / name).data for name in ("c", "again"))
    assert (again["bos"], again["tokenizer"]) == (first["bos"], first["tokenizer"])


CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"boost_lowrank": {"ranks": {}}}, "merge them first: boost.merge_lowrank"),
    ({"transformers_weights": "other.safetensors"}, "transformers_weights = 'other.safetensors'"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "has no low_freq_factor"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type = 'linear'"),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type = 'yarn'"),
    ({"attention_bias": True}, r"has no tensor 'model\.layers\.0\.self_attn\.q_proj\.bias' \(8 are missing\)"),
    ({"attention_bias": True, "model_type": "mistral"}, "attention_bias = true .* not supported for 'mistral'"),
    ({"mlp_bias": True}, "mlp_bias = true"),
    ({"head_dim": 16}, r"q_proj\.weight' has shape \[32, 32\], but config.json implies \[64, 32\]"),
    ({"head_dim": None, "model_type": "qwen3"}, "head_dim = null .* not valid for 'qwen3'"),
    (
        {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4},
        "sliding_window = 4 .* has no sliding windows",
    ),
    (
        {"model_type": "qwen2", "layer_types": ["full_attention", "sliding_attention"], "sliding_window": None},
        "layer_types has",
    ),
    ({"model_type": "smollm3", "layer_types": ["chunked_attention"] * 2}, "layer_types has 'chunked_attention'"),
    ({"model_type": "smollm3", "no_rope_layers": [1]}, r"no_rope_layers = \[1\] .* each of the 2 layers"),
    ({"attention_multiplier": 0.5}, "attention_multiplier = 0.5 .* valid value: 1"),
    ({"model_type": "gemma3_text"}, "valid values: 'llama', 'mistral', 'qwen2', 'qwen3', 'smollm3' and 'cola'"),
    ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    ({"is_causal": False}, r"is_causal = false .* \(bidirectional attention\)"),
    ({"model_type": "mamba"}, "model_type = 'mamba'"),
    (
        {"model_type": "mistral", "sliding_window": 4},
        "to use the model within one window, set max_position_embeddings = 4",
    ),
    ({"model_type": "mistral", "num_key_value_heads": None}, "num_key_value_heads = null"),
    ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    ({"num_hidden_layers": None}, "model.layers = None must be an integer"),
    ({"num_attention_heads": 5, "head_dim": None}, "model.heads = 5 must divide model.dim = 32"),
    ({"num_hidden_layers": 1 << 17}, "model.layers = 131072 exceeds 10000"),
    ({"num_hidden_layers": 100}, "num_hidden_layers = 100 .* requires more tensors than the 21 in the"),
    ({"max_position_embeddings": float("inf")}, "max_position_embeddings = inf"),
    ({"max_position_embeddings": "12"}, "max_position_embeddings = '12'"),
    ({"max_position_embeddings": 10**30}, "max_position_embeddings = 10{30} "),
    ({"head_dim": "a\nb"}, r"head_dim = 'a\\nb'"),
    ({"rope_theta": "a\nb"}, "model.rope_theta"),
    ({"quantization_config": {"quant_method": "a\nb"}}, r"quantization_config \('a\\nb'\)"),
    ({"num_hidden_layers": 3}, r"has no tensor 'model\.layers\.2\..*\(9 are missing\)"),
    ({"num_hidden_layers": 1}, r"has an unexpected tensor 'model\.layers\.1\."),
    (
        {"intermediate_size": 64},
        r"'model\.layers\.0\.mlp\.gate_proj\.weight' has shape \[48, 32\], but config.json implies \[64, 32\]",
    ),
    ({"vocab_size": 65}, r"'model\.embed_tokens\.weight' has shape \[64, 32\]"),
    ({"num_key_value_heads": 4}, r"k_proj\.weight' has shape \[16, 32\], but config.json implies \[32, 32\]"),
]


@pytest.mark.parametrize(("changes", "message"), CONFIGS, ids=[message[:24] for _, message in CONFIGS])
def test_what_our_decoder_has_not_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    llama_folder(tmp_path / "theirs")
    (tmp_path / "theirs" / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    with pytest.raises(BoostError, match=message) as caught:
        bring(tmp_path / "theirs", tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["theirs"]


class Evil:
    def __reduce__(self) -> Any:
        return open, ("executed", "w")


def test_a_pickle_is_refused_and_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    llama_folder(tmp_path / "theirs")
    (tmp_path / "theirs" / "model.safetensors").unlink()
    (tmp_path / "theirs" / "pytorch_model.bin").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match=r"pickle \(pytorch_model.bin\).*safe_serialization=True"):
        bring(tmp_path / "theirs", tmp_path / "out")
    assert not (tmp_path / "executed").exists()


def test_damaged_and_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no folder at"):
        bring(tmp_path / "nowhere", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        bring(tmp_path / "empty", tmp_path / "out")
    tensors = llama_folder(tmp_path / "theirs")
    weights = tmp_path / "theirs" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors' is damaged"):
        bring(tmp_path / "theirs", tmp_path / "out")
    save_file(tensors, weights)
    weights.rename(weights.with_name("model-00001-of-00001.safetensors"))
    index = {"weight_map": dict.fromkeys(tensors, "gone.safetensors")}
    (tmp_path / "theirs" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"lists the missing file 'gone.safetensors'"):
        bring(tmp_path / "theirs", tmp_path / "out")
    for strange in (["x"], 3, {"a": "b"}, None, "../theirs/model.safetensors", "/etc/passwd", ".."):
        text = json.dumps({"weight_map": {"a": strange, "b": "model.safetensors"}})
        (tmp_path / "theirs" / "model.safetensors.index.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"index\.json': weight_map = .* is not a valid file name"):
            bring(tmp_path / "theirs", tmp_path / "out")
    (tmp_path / "theirs" / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json' cannot be read"):
        bring(tmp_path / "theirs", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_rotary_frequencies_of_old_checkpoints_are_not_asked_for(tmp_path: Path) -> None:
    tensors = llama_folder(tmp_path / "theirs")
    more = {f"model.layers.{n}.self_attn.rotary_emb.inv_freq": torch.ones(4) for n in range(2)}
    write_folder(tmp_path / "theirs", LLAMA, tensors | more)
    assert_same(there_and_back(tmp_path / "theirs", tmp_path), tensors)


def test_a_checkpoint_of_ours_needs_no_import(tmp_path: Path, store: Path) -> None:
    path = save(tmp_path / "a run", toy.toy_config("float32", model={"family": "dense"}), store / "tokenizer.json")
    with pytest.raises(ConfigError, match=r"boost train --start-from '.*/a run/step-\d+', or"):
        bring(path, tmp_path / "out")


@pytest.mark.parametrize("newer", ["single", "shards"])
def test_two_sets_of_weights_are_the_one_that_transformers_loads(newer: str, tmp_path: Path) -> None:
    """model.safetensors, whichever is newer; and a note names both."""
    tensors, theirs = llama_folder(tmp_path / "theirs"), tmp_path / "theirs"
    shard, index = "model-00001-of-00001.safetensors", "model.safetensors.index.json"
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, theirs / shard)
    (theirs / index).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, shard)}))
    if newer == "single":
        save_file(tensors, theirs / "model.safetensors", metadata={"format": "pt"})
    (note,) = bring(theirs, tmp_path / "imported").notes
    assert torch.equal(toy.weights(loaded(tmp_path / "imported")[0])["embed"], tensors["model.embed_tokens.weight"])
    assert "those in model.safetensors, as transformers loads them" in note and f"also has {shard} and 1 more" in note
    with pytest.warns(UserWarning, match="those in model.safetensors"):
        boost.Model.from_pretrained(theirs)
    (theirs / "model.safetensors").rename(theirs / "model-00002-of-00002.safetensors")
    (note,) = bring(theirs, tmp_path / "shards").notes
    assert f"those in {shard}, as" in note and "also has model-00002-of-00002.safetensors, which" in note
    (theirs / index).unlink()
    with pytest.raises(CheckpointError, match=r"2 safetensors files \(model-00001-of-.* no model\..*index"):
        bring(theirs, tmp_path / "neither")


def test_an_adapter_next_to_the_weights_is_refused_with_the_command_that_merges(tmp_path: Path) -> None:
    llama_folder(tmp_path / "theirs")
    (tmp_path / "theirs" / "adapter_config.json").write_text("{}")
    for way in (bring, boost.Model.from_pretrained):
        with pytest.raises(CheckpointError, match=r"has an adapter .*merge_and_unload\(\)"):
            way(tmp_path / "theirs", *[tmp_path / "out"] * (way is bring))


def test_fields_that_are_not_used_are_named(tmp_path: Path) -> None:
    rope = {"rope_scaling": {"rope_type": "default", "factor": 4.0}}
    own = {"auto_map": {"AutoModelForCausalLM": "modeling_own.Own"}, "qk_norm": True}  # ours in other folders only
    llama_folder(
        tmp_path / "theirs", attention_dropout=0.1, sliding_window=None, use_cache=True, is_causal=True, **rope, **own
    )
    (note,) = bring(tmp_path / "theirs", tmp_path / "out").notes
    named = 'attention_dropout = 0.1, auto_map = {"AutoModelForCausalLM": "modeling_own.Own"}'
    fields = f"{named}, qk_norm = true, rope_scaling.factor = 4.0"
    assert note.endswith(f"fields of config.json: {fields}")


@pytest.mark.parametrize("token", [-1, 64, [64]])
def test_an_end_token_without_a_row_is_named_and_not_used(token: Any, tmp_path: Path) -> None:
    llama_folder(tmp_path / "theirs", eos_token_id=token)
    (note,) = bring(tmp_path / "theirs", tmp_path / "out").notes
    assert f"eos_token_id = {str(token).strip('[]')}" in note
    assert open_checkpoint(tmp_path / "out").data["eos"] is None


def test_an_end_token_at_which_generation_does_not_end_is_named(tmp_path: Path, store: Path) -> None:
    tokenizer = Tokenizer.from_file(str(store / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|im_end|>"])
    size = tokenizer.get_vocab_size()
    llama_folder(tmp_path / "theirs", vocab_size=size, eos_token_id=0)
    tokenizer.save(str(tmp_path / "theirs" / "tokenizer.json"))
    (tmp_path / "theirs" / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    (note,) = bring(tmp_path / "theirs", tmp_path / "out").notes
    assert f"end token has id {size - 1}, but generation ends only at 0" in note
    (tmp_path / "theirs" / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, size - 1]}))
    assert bring(tmp_path / "theirs", tmp_path / "both").notes == []


def test_a_token_after_every_text_is_named(tmp_path: Path, store: Path) -> None:
    """Written as add_eos_token."""
    tokenizer = Tokenizer.from_file(str(store / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(single="$A E", special_tokens=[("E", 0)])
    llama_folder(tmp_path / "theirs", vocab_size=tokenizer.get_vocab_size(), eos_token_id=0)
    tokenizer.save(str(tmp_path / "theirs" / "tokenizer.json"))
    (note,) = bring(tmp_path / "theirs", tmp_path / "out").notes
    assert "adds a token after every text, which boost and its exports leave out" in note


def test_generation_settings_that_are_not_used_are_named(tmp_path: Path) -> None:
    llama_folder(tmp_path / "theirs")
    used = {"_from_model_config": True, "eos_token_id": [2, 3], "do_sample": True, "temperature": 0.6, "num_beams": 1}
    (tmp_path / "theirs" / "generation_config.json").write_text(json.dumps({**used, "repetition_penalty": 1.05}))
    (note,) = bring(tmp_path / "theirs", tmp_path / "out").notes
    assert note.endswith("fields of generation_config.json: repetition_penalty = 1.05")
    for ends in ([[2]], {"2": 2}, "2", 1.5):
        (tmp_path / "theirs" / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
        with pytest.raises(ConfigError, match="eos_token_id = .*theirs' is neither a token id nor a list of them"):
            bring(tmp_path / "theirs", tmp_path / "other")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e39])
def test_weights_that_are_not_finite_are_counted_and_refused(value: float, tmp_path: Path) -> None:
    """Those that overflow in the wanted dtype, too."""
    tensors = {name: tensor.double() for name, tensor in llama_folder(tmp_path / "theirs").items()}
    tensors["model.norm.weight"][3:5] = value
    tensors["lm_head.weight"][0, 0] = value
    write_folder(tmp_path / "theirs", LLAMA, tensors)
    said = r"3 of 19,616 weights are NaN or infinite in float32, in 2 tensors, such as"
    with pytest.raises(ConfigError, match=said + r".*--allow-nonfinite"):
        bring(tmp_path / "theirs", tmp_path / "out", dtype="float32")
    assert not (tmp_path / "out").exists()
    (note,) = bring(tmp_path / "theirs", tmp_path / "out", dtype="float32", nonfinite=True).notes
    assert re.match(said, note)
    if value != 1e39:
        with pytest.warns(UserWarning, match="2 tensors have NaN or infinite values, such as"):
            boost.Model.from_pretrained(tmp_path / "theirs")


def test_a_tokenizer_larger_than_the_embedding_is_named(tmp_path: Path, store: Path) -> None:
    tokenizer = Tokenizer.from_file(str(store / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    llama_folder(tmp_path / "theirs", vocab_size=size, eos_token_id=0)
    tokenizer.add_special_tokens(["<pad>"])
    tokenizer.save(str(tmp_path / "theirs" / "tokenizer.json"))
    (note,) = bring(tmp_path / "theirs", tmp_path / "out").notes
    assert f"token ids up to {size}, but the embedding has {size} rows" in note
    assert f"resize_token_embeddings({size + 1})" in note
