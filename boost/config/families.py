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

    crosses: ClassVar[bool] = False
    """Whether latents of each block enter the next."""

    recipe: ClassVar[Mapping[str, Any]] = {"mlp_silu": True}
    """Defaults that go with the family. Under another family, a preset's values for these fields no longer count."""

    family: Family = "cola"
    """Form of the seven linears of a block; embedding and head stay dense."""

    vocab_size: Count = 32000
    """V, rows of the embedding and of the head; at least the tokenizer's size, and divisible by parallel.tp."""

    dim: Width = 512
    """d, width of the residual stream."""

    ffn_dim: Width = 1376
    """f (d_ff), width of the gated MLP."""

    layers: Width = 8
    """Number of decoder blocks."""

    heads: Width = 8
    """Attention heads; dim / heads is the width of a head and must be even (rotary pairs)."""

    kv_heads: Width
    """Key/value heads (GQA); divides heads. Default: heads."""

    mlp_silu: bool = True
    """True keeps SwiGLU's silu on the gate; False is CoLA's down(gate(x) * up(x)) of 350M and up."""

    norm_eps: Positive = 1e-6
    """epsilon of RMSNorm, added to the mean square."""

    rope_theta: Positive = 10000.0
    """Base of the rotary position embedding."""

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
        """Whether latents that enter the next block pass a gate that needs all of each."""
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
    """What families with a bottleneck share: y = B act(A x)."""

    low_rank: ClassVar[bool] = True
    recipe: ClassVar[Mapping[str, Any]] = {"mlp_silu": True, "latent_act": "none", "factor_init": "xavier"}

    rank: Width
    """r, width of the bottleneck of every low-rank linear. Default: dim / 4."""

    ranks: Annotated[dict[str, Width], BeforeValidator(_flat)] = Field(default={})
    """Linears of another rank than `rank`, as a table: attn, mlp, one linear (attn.q), or one of one block (layers.3.attn.q);
    the narrower name counts. CoLA's separate ranks are ranks.attn and ranks.mlp."""

    latent_act: Literal["silu", "none"]
    """Activation of the latent, act in y = B act(A x). Default: silu for cola, none otherwise."""

    factor_init: Literal["cola", "xavier", "spectral"]
    """Initial factors. cola: normal of deviation (rank)^(-1/4) (d_in + d_out)^(-1/4); xavier: each factor by itself; spectral: the
    truncated SVD of the dense linear's initial weight. Default: cola for cola, xavier for svd."""

    @classmethod
    def derived(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """The rank follows the width; the rest is the recipe."""
        dim = values.get("dim", cls.model_fields["dim"].default)
        rank = max(dim // 4, 1) if isinstance(dim, int) else None
        return super().derived(values) | {"rank": rank, **LowRankConfig.recipe, **cls.kind(values).recipe}

    def problems(self, config: "Config") -> Iterator[str]:
        """Ranks that are wider than their linears, or of linears that do not exist."""
        narrow = min(self.dim, self.ffn_dim)
        if self.rank > narrow:
            yield f"model.rank = {self.rank} is wider than the linears it factors; the largest legal value is {narrow}"
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
                yield f"model.ranks.{name} = {rank} is wider than the linears it factors; the largest legal value is {most}"


class SVDConfig(LowRankConfig):
    """y = B (A x)."""

    family: Literal["svd"] = "svd"


class CoLAConfig(LowRankConfig):
    """y = B silu(A x)."""

    family: Literal["cola"] = "cola"
    recipe: ClassVar[Mapping[str, Any]] = {"mlp_silu": True, "latent_act": "silu", "factor_init": "cola"}


class LaXConfig(LowRankConfig):
    """svd or cola whose latents also enter the next block."""

    crosses: ClassVar[bool] = True
    family: Literal["lax"] = "lax"

    over: Literal["svd", "cola"] = "cola"
    """Family of the linears."""

    gate: Literal["identity", "tensor", "dense"] = "identity"
    """What the latents of the previous block pass through. identity: nothing; tensor: two small matrices, one for each of
    the most balanced factors of the rank; dense: a linear of rank x rank."""

    @classmethod
    def kind(cls, values: Mapping[str, Any]) -> Any:
        """The family that the latents are of."""
        return cls.find(values.get("over", cls.model_fields["over"].default)) or cls

    @property
    def title(self) -> str:
        """The family with its main choices."""
        return f"lax over {self.over}, {self.gate} gate"

    def problems(self, config: "Config") -> Iterator[str]:
        """A linear's latents enter the same linear of the next block."""
        for name in self.ranks:
            if name.startswith("layers."):
                yield (
                    f"model.ranks.{name}: under model.family = 'lax' a linear's latents enter the same linear of the next "
                    f"block, so all blocks have one rank for it; write ranks.{name.partition('.')[2].partition('.')[2]}"
                )
        yield from super().problems(config)
