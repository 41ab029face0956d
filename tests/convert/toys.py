"""Tiny checkpoints and folders for tests of import and export."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from boost.config import Config
from boost.convert.export import export
from boost.convert.importing import import_weights
from boost.models.decoder import Decoder
from boost.models.fused import fused_params
from boost.optim.adamw import build_optimizer
from boost.train import checkpoint as ckpt
from boost.train.checkpoint import Checkpoint, Position, open_checkpoint
from boost.train.model import build_decoder
from tests import toy

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "bos_token_id": 1,
}
"""config.json of a tiny model as transformers 4 writes it."""

ROPE = {"rope_theta": 50.0, "rope_factor": 8.0, "rope_original_len": 16}
"""One rotation is slower by the whole factor, one by a part of it."""

CASES: dict[str, tuple[dict[str, Any], bool, str]] = {
    "dense": ({"family": "dense"}, True, "LlamaForCausalLM"),
    "dense-linear": ({"family": "dense", "mlp_silu": False}, True, "LlamaForCausalLM"),
    "svd-merged": ({"family": "svd", "ranks": {"mlp": 12}}, True, "LlamaForCausalLM"),
    "svd": ({"family": "svd"}, False, "BoostForCausalLM"),
    "cola": ({"family": "cola", "rope_theta": 500.0, "kv_heads": 8}, True, "ColaForCausalLM"),
    "cola-gqa": ({"family": "cola"}, True, "BoostForCausalLM"),
    "cola-rope": ({"family": "cola", "kv_heads": 8, **ROPE}, True, "BoostForCausalLM"),
    "dense-rope": ({"family": "dense", **ROPE}, True, "LlamaForCausalLM"),
    "cola-linear": ({"family": "cola", "mlp_silu": False, "kv_heads": 8}, True, "ColaForCausalLM"),
    "cola-ranks": ({"family": "cola", "ranks": {"attn": 6, "layers.1.mlp.up": 5}}, True, "BoostForCausalLM"),
    "cola-no-act": ({"family": "cola", "latent_act": "none", "mlp_silu": False}, False, "BoostForCausalLM"),
    "lax-svd": ({"family": "lax", "over": "svd"}, True, "LaXForCausalLM"),
    "lax-identity": ({"family": "lax", "gate": "identity", "layers": 3}, True, "LaXForCausalLM"),
    "lax-tensor": ({"family": "lax", "gate": "tensor", "ranks": {"mlp": 6}}, True, "LaXForCausalLM"),
    "lax-dense": ({"family": "lax", "gate": "dense", "norm_eps": 1e-3}, True, "LaXForCausalLM"),
    "qwen2": ({"family": "dense", "attn_bias": "qkv"}, True, "Qwen2ForCausalLM"),
    "qwen3": ({"family": "dense", "qk_norm": True, "head_dim": 6}, True, "Qwen3ForCausalLM"),
    "qwen3-biased": ({"family": "dense", "qk_norm": True, "attn_bias": "qkvo"}, True, "Qwen3ForCausalLM"),
    "smollm3": ({"family": "dense", "nope_layers": [1]}, True, "SmolLM3ForCausalLM"),
    "llama-biased": ({"family": "dense", "attn_bias": "qkvo", "head_dim": 6}, True, "LlamaForCausalLM"),
    "qwen2-merged": ({"family": "svd", "attn_bias": "qkv"}, True, "Qwen2ForCausalLM"),
    "cola-heads": (
        {"family": "cola", "attn_bias": "qkvo", "qk_norm": True, "nope_layers": [0], "head_dim": 6},
        True,
        "BoostForCausalLM",
    ),
    "svd-biased": ({"family": "svd", "attn_bias": "qkv", "qk_norm": True}, True, "BoostForCausalLM"),
}
"""(model, whether factors are merged if possible, transformers' name for it) for each export."""

BY_NIGHT = {
    "dense-linear",
    "cola-rope",
    "cola-linear",
    "lax-svd",
    "lax-identity",
    "qwen3-biased",
    "llama-biased",
    "qwen2-merged",
}
"""Combinations of other cases."""


def cases(names: Iterable[str] = CASES, by_night: Iterable[str] = ()) -> list[Any]:
    """Parameters of a test: names of cases; those `by_night` run only nightly."""
    return [pytest.param(name, marks=[pytest.mark.nightly] * (name in {*BY_NIGHT, *by_night})) for name in names]


def save(
    folder: Path, config: Config, tokenizer: Path, eos: int = 0, fingerprint: str = "t", bos: int | None = None
) -> Path:
    """Saves a checkpoint of an initialized model from all processes of its mesh, with nontrivial norms and biases."""
    decoder, mesh = toy.toy_decoder(config)
    with torch.no_grad():
        for name, value in toy.weights(decoder).items():
            if name.endswith(("norm", "norm_weight", "bias")):
                value.add_(torch.linspace(-0.5, 0.5, value.numel()))
    optimizer = build_optimizer(list(fused_params(decoder)), config, mesh)
    data = {"tokenizer": fingerprint, "content": "c", "eos": eos} | ({} if bos is None else {"bos": bos})
    saver = ckpt.CheckpointSaver(decoder, optimizer, config, tokenizer.read_bytes(), data, mesh)
    return saver.save(folder, Position(3, 96)).path


GB = 10**9


def exported(folder: Path, model: dict[str, Any], tokenizer: Path, merge: bool = True, **saved: Any) -> Path:
    """The folder that `boost export` writes for an initialized model, whose checkpoint is in the folder `c` next to it."""
    path = save(folder / "c", toy.toy_config("float32", model=model), tokenizer, **saved)
    return give(path, folder / "out", merge)


def give(checkpoint: Path, out: Path, merge: bool = True) -> Path:
    export(open_checkpoint(checkpoint), out, None, merge, GB)
    return out


def bring(source: Path, out: Path, **choices: Any) -> Any:
    """Imports a folder, tied or not."""
    given: dict[str, Any] = {"dtype": None, "tokenizer": None, "how": None, "file_bytes": GB, "untie": False, **choices}
    return import_weights(source, out, **given)


def loaded(path: Path) -> tuple[Decoder, Checkpoint]:
    """The model of a checkpoint on this process, and the checkpoint."""
    checkpoint = open_checkpoint(path)
    config = toy.single(checkpoint.config)
    mesh = toy.toy_mesh(config)
    decoder = build_decoder(config, mesh)
    ckpt.load_weights(checkpoint, decoder, mesh)
    return decoder, checkpoint


@torch.no_grad()
def all_logits(decoder: Decoder, tokens_BS: Tensor) -> Tensor:
    """Logits [B, S, V] of every position."""
    batch, length = tokens_BS.shape
    (stream,) = decoder._run_blocks(decoder.layout, decoder._parts(tokens_BS, None, (), False))
    x = stream.x
    logits = decoder.layout.logits(x, decoder.final_norm, decoder.head_weight, torch.arange(batch * length))
    return logits.view(batch, length, -1)


def llama_folder(path: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> dict[str, Tensor]:
    """Writes a tiny LLaMA folder with transformers' names; returns its random weights."""
    config = {**LLAMA, **changes}
    d, f, v = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    kv = config["num_key_value_heads"] * d // config["num_attention_heads"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (v, d), "model.norm.weight": (d,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (v, d)
    for layer in range(config["num_hidden_layers"]):
        for name, shape in {
            "input_layernorm": (d,), "post_attention_layernorm": (d,), "self_attn.q_proj": (d, d), "self_attn.k_proj": (kv, d),
            "self_attn.v_proj": (kv, d), "self_attn.o_proj": (d, d), "mlp.gate_proj": (f, d), "mlp.up_proj": (f, d),
            "mlp.down_proj": (d, f),
        }.items():  # fmt: skip
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
    generator = torch.Generator().manual_seed(5)
    tensors = {name: torch.randn(shape, generator=generator).mul(0.2).to(dtype) for name, shape in shapes.items()}
    write_folder(path, config, tensors)
    return tensors


def write_folder(path: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Writes config.json and model.safetensors."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
