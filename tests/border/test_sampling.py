"""Sampling next to transformers: the distribution of the next token under a random generation_config.json."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from boost.train.generate import distribution
from boost.train.sampling import Sampling
from tests.border.draws import Seeds, drawn, run

pytestmark = pytest.mark.slow

VALUES: dict[str, list[Any]] = {
    "temperature": [0.6, 1, 1.5, None],
    "top_k": [0, 1, 20, None],
    "top_p": [0.2, 0.9, 1, 1.0, None],
}


@pytest.fixture(scope="module")
def model() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 4}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=200, initializer_range=0.5, **sizes))


def compare_sampling(model: Any, folder: Path, seed: int) -> str:
    from transformers import GenerationConfig

    rng = random.Random(seed)
    settings = {name: rng.choice(values) for name, values in VALUES.items() if rng.random() < 0.7} | {"do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    theirs = model.generate(
        torch.tensor([[rng.randrange(200)]]), generation_config=GenerationConfig.from_pretrained(folder),
        max_new_tokens=1, output_scores=True, output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    ours = distribution(theirs.logits[0], Sampling.of(settings, None, None, None, 0))
    torch.testing.assert_close(ours, theirs.scores[0].softmax(-1), msg=lambda text: f"{settings}: {text}")
    return "equal"


@drawn(30, 500)
def test_the_distribution_is_that_of_transformers(seeds: Seeds, model: Any, tmp_path: Path) -> None:
    run(lambda seed: compare_sampling(model, tmp_path, seed), seeds, 0.99)
