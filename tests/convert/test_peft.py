"""peft adapts what `boost export` writes: LoRA on A and B by suffix and by "all-linear", trained, merged, saved and loaded."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import toy
from tests.convert.toys import CASES, all_logits, bring, cases, exported, loaded

pytestmark = pytest.mark.slow

OF_OTHERS = ("svd-merged", "svd", "cola", "lax-dense", "qwen2", "smollm3")
"""Modules that the others have; run nightly."""
FAMILIES = cases(("dense", "cola-ranks", "cola-heads", "qwen3", "lax-identity", "lax-tensor", *OF_OTHERS), OF_OTHERS)


def load(folder: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, store: Path) -> Path:
    """An exported model."""
    model, merge, _ = CASES[request.param]
    home = tmp_path_factory.mktemp(request.param)
    return exported(home, {"init_std": 0.5, **model}, store / "tokenizer.json", merge)


def factors(model: Any) -> list[str]:
    """Names of the linears of the blocks."""
    return [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and "layers." in n]


@pytest.mark.parametrize("kind", ["suffix", "all-linear"])
def test_lora_trains_merges_and_comes_back(folder: Path, kind: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    base = load(folder)
    # By suffix: A and B of every low-rank linear, or the seven linears of a dense block.
    names = kind if kind == "all-linear" else sorted({name.rpartition(".")[2] for name in factors(base)})
    assert names in ("all-linear", ["A", "B"]) or "q_proj" in names
    count = len(factors(base))
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, lora_alpha=16, target_modules=names, task_type="CAUSAL_LM"))
    adapted = [m for m in model.modules() if isinstance(m, peft.tuners.lora.Linear)]
    assert len(adapted) == count
    tokens, _ = toy.toy_tokens(toy.toy_config())
    before = model(tokens).logits.detach()
    optimizer = torch.optim.AdamW([w for w in model.parameters() if w.requires_grad], lr=1e-2)
    losses = []
    for _ in range(6):
        loss = model(tokens, labels=tokens).loss
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        assert all(w.grad is None for n, w in model.named_parameters() if "lora_" not in n), "the base is frozen"
        optimizer.step()
    assert losses[-1] < 0.95 * losses[0]
    model.eval()
    with torch.no_grad():
        expected = model(tokens).logits
    assert (expected - before).abs().max() > 1e-2 * before.abs().max()
    model.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(load(folder), tmp_path / "adapter").eval()
    with torch.no_grad():
        torch.testing.assert_close(again(tokens).logits, expected)
        for safe in (False, True):
            merged = copy.deepcopy(again).merge_and_unload(safe_merge=safe)
            close = {"rtol": 0.0, "atol": 1e-5 * float(expected.abs().max())}
            torch.testing.assert_close(merged(tokens).logits, expected, **close)
    assert {n for n, _ in merged.named_parameters()} == {n for n, _ in load(folder).named_parameters()}
    # What is merged is an ordinary folder: transformers loads it again, and `boost import` takes it.
    merged.save_pretrained(tmp_path / "merged")
    bring(tmp_path / "merged", tmp_path / "imported")
    with torch.no_grad():
        torch.testing.assert_close(load(tmp_path / "merged")(tokens).logits, expected, **close)
        torch.testing.assert_close(all_logits(loaded(tmp_path / "imported")[0], tokens), expected, rtol=1e-4, atol=1e-4)
