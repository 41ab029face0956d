"""`boost.lowrank` next to transformers and peft: the function of each linear's truncated SVD, and an adapter's own merge."""

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import boost
from boost.api.swap import ranks_of
from boost.errors import ConfigError
from tests.border.draws import Seeds, drawn, run

pytestmark = pytest.mark.slow

SIZES = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {**SIZES, "num_key_value_heads": 2, "max_position_embeddings": 32},
    "Qwen2": {**SIZES, "num_key_value_heads": 2, "max_position_embeddings": 32},
    "GPT2": {"vocab_size": 48, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "pad_token_id": 0},
    "Bert": {**SIZES, "max_position_embeddings": 32},
}
HEADS = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
PATTERNS = ["*", "*.mlp.*", "*attn*", "*.0.*", "*_proj", "*dense*", "*q*", "*nothing*"]


def truncated(model: Any, ranks: dict[str, int]) -> Any:
    """The same model with the best approximations of these ranks as its dense weights."""
    model = copy.deepcopy(model)
    for name, rank in ranks.items():
        weight = model.get_submodule(name).weight
        u, s, v = torch.linalg.svd(weight.detach(), full_matrices=False)
        weight.data = (u[:, :rank] * s[:rank]) @ v[:rank]
    return model


def outputs(model: Any) -> torch.Tensor:
    with torch.no_grad():
        made = model(input_ids=torch.arange(2, 14)[None])
    return made.logits if "logits" in made else made.start_logits


def compare(seed: int, home: Path) -> str:
    """ "equal", or why it was refused."""
    import peft
    import transformers

    draw = random.Random(seed)
    torch.manual_seed(seed)
    name = draw.choice(sorted(MODELS))
    heads = ("ForMaskedLM" if name == "Bert" else "LMHeadModel" if name == "GPT2" else "ForCausalLM", *HEADS)
    config = getattr(transformers, f"{name}Config")(**MODELS[name], tie_word_embeddings=draw.random() < 0.5)
    kind = draw.choice([head for head in heads if hasattr(transformers, name + head)])
    model = getattr(transformers, name + kind)(config).double().eval()
    for weight in model.parameters():
        weight.requires_grad_(draw.random() < 0.7)
        if weight.ndim == 2:
            weight.data.normal_(std=0.3)
    linears = [n for n, part in model.named_modules() if isinstance(part, nn.Linear) or type(part).__name__ == "Conv1D"]
    include: Any = [draw.choice(PATTERNS + linears) for _ in range(draw.choice((1, 1, 2)))]
    rank: Any = draw.choice((3, 0.25, 0.5, {draw.choice(PATTERNS + linears): draw.choice((2, 0.3)) for _ in range(2)}))
    adapted = None
    if draw.random() < 0.3:
        leaf = draw.choice(linears).rpartition(".")[2]
        adapted = peft.get_peft_model(
            copy.deepcopy(model), peft.LoraConfig(r=2, target_modules=[leaf], init_lora_weights=False)
        ).eval()
        before = outputs(adapted)
        if not torch.allclose(outputs(copy.deepcopy(adapted).merge_and_unload()), before, rtol=1e-7, atol=1e-9):
            return "not merged by peft"  # an adapter of a tied output embedding also changes the embedding
        wanted = {n: p.requires_grad for n, p in adapted.named_parameters()}
    target = copy.deepcopy(model) if adapted is None else adapted
    try:
        boost.lowrank(target, rank, include=include)
    except ConfigError as error:
        if adapted is not None:  # as it was
            torch.testing.assert_close(outputs(adapted), before, rtol=0, atol=0)
            assert {n: p.requires_grad for n, p in adapted.named_parameters()} == wanted
        return str(error)
    ranks = ranks_of(target)
    base = target if adapted is None else adapted.get_base_model()
    inner = {n.removeprefix("base_model.model."): r for n, r in ranks.items()}
    for place in inner:
        factors, old = base.get_submodule(place), model.get_submodule(place)
        # peft freezes what it does not adapt.
        trains = old.weight.requires_grad and adapted is None
        assert factors.A.weight.requires_grad == factors.B.weight.requires_grad == trains
        named = place in include or (isinstance(rank, dict) and place in rank)
        assert named or old is not model.get_output_embeddings()
    if adapted is None:
        expected = outputs(truncated(model, inner))
        torch.testing.assert_close(outputs(target), expected, rtol=1e-7, atol=1e-9)
        target.save_pretrained(home)
        torch.testing.assert_close(
            outputs(boost.load_lowrank(home, dtype=torch.float64).eval()), expected, rtol=1e-7, atol=1e-9
        )
        target = peft.get_peft_model(
            target, peft.LoraConfig(r=2, target_modules=["A", "B"], init_lora_weights=False)
        ).eval()
    after = outputs(target)
    assert adapted is not None or not torch.equal(after, expected)
    merged = boost.merge_lowrank(target.merge_and_unload())
    torch.testing.assert_close(outputs(merged), after, rtol=1e-7, atol=1e-9)
    assert not ranks_of(merged)
    return "equal"


@drawn(24, 2000)
def test_models(seeds: Seeds, tmp_path: Path) -> None:
    run(lambda seed: compare(seed, tmp_path / str(seed)), seeds, 1 / 4)
