"""`boost import` of folders that transformers wrote and people changed: the same function as in transformers, or a refusal."""

import json
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import boost
from boost.convert.spectrum import Truncation
from boost.convert.vocabulary import end_tokens
from boost.errors import BoostError
from boost.train.generate import generate
from boost.train.sampling import Sampling
from tests.border.draws import Seeds, drawn, run
from tests.convert.toys import all_logits, bring, give, loaded

pytestmark = pytest.mark.slow

LLAMA_3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES: list[Any] = [
    None, {}, {"rope_type": "default"}, {"type": "default", "rope_theta": 90.0}, {"rope_theta": 31.0}, LLAMA_3,
    {**LLAMA_3, "original_max_position_embeddings": 16}, {**LLAMA_3, "rope_theta": 50.0, "original_max_position_embeddings": 24},
    {"rope_type": "linear", "factor": 2.0}, {"rope_type": "yarn", "factor": 2.0},
]  # fmt: skip
"""Values of rope_parameters and of rope_scaling."""


def write(draw: random.Random, folder: Path) -> None:
    """A tiny model of a type that is taken as transformers saves it, with other files, dtypes, spellings, settings and tensors."""
    import transformers

    heads = draw.choice((2, 4))
    dim = heads * draw.choice((4, 8))
    torch.manual_seed(draw.randrange(1 << 30))
    kind, layers = draw.choice(("Llama", "Llama", "Mistral", "Qwen2", "Qwen3", "SmolLM3")), draw.choice((1, 2))
    # Fields of these classes, with a value of some models, and values to change them to.
    types = [["full_attention"] * layers, ["sliding_attention"] * layers, None]
    windows: dict[str, tuple[Any, ...]] = {"sliding_window": (None, 24, 200)} if kind != "Llama" else {}
    if kind in ("Qwen2", "Qwen3", "SmolLM3"):
        windows |= {"use_sliding_window": (False, True), "layer_types": tuple(types), "max_window_layers": (0, 1, 28)}
    if kind == "SmolLM3":
        windows |= {"no_rope_layers": ([1, 0], [0, 0, 1], [1], None), "no_rope_layer_interval": (1, 2, 4)}
    more = {name: draw.choice(values) for name, values in windows.items() if draw.random() < 0.3}
    if more.get("no_rope_layers") == [1] and layers > 1:
        del more["no_rope_layers"]
    if kind in ("Llama", "Qwen3", "SmolLM3"):
        more["attention_bias"] = draw.random() < 0.3
    if kind != "SmolLM3" and (kind == "Qwen3" or draw.random() < 0.3):
        more["head_dim"] = draw.choice((4, 6))
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=draw.choice((48, 64)), hidden_size=dim, intermediate_size=draw.choice((24, 40)),
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=draw.choice((heads, heads // 2)),
        max_position_embeddings=draw.choice((64, 128)), tie_word_embeddings=draw.random() < 0.3, initializer_range=0.4,
        rms_norm_eps=draw.choice((1e-6, 1e-3)), eos_token_id=draw.choice((2, [2, 7, 9], None)), bos_token_id=draw.choice((1, None)),
        pad_token_id=None, **more,
    )  # fmt: skip
    if draw.random() < 0.1:
        config.hidden_act = "gelu"
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(
        draw.choice((torch.float32, torch.bfloat16, torch.float16))
    )
    if draw.random() < 0.3:
        model.generation_config.update(max_new_tokens=5, eos_token_id=draw.choice((3, [4, 5])))
    size = draw.choice(("1GB", "6KB"))
    model.save_pretrained(folder, max_shard_size=size)
    if draw.random() < 0.3:  # saved again by a program that leaves older files behind
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1.5)
        old = {file.name: file.read_bytes() for file in folder.iterdir()}
        model.save_pretrained(folder, max_shard_size="6KB" if size == "1GB" else "1GB")
        for name, content in old.items():
            (folder / name).write_bytes(content)
    file = draw.choice(sorted(folder.glob("*.safetensors")))
    tensors = load_file(file)
    name = draw.choice(sorted(tensors))
    change = draw.random()
    if change < 0.2:
        tensors[name] = tensors[name].to(draw.choice((torch.float32, torch.bfloat16, torch.float64)))
    elif change < 0.25:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(2)
    elif change < 0.3:
        tensors["model.layers.0.mlp.extra.weight"] = torch.ones(2)
    elif change < 0.35:
        del tensors[name]
    elif change < 0.4 and config.tie_word_embeddings:
        tensors["lm_head.weight"] = torch.randn(config.vocab_size, dim)
    if tensors:
        save_file(tensors, file, metadata={"format": "pt"})
    content = json.loads((folder / "config.json").read_text())
    for field, values in (
        ("rope_scaling", ROPES), ("rope_parameters", ROPES), ("rope_theta", (777.0, 20000.0)),
        ("original_max_position_embeddings", (32,)), ("num_key_value_heads", (None,)), ("attention_dropout", (0.1,)),
        ("tie_word_embeddings", (True, False)), *([] if "head_dim" in more else [("head_dim", (dim // heads, None))]),
        *windows.items(), ("is_causal", (True, False)),
    ):  # fmt: skip
        if (chance := draw.random()) < 0.25:
            content[field] = draw.choice(values)
        elif chance < 0.4:
            content.pop(field, None)
    (folder / "config.json").write_text(json.dumps(content))


@torch.no_grad()
def compare(seed: int, home: Path) -> str:
    """ "equal", or why it was refused."""
    import transformers

    draw = random.Random(seed)
    write(draw, home / "theirs")
    theirs: Any = None
    try:
        theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
            home / "theirs", dtype=torch.float32, output_loading_info=True
        )
    except Exception as error:  # anything that transformers raises
        report = {"error": error}
    try:
        bring(home / "theirs", home / "ours", dtype="float32")
    except BoostError as error:
        return str(error)
    assert theirs is not None and not report["missing_keys"], report
    tokens = torch.tensor([[draw.randrange(48) for _ in range(40)]])
    expected = theirs(tokens).logits
    decoder, checkpoint = loaded(home / "ours")
    close = {"rtol": 0, "atol": 1e-4 * float(expected.abs().max())}
    torch.testing.assert_close(all_logits(decoder, tokens).float(), expected, **close)
    bring(home / "theirs", home / "factors", dtype="float32", how=Truncation(energy=1.0))
    torch.testing.assert_close(all_logits(loaded(home / "factors")[0], tokens).float(), expected, **close)
    with warnings.catch_warnings(action="ignore"):  # what an import notes
        model = boost.Model.from_pretrained(home / "theirs", dtype=torch.float32)
    torch.testing.assert_close(model(tokens), expected, **close)
    prompt = tokens[0, :5].tolist()
    text = theirs.generate(tokens[:, :5], do_sample=False, max_new_tokens=6)[0, 5:].tolist()
    ends = end_tokens(checkpoint.data)  # those of generation_config.json, and always the one that separates documents
    until = next((place + 1 for place, token in enumerate(text) if token in ends), len(text))
    assert list(generate(decoder, prompt, 6, Sampling(temperature=0), ends)) == text[:until]
    again = transformers.AutoModelForCausalLM.from_pretrained(give(home / "ours", home / "back"), dtype=torch.float32)
    torch.testing.assert_close(again(tokens).logits, expected, rtol=0, atol=0)
    bring(home / "back", home / "twice", dtype="float32")
    torch.testing.assert_close(all_logits(loaded(home / "twice")[0], tokens).float(), expected, **close)
    return "equal"


@drawn(24, 2000)
def test_folders(seeds: Seeds, tmp_path: Path) -> None:
    run(lambda seed: compare(seed, tmp_path / str(seed)), seeds, 1 / 3)
