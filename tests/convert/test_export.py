"""transformers loads what `boost export` writes and computes the same function."""

import copy
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, processors

from boost.convert.export import export
from boost.convert.vocabulary import read_vocabulary
from boost.data.tokenizer import load_tokenizer, tokenizer_fingerprint
from boost.models.decoder import Decoder
from boost.train.checkpoint import open_checkpoint
from boost.train.generate import generate
from boost.train.sampling import Sampling
from tests import toy
from tests.convert.toys import CASES, GB, all_logits, bring, cases, exported, give, llama_folder, loaded, save
from tests.distributed import run_distributed

pytestmark = pytest.mark.slow

transformers: Any


@pytest.fixture(autouse=True, scope="module")
def imported() -> None:
    """By the worker that runs this file alone: every worker collects it, and the import takes seconds."""
    global transformers
    transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module", params=cases())
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, store: Path) -> tuple[Decoder, Any]:
    """Our decoder, and the transformers model of its export."""
    model, merge, expected = CASES[request.param]
    home = tmp_path_factory.mktemp(request.param)
    folder = exported(home, {"init_std": 0.5, **model}, store / "tokenizer.json", merge)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert type(theirs).__name__ == expected
    assert theirs.config.tie_word_embeddings is False
    return loaded(next((home / "c").glob("step-*")))[0], theirs


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max()


@torch.no_grad()
def test_logits_and_loss_are_equal(pair: tuple[Decoder, Any]) -> None:
    ours, theirs = pair
    tokens, _ = toy.toy_tokens(toy.toy_config())
    expected = all_logits(ours, tokens)
    for implementation in ("sdpa", "eager"):
        theirs.set_attn_implementation(implementation)
        output = theirs(tokens, labels=tokens)
        assert_close(output.logits, expected)
    loss = torch.nn.functional.cross_entropy(expected[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    torch.testing.assert_close(output.loss, loss, rtol=1e-5, atol=0)
    masked = tokens.clone()
    masked[:, :7] = -100
    kept = torch.nn.functional.cross_entropy(expected[:, 6:-1].flatten(0, 1), tokens[:, 7:].flatten())
    torch.testing.assert_close(theirs(tokens, labels=masked).loss, kept, rtol=1e-5, atol=0)
    # As trainers ask for it: the targets of each position, and the number of all targets in the step.
    targets = {"labels": tokens, "shift_labels": tokens.roll(-2, 1), "num_items_in_batch": 7}
    total = torch.nn.functional.cross_entropy(expected.flatten(0, 1), tokens.roll(-2, 1).flatten(), reduction="sum")
    torch.testing.assert_close(theirs(tokens, **targets).loss, total / 7, rtol=1e-5, atol=0)
    assert_close(theirs(tokens, logits_to_keep=2).logits, expected[:, -2:])
    states = theirs(tokens, output_hidden_states=True).hidden_states
    assert len(states) == ours.model.layers + 1
    assert_close(theirs.lm_head(states[-1]), expected)


@torch.no_grad()
def test_trainers_shift_smoothed_labels(pair: tuple[Decoder, Any], tmp_path: Path, transformers: Any) -> None:
    pytest.importorskip("accelerate")
    ours, theirs = pair
    tokens, _ = toy.toy_tokens(toy.toy_config())
    logits, labels = all_logits(ours, tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
    smoothed = torch.nn.functional.cross_entropy(logits, labels, label_smoothing=0.1)
    arguments = transformers.TrainingArguments(str(tmp_path), label_smoothing_factor=0.1, use_cpu=True, report_to=[])
    trainer = transformers.Trainer(theirs, arguments)
    loss = trainer.compute_loss(theirs, {"input_ids": tokens, "labels": tokens.clone()})
    torch.testing.assert_close(loss, smoothed, rtol=1e-5, atol=0)


@torch.no_grad()
def test_text_is_equal_with_and_without_cache_and_padding(pair: tuple[Decoder, Any]) -> None:
    ours, theirs = pair
    theirs.set_attn_implementation("sdpa")
    prompts = [[5, 9, 33, 2, 7, 41, 8], [11, 3, 60]]
    # No end of a document, behind which ours goes on and theirs does not.
    greedy = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = [list(generate(ours, prompt, 9, Sampling(temperature=0))) for prompt in prompts]
    assert len({token for text in expected for token in text}) > 2, "text that says one word would show little"
    for prompt, text in zip(prompts, expected, strict=True):
        for use_cache in (True, False):
            made = theirs.generate(torch.tensor([prompt]), use_cache=use_cache, **greedy)
            assert made[0, len(prompt) :].tolist() == text
    padded = torch.tensor([prompts[0], [0] * 4 + prompts[1]])
    mask = torch.tensor([[1] * 7, [0] * 4 + [1] * 3])
    made = theirs.generate(padded, attention_mask=mask, **greedy)
    assert made[:, 7:].tolist() == expected
    # Padding on the right, as for training: what stands before it does not see it.
    right = torch.tensor([prompts[0], prompts[1] + [0] * 4])
    mask = torch.tensor([[1] * 7, [1] * 3 + [0] * 4])
    assert_close(theirs(right, attention_mask=mask).logits[1, :3], theirs(torch.tensor([prompts[1]])).logits[0])


@torch.no_grad()
def test_a_chunk_behind_a_cache_is_as_the_whole(pair: tuple[Decoder, Any]) -> None:
    _, theirs = pair
    tokens, _ = toy.toy_tokens(toy.toy_config())
    whole = theirs(tokens).logits
    first = theirs(tokens[:, :5], use_cache=True)
    name = "cache" if "cache" in first else "past_key_values"  # renamed in transformers 5.24
    second = theirs(tokens[:, 5:], **{name: first[name]}, use_cache=True)
    assert_close(torch.cat((first.logits, second.logits), dim=1), whole)


def test_gradients_reach_every_weight_but_those_that_nothing_reads(pair: tuple[Decoder, Any]) -> None:
    _, theirs = pair
    tokens, _ = toy.toy_tokens(toy.toy_config())
    theirs.zero_grad()
    theirs(tokens, labels=tokens).loss.backward()
    assert all(weight.grad is not None and weight.grad.abs().sum() > 0 for weight in theirs.parameters())


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_changes_no_gradient(pair: tuple[Decoder, Any], reentrant: bool) -> None:
    theirs = copy.deepcopy(pair[1]).train()
    tokens, _ = toy.toy_tokens(toy.toy_config())
    theirs(tokens, labels=tokens).loss.backward()
    expected = {name: weight.grad for name, weight in theirs.named_parameters()}
    theirs.zero_grad()
    theirs.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    calls: list[int] = []
    theirs.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    theirs(tokens, labels=tokens).loss.backward()
    assert len(calls) == 2, "the block was not computed again"
    for name, weight in theirs.named_parameters():
        torch.testing.assert_close(weight.grad, expected[name], rtol=1e-5, atol=1e-7)


@torch.no_grad()
def test_the_body_alone(pair: tuple[Decoder, Any]) -> None:
    _, theirs = pair
    tokens, _ = toy.toy_tokens(toy.toy_config())
    path = theirs.config._name_or_path
    body = transformers.AutoModel.from_pretrained(path, trust_remote_code=True)
    assert type(body).__name__ == type(theirs).__name__.replace("ForCausalLM", "Model")
    torch.testing.assert_close(theirs.lm_head(body(tokens).last_hidden_state), theirs(tokens).logits)


def test_a_model_of_the_configuration_alone_has_sound_weights(pair: tuple[Decoder, Any]) -> None:
    torch.manual_seed(0)
    theirs = type(pair[1])(copy.deepcopy(pair[1].config))
    assert {name for name, _ in theirs.named_parameters()} == {name for name, _ in pair[1].named_parameters()}
    assert not any(weight.isnan().any() for weight in theirs.parameters())
    tokens, _ = toy.toy_tokens(toy.toy_config())
    loss = theirs(tokens, labels=tokens).loss
    assert 1 < loss.item() < 40


def test_what_our_class_does_not_compute_is_refused(pair: tuple[Decoder, Any]) -> None:
    config = pair[1].config
    if "modeling_" in type(config).__module__:
        with pytest.raises(ValueError, match="rope_scaling = .*yarn.* is not supported"):
            type(config)(**{**config.to_dict(), "rope_scaling": {"type": "yarn", "factor": 4.0}})
        for field in ["gate"] * hasattr(config, "gate") + ["latent_act"] * (config.model_type != "cola"):
            with pytest.raises(ValueError, match=f"{field} = 'own'.* is not supported"):
                type(config)(**{**config.to_dict(), field: "own"})
        type(config)(
            **{**config.to_dict(), "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta}}
        )


def _save_on_mesh(folder: Path, tokenizer: Path) -> str:
    config = toy.toy_config("float32", model={"family": "cola", "kv_heads": 8}, parallel={"layout": "btp", "tp": 2})
    return str(save(folder, config, tokenizer))


def test_a_checkpoint_of_two_processes_in_several_files(tmp_path: Path, store: Path) -> None:
    """Shards of two processes become whole tensors, in files no larger than requested."""
    tokenizer = store / "tokenizer.json"
    two = Path(run_distributed(2, _save_on_mesh, tmp_path / "two", tokenizer)[0])
    assert len(list((two / "tensors").glob("*.safetensors"))) == 2
    done = export(open_checkpoint(two), tmp_path / "out", None, True, 16_000)
    files = sorted((tmp_path / "out").glob("model-*.safetensors"))
    assert len(files) == done.files > 2
    assert all(file.stat().st_size < 16_000 + 4_000 for file in files)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == done.bytes == 4 * done.parameters
    assert set(index["weight_map"].values()) == {file.name for file in files}
    decoder, _ = loaded(two)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
    expected = toy.weights(decoder)
    assert torch.equal(theirs.model.embed_tokens.weight, expected["embed"])
    assert torch.equal(theirs.model.layers[1].self_attn.v_proj.B.weight, expected["layers.1.attn.v.B"])
    tokens, _ = toy.toy_tokens(toy.toy_config())
    assert_close(theirs(tokens).logits, all_logits(decoder, tokens))


def test_bfloat16_tokenizer_and_generation_configuration(tmp_path: Path, store: Path) -> None:
    config = toy.toy_config("float32", model={"vocab_size": 300})
    path = save(tmp_path / "c", config, store / "tokenizer.json", eos=0)
    done = export(open_checkpoint(path), tmp_path / "out", "bfloat16", True, GB)
    assert done.dtype == "bfloat16"
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True, dtype="auto")
    assert model.dtype == torch.bfloat16
    assert all(weight.dtype == torch.bfloat16 for weight in model.parameters())
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (0, 0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out", trust_remote_code=True)
    text = "def main(x):\n    return x + 1\n"
    assert tokenizer(text)["input_ids"] == load_tokenizer(store / "tokenizer.json").encode(text).ids
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id) == (0, 0, 0)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "# out\n" in card and 'from_pretrained("out", trust_remote_code=True)' in card


POST_PROCESSORS: dict[str, tuple[dict[str, Any], int | None]] = {
    "t5": ({"single": "$A </s>", "pair": "$A </s> $B </s>"}, None),
    "llama": ({"single": "<s> $A", "pair": "<s> $A <s> $B"}, 1),
    "llama-3": ({"single": "<s> $A </s>", "pair": "<s> $A <s> $B"}, 1),
    "none": ({}, 1),
}


@pytest.mark.parametrize(
    ("family", "kind"), [*zip(itertools.cycle(("dense", "cola")), POST_PROCESSORS, strict=False), ("dense", "llama")]
)
def test_a_prompt_is_encoded_as_generate_does(kind: str, family: str, tmp_path: Path, store: Path) -> None:
    """As `boost generate`, for any post-processor of the tokenizer: training used none of it, and an end of text would end the
    prompt."""
    template, bos = POST_PROCESSORS[kind]
    tokenizer = Tokenizer.from_file(str(store / "tokenizer.json"))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    known = [(token, tokenizer.token_to_id(token)) for token in ("<s>", "</s>")]
    parts: list[Any] = [processors.ByteLevel(trim_offsets=False)] if kind == "llama-3" else []
    parts += [processors.TemplateProcessing(special_tokens=known, **template)] if template else []
    if parts:
        tokenizer.post_processor = parts[0] if len(parts) == 1 else processors.Sequence(parts)
    start, eos = (known[0][1] if bos else None), known[1][1]
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    exported(tmp_path, {"vocab_size": size, "family": family}, tmp_path / "tokenizer.json", eos=eos, bos=start)
    (path,) = (tmp_path / "c").glob("step-*")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out", trust_remote_code=True)
    ours = load_tokenizer(path / "tokenizer.json")
    for text in ("def main(x):\n    return x + 1\n", "a </s> b<s>"):
        prompt = ([] if start is None else [start]) + ours.encode(text, add_special_tokens=False).ids
        assert theirs(text).input_ids == theirs.encode(text) == theirs([text]).input_ids[0] == prompt
        assert theirs.decode(prompt, skip_special_tokens=True) == text
    assert eos not in prompt
    assert theirs.decode([*prompt[:4], eos], skip_special_tokens=True) == theirs.decode(
        prompt[:4], skip_special_tokens=True
    )
    assert (theirs.eos_token_id, theirs.bos_token_id) == (eos, eos if start is None else start)
    # The checkpoint's own is as it was, and is what the folder is recognized by when it comes back.
    assert (path / "tokenizer.json").read_text() == (tmp_path / "tokenizer.json").read_text()
    back = read_vocabulary(tmp_path / "out")
    assert back.start == start
    assert back.fingerprint == tokenizer_fingerprint(load_tokenizer(tmp_path / "tokenizer.json"))


@pytest.mark.parametrize("name", ["extra_special_tokens", "additional_special_tokens"])
def test_special_tokens_are_written_for_every_version_of_transformers(name: str, tmp_path: Path, store: Path) -> None:
    """transformers 5 saves them as a list under a name for which 4 expects a mapping."""
    tokenizer = Tokenizer.from_file(str(store / "tokenizer.json"))
    tokenizer.add_special_tokens(["<a>", "<b>"])
    theirs = tmp_path / "theirs"
    llama_folder(theirs, vocab_size=tokenizer.get_vocab_size())
    tokenizer.save(str(theirs / "tokenizer.json"))
    (theirs / "tokenizer_config.json").write_text(json.dumps({name: ["<a>", "<b>"]}))
    bring(theirs, tmp_path / "c")
    out = give(tmp_path / "c", tmp_path / "out")
    content = json.loads((out / "tokenizer_config.json").read_text())
    assert content["additional_special_tokens"] == ["<a>", "<b>"] and "extra_special_tokens" not in content
    loaded_tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert {"<a>", "<b>"} <= set(loaded_tokenizer.all_special_tokens)


def test_what_an_export_changes_is_said(tmp_path: Path, store: Path) -> None:
    model = {"family": "svd", "mlp_silu": False}
    path = save(tmp_path / "c", toy.toy_config("float32", model=model), store / "tokenizer.json")
    done = export(open_checkpoint(path), tmp_path / "out", None, True, GB)
    kept = export(open_checkpoint(path), tmp_path / "kept", None, False, GB)
    merged, act = done.notes
    assert f"{done.parameters:,} parameters instead of {kept.parameters:,}; --no-merge (merge=False) keeps" in merged
    assert "llama.cpp ignore it" in act and "vLLM refuses it; --no-merge" in act
    assert kept.notes == []


@pytest.mark.parametrize(
    ("model", "noted"),
    [
        ({"qk_norm": True, "rope_factor": 8.0}, "rope_factor = 8 in a Qwen3"),
        ({"attn_bias": "qkv", "rope_factor": 8.0}, "rope_factor = 8 in a Qwen2"),
        ({"nope_layers": [0], "layers": 4}, "nope_layers = [0]"),
        ({"nope_layers": [3], "layers": 4}, ""),
        ({"rope_factor": 8.0}, ""),
        ({"qk_norm": True}, ""),
    ],
)
def test_what_llama_cpp_computes_differently_is_said(
    model: dict[str, Any], noted: str, tmp_path: Path, store: Path
) -> None:
    """As compared with llama.cpp itself; its converter is in no package."""
    path = save(tmp_path / "c", toy.toy_config("float32", model={"family": "dense"} | model), store / "tokenizer.json")
    notes = export(open_checkpoint(path), tmp_path / "out", None, True, GB).notes
    notes = [note for note in notes if "llama.cpp" in note]
    assert len(notes) == bool(noted) and all(noted in note for note in notes)


@pytest.mark.parametrize("case", ["qwen2", "dense"])
def test_a_tokenizer_that_transformers_would_change_is_named(
    case: str, tmp_path: Path, store: Path, transformers: Any
) -> None:
    path = save(tmp_path / "c", toy.toy_config("float32", model=CASES[case][0]), store / "tokenizer.json")
    notes = export(open_checkpoint(path), tmp_path / "out", None, True, GB).notes
    text = "cafe\u0301"  # in NFC, one character less
    expected = Tokenizer.from_file(str(store / "tokenizer.json")).encode(text).ids
    auto, plain = (
        getattr(transformers, kind).from_pretrained(tmp_path / "out")(text).input_ids
        for kind in ("AutoTokenizer", "PreTrainedTokenizerFast")
    )
    assert plain == expected and (auto != expected) == bool(notes) == (case == "qwen2")
    assert all("load it with PreTrainedTokenizerFast" in note for note in notes)


@pytest.mark.parametrize("case", ["lax-tensor", "cola"])
@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_in_bfloat16_are_those_of_float32(case: str, autocast: bool, tmp_path: Path, store: Path) -> None:
    """On CPUs, some of torch's backward passes sum over tokens in bfloat16: of a LayerNorm's weight, and of an embedding's row that
    is half of the input."""
    model, merge, _ = CASES[case]
    folder = exported(tmp_path, {"init_std": 0.3, **model}, store / "tokenizer.json", merge)
    rounded = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.bfloat16)
    exact = copy.deepcopy(rounded).float()
    actual = copy.deepcopy(exact) if autocast else rounded
    tokens = torch.randint(60, (8, 256), generator=torch.Generator().manual_seed(0))
    tokens[:, ::2] = 7
    exact(tokens, labels=tokens).loss.backward()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        actual(tokens, labels=tokens).loss.backward()
    for (name, weight), expected in zip(actual.named_parameters(), exact.parameters(), strict=True):
        assert (weight.grad.float() - expected.grad).norm() < 0.1 * expected.grad.norm(), name
    row = actual.get_input_embeddings().weight.grad[7].float()
    assert (row - exact.get_input_embeddings().weight.grad[7]).norm() < 0.05 * row.norm()
