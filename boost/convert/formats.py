"""The formats of Hugging Face folders: their `config.json` as our [model] section, and the names of their tensors.

llama   dense weights under the names of transformers' LlamaForCausalLM, which Mistral, Qwen2, Qwen3 and SmolLM3 share; merged: the
        same for factors without an activation between them, with W = B A
cola    the official CoLA class (github.com/alvin-zyl/CoLA): factors transposed, cola_a [d_in, r] and cola_b [r, d_out]
boost   our own modeling file, or the family's: factors (A.weight, B.weight) and extra parameters, inside LLaMA's module names
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Literal

from boost.config.architecture import SLOTS, Parameter, is_product, is_usual, parameters, slot_of
from boost.config.factors import is_factor
from boost.config.load import from_tree
from boost.config.schema import ModelConfig
from boost.errors import BoostError, ConfigError
from boost.paths import read_text
from boost.text import JsonObject
from boost.version import __version__

Form = Literal["llama", "merged", "cola", "boost"]
MODELING = Path(__file__).with_name("modeling_boost.py")
STOCK = ("llama", "merged")
"""Forms that classes of transformers load."""

_FIELDS = {
    "vocab_size": "vocab_size",
    "dim": "hidden_size",
    "ffn_dim": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "norm_eps": "rms_norm_eps",
}
"""Our names -> LLaMA's names, for the fields that both always have."""
_RENAMED = {*_FIELDS, "kv_heads", "init_std", "tied", "rope_theta"}
"""Fields that a folder with our modeling file stores as LLaMA does. It stores all others under our names."""
_ROPE = {
    "rope_factor": "factor",
    "rope_low_freq": "low_freq_factor",
    "rope_high_freq": "high_freq_factor",
    "rope_original_len": "original_max_position_embeddings",
}
"""Our names -> transformers' names, for Llama 3.1's RoPE scaling (rope_type = 'llama3')."""
_READ = {
    *_FIELDS.values(),
    "architectures", "attention_bias", "bos_token_id", "eos_token_id", "head_dim", "hidden_act", "initializer_range", "is_causal",
    "max_position_embeddings", "mlp_bias", "model_type", "num_key_value_heads",
    "original_max_position_embeddings", "rope_parameters", "rope_scaling", "rope_theta", "tie_word_embeddings",
    # No effect on what a model computes.
    "_attn_implementation_autoset", "_name_or_path", "boost_version", "dtype", "pad_token_id", "pretraining_tp",
    "torch_dtype", "transformers_version", "use_cache",
}  # fmt: skip
"""Fields of config.json that an import reads or may leave out; it names any other."""
_READ_OF = {"cola": {"auto_map", "rank", "lr_act_type", "only_lr_act"}, "boost": {"auto_map"}}
"""More such fields, by model type, for those that are not dense."""
_QWEN = {
    "num_key_value_heads": 32, "max_position_embeddings": 32768, "use_sliding_window": False, "sliding_window": 4096,
    "max_window_layers": 28, "layer_types": None,
}  # fmt: skip
_DEFAULTS: dict[str, JsonObject] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    "qwen2": _QWEN,
    "qwen3": _QWEN | {"head_dim": 128},
    "smollm3": {
        "num_key_value_heads": 4, "max_position_embeddings": 32768, "use_sliding_window": False, "sliding_window": None,
        "layer_types": None, "no_rope_layers": None, "no_rope_layer_interval": 4, "tie_word_embeddings": True, "rope_theta": 2e6,
        "bos_token_id": 128000, "eos_token_id": 128001,
    },
}  # fmt: skip
"""The model types of dense decoders, and what their classes assume for fields that config.json omits, where LlamaConfig assumes
something else or has no such field."""
_NOT_ONE = (
    "attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale", "scale_emb",
    "scale_depth", "attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar",
)  # fmt: skip
"""Scalars of other decoders, which change the function unless they are 1 or absent."""
_STOCK = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "smollm3": "SmolLM3"}
"""Prefixes of transformers' classes for dense weights, by model type."""
_ENDS = {"embed": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "head": "lm_head.weight"}
_NORMS = {"attn_norm": "input_layernorm.weight", "mlp_norm": "post_attention_layernorm.weight"}
_MODULES = {
    slot: f"{'self_attn' if slot.startswith('attn') else 'mlp'}.{slot.partition('.')[2]}_proj" for slot in SLOTS
}
_KINDS: dict[Form, dict[str, str]] = {
    "llama": {"W": "weight"},
    "merged": {"W": "weight"},
    "cola": {"A": "cola_a", "B": "cola_b"},
    "boost": {},  # every map is a linear of its own, and the outer one has the bias
}
"""Names of tensors: those outside the blocks, norms, each linear's module and, by form, the linear's weight or factors."""


@dataclass(frozen=True)
class Folder:
    """The configuration of a folder's weights."""

    model: ModelConfig
    form: Form
    context: int
    """Maximum sequence length in tokens; 2048 if the folder does not specify one."""
    eos: int | None
    bos: int | None
    unused: tuple[str, ...]
    """Fields of config.json that have a value and no meaning here."""


def config_json(
    model: ModelConfig, form: Form, dtype: str, context: int, eos: int | None, bos: int | None
) -> JsonObject:
    """Returns the content of `config.json` for a folder of this form.

    rope_theta and torch_dtype are written as in transformers 4; transformers 5 and the official CoLA class read both. There is no
    pad token, because LLaMA's embedding would leave its row untrained.
    """
    own, kind = form not in STOCK, model_type(model, form)
    content: JsonObject = {"architectures": [class_name(model, form)], "model_type": kind}
    if own:
        path, prefix = modeling(model, form)
        content["auto_map"] = {
            "AutoConfig": f"{path.stem}.{prefix}Config",
            "AutoModel": f"{path.stem}.{prefix}Model",
            "AutoModelForCausalLM": f"{path.stem}.{prefix}ForCausalLM",
        }
    content |= {theirs: getattr(model, ours) for ours, theirs in _FIELDS.items()}
    content |= {
        "num_key_value_heads": model.kv_heads,
        "max_position_embeddings": context,
        "rope_theta": model.rope_theta,
        "initializer_range": model.init_std,
        "attention_bias": not own and model.attn_bias == "qkvo",
        "mlp_bias": False,
        "tie_word_embeddings": model.tied,
        "use_cache": True,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "torch_dtype": dtype,
        "boost_version": __version__,
    }
    if form in ("llama", "merged"):
        content["hidden_act"] = "silu" if model.mlp_silu else "linear"
    elif form == "cola":
        content |= {"hidden_act": "silu", "rank": model.rank, "lr_act_type": "silu", "only_lr_act": not model.mlp_silu}
    else:
        content |= {field: value for field, value in model.model_dump(mode="json").items() if field not in _RENAMED}
    if kind == "qwen3" or model.heads_dim != model.dim:
        content["head_dim"] = model.head_dim
    if kind == "smollm3":  # its default pad token may be larger than the vocabulary
        content |= {
            "no_rope_layers": [int(n not in model.nope_layers) for n in range(model.layers)],
            "pad_token_id": None,
        }
    if model.rope_factor != 1 and not own:
        scaling = {theirs: getattr(model, ours) for ours, theirs in _ROPE.items()}
        content["rope_scaling"] = {"rope_type": "llama3", **scaling}
    return content


def read_folder(path: Path) -> Folder:
    """Reads the configuration of a folder. Raises ConfigError, naming the field, if our decoder does not implement the model."""
    content = read_json(path / "config.json", "fix it, or save the model again")
    if not content:
        raise ConfigError(f"'{path}' has no config.json; pass a Hugging Face folder with safetensors weights")
    kind = content.get("model_type")
    if kind not in (*_DEFAULTS, "cola", "boost"):
        raise ConfigError(
            f"model_type = {kind!r} in '{path}/config.json' is not supported; valid values: {', '.join(map(repr, _DEFAULTS))} and "
            "'cola' (the official classes), and 'boost' (our own exports)"
        )
    where, defaults = f"'{path}/config.json'", _DEFAULTS.get(kind, {})
    content, read = {**defaults, **content}, _READ | _READ_OF.get(kind, defaults.keys())
    if kind == "mistral" and content["num_key_value_heads"] is None:
        raise ConfigError(
            f"num_key_value_heads = null in {where} is not valid for Mistral; set it to the number of heads"
        )
    _require_supported(kind, content, where)
    context = content.get("max_position_embeddings")
    context = 2048 if context is None else context
    if type(context) is not int or not 1 <= context < 2**63:
        raise ConfigError(f"max_position_embeddings = {context!r} in {where} must be a positive integer")
    window = _sliding_window(kind, content, where)
    if window is not None and window < context:
        raise ConfigError(
            f"sliding_window = {window} in {where} is smaller than max_position_embeddings = {context}, but boost has no sliding "
            f"windows; to use the model within one window, set max_position_embeddings = {window}"
        )
    try:
        table = _model_table(content) | (own := _family_table(kind, content, where))
        read |= own.keys() if kind == "boost" else set()
        model = from_tree({"model": table, "parallel": {"layout": "single"}}).model
    except KeyError as error:
        raise ConfigError(f"{where} has no {error.args[0]}; fix the file, or save the model again") from None
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ConfigError(f"{where} cannot be read: {' '.join(str(error).split())}") from None
    except BoostError as error:
        raise ConfigError(f"{where} describes a model boost cannot train: {' '.join(str(error).split())}") from None
    generation = read_json(path / "generation_config.json", "fix or remove it")

    def token(name: str) -> int | None:
        """Takes the first token of a list, because chat models also list end-of-turn tokens."""
        for value in (content.get(name), generation.get(name)):
            first = value[0] if isinstance(value, list) and value else value
            if isinstance(first, int) and not isinstance(first, bool):
                if 0 <= first < model.vocab_size:
                    return first
                others[name] = first
        return None

    rope_type, rope = _rope(content)
    read_of_rope = {"rope_type", "type", "rope_theta", "original_max_position_embeddings"}
    read_of_rope |= {*_ROPE.values()} if rope_type == "llama3" else set()
    field = "rope_scaling" if content.get("rope_scaling") else "rope_parameters"
    others = {key: value for key, value in content.items() if key not in read}
    others |= {f"{field}.{key}": rope[key] for key in rope.keys() - read_of_rope if rope[key] != 1}
    eos, bos = token("eos_token_id"), token("bos_token_id")
    unused = tuple(f"{key} = {json.dumps(value)[:60]}" for key, value in others.items() if value and value != "none")
    return Folder(model, "llama" if kind in _DEFAULTS else kind, context, eos, bos, unused)


def read_json(path: Path, advice: str) -> JsonObject:
    """Reads a JSON object; {} if the file does not exist. Raises ConfigError if the file cannot be read or is not an object."""
    try:
        content = json.loads(read_text(path))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"'{path}' cannot be read ({error}); {advice}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"'{path}' is not a JSON object; {advice}")
    return content


def _model_table(content: JsonObject) -> JsonObject:
    """The fields of [model] that all classes have. Raises KeyError for one that is missing."""
    table = {o: content[theirs] for o, theirs in _FIELDS.items() if theirs in content or theirs != "rms_norm_eps"}
    table["kv_heads"] = content.get("num_key_value_heads") or content["num_attention_heads"]
    if width := content.get("head_dim"):
        table["head_dim"] = width
    kind, rope = _rope(content)
    table["rope_theta"] = rope["rope_theta"]
    table["tied"] = bool(content.get("tie_word_embeddings"))
    table["init_std"] = content.get("initializer_range") or 0.02
    return table | {ours: rope[theirs] for ours, theirs in _ROPE.items() if kind == "llama3"}


def _rope(content: JsonObject) -> tuple[object, JsonObject]:
    """(type, parameters) of RoPE, as transformers 5's LlamaConfig reads them whichever version is installed (4 ignores
    rope_parameters; tests/border/test_weights.py compares). A folder has rope_parameters, or rope_theta and maybe rope_scaling;
    if it has both, rope_scaling counts. What that field omits, the top level supplies."""
    rope = content.get("rope_scaling") or content.get("rope_parameters") or {}
    rope = dict(rope) if isinstance(rope, dict) else {"rope_type": str(rope)}
    rope.setdefault("rope_theta", content.get("rope_theta", 10000.0))
    length = content.get("original_max_position_embeddings")
    default = content.get("max_position_embeddings", 2048)
    rope["original_max_position_embeddings"] = length or rope.get("original_max_position_embeddings", default)
    return rope.get("rope_type", rope.get("type", "default")), rope


def _sliding_window(kind: str, content: JsonObject, where: str) -> int | None:
    """The window of tokens to which some block of the model attends; None: all attend to the whole context."""
    if kind not in _DEFAULTS or kind == "llama":
        return None
    window = content["sliding_window"]
    if kind != "mistral":
        is_used, types = content["use_sliding_window"], content["layer_types"]
        if types is None:
            window = window if is_used else None
        else:  # which sets the masks, whether or not the window is used
            window = window if is_used or kind == "smollm3" else None
            other = [each for each in types if each != "full_attention"] if isinstance(types, list) else [types]
            if other and (other[0] != "sliding_attention" or window is None):
                raise ConfigError(
                    f"layer_types has {other[0]!r} in {where}, which is not supported; valid value: 'full_attention'"
                )
            window = window if other else None
    if window is not None and (not isinstance(window, int) or isinstance(window, bool)):
        raise ConfigError(f"sliding_window = {window!r} in {where} must be an integer or null")
    return window


def _nope_layers(content: JsonObject, where: str) -> list[int]:
    """Blocks without rotary embeddings, which SmolLM3 marks with 0 in `no_rope_layers`."""
    layers, marks = content["num_hidden_layers"], content["no_rope_layers"]
    if marks is None:
        interval = content["no_rope_layer_interval"]
        marks = [(n + 1) % interval for n in range(layers)]
    if not isinstance(marks, list) or len(marks) < layers:
        raise ConfigError(
            f"no_rope_layers = {marks!r} in {where} must be a list of 0 or 1 for each of the {layers} layers"
        )
    return [n for n in range(layers) if not marks[n]]


def _require_supported(kind: str, content: JsonObject, where: str) -> None:
    """Raises ConfigError for LLaMA features that our decoder does not have."""
    rope_type, _ = _rope(content)
    if rope_type not in ("default", "llama3"):
        raise ConfigError(
            f"rope_type = {rope_type!r} in {where} is not supported; valid values: 'default' and 'llama3'"
        )
    for field in ("mlp_bias",) if kind in ("llama", "qwen3", "smollm3") else ("attention_bias", "mlp_bias"):
        if content.get(field):
            raise ConfigError(f"{field} = true in {where} is not supported for {kind!r}; valid value: false")
    if content.get("is_causal") not in (None, True):
        raise ConfigError(f"is_causal = false in {where} is not supported (bidirectional attention); valid value: true")
    for field in _NOT_ONE:
        if (value := content.get(field)) not in (None, 1):
            raise ConfigError(f"{field} = {value!r} in {where} is not supported; valid value: 1 (or no such field)")
    if content.get("head_dim", 1) is None and kind in ("qwen2", "qwen3", "smollm3"):
        raise ConfigError(f"head_dim = null in {where} is not valid for {kind!r}; set it to the width of one head")
    if "boost_lowrank" in content:
        raise ConfigError(
            f"{where} belongs to a model with factors from boost.lowrank; merge them first: "
            "boost.merge_lowrank(boost.load_lowrank(PATH)).save_pretrained(OUT)"
        )
    if name := content.get("transformers_weights"):
        raise ConfigError(
            f"transformers_weights = {name!r} in {where} is not supported; rename the file: model.safetensors"
        )
    if quantization := content.get("quantization_config"):
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise ConfigError(f"quantization_config ({method!r}) in {where} is not supported; import unquantized weights")


def _family_table(kind: str, content: JsonObject, where: str) -> JsonObject:
    """The fields of [model] that depend on the class of the folder's model."""
    act = content.get("hidden_act", "silu")
    if kind == "boost":
        fields = (ModelConfig.find(content["family"]) or ModelConfig).model_fields
        return {field: content[field] for field in fields if field not in _RENAMED}
    if kind in _DEFAULTS:
        if act not in ("silu", "swish", "linear"):
            raise ConfigError(f"hidden_act = {act!r} in {where} is not supported; valid values: 'silu' and 'linear'")
        table = {"family": "dense", "mlp_silu": act != "linear", "qk_norm": kind == "qwen3"}
        table["attn_bias"] = "qkv" if kind == "qwen2" else "qkvo" if content.get("attention_bias") else "none"
        return table | ({"nope_layers": _nope_layers(content, where)} if kind == "smollm3" else {})
    if act and act not in ("silu", "swish"):
        raise ConfigError(f"hidden_act = {act!r} in {where} is not supported for CoLA; valid value: 'silu'")
    # The official classes default only_lr_act to true. They read lr_act_type, but apply hidden_act.
    rank = content.get("rank") or content["hidden_size"] // 4
    return {"family": "cola", "rank": rank, "mlp_silu": not content.get("only_lr_act", True)}


@dataclass(frozen=True)
class Entry:
    """One tensor in a folder, and the boost parameters that it is made from."""

    name: str
    shape: tuple[int, ...]
    parameters: tuple[Parameter, ...]
    """One parameter, or (A, B) if the tensor is the product B A."""
    transposed: bool = False


def form_of(model: ModelConfig, merge: bool, official: bool = True) -> Form:
    """Returns the form in which a model is exported. `merge`: merge the two factors of each linear into one matrix if there is no
    activation between them; `official`: prefer the official CoLA format over our own if it supports the model.

    The official CoLA class supports only one rank, silu in every bottleneck, and RoPE without scaling. It does not support
    grouped-query attention, because it computes the width of all heads as hidden_size / num_attention_heads. All other models use
    our modeling file, and the family's own.
    """
    own = _modeling(model)
    if own == "transformers":
        return "llama"
    if own != "boost":
        return "boost"
    kind = model_type(model, "merged")
    if is_product(model) and merge and kind:
        return "merged"
    plain = model.attn_bias == "none" and model.kv_heads == model.heads and model.heads_dim == model.dim
    plain = plain and kind == "llama" and model.rope_factor == 1 and not model.ranks
    return "cola" if official and plain and model.latent_act == "silu" else "boost"


def model_type(model: ModelConfig, form: Form) -> str:
    """model_type of a folder of this form; for dense weights, the first class of transformers that computes the model, or empty."""
    if form not in STOCK:
        return form
    able = {
        "llama": not model.qk_norm and not model.nope_layers and model.attn_bias != "qkv",
        "qwen2": not model.qk_norm and not model.nope_layers and model.attn_bias == "qkv",
        "qwen3": model.qk_norm and not model.nope_layers and model.attn_bias != "qkv",
        "smollm3": not model.qk_norm and bool(model.nope_layers) and model.attn_bias != "qkv",
    }
    return next((kind for kind, is_able in able.items() if is_able), "")


def class_name(model: ModelConfig, form: Form) -> str:
    """Name of the class that a folder of this form is loaded with."""
    prefix = _STOCK[model_type(model, form)] if form in STOCK else modeling(model, form)[1]
    return f"{prefix}ForCausalLM"


def _modeling(model: ModelConfig) -> str:
    """`model.modeling`, which subclasses do not inherit; our file computes usual linears only."""
    own = str(vars(type(model)).get("modeling", ""))
    return own if is_usual(model) or ":" in own else ""


def modeling(model: ModelConfig, form: Form) -> tuple[Path, str]:
    """The modeling file of a form that is not stock, and what the names of its classes begin with. Raises ConfigError."""
    own, prefix = _modeling(model), type(model).__name__.removesuffix("Config")
    if own == "boost":
        return MODELING, "Cola" if form == "cola" else "Boost"
    module, _, file = own.partition(":")
    try:
        path = Path(str(import_module(module).__file__)).with_name(file)
        read_text(path).index(f"class {prefix}ForCausalLM(")
    except (ImportError, OSError, ValueError) as error:
        raise ConfigError(
            f"model.family = '{model.family}' has no class {prefix}ForCausalLM for transformers (modeling = '{own}': {error}); set "
            "`modeling` in its class (docs/extend.md)"
        ) from None
    return path, prefix


def entries(model: ModelConfig, form: Form) -> Iterator[Entry]:
    """Yields every tensor in a folder of this form, in the order of the forward pass."""
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
            name = parameter.name
            if form == "boost" and is_factor(parameter.role):
                name += ".weight"
            elif form == "boost" and factor == "bias":
                name = f"{linear}.{slot_of(model, name).linear.last[0].name}.bias"
            yield Entry(_name(name, form), shape, (parameter,), transposed)


def _name(name: str, form: Form) -> str:
    """Returns the name of a boost parameter in a folder of this form."""
    if name in _ENDS:
        return _ENDS[name]
    layer, rest = name.split(".", 2)[1:]
    if rest in _NORMS:
        return f"model.layers.{layer}.{_NORMS[rest]}"
    slot, kind = ".".join(rest.split(".", 2)[:2]), rest.split(".", 2)[2]
    if kind == "norm":
        return f"model.layers.{layer}.self_attn.{slot[-1]}_norm.weight"
    return f"model.layers.{layer}.{_MODULES[slot]}.{_KINDS[form].get(kind, kind)}"
