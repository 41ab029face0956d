"""transformers' tensor parallelism shards what `boost export` writes: the same function on two processes, half the weights."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from boost.convert.export import export
from boost.measure.counting import CollectiveCounter
from boost.train.checkpoint import open_checkpoint
from tests import toy
from tests.convert.toys import CASES, GB, cases, exported, save
from tests.distributed import run_distributed
from tests.families import known

pytestmark = pytest.mark.slow

SHARDED = {
    "dense": 32, "svd-merged": 32, "svd": 8, "cola": 8, "cola-gqa": 8, "cola-ranks": 8, "cola-rope": 8, "lax-svd": 8,
    "lax-identity": 8, "lax-tensor": 8, "lax-dense": 8, "qwen2": 32, "qwen3": 32, "smollm3": 32, "cola-heads": 8,
}  # fmt: skip
"""Families with a plan, and the widest all-reduce of their blocks: d of a dense one, r of a low-rank one."""


@dataclass
class OnTwo:
    """The result of one of two processes."""

    logits: float
    """Relative error."""
    gradients: float
    """The largest relative error of a gradient."""
    same_text: bool
    widths: list[int]
    """Of the forward pass' all-reduces, without the head."""
    held: float
    """Fraction of the parameters that this process holds."""


def load(folder: Path, **options: Any) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, **options)


def load_sharded(folder: Path) -> Any:
    from transformers.distributed import DistributedConfig

    return load(folder, distributed_config=DistributedConfig(tp_size=2))


def measured(model: Any) -> tuple[Tensor, dict[str, Tensor], list[int]]:
    """Logits, gradients of the loss, greedy text."""
    tokens, _ = toy.toy_tokens(toy.toy_config())
    with torch.no_grad():
        logits = model(tokens).logits
    model(tokens, labels=tokens).loss.backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    gradients = {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in gradients.items()}
    greedy = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    return logits, gradients, model.generate(tokens[:1, :7], **greedy)[0].tolist()


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max())


def on_two(folder: Path) -> OnTwo:
    one, two = load(folder), load_sharded(folder)
    (logits, gradients, text), (logits_2, gradients_2, text_2) = measured(one), measured(two)
    assert gradients.keys() == gradients_2.keys()
    with CollectiveCounter() as counter:
        two.model(toy.toy_tokens(toy.toy_config())[0])
    assert {each.kind for each in counter.collectives} == {"all-reduce"}
    held = sum(w.to_local().numel() if hasattr(w, "to_local") else w.numel() for w in two.parameters())
    return OnTwo(
        error(logits_2, logits),
        max(error(gradients_2[name], gradient) for name, gradient in gradients.items()),
        text == text_2,
        [each.shape[-1] for each in counter.collectives],
        held / sum(w.numel() for w in one.parameters()),
    )


OF_OTHERS = ("qwen2", "smollm3", "svd-merged", "cola-gqa", "cola-ranks", "lax-svd", "lax-identity")
"""Plans and modules that dense and cola have; run nightly."""


@pytest.mark.parametrize("family", cases(SHARDED, OF_OTHERS))
def test_two_processes_are_the_same_function(family: str, tmp_path: Path, store: Path) -> None:
    model, merge, _ = CASES[family]
    config = toy.toy_config("float32", model={"init_std": 0.5, **model})
    path = save(tmp_path / "c", config, store / "tokenizer.json")
    export(open_checkpoint(path), tmp_path / "out", None, merge, GB, official=False)
    for found in run_distributed(2, on_two, tmp_path / "out"):
        assert found.logits <= 1e-5
        assert found.gradients <= 1e-5
        assert found.same_text
        assert found.held < 0.7
        embedding, *blocks = found.widths
        assert embedding == config.model.dim
        assert len(blocks) == 2 * config.model.layers
        assert max(blocks) == SHARDED[family]


def refused(folder: Path) -> str:
    with pytest.raises(ValueError, match="tp_plan") as caught:
        load_sharded(folder)
    return str(caught.value)


@pytest.mark.parametrize("name", ["Cola", "Lost"])
def test_some_formats_declare_no_plan(name: str, tmp_path: Path, store: Path) -> None:
    """transformers would shard cola_a before it transposes it, and not know where selected inputs are: a one-line error instead of
    wrong logits."""
    with known.registered():
        model = CASES["cola"][0] if name == "Cola" else {"family": name.lower()}
        folder = exported(tmp_path, model, store / "tokenizer.json")
    for message in run_distributed(2, refused, folder):
        assert f"`{name}ForCausalLM` has no `tp_plan`" in message
