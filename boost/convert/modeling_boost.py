"""BOOST's low-rank decoders for Hugging Face transformers: every linear in a LLaMA block is y = B act(A x).

act is silu (CoLA, arXiv 2502.10940) or the identity; a family with other mathematics adds a file of its own. Requires only torch
and transformers:

    AutoModelForCausalLM.from_pretrained(PATH, trust_remote_code=True)

Legend: B batch size, S sequence length, D width of the residual stream, I and O input and output width of a linear, r rank,
H query heads, E head dimension.
"""

import inspect
import math
import sys
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel, Qwen3Config
from transformers.cache_utils import Cache, DynamicCache
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import Transpose, WeightConverter
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

CACHE = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"
"""The cache argument's name in the installed transformers: `cache` since 5.24, `past_key_values` before. Before 5.24, `cache` was
the paged cache of continuous batching, which attention implementations update; now it is an ordinary cache."""


class BoostConfig(PretrainedConfig):
    """LLaMA's fields, and the fields of the bottleneck.

    rank: r for every linear; ranks: exceptions by name (attn, mlp.down, layers.3.attn.q; the most specific name applies);
    rope_factor, rope_low_freq, rope_high_freq, rope_original_len: Llama 3.1's RoPE scaling (factor 1: none);
    latent_act: silu or none; mlp_silu: SwiGLU's own silu;
    attn_bias: linears of attention with a bias after B (none, qkv or qkvo); qk_norm: RMSNorm of each head's query and key;
    nope_layers: blocks without RoPE.
    """

    bottleneck: ClassVar[type[nn.Module]]  # BoostBottleneck, unless the modeling file of another family names its own
    model_type = "boost"
    keys_to_ignore_at_inference = [CACHE]  # noqa: RUF012 (transformers reads a plain list)
    # Tensor parallelism by transformers: heads and MLP channels are sharded, latents are replicated. A block's only collectives are
    # two all-reduces of r numbers per token, after A of o and A of down. Activations see complete latents.
    base_model_tp_plan: ClassVar[dict[str, str] | None] = {
        **{f"layers.*.self_attn.{name}_proj.B": "colwise" for name in "qkv"},
        "layers.*.self_attn.o_proj.A": "rowwise",
        **{f"layers.*.mlp.{name}_proj.B": "colwise" for name in ("gate", "up")},
        "layers.*.mlp.down_proj.A": "rowwise",
    }

    def __init__(
        self,
        vocab_size: int = 32000,
        hidden_size: int = 512,
        intermediate_size: int = 1376,
        num_hidden_layers: int = 8,
        num_attention_heads: int = 8,
        num_key_value_heads: int | None = None,
        max_position_embeddings: int = 2048,
        rms_norm_eps: float = 1e-6,
        rope_theta: float = 10000.0,
        rope_factor: float = 1.0,
        rope_low_freq: float = 1.0,
        rope_high_freq: float = 4.0,
        rope_original_len: int = 8192,
        initializer_range: float = 0.02,
        rank: int | None = None,
        ranks: dict[str, int] | None = None,
        latent_act: str = "silu",
        mlp_silu: bool = True,
        head_dim: int | None = None,
        attn_bias: str = "none",
        qk_norm: bool = False,
        nope_layers: list[int] | None = None,
        use_cache: bool = True,
        tie_word_embeddings: bool = False,
        **kwargs: object,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads or num_attention_heads
        self.max_position_embeddings = max_position_embeddings
        self.rms_norm_eps = rms_norm_eps
        self.rope_theta = rope_theta
        self.rope_factor = rope_factor
        self.rope_low_freq, self.rope_high_freq = rope_low_freq, rope_high_freq
        self.rope_original_len = rope_original_len
        self.initializer_range = initializer_range
        self.rank = rank or max(hidden_size // 4, 1)
        self.ranks = ranks or {}
        self.latent_act = latent_act
        self.mlp_silu = mlp_silu
        self.head_dim = head_dim or hidden_size // num_attention_heads
        self.attn_bias, self.qk_norm, self.nope_layers = attn_bias, qk_norm, nope_layers or []
        style = (Qwen3Config.base_model_tp_plan or {})["layers.*.self_attn.q_norm"]  # sums the gradients of the norms
        if qk_norm and self.base_model_tp_plan:
            self.base_model_tp_plan = {  # type: ignore[misc]
                **self.base_model_tp_plan,
                **{f"layers.*.self_attn.{name}_norm": style for name in "qk"},
            }
        self.use_cache = use_cache
        rope: Any = kwargs.get("rope_scaling") or kwargs.get("rope_parameters") or {}
        if rope.get("rope_type", rope.get("type", "default")) != "default":
            raise ValueError(f"rope_scaling = {rope} is not supported; set rope_factor, for Llama 3.1's scaling")
        if self.bottleneck is BoostBottleneck and latent_act not in ("silu", "none"):
            raise ValueError(f"latent_act = {latent_act!r} is not supported")
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        cls.__init__ = cls.__init__  # type: ignore[method-assign]  # else, transformers generates one that ignores ours
        super().__init_subclass__(**kwargs)

    def rank_of(self, layer: int, slot: str) -> int:
        """Rank of the linear `slot` (attn.q, ...) in block `layer`."""
        names = (f"layers.{layer}.{slot}", slot, slot.partition(".")[0])
        return next((self.ranks[name] for name in names if name in self.ranks), self.rank)


class ColaConfig(BoostConfig):
    """The official CoLA fields: one rank, silu in every bottleneck; `only_lr_act`: without SwiGLU's own silu."""

    model_type = "cola"
    # transformers shards a tensor while reading it, before the transpose, and therefore along the wrong dim.
    base_model_tp_plan = None

    def __init__(self, only_lr_act: bool = True, lr_act_type: str = "silu", **kwargs: Any) -> None:
        if lr_act_type != "silu":
            raise ValueError(f"lr_act_type = {lr_act_type!r}: only 'silu' is supported")
        self.only_lr_act, self.lr_act_type = only_lr_act, lr_act_type
        super().__init__(**kwargs | {"latent_act": "silu", "mlp_silu": not only_lr_act})


class BoostRMSNorm(nn.Module):
    """x / rms(x) * weight, with the mean square in fp32 or wider."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x_BSD: Tensor) -> Tensor:
        x_acc_BSD = x_BSD.to(torch.promote_types(x_BSD.dtype, torch.float32))
        inverse = torch.rsqrt(x_acc_BSD.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * (x_acc_BSD * inverse).to(x_BSD.dtype)


class BoostEmbedding(nn.Embedding):
    """An embedding whose gradient is summed in fp32 or wider on CPUs, too."""

    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight
        if weight.is_cpu and weight.requires_grad and torch.is_grad_enabled():
            weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
        return F.embedding(input, weight).to(self.weight.dtype)


class BoostBottleneck(nn.Module):
    """y = B act(A x): A and B are `nn.Linear` with weights [r, I] and [O, r], so that peft can adapt them.

    Files in the official CoLA format store the transposes cola_a [I, r] and cola_b [r, O]. transformers converts them when
    loading and saving.
    """

    def __init__(self, config: BoostConfig, layer: int, slot: str, d_in: int, d_out: int) -> None:
        super().__init__()
        rank = config.rank_of(layer, slot)
        self.silu = config.latent_act == "silu"
        self.A = nn.Linear(d_in, rank, bias=False)
        has_bias = config.attn_bias != "none" and slot.removeprefix("attn.") in config.attn_bias
        self.B = nn.Linear(rank, d_out, bias=has_bias)

    def initialize(self) -> None:
        """Draws the weights of a model that is not loaded."""
        a, b = self.A.weight, self.B.weight
        std = a.shape[0] ** -0.25 * (a.shape[1] + b.shape[0]) ** -0.25
        for name, weight in self.named_parameters():
            if name.endswith(".weight"):
                nn.init.normal_(weight, std=std)
        if self.B.bias is not None:
            nn.init.zeros_(self.B.bias)

    def act(self, u_BSr: Tensor) -> Tensor:
        """The activation of latents."""
        return F.silu(u_BSr) if self.silu else u_BSr

    def forward(self, x_BSI: Tensor, prev_latents_BSr: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns y [B, S, O], and the latents h [B, S, r], which the next block gets as `prev_latents_BSr`."""
        h_BSr = self.act(self.A(x_BSI))
        return self.B(h_BSr), h_BSr


BoostConfig.bottleneck = BoostBottleneck


def eager_attention(
    module: "BoostHeads", q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None, scaling: float, **_: object
) -> tuple[Tensor, Tensor]:
    """softmax(q k^T scaling + mask) v in plain operations, for attn_implementation="eager": returns [B, S, H, E] and weights."""
    k, v = (x.repeat_interleave(module.num_key_value_groups, dim=1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = scores.softmax(dim=-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
    return (weights @ v).transpose(1, 2).contiguous(), weights


def rotate(x_BHSE: Tensor, cos_BSE: Tensor, sin_BSE: Tensor) -> Tensor:
    """Rotary embedding in the rotate-half form."""
    first, second = x_BHSE.chunk(2, dim=-1)
    return x_BHSE * cos_BSE[:, None] + torch.cat((-second, first), dim=-1) * sin_BSE[:, None]


# The class name must not end in Attention: transformers 5 searches the source of such classes for a call that only version 5 has,
# and if it is missing, does not allow choosing the attention implementation.
class BoostHeads(nn.Module):
    """Causal attention, using the attention implementation selected in transformers."""

    def __init__(self, config: BoostConfig, layer: int) -> None:
        super().__init__()
        self.config, self.layer_idx = config, layer
        self.head_dim, self.has_rope = config.head_dim, layer not in config.nope_layers
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.is_causal = True
        d, kv = config.hidden_size, config.num_key_value_heads * self.head_dim
        all_heads = config.num_attention_heads * self.head_dim
        self.q_proj = config.bottleneck(config, layer, "attn.q", d, all_heads)
        self.k_proj = config.bottleneck(config, layer, "attn.k", d, kv)
        self.v_proj = config.bottleneck(config, layer, "attn.v", d, kv)
        self.o_proj = config.bottleneck(config, layer, "attn.o", all_heads, d)
        if config.qk_norm:
            self.q_norm, self.k_norm = (BoostRMSNorm(self.head_dim, config.rms_norm_eps) for _ in "qk")

    def forward(
        self,
        x_BSD: Tensor,
        prev_latents: tuple[Tensor | None, ...],
        rotary: tuple[Tensor, Tensor],
        attention_mask: Tensor | None,
        past_key_values: Cache | None,
        **kwargs: object,
    ) -> tuple[Tensor, tuple[Tensor, ...], Tensor | None]:
        """Returns the residual update [B, S, D], latents of q, k, v, o, and attention weights if the implementation returns them.

        The paged cache of continuous batching reads the tokens' page positions from `kwargs`.
        """
        projections = (self.q_proj, self.k_proj, self.v_proj)
        projected = [linear(x_BSD, h) for linear, h in zip(projections, prev_latents[:3], strict=True)]
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for y, _ in projected)
        if self.config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.has_rope:
            q, k = rotate(q, *rotary), rotate(k, *rotary)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx, **({"kwargs": kwargs} if CACHE == "cache" else {}))
        name = self.config._attn_implementation
        attend = eager_attention if name == "eager" else ALL_ATTENTION_FUNCTIONS[name]
        a_BSHE, weights = attend(self, q, k, v, attention_mask, dropout=0.0, scaling=self.scaling, **kwargs)
        update_BSD, h_o = self.o_proj(a_BSHE.flatten(2), prev_latents[3])
        return update_BSD, (*(h for _, h in projected), h_o), weights


class BoostMLP(nn.Module):
    """down(act(gate x) * up x), where act is silu or the identity."""

    def __init__(self, config: BoostConfig, layer: int) -> None:
        super().__init__()
        self.silu = config.mlp_silu
        d, f = config.hidden_size, config.intermediate_size
        self.gate_proj = config.bottleneck(config, layer, "mlp.gate", d, f)
        self.up_proj = config.bottleneck(config, layer, "mlp.up", d, f)
        self.down_proj = config.bottleneck(config, layer, "mlp.down", f, d)

    def forward(self, x_BSD: Tensor, prev_latents: tuple[Tensor | None, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        gate, h_gate = self.gate_proj(x_BSD, prev_latents[0])
        up, h_up = self.up_proj(x_BSD, prev_latents[1])
        update_BSD, h_down = self.down_proj((F.silu(gate) if self.silu else gate) * up, prev_latents[2])
        return update_BSD, (h_gate, h_up, h_down)


class BoostDecoderLayer(GradientCheckpointingLayer):
    """Pre-norm attention and gated MLP with residual connections.

    Tensors with gradients are separate positional arguments, because reentrant checkpointing does not look inside tuples.
    """

    def __init__(self, config: BoostConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = BoostHeads(config, layer)
        self.mlp = BoostMLP(config, layer)
        self.input_layernorm = BoostRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = BoostRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x_BSD: Tensor, *prev_latents: Tensor | None, **kwargs: object) -> tuple[Tensor | None, ...]:
        """Returns the residual stream after this block, the attention weights, and the block's seven latents."""
        update, attention_latents, weights = self.self_attn(self.input_layernorm(x_BSD), prev_latents[:4], **kwargs)
        x_BSD = x_BSD + update
        update, mlp_latents = self.mlp(self.post_attention_layernorm(x_BSD), prev_latents[4:])
        return x_BSD + update, weights, *attention_latents, *mlp_latents


class BoostPreTrainedModel(PreTrainedModel):
    """Common attributes and initialization of the model classes."""

    config_class: type[BoostConfig] = BoostConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["BoostDecoderLayer"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values", "cache"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # `Trainer` shifts the labels for label smoothing only if the class is in this table.
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[cls.__name__] = cls.__name__
        # `transformers serve` looks up the class that config.json names among its own classes, even with --trust-remote-code.
        if (server := sys.modules.get("transformers.cli.serving.model_manager")) is not None:
            setattr(server.transformers, cls.__name__, cls)

    def _init_weights(self, module: nn.Module) -> None:
        """Initializes a model that is created from a configuration. Does not apply to weights loaded from a checkpoint."""
        if isinstance(module, BoostBottleneck):
            module.initialize()
        elif isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
        elif isinstance(module, BoostRMSNorm):
            nn.init.ones_(module.weight)


class BoostModel(BoostPreTrainedModel):
    """Embedding, blocks, final norm."""

    def __init__(self, config: BoostConfig) -> None:
        super().__init__(config)
        self.embed_tokens = BoostEmbedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(BoostDecoderLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = BoostRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: object,
    ) -> "tuple[object, ...] | BaseModelOutputWithPast":
        """Hidden states [B, S, D] for tokens [B, S]; attention_mask [B, tokens so far], 0 for padding on either side."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass exactly one of input_ids and inputs_embeds")
        config = self.config
        output_attentions = config.output_attentions if output_attentions is None else output_attentions
        output_hidden_states = config.output_hidden_states if output_hidden_states is None else output_hidden_states
        x_BSD = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        cache = kwargs.pop(CACHE, past_key_values)
        if self.gradient_checkpointing and self.training:  # recomputing a block would update its cache twice
            cache, use_cache = None, False
        if cache is None and (config.use_cache if use_cache is None else use_cache):
            cache = DynamicCache()
        seen = cache.get_seq_length() if isinstance(cache, Cache) else 0
        positions_S = torch.arange(x_BSD.shape[1], device=x_BSD.device) + seen
        position_ids = positions_S[None] if position_ids is None else position_ids
        mask = _causal_mask(config, x_BSD, attention_mask, positions_S, cache, position_ids)
        shared = {"rotary": _rotary(config, position_ids, x_BSD.dtype), "attention_mask": mask}
        kwargs.pop("cache_position", None)
        latents: list[Tensor | None] = [None] * 7
        states: list[Tensor] = []
        attentions: list[Tensor | None] = []
        for block in self.layers:
            states += [x_BSD] if output_hidden_states else []
            x_BSD, weights, *latents = block(x_BSD, *latents, **shared, past_key_values=cache, **kwargs)
            attentions += [weights] if output_attentions else []
        x_BSD = self.norm(x_BSD)
        output = BaseModelOutputWithPast(
            last_hidden_state=x_BSD,
            **{CACHE: cache},
            hidden_states=(*states, x_BSD) if output_hidden_states else None,
            attentions=tuple(attentions) if output_attentions else None,
        )
        return output.to_tuple() if return_dict is False else output


class ColaModel(BoostModel):
    """BoostModel for checkpoints in the format of the official CoLA class."""

    config_class = ColaConfig


def _causal_mask(
    config: BoostConfig, x_BSD: Tensor, mask: Tensor | None, positions_S: Tensor, cache: Cache | None, positions: Tensor
) -> object:
    """The mask for the chosen attention implementation; versions of transformers name the arguments differently."""
    supported = inspect.signature(create_causal_mask).parameters
    arguments = {"attention_mask": mask, "position_ids": positions}
    arguments[CACHE] = cache
    arguments["inputs_embeds" if "inputs_embeds" in supported else "input_embeds"] = x_BSD
    if "cache_position" in supported:
        arguments["cache_position"] = positions_S
    return create_causal_mask(config=config, **arguments)


def _rotary(config: BoostConfig, position_ids_BS: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [B, S, E] in `dtype`, recomputed on each call because a non-persistent buffer could be lost."""
    head_dim = config.head_dim
    acc_dtype = torch.promote_types(dtype, torch.float32)
    exponents = torch.arange(0, head_dim, 2, device=position_ids_BS.device, dtype=acc_dtype) / head_dim
    frequencies = config.rope_theta**-exponents
    if config.rope_factor != 1:
        turns = config.rope_original_len * frequencies / (2 * math.pi)
        unchanged = ((turns - config.rope_low_freq) / (config.rope_high_freq - config.rope_low_freq)).clamp(0, 1)
        frequencies = frequencies * (unchanged + (1 - unchanged) / config.rope_factor)
    angles_BSE = (position_ids_BS[..., None].to(acc_dtype) * frequencies).repeat(1, 1, 2)
    return angles_BSE.cos().to(dtype), angles_BSE.sin().to(dtype)


class BoostForCausalLM(BoostPreTrainedModel, GenerationMixin):
    """The decoder with a head, whose weight is the embedding's if config.tie_word_embeddings."""

    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan: ClassVar[dict[str, str] | None] = {"lm_head": "colwise_rep"}

    def __init__(self, config: BoostConfig) -> None:
        super().__init__(config)
        self.model = BoostModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        **kwargs: object,
    ) -> "tuple[object, ...] | CausalLMOutputWithPast":
        """Returns logits [B, S, V], only for the last `logits_to_keep` tokens if not 0. With `labels` [B, S], also returns the mean
        next-token cross-entropy (ignoring labels of -100)."""
        hidden = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        last = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(hidden.last_hidden_state[:, last])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.vocab_size, **kwargs)
        output = CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            **{CACHE: getattr(hidden, CACHE)},
            hidden_states=hidden.hidden_states,
            attentions=hidden.attentions,
        )
        return output.to_tuple() if return_dict is False else output


class ColaForCausalLM(BoostForCausalLM):
    """BoostForCausalLM for checkpoints in the format of the official CoLA class."""

    config_class = ColaConfig
    _tp_plan = None


for _model in (ColaModel, ColaForCausalLM):
    register_checkpoint_conversion_mapping(
        _model.__name__,
        [WeightConverter(f"_proj.cola_{x.lower()}", f"_proj.{x}.weight", operations=[Transpose()]) for x in "AB"],
        overwrite=True,
    )
