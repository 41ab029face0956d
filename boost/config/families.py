"""Model configuration: the fields of every decoder, and one class per family of linears.

A family is a subclass of `ModelConfig` with its documentation, its own fields, derived defaults and rules.
"""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar, cast, get_args

from pydantic import BeforeValidator, Field

from boost.config.linears import SPECTRAL, Initial, Linear, Map, Size
from boost.config.section import Count, Natural, Positive, Tagged, Values, WholeConfig, Width
from boost.errors import ConfigError

Family = str
"""A value of model.family, one of `ModelConfig.choices`."""

SLOTS = ("attn.q", "attn.k", "attn.v", "attn.o", "mlp.gate", "mlp.up", "mlp.down")
"""Names of the linears in a block, in the order of `boost.config.architecture.groups`."""


class ModelConfig(Tagged):
    """A LLaMA-style decoder with dense or low-rank linears."""

    key: ClassVar[str] = "model.family"
    absent: ClassVar[Values] = {"rank": None, "ranks": {}, "latent_act": "none", "factor_init": "none"}
    if TYPE_CHECKING:  # readable for every family: its own field, or the value in `absent`
        rank: int | None = None
        ranks: dict[str, int] = Field(default={})
        latent_act: str = "none"
        factor_init: str = "none"

    low_rank: ClassVar[bool] = False
    """Whether the linears have bottlenecks."""

    math: ClassVar[str] = "boost.models.latents:Math"
    """`module:Class` of its mathematics; imported when a model is built."""

    computed_by: ClassVar[dict[str, str]] = {}
    """Fields with a value for each formula, and what has the formulas: `math`, or a method. A subclass that adds values brings its
    own."""

    modeling: ClassVar[str] = ""
    """Code with which transformers computes this family: `transformers` (its dense classes), `boost` (our modeling file), or
    `module:file.py`, a file beside that module. Without it, `boost export` refuses. Not inherited: subclasses may differ."""

    recipe: ClassVar[Values] = {"mlp_silu": True}
    """The family's defaults. Switching the family resets these fields of a preset."""

    family: Family = "cola"
    """Parameterization of the seven linears in a block; the embedding and head stay dense."""

    vocab_size: Count = 32000
    """V, number of rows in the embedding and in the head. Must be at least the tokenizer's size and divisible by parallel.tp."""

    dim: Width = 512
    """d, width of the residual stream."""

    ffn_dim: Width = 1376
    """f (d_ff), width of the gated MLP."""

    layers: Width = 8
    """Number of decoder blocks."""

    heads: Width = 8
    """Number of attention heads."""

    kv_heads: Width
    """Number of key/value heads (GQA); must divide heads. Default: heads."""

    head_dim: Width
    """Width of one attention head; must be even, because rotary embeddings use pairs. Default: dim / heads."""

    attn_bias: Literal["none", "qkv", "qkvo"] = "none"
    """Linears of attention that add a bias to their output. qkv: as in Qwen2. qkvo: all four."""

    qk_norm: bool = False
    """True: RMSNorm of each head's query and key before RoPE, with one gain per dimension of a head, as in Qwen3."""

    nope_layers: Annotated[tuple[Natural, ...], Field(strict=False)] = ()
    """Indices of the blocks without rotary embeddings (NoPE), such as [3, 7, 11], as in SmolLM3."""

    tied: bool = False
    """True: the head is the embedding, one V x d table with the sum of both gradients. It is sharded along the vocabulary under
    every layout."""

    mlp_silu: bool = True
    """True: SwiGLU, silu on the gate. False: down(gate(x) * up(x)), as in CoLA's models of 350M parameters and more."""

    norm_eps: Positive = 1e-6
    """epsilon of RMSNorm, added to the mean square."""

    rope_theta: Positive = 10000.0
    """Base of the rotary position embeddings."""

    rope_factor: Positive = 1.0
    """Factor by which low rotary frequencies are divided to extend the context; 8 in Llama 3.1. 1 disables scaling."""

    rope_low_freq: Positive = 1.0
    """With `rope_factor`: frequencies of at most this many turns per `rope_original_len` tokens are divided by the full factor.
    Between this and `rope_high_freq`, the scaling is interpolated."""

    rope_high_freq: Positive = 4.0
    """With `rope_factor`: frequencies of at least this many turns per `rope_original_len` tokens are not scaled."""

    rope_original_len: Count = 8192
    """With `rope_factor`: context length before the extension, in tokens."""

    init_std: Positive = 0.02
    """Standard deviation of the initial embedding, head and dense linears. For low-rank factors, see `factor_init`."""

    @classmethod
    def derived(cls, values: Values) -> dict[str, object]:
        """By default, there are as many key/value heads as attention heads, and together the latter are as wide as the model."""
        dim, heads = (values.get(name, cls.model_fields[name].default) for name in ("dim", "heads"))
        if not (isinstance(dim, int) and isinstance(heads, int) and min(dim, heads) > 0):
            return {"kv_heads": heads, "head_dim": 1}
        return {"kv_heads": heads, "head_dim": max(dim // heads, 1)}

    @classmethod
    def kind(cls, values: Values) -> type["ModelConfig"]:
        """The family whose recipe applies to this family's linears."""
        return cls

    @classmethod
    def dropped(cls, former: type["ModelConfig"], new: type["ModelConfig"], table: Values, changes: Values) -> set[str]:
        """The fields in either family's recipe; none if the recipe stays the same, as from CoLA to LaX over CoLA."""
        same = former.kind(table) is new.kind(changes)
        return set() if same else {*former.recipe, *new.recipe}

    @classmethod
    def smallest(cls, dim: int) -> Values:
        """The family's own fields in a small model of width `dim`."""
        return {"rank": dim // 4} if cls.low_rank else {}

    def advice(self) -> Iterator[str]:
        """Yields advice to print before a run of this model, one sentence at a time."""
        yield from ()

    @property
    def heads_dim(self) -> int:
        """Width of all attention heads: the output of q, and the input of o."""
        return self.heads * self.head_dim

    @property
    def title(self) -> str:
        """The family with its main choices."""
        return self.family

    @property
    def equation(self) -> str:
        """What a linear computes, in a few words."""
        return "W x"

    @property
    def mixing(self) -> str:
        """How a block combines its latents u with those of the previous block h, if it does."""
        return "u and h"

    def require_implemented(self) -> None:
        """Raises ConfigError for an activation, an initialization or a gate that neither BOOST nor the family computes: a family of
        another package may declare any."""
        family, bases = f"model.family = '{self.family}'", type(self).__mro__
        if self.math != ModelConfig.math and not self.low_rank:
            raise ConfigError(f"{family} has whole weights, so its math = '{self.math}' has no effect; remove it")
        for name, what in self.computed_by.items():
            owners = [base for base in bases if name in getattr(base, "model_fields", {})]
            # The class that has the formulas knows the values; if they come with every decoder, the class that has the field first.
            owner = next((base for base in bases if what in vars(base) and base in owners), owners[-1])
            value, known = getattr(self, name), get_args(owner.model_fields[name].annotation)  # type: ignore[attr-defined]
            if value not in known:
                raise ConfigError(
                    f"model.{name} = '{value}' of {family} is not implemented; valid values: {', '.join(known)}"
                )

    def linear(self, layer: int, size: Size) -> Linear:
        """The maps of one linear in block `layer`. Those of a block that share an input have equally many."""
        return Linear(weight=(Map("W", size.d_out, self.init_std),))

    def rank_of(self, layer: int, slot: str) -> int | None:
        """Rank of the linear `slot` (attn.q, ...) in block `layer`; None for the dense family."""
        for name in (f"layers.{layer}.{slot}", slot, slot.partition(".")[0]):
            if name in self.ranks:
                return self.ranks[name]
        return self.rank


def _by_linear(table: Any, prefix: str = "") -> Any:
    """Flattens a table of ranks (TOML parses a bare `attn.q = 64` as a table in a table), and replaces `kv` with attn.k and attn.v,
    unless the table names these too."""
    if not isinstance(table, dict):
        return table
    flat: dict[str, object] = {}
    for name, value in table.items():
        flat |= _by_linear(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    if "kv" in flat:
        rank = flat.pop("kv")
        flat = {"attn.k": rank, "attn.v": rank} | flat
    return flat


class LowRankConfig(ModelConfig):
    """Base of the low-rank families: y = B act(A x)."""

    low_rank: ClassVar[bool] = True
    computed_by: ClassVar[dict[str, str]] = {"latent_act": "math", "factor_init": "initial"}
    recipe: ClassVar[Values] = {"mlp_silu": True, "latent_act": "none", "factor_init": "xavier"}

    rank: Width
    """r, bottleneck rank of every low-rank linear. Default: dim / 4."""

    ranks: Annotated[dict[str, Width], BeforeValidator(_by_linear)] = Field(default={})
    """Overrides of `rank`, as a table. Its keys are attn, mlp, kv (attn.k and attn.v), one linear (attn.q), or one linear in one
    block (layers.3.attn.q); the most specific key wins. CoLA's separate ranks are ranks.attn and ranks.mlp."""

    latent_act: Literal["silu", "none"]
    """Activation of the latent, act in y = B act(A x). Default: silu for cola, none otherwise."""

    factor_init: Literal["cola", "xavier", "spectral"]
    """Initialization of the factors. cola: normal with std (rank)^(-1/4) (d_in + d_out)^(-1/4). xavier: Xavier normal. spectral:
    the truncated SVD of the dense linear's initial weight. Default: cola for cola, xavier for svd."""

    @classmethod
    def derived(cls, values: Values) -> dict[str, object]:
        """rank is dim / 4 by default; the other defaults come from the recipe."""
        dim = values.get("dim", cls.model_fields["dim"].default)
        rank = max(dim // 4, 1) if isinstance(dim, int) else None
        return super().derived(values) | {"rank": rank, **LowRankConfig.recipe, **cls.kind(values).recipe}

    @property
    def equation(self) -> str:
        """What a linear computes, in a few words."""
        return "B A x" if self.latent_act == "none" else f"B {self.latent_act}(A x)"

    def linear(self, layer: int, size: Size) -> Linear:
        """B act(A x)."""
        rank = self.rank_of(layer, size.name) or 0
        a, b = (self.initial(size, rank, (rank, size.d_in)), self.initial(size, rank, (size.d_out, rank)))
        return Linear((Map("A", rank, a),), (Map("B", rank, b),))

    def initial(self, size: Size, rank: int, shape: tuple[int, int]) -> Initial:
        """Initial values of a factor of this shape, by `factor_init`."""
        if self.factor_init == "xavier":
            return math.sqrt(2 / sum(shape))
        # As in CoLA's official code: the same for both factors of a linear.
        return SPECTRAL if self.factor_init == "spectral" else rank**-0.25 * (size.d_in + size.d_out) ** -0.25

    def advice(self) -> Iterator[str]:
        """Names key/value projections whose factors are larger than a dense matrix, as with few key/value heads."""
        width = self.kv_heads * self.head_dim
        for slot in ("attn.k", "attn.v"):
            rank = max(self.rank_of(layer, slot) or 0 for layer in range(self.layers if self.ranks else 1))
            if rank * (self.dim + width) > self.dim * width:
                yield (
                    f"{slot} ({self.dim} x {width}) has more parameters as factors of rank {rank} than as one matrix; to set its "
                    f"rank to a quarter of its width, add --model.ranks.{slot} {max(width // 4, 1)} (ranks.kv: attn.k and attn.v)"
                )

    def problems(self, config: WholeConfig) -> Iterator[str]:
        """Ranks larger than their linears, and ranks for unknown linears."""
        narrow, bound = min((self.dim, "model.dim"), (self.ffn_dim, "model.ffn_dim"))
        if self.rank > narrow:
            yield f"model.rank = {self.rank} exceeds {bound} = {narrow}; largest valid value: {narrow}"
        numbers = {str(number) for number in range(self.layers)} if self.ranks else set()
        for name, rank in self.ranks.items():
            _, layer, slot = (*name.split(".", 2), "", "")[:3] if name.startswith("layers.") else ("", "", name)
            if slot not in (SLOTS if layer else ("attn", "mlp", *SLOTS)) or (layer and layer not in numbers):
                example = f", or layers.0.{SLOTS[0]} to layers.{self.layers - 1}.{SLOTS[-1]} for one block"
                yield (
                    f"model.ranks.{name} is not a linear in this model; valid names: "
                    f"{', '.join(('attn', 'mlp', 'kv', *SLOTS))}{example}"
                )
                continue
            # Not checked against the width of few key/value heads: a rank larger than that is wasteful but valid.
            most, field = (self.dim, "model.dim") if slot.startswith("attn") else (narrow, bound)
            if rank > most:
                yield f"model.ranks.{name} = {rank} exceeds {field} = {most}; largest valid value: {most}"


AnyFamily = TypeVar("AnyFamily", bound=type[ModelConfig])


def register_family(family: AnyFamily) -> AnyFamily:
    """Registers a family for use in configurations, `boost.nn` and the planner. Usable as a class decorator.

    A family is a subclass of `ModelConfig` (or `LowRankConfig`, `SVDConfig`, ...) whose field `family` is a `Literal` of its name:

        @boost.register_family
        class NormedCoLA(CoLAConfig):
            family: Literal["normed-cola"] = "normed-cola"
            qk_norm: bool = True

    Raises ConfigError if the class does not define its own name.
    """
    values = get_args(cast(type[ModelConfig], family).model_fields["family"].annotation)
    if len(values) != 1 or ModelConfig.choices.get(values[0]) is not family:
        raise ConfigError(
            f"{family.__name__} does not define its own family name; add a field such as family: Literal['my-family'] = 'my-family'"
        )
    return family
