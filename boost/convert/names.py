"""Maps parameters to the tensor names of Hugging Face folders, which have one of these forms.

llama   dense weights under the names of transformers' LlamaForCausalLM; merged: the same for svd, with W = B A
cola    the official CoLA class (github.com/alvin-zyl/CoLA): factors transposed, cola_a [d_in, r] and cola_b [r, d_out]
boost   our own modeling file: factors (A.weight, B.weight) and latent gates unchanged, inside LLaMA's module names
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal

from boost.config.architecture import SLOTS, Parameter, parameters
from boost.config.schema import ModelConfig

Form = Literal["llama", "merged", "cola", "boost"]

_ENDS = {"embed": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "head": "lm_head.weight"}
_NORMS = {"attn_norm": "input_layernorm.weight", "mlp_norm": "post_attention_layernorm.weight"}
_MODULES = {
    slot: f"{'self_attn' if slot.startswith('attn') else 'mlp'}.{slot.partition('.')[2]}_proj" for slot in SLOTS
}
_KINDS: dict[Form, dict[str, str]] = {
    "llama": {"W": "weight"},
    "merged": {"W": "weight"},
    "cola": {"A": "cola_a", "B": "cola_b"},
    "boost": {"A": "A.weight", "B": "B.weight"},
}


@dataclass(frozen=True)
class Entry:
    """One tensor of a folder, and the boost parameters that it is made from."""

    name: str
    shape: tuple[int, ...]
    parameters: tuple[Parameter, ...]
    """One parameter, or (A, B) if the tensor is the product B A."""
    transposed: bool = False


def form_of(model: ModelConfig, merge: bool, official: bool = True) -> Form:
    """Returns the form in which a model is exported. `merge`: merge the factors of linears without activation into one matrix;
    `official`: prefer the official CoLA format over our own where it supports the model.

    The official CoLA class supports one rank, silu in every bottleneck, as many key/value heads as query heads, because it computes
    the width of all heads as hidden_size / num_attention_heads, and RoPE without scaling. Other models use our own modeling file.
    """
    if model.family == "dense":
        return "llama"
    if model.family == "svd" and model.latent_act == "none" and merge:
        return "merged"
    plain = model.kv_heads == model.heads and model.rope_factor == 1
    if official and model.family == "cola" and model.latent_act == "silu" and not model.ranks and plain:
        return "cola"
    return "boost"


def stored_form(form: Form, names: Collection[str]) -> Form:
    """Returns the form that matches the tensor names of a folder. config.json alone does not determine it: transformers and peft
    may save the factors of a CoLA model under the names of its modules."""
    return "boost" if "model.layers.0.self_attn.q_proj.A.weight" in names else form


def entries(model: ModelConfig, form: Form) -> Iterator[Entry]:
    """Yields every tensor of a folder of this form, in the order of the forward pass."""
    inner: dict[str, Parameter] = {}
    for parameter in parameters(model):
        linear, _, factor = parameter.name.rpartition(".")
        if form == "merged" and factor == "A":
            inner[linear] = parameter
        elif form == "merged" and factor == "B":
            a = inner.pop(linear)
            yield Entry(_name(f"{linear}.W", form), (parameter.shape[0], a.shape[1]), (a, parameter))
        else:
            transposed = form == "cola" and factor in ("A", "B")
            shape = parameter.shape[::-1] if transposed else parameter.shape
            yield Entry(_name(parameter.name, form), shape, (parameter,), transposed)


def _name(name: str, form: Form) -> str:
    """Returns the name of a boost parameter in a folder of this form."""
    if name in _ENDS:
        return _ENDS[name]
    layer, rest = name.split(".", 2)[1:]
    if rest in _NORMS:
        return f"model.layers.{layer}.{_NORMS[rest]}"
    slot, _, kind = rest.rpartition(".")
    return f"model.layers.{layer}.{_MODULES[slot]}.{_KINDS[form].get(kind, kind)}"
