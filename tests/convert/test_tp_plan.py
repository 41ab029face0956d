"""transformers' own tensor parallelism shards what `boost export` writes: the same logits and gradients from two processes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from boost.convert.export import export
from boost.train.checkpoint import open_checkpoint
from tests import toy
from tests.convert.toys import CASES, save
from tests.distributed import run_distributed

transformers = pytest.importorskip("transformers", minversion="5")
pytestmark = pytest.mark.slow

GB = 10**9
FAMILIES = ("dense", "svd-merged", "svd", "cola", "cola-gqa", "cola-ranks", "lax-svd", "lax-identity", "lax-tensor", "lax-dense")


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def forward_and_backward(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor], list[int]]:
    """Logits without gradients, all gradients of the loss, and greedy text."""
    tokens, _ = toy.toy_tokens(toy.toy_config())
    with torch.no_grad():
        logits = model(tokens).logits
    model(tokens, labels=tokens).loss.backward()
    gradients = {name: whole(weight.grad) for name, weight in model.named_parameters()}
    greedy = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    return logits, gradients, model.generate(tokens[:1, :7], **greedy)[0].tolist()


def on_two(folder: Path) -> tuple[list[str], float, float, bool, int, set[str]]:
    """In each of two processes: what plan there is, relative errors of logits and gradients, text, parameters held here."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from transformers.distributed import DistributedConfig

    sizes: list[int] = []

    class Collectives(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "c10d" in func.namespace or "c10d" in str(func):
                first = args[0][0] if isinstance(args[0], list | tuple) else args[0]
                if isinstance(first, torch.Tensor) and "wait" not in str(func):
                    sizes.append(first.shape[-1])
            return func(*args, **(kwargs or {}))

    options = {"trust_remote_code": True, "dtype": torch.float32}
    one = transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
    two = transformers.AutoModelForCausalLM.from_pretrained(
        folder, distributed_config=DistributedConfig(tp_size=2), **options
    )
    expected, actual = forward_and_backward(one), forward_and_backward(two)
    errors = [float((a - e).abs().max() / e.abs().max()) for a, e in [(actual[0], expected[0])]]
    assert actual[1].keys() == expected[1].keys()
    worst = max(float((actual[1][n] - g).abs().max() / g.abs().max()) for n, g in expected[1].items())
    tokens, _ = toy.toy_tokens(toy.toy_config())
    with torch.no_grad(), Collectives():
        two.model(tokens)
    held = sum(w.to_local().numel() if hasattr(w, "to_local") else w.numel() for w in two.parameters())
    return sizes, errors[0], worst, actual[2] == expected[2], held, sum(w.numel() for w in one.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_two_processes_are_the_same_function(family: str, tmp_path: Path, store: Path) -> None:
    model, merge, _ = CASES[family]
    config = toy.toy_config("float32", model={"init_std": 0.5, **model})
    export(open_checkpoint(save(tmp_path / "c", config, store / "tokenizer.json")), tmp_path / "out", None, merge, GB)
    for sizes, logits, gradients, same_text, held, total in run_distributed(2, on_two, tmp_path / "out"):
        print(family, sizes, logits, gradients, same_text, held, total)
        assert logits <= 1e-5
        assert gradients <= 1e-4
        assert same_text
        assert held < 0.8 * total
