"""`boost export` of random models in other consumers: transformers, and MLX-LM if it is installed.

The oracle is our own decoder: logits, greedy text, and the weights that come back.
"""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from boost.convert.export import export
from boost.errors import BoostError
from boost.train.checkpoint import open_checkpoint
from boost.train.generate import generate
from boost.train.sampling import Sampling
from tests import toy
from tests.border.draws import Seeds, drawn, run
from tests.convert.toys import GB, all_logits, bring, loaded, save

pytestmark = pytest.mark.slow


def draw_model(draw: random.Random) -> dict[str, Any]:
    """The [model] section of a tiny model of any family."""
    kv, heads = draw.choice(((1, 2), (2, 2), (2, 4), (4, 4)))
    family = draw.choice(("dense", "svd", "cola", "lax"))
    model: dict[str, Any] = {
        "family": family, "heads": heads, "kv_heads": kv, "dim": heads * draw.choice((4, 8)), "ffn_dim": draw.choice((24, 40)),
        "layers": draw.choice((1, 2, 3)), "vocab_size": 300, "init_std": 0.4, "norm_eps": draw.choice((1e-6, 1e-3)),
        "rope_theta": draw.choice((50.0, 10000.0)), "mlp_silu": draw.random() < 0.8,
    }  # fmt: skip
    if draw.random() < 0.3:
        model |= {"rope_factor": 8.0, "rope_original_len": draw.choice((16, 24))}
    if draw.random() < 0.5:
        model |= {"attn_bias": draw.choice(("none", "qkv", "qkvo")), "qk_norm": draw.random() < 0.3}
        model |= {"nope_layers": draw.choice(([], [], [0]))} | draw.choice(({}, {"head_dim": 6}))
    if family != "dense":
        model |= {"rank": draw.choice((3, 4, 8)), "ranks": draw.choice(({}, {"mlp": 6}, {"attn.q": 5}))}
    if family == "lax":
        model |= {"over": draw.choice(("svd", "cola")), "gate": draw.choice(("identity", "tensor", "dense"))}
    elif family == "cola":
        model |= {"latent_act": draw.choice(("silu", "none"))}
    return model


def mlx_logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor | None:
    """What MLX-LM computes, if it is installed."""
    try:
        import mlx.core as mx
        from mlx_lm.utils import load_model
    except ImportError:
        return None
    model, _ = load_model(folder)
    return torch.tensor(model(mx.array(tokens.tolist())).astype(mx.float32).tolist())


@torch.no_grad()
def compare(seed: int, home: Path, tokenizer: Path) -> str:
    """ "equal", or why the model was refused."""
    import transformers

    draw = random.Random(seed)
    try:
        config = toy.toy_config("float32", model=draw_model(draw))
    except BoostError as error:
        return str(error)
    path = save(home / "c", config, tokenizer)
    # float16 and float32 represent these weights; bfloat16 rounds them before.
    dtype, merge, official = draw.choice((None, None, "bfloat16")), draw.random() < 0.5, draw.random() < 0.7
    try:
        if dtype:
            export(open_checkpoint(path), home / "rounded", dtype, False, GB)
            path = bring(home / "rounded", home / "c2", dtype="float32").path
        done = export(open_checkpoint(path), home / "out", None, merge, draw.choice((GB, 6000)), official)
    except BoostError as error:  # no class of transformers is this dense model
        return str(error)
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        home / "out", trust_remote_code=True, dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"], report
    decoder, _ = loaded(path)
    tokens = torch.tensor([[draw.randrange(300) for _ in range(40)]])
    expected = all_logits(decoder, tokens).float()
    close = {"rtol": 1e-3, "atol": 1e-4 * float(expected.abs().max())}
    torch.testing.assert_close(theirs(tokens).logits, expected, **close)
    text = list(generate(decoder, tokens[0, :5].tolist(), 6, Sampling(temperature=0)))
    greedy = {"do_sample": False, "max_new_tokens": 6, "eos_token_id": None, "pad_token_id": 0}
    made = theirs.generate(tokens[:, :5], attention_mask=torch.ones(1, 5, dtype=torch.long), **greedy)
    assert made[0, 5:].tolist() == text
    if done.form in ("llama", "merged") and (logits := mlx_logits(home / "out", tokens)) is not None:
        apart = float((logits - expected).abs().max()) > close["atol"] * 10
        assert apart == any("MLX-LM" in note for note in done.notes)
    theirs.save_pretrained(home / "saved")
    bring(home / "saved", home / "back")
    torch.testing.assert_close(all_logits(loaded(home / "back")[0], tokens).float(), expected, **close)
    return "equal"


@drawn(16, 2000)
def test_exports(seeds: Seeds, tmp_path: Path, store: Path) -> None:
    run(lambda seed: compare(seed, tmp_path / str(seed), store / "tokenizer.json"), seeds, 1 / 2)
