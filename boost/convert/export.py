"""Exports a checkpoint as a Hugging Face folder. Streams the weights: memory holds at most one output file and one linear."""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from boost.config.architecture import parameter_count
from boost.config.schema import ModelConfig
from boost.convert.formats import MODELING, STOCK, Form, class_name, config_json, entries, form_of, model_type, modeling
from boost.convert.tensors import INDEX, TensorWriter, dtype_name
from boost.convert.vocabulary import BOS, merged_generation_config, template_files, tokenizer_files
from boost.data.tokenizer import by_transformers, differing_text, parse_tokenizer
from boost.errors import ConfigError
from boost.files import new_folder, require_free
from boost.paths import read_text
from boost.text import JsonObject, printable
from boost.train.checkpoint import HUB, Checkpoint, WeightReader
from boost.train.progress import progress
from boost.version import __version__


@dataclass(frozen=True)
class Exported:
    """Result of an export."""

    path: Path
    form: Form
    class_name: str
    """The class of transformers, or of our modeling file, that loads the folder."""
    parameters: int
    bytes: int
    files: int
    dtype: str
    tokenizer: bool
    notes: list[str]
    """What differs from the checkpoint, and where the folder does not work."""


def export(
    checkpoint: Checkpoint, out: Path, dtype: str | None, merge: bool, file_bytes: int, official: bool = True
) -> Exported:
    """Writes `out`, which must be empty or not exist. `dtype`: None keeps the stored dtype. `merge`, `official`: see `form_of`.

    Writes to a temporary folder and renames it once complete.
    Raises ConfigError, CheckpointError, StorageError.
    """
    require_free(out, "--out")
    model = checkpoint.config.model
    form = form_of(model, merge, official)
    if not model_type(model, form):
        raise ConfigError(
            f"model.attn_bias = '{model.attn_bias}', model.qk_norm = {str(model.qk_norm).lower()} and model.nope_layers = "
            f"{list(model.nope_layers)} have no common class for dense models in transformers; low-rank models can be exported"
        )
    code = [] if form in STOCK else [MODELING, modeling(model, form)[0]]
    reader = WeightReader(checkpoint)
    target = getattr(torch, dtype) if dtype else None
    with new_folder(out, "--out") as temporary:
        writer = TensorWriter(temporary, "model", file_bytes)
        for entry in progress(list(entries(model, form)), "exporting"):
            parts = [reader.read(parameter.name) for parameter in entry.parameters]
            tensor = parts[0].T if entry.transposed else parts[0]
            if len(parts) == 2:  # A and B; multiplied in fp64, so that a merged model is exact in fp32
                tensor = parts[1].double() @ parts[0].double()
            kept = entry.parameters[0].is_index or target is None
            converted = tensor.to(reader.dtype(entry.parameters[0].name) if kept else target)
            if converted.dtype == torch.float16 and converted.isinf().any():
                raise ConfigError(
                    f"--dtype = float16 overflows in '{entry.name}' (float16 maximum: 65504); choose bfloat16"
                )
            writer.add(entry.name, converted)
        weight_map = writer.close()
        stored = dtype or dtype_name(reader.dtype("embed"))
        texts = _texts(checkpoint, form, stored, writer, weight_map, out.resolve().name)
        for name, text in (*((path.name, read_text(path)) for path in code), *texts):
            (temporary / name).parent.mkdir(exist_ok=True)
            (temporary / name).write_text(text, encoding="utf-8")
        temporary.rename(out.resolve())
    files = len(set(weight_map.values()))
    has_tokenizer = (out / "tokenizer.json").is_file()
    notes = list(_notes(model, form, writer.parameters))
    if has_tokenizer and form in STOCK:
        with contextlib.suppress(ImportError):
            owner = by_transformers(out)
            probe = differing_text(owner.backend_tokenizer, parse_tokenizer(read_text(out / "tokenizer.json")))
            if probe is not None:
                notes.append(
                    f"AutoTokenizer loads the tokenizer of {class_name(model, form)} as {type(owner).__name__}, which encodes some "
                    f"text differently, such as {probe!a}; load it with PreTrainedTokenizerFast.from_pretrained("
                    f"{json.dumps(str(out))})"
                )
    return Exported(
        out, form, class_name(model, form), writer.parameters, writer.total_bytes, files, stored, has_tokenizer, notes
    )


def _notes(model: ModelConfig, form: Form, parameters: int) -> Iterator[str]:
    """What an export changes, and which software computes another function than transformers (llama.cpp: that of llama-cpp-python
    0.3.36, whose converter and runtime were compared on random models)."""
    if form == "merged":
        yield (
            f"the factors are merged into dense linears: {parameters:,} parameters instead of {parameter_count(model):,}; "
            "--no-merge (merge=False) keeps them"
        )
    if form not in STOCK:
        return
    if not model.mlp_silu:
        own = "; --no-merge writes our own format instead" if form == "merged" else ""
        yield (
            'model.mlp_silu = false is exported as hidden_act = "linear", which transformers computes; MLX-LM, CTranslate2 and '
            f"llama.cpp ignore it and compute another function, and vLLM refuses it{own}"
        )
    name = class_name(model, form)
    if model.rope_factor != 1 and name != "LlamaForCausalLM":
        yield (
            f"llama.cpp ignores model.rope_factor = {model.rope_factor:g} in a {name}, or refuses the model; transformers and "
            "MLX-LM compute it"
        )
    if model.nope_layers and list(model.nope_layers) != list(range(3, model.layers, 4)):
        yield (
            f"llama.cpp leaves out RoPE in every fourth layer of a {name}, not in model.nope_layers = "
            f"{list(model.nope_layers)}; transformers and MLX-LM compute it"
        )


def _texts(
    checkpoint: Checkpoint,
    form: Form,
    dtype: str,
    writer: TensorWriter,
    weight_map: dict[str, str],
    folder: str,
) -> Iterator[tuple[str, str]]:
    """Yields (name, content) for all files in the folder except the weights."""
    model, data = checkpoint.config.model, checkpoint.data
    hub, eos, start = data.get(HUB) or {}, data.get("eos"), data.get("bos")
    # Our documents have no bos: each begins after the eos of the previous one.
    bos = next((token for token in (start, hub.get(BOS)) if isinstance(token, int)), eos)
    if len(set(weight_map.values())) > 1:
        yield INDEX, _json({"metadata": {"total_size": writer.total_bytes}, "weight_map": weight_map})
    yield "config.json", _json(config_json(model, form, dtype, checkpoint.context, eos, bos))
    known = {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": eos}
    generation = {name: token for name, token in known.items() if token is not None}
    yield "generation_config.json", _json(merged_generation_config(generation, hub))
    if checkpoint.tokenizer.is_file():
        text = read_text(checkpoint.tokenizer)
        text, tokenizer_config = tokenizer_files(text, eos, bos, start, checkpoint.context, hub)
        yield "tokenizer.json", text
        yield "tokenizer_config.json", _json(tokenizer_config)
        yield from template_files(checkpoint).items()
    assert form == "merged" or writer.parameters == parameter_count(model)
    yield "README.md", _card(checkpoint, form, printable(folder))


_WHAT = {
    "llama": "A decoder with dense linears, in the format of `{0}` from transformers.",
    "merged": "A decoder trained with low-rank factors, each pair merged into W = B A, in the format of `{0}` from transformers.",
    "cola": "A CoLA decoder, y = B silu(A x). The official `ColaForCausalLM` can load it, because tensor names and shapes match.",
    "boost": "A decoder with its modeling code next to the weights.",
}


def _card(checkpoint: Checkpoint, form: Form, folder: str) -> str:
    """Returns the model card, README.md, which describes the model and shows how to load it from `folder`."""
    trust = "" if form in STOCK else ", trust_remote_code=True"
    return f"""---
library_name: transformers
pipeline_tag: text-generation
---

# {folder}

{_WHAT[form].format(class_name(checkpoint.config.model, form))}

Family: {checkpoint.config.model.title}. Training: {checkpoint.position.step:,} steps, {checkpoint.position.tokens:,} tokens.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained({json.dumps(folder)}{trust})
tokenizer = AutoTokenizer.from_pretrained({json.dumps(folder)}{trust})
```

Exported by boost {__version__}.
"""


def _json(content: JsonObject) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"
