"""The model card of an exported folder: describes the model and how to load it."""

from boost import __version__
from boost.convert.names import Form
from boost.train.checkpoint import Checkpoint

_WHAT = {
    "llama": "A LLaMA decoder with dense linears, in the format of `LlamaForCausalLM` from transformers.",
    "merged": "Trained with low-rank factors; each pair is merged into W = B A, in the format of `LlamaForCausalLM`.",
    "cola": "CoLA, y = B silu(A x). Tensor names and shapes match the official `ColaForCausalLM`, which can load these weights.",
    "boost": "A low-rank decoder, y = B act(A x), with its modeling file next to the weights.",
}


def card(checkpoint: Checkpoint, form: Form, parameters: int, dtype: str, context: int) -> str:
    """Returns the content of README.md."""
    model = checkpoint.config.model
    rows = {
        "family": model.title,
        "parameters": f"{parameters:,}",
        "dim / ffn_dim / layers": f"{model.dim} / {model.ffn_dim} / {model.layers}",
        "heads / key-value heads": f"{model.heads} / {model.kv_heads}",
        "vocabulary": f"{model.vocab_size:,}",
        "sequence length": f"{context:,}",
        "dtype": dtype,
        "trained": f"{checkpoint.position.step:,} steps, {checkpoint.position.tokens:,} tokens",
    }
    if model.low_rank:
        rows["rank"] = f"{model.rank}" + (f", with {len(model.ranks)} exceptions in config.json" if model.ranks else "")
    if not model.mlp_silu:
        rows["gated product"] = "down(gate(x) * up(x)), without silu"
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    trust = ", trust_remote_code=True" if form in ("cola", "boost") else ""
    return f"""---
library_name: transformers
pipeline_tag: text-generation
---

# {checkpoint.path.name}

{_WHAT[form]}

| | |
|---|---|
{table}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("."{trust})
tokenizer = AutoTokenizer.from_pretrained("."{trust})
```

Exported by boost {__version__}.
"""
