"""Low-rank linears in a transformers model: factorize the linears, compare losses, and heal the model with a few training steps.

    python examples/lowrank_transformers.py

To avoid a download, the example uses a small LLaMA with random weights. With a trained model:

    model = transformers.AutoModelForCausalLM.from_pretrained("path/to/model")
    boost.lowrank(model, rank=0.25, include=["*.mlp.*", "*.self_attn.*"], init="svd")
"""

from pathlib import Path

import torch
import transformers

import boost


def main() -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=352, num_hidden_layers=2, num_attention_heads=4
    )
    model = transformers.LlamaForCausalLM(config)
    text = torch.tensor([list(Path(__file__).read_bytes()[:512])])
    train(model, text, steps=30)
    report("dense", model, text)

    boost.lowrank(model, rank=0.25, include=["*.mlp.*", "*.self_attn.*"], init="svd")
    report("rank d/4, truncated SVD", model, text)

    train(model, text, steps=15)
    report("after 15 steps", model, text)


def train(model: torch.nn.Module, text: torch.Tensor, steps: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        model(input_ids=text, labels=text).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def report(what: str, model: torch.nn.Module, text: torch.Tensor) -> None:
    with torch.no_grad():
        loss = model(input_ids=text, labels=text).loss.item()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{what:26}{parameters / 1e6:6.2f}M parameters   loss {loss:.3f}")


if __name__ == "__main__":
    main()
