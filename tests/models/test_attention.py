"""Rotary embeddings against those of transformers."""

import pytest
import torch

from boost.config import load
from boost.models.attention import SequenceShare, rotary_frequencies


@pytest.mark.parametrize("changes", [[], ["--model.rope_factor", "32"], ["--model.rope_low_freq", "2.5"]], ids=str)
@pytest.mark.parametrize("preset", ["llama3-8b", "llama3-405b"])
def test_scaled_rotations_are_those_of_llama_3(preset: str, changes: list[str]) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    model = load(preset, changes).model
    theirs = LlamaConfig(
        hidden_size=model.dim,
        num_attention_heads=model.heads,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": model.rope_theta,
            "factor": model.rope_factor,
            "low_freq_factor": model.rope_low_freq,
            "high_freq_factor": model.rope_high_freq,
            "original_max_position_embeddings": model.rope_original_len,
        },
    )
    expected, scale = ROPE_INIT_FUNCTIONS["llama3"](theirs, torch.device("cpu"))
    found = rotary_frequencies(model, torch.float32)
    assert scale == 1.0
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0.0)
    plain = rotary_frequencies(model.model_copy(update={"rope_factor": 1.0}), torch.float32)
    slower = found / plain
    assert slower[0] == 1 and slower[-1] * model.rope_factor == pytest.approx(1.0)
    assert ((slower > 1.01 / model.rope_factor) & (slower < 0.99)).any()


def test_a_compiled_exchange_accepts_any_batch() -> None:
    """From its second value on, the batch is dynamic."""
    share = SequenceShare(1, 2, True)

    @torch.compile(backend="eager", fullgraph=True)
    def there_and_back(x: torch.Tensor, batch: int) -> torch.Tensor:
        return share.to_processes(share.to_sequences(x, batch), batch)

    for batch in (1, 2, 3):
        assert torch.equal(there_and_back(torch.arange(8 * batch), batch), torch.arange(8 * batch))
