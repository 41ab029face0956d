"""Serving an export: transformers' continuous batching gives the text of `boost generate`."""

from pathlib import Path

import pytest

from boost.train.generate import generate
from boost.train.sampling import Sampling
from tests.convert.toys import CASES, cases, exported, loaded

PROMPTS = [[5, 9, 33, 2, 7, 41, 8], [11, 3, 60], [4], [9, 8]]


@pytest.mark.slow
@pytest.mark.parametrize("name", cases(["cola", "svd", "lax-tensor"], by_night=["cola", "svd"]))
def test_continuous_batching_gives_the_text_of_each_prompt_alone(name: str, tmp_path: Path, store: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model, merge, _ = CASES[name]
    folder = exported(tmp_path, {"init_std": 0.5, **model}, store / "tokenizer.json", merge, eos=1)
    decoder, _ = loaded(tmp_path / "c")
    expected = [list(generate(decoder, prompt, 9, Sampling(0.0))) for prompt in PROMPTS]
    assert len({token for text in expected for token in text}) > 4, "text that says one word would show little"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    settings = transformers.GenerationConfig(max_new_tokens=9, do_sample=False, eos_token_id=-1, pad_token_id=0)
    batching = transformers.ContinuousBatchingConfig(num_blocks=16, block_size=32, max_batch_tokens=64)
    outputs = theirs.generate_batch(
        PROMPTS, generation_config=settings, continuous_batching_config=batching, progress_bar=False
    )
    found = sorted(outputs.values(), key=lambda output: PROMPTS.index(list(output.prompt_ids)))
    assert [output.generated_tokens for output in found] == expected
