"""The mathematical function: what every decoder has, and one class for each family of linears.

A family is a subclass of `ModelConfig`: its documentation, its own fields, the defaults that it derives, and its rules.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from boost.config.section import Count, Positive, Tagged, Width

if TYPE_CHECKING:
    from boost.config.schema import Config

Family = str
"""A tag of `ModelConfig`, one of `ModelConfig.choices`."""

SLOTS = ("attn.q", "attn.k", "attn.v", "attn.o", "mlp.gate", "mlp.up", "mlp.down")
"""Names of the linears of a block, in the order of `boost.config.architecture.groups`."""


class ModelConfig(Tagged):
    """A LLaMA-style decoder whose linears are dense or a low-rank bottleneck."""

    key: ClassVar[str] = "model.family"
    absent: ClassVar[Mapping[str, Any]] = {
        "over": "none", "gate": "none", "rank": None, "ranks": {}, "latent_act": "none", "factor_init": "none",
    }  # fmt: skip
    if TYPE_CHECKING:  # every family has a value for these: its own field's, or that of `absent`
        over: str = "none"
        gate: str = "none"
        rank: int | None = None
        ranks: dict[str, int] = Field(default={})
        latent_act: str = "none"
        factor_init: str = "none"

    low_rank: ClassVar[bool] = False
    """Whether the linears are pairs of factors."""

    has_latent_gates: ClassVar[bool] = False
    """Whether each block's latents pass through a latent gate into the next block."""

    recipe: ClassVar[Mapping[str, Any]] = {"mlp_silu": True}
    """The family's defaults. Switching the family resets a preset's values of these fields."""

    family: Family = "cola"
    """Parameterization of the seven linears of a block; embedding and head stay dense."""

    vocab_size: Count = 32000
    """V, rows of the embedding and of the head; at least the tokenizer's size, and divisible by parallel.tp."""

    dim: Width = 512
    """d, width of the residual stream."""

    ffn_dim: Width = 1376
    """f (d_ff), width of the gated MLP."""

    layers: Width = 8
    """Number of decoder blocks."""

    heads: Width = 8
    """Attention heads; head_dim = dim / heads must be even (rotary embeddings use pairs)."""

    kv_heads: Width
    """Key/value heads (GQA); divides heads. Default: heads."""

    mlp_silu: bool = True
    """True: SwiGLU, silu on the gate; False: CoLA's down(gate(x) * up(x)), used from 350M up."""

    norm_eps: Positive = 1e-6
    """epsilon of RMSNorm, added to the mean square."""

    rope_theta: Positive = 10000.0
    """Base of the rotary position embeddings."""

    rope_factor: Positive = 1.0
    """Rotations of few turns within `rope_original_len` tokens are this many times slower, as in Llama 3.1 (8). 1: none is."""

    rope_low_freq: Positive = 1.0
    """With `rope_factor`: rotations of at most so many turns are slower by all of it, those up to `rope_high_freq` by a part."""

    rope_high_freq: Positive = 4.0
    """With `rope_factor`: rotations of at least so many turns are as rope_theta says."""

    rope_original_len: Count = 8192
    """With `rope_factor`: tokens of the sequences that rope_theta was made for."""

    init_std: Positive = 0.02
    """Standard deviation of the embedding, the head and the dense linears. Factors of low-rank linears have their own."""

    @classmethod
    def derived(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Key/value heads, as many as heads."""
        return {"kv_heads": values.get("heads", cls.model_fields["heads"].default)}

    @classmethod
    def kind(cls, values: Mapping[str, Any]) -> Any:
        """The family whose recipe the linears of this one have."""
        return cls

    @classmethod
    def dropped(
        cls, former: type["ModelConfig"], new: type["ModelConfig"], table: Mapping[str, Any], changes: Mapping[str, Any]
    ) -> set[str]:
        """The former family's recipe, unless the new one has the same: CoLA's linears stay CoLA's in LaX over CoLA."""
        same = former.kind(table) is new.kind(changes)
        return set() if same else {*former.recipe, *new.recipe}

    def advice(self) -> Iterator[str]:
        """What a person would want to know before a run of this model, a sentence each."""
        yield from ()

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.heads

    @property
    def title(self) -> str:
        """The family with its main choices, as 'lax over cola, tensor gate'."""
        return self.family

    @property
    def mixes(self) -> bool:
        """Whether the latent gate mixes ranks, and so needs whole latents."""
        return self.gate in ("tensor", "dense")

    def rank_of(self, layer: int, slot: str) -> int | None:
        """Rank of the linear `slot` (attn.q, ...) of block `layer`; None for the dense family."""
        for name in (f"layers.{layer}.{slot}", slot, slot.partition(".")[0]):
            if name in self.ranks:
                return self.ranks[name]
        return self.rank


class DenseConfig(ModelConfig):
    """y = W x."""

    family: Literal["dense"] = "dense"


def _flat(table: Any, prefix: str = "") -> Any:
    """Entries of nested tables under dotted names: TOML reads a bare `attn.q = 64` as a table in a table."""
    if not isinstance(table, dict):
        return table
    flat: dict[str, Any] = {}
    for name, value in table.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


class LowRankConfig(ModelConfig):
    """Base of the low-rank families: y = B act(A x)."""

    low_rank: ClassVar[bool] = True
    recipe: ClassVar[Mapping[str, Any]] = {"mlp_silu": True, "latent_act": "none", "factor_init": "xavier"}

    rank: Width
    """r, width of the bottleneck of every low-rank linear. Default: dim / 4."""

    ranks: Annotated[dict[str, Width], BeforeValidator(_flat)] = Field(default={})
    """Per-linear overrides of `rank`, as a table: attn, mlp, one linear (attn.q), or one linear of one block (layers.3.attn.q);
    the most specific name wins. CoLA's separate ranks are ranks.attn and ranks.mlp."""

    latent_act: Literal["silu", "none"]
    """Activation of the latent, act in y = B act(A x). Default: silu for cola, none otherwise."""

    factor_init: Literal["cola", "xavier", "spectral"]
    """Initialization of the factors. cola: normal with std (rank)^(-1/4) (d_in + d_out)^(-1/4); xavier: per factor; spectral: the
    truncated SVD of the dense linear's initial weight. Default: cola for cola, xavier for svd."""

    @classmethod
    def derived(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """The rank follows the width; the rest is the recipe."""
        dim = values.get("dim", cls.model_fields["dim"].default)
        rank = max(dim // 4, 1) if isinstance(dim, int) else None
        return super().derived(values) | {"rank": rank, **LowRankConfig.recipe, **cls.kind(values).recipe}

    def advice(self) -> Iterator[str]:
        """Key/value projections (of few heads) for which two factors are larger than one matrix."""
        width = self.kv_heads * self.head_dim
        for slot in ("attn.k", "attn.v"):
            rank = max(self.rank_of(layer, slot) or 0 for layer in range(self.layers if self.ranks else 1))
            if rank * (self.dim + width) > self.dim * width:
                yield (
                    f"{slot} of {self.dim} x {width} has more parameters as factors of rank {rank} than as one matrix: "
                    f"--model.ranks.{slot} {max(width // 4, 1)} would give it a quarter of its width"
                )

    def problems(self, config: "Config") -> Iterator[str]:
        """Ranks wider than their linears, or of linears that do not exist."""
        narrow = min(self.dim, self.ffn_dim)
        if self.rank > narrow:
            yield f"model.rank = {self.rank} is larger than the linears it factors; largest valid value: {narrow}"
        numbers = {str(number) for number in range(self.layers)} if self.ranks else set()
        for name, rank in self.ranks.items():
            _, layer, slot = (*name.split(".", 2), "", "")[:3] if name.startswith("layers.") else ("", "", name)
            if slot not in (SLOTS if layer else ("attn", "mlp", *SLOTS)) or (layer and layer not in numbers):
                example = f", or layers.0.{SLOTS[0]} to layers.{self.layers - 1}.{SLOTS[-1]} for one block"
                yield f"model.ranks.{name} is no linear of this model; the names are {', '.join(('attn', 'mlp', *SLOTS))}{example}"
                continue
            # Not checked against key/value heads, which may be few: a bottleneck wider than those is no bottleneck, but legal.
            most = self.dim if slot.startswith("attn") else narrow
            if rank > most:
                yield f"model.ranks.{name} = {rank} is larger than the linears it factors; largest valid value: {most}"


class SVDConfig(LowRankConfig):
    """y = B (A x)."""

    family: Literal["svd"] = "svd"


class CoLAConfig(LowRankConfig):
    """y = B silu(A x)."""

    family: Literal["cola"] = "cola"
    recipe: ClassVar[Mapping[str, Any]] = {"mlp_silu": True, "latent_act": "silu", "factor_init": "cola"}


class LaXConfig(LowRankConfig):
    """svd or cola whose latents also feed the next block (LaX)."""

    has_latent_gates: ClassVar[bool] = True
    family: Literal["lax"] = "lax"

    over: Literal["svd", "cola"] = "cola"
    """Family of the linears."""

    gate: Literal["identity", "tensor", "dense"] = "identity"
    """Gate applied to the previous block's latents. identity: none; tensor: two small matrices, one for each of
    the two most balanced divisors of the rank; dense: a rank x rank linear."""

    @classmethod
    def kind(cls, values: Mapping[str, Any]) -> Any:
        """The family that the latents are of."""
        return cls.find(values.get("over", cls.model_fields["over"].default)) or cls

    @property
    def title(self) -> str:
        """The family with its main choices."""
        return f"lax over {self.over}, {self.gate} gate"

    def problems(self, config: "Config") -> Iterator[str]:
        """A linear's latents feed the same linear of the next block."""
        for name in self.ranks:
            if name.startswith("layers."):
                yield (
                    f"model.ranks.{name}: under model.family = 'lax' a linear's latents enter the same linear of the next "
                    f"block, so all blocks have one rank for it; write ranks.{name.partition('.')[2].partition('.')[2]}"
                )
        yield from super().problems(config)
