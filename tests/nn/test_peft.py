"""LoRA by peft finds the factors of `boost.nn` modules, because they are plain linears."""

import pytest
import torch

import boost


@pytest.mark.parametrize("family", ["cola", "svd", "lax", "dense"])
@pytest.mark.slow
def test_adapters_train_and_merge(family: str) -> None:
    import peft

    torch.manual_seed(0)  # of the adapters
    rank = {} if family == "dense" else {"rank": 8}
    model = boost.nn.Decoder(family=family, vocab_size=64, dim=32, ffn_dim=48, layers=2, heads=4, **rank)
    tokens = torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(0))
    tokens, targets = tokens[:, :-1], tokens[:, 1:]
    before = model(tokens)
    targeted = ["q_proj", "v_proj", "down_proj"] if family == "dense" else ["q_proj.A", "q_proj.B", "down_proj.B"]
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targeted))  # type: ignore[arg-type]
    torch.testing.assert_close(adapted(tokens), before, msg="an adapter begins as nothing")
    trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    optimizer, losses = torch.optim.Adam(trained, lr=1e-2), []
    for _ in range(15):
        loss = adapted(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.02
    expected = adapted(tokens)
    merged = adapted.merge_and_unload()
    assert isinstance(merged, boost.nn.Decoder)
    torch.testing.assert_close(merged(tokens), expected, rtol=1e-4, atol=1e-5)
