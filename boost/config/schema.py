"""What a run is: typed, frozen, validated. No torch here, so that a mistake is answered before anything heavy starts.

Every field carries its documentation as the string below it: `boost config --fields` and `boost train --help` print it.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

Family = Literal["dense", "svd", "cola", "lax"]
DType = Literal["float32", "bfloat16", "float64"]
RecomputeName = Literal["none", "low-rank", "low-rank+attention-output", "low-rank-sharded", "full-block"]

Count = Annotated[int, Field(ge=1, le=2**31)]
Width = Annotated[int, Field(ge=1, le=2**20)]
Natural = Annotated[int, Field(ge=0, le=2**31)]
Positive = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Place = Annotated[str, Field(min_length=1)]


def _known_layout(name: str) -> str:
    names = layout_names()
    if name not in names:
        raise PydanticCustomError("unknown_name", "unknown name", {"names": names})
    return name


def layout_names() -> tuple[str, ...]:
    """Names of the registered layouts."""
    from boost.config import layouts  # its specs speak of the sections below

    return layouts.layout_names()


@dataclass(frozen=True)
class OneOf:
    """Marks a field whose value is a name from a registry."""

    names: Callable[[], tuple[str, ...]]


LayoutName = Annotated[str, AfterValidator(_known_layout), OneOf(layout_names)]


class Section(BaseModel):
    """A table of the configuration file. Frozen; unknown keys and wrong types are errors."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class ModelConfig(Section):
    """The mathematical function: a LLaMA-style decoder whose linears are dense or a low-rank bottleneck."""

    family: Family = "cola"
    """dense: y = Wx; svd: y = B(Ax); cola: y = B silu(Ax); lax: one of the two whose latents cross from block to block. All
    seven linears of a block; embedding and head stay dense."""

    over: Literal["none", "svd", "cola"]
    """lax only: the family whose latents cross. Default: cola; none for the other families."""

    gate: Literal["none", "identity", "tensor", "dense"]
    """lax only: what the latents of the block before pass on their way. identity: nothing; tensor: two small matrices, one
    for each of the most balanced factors of the rank; dense: a linear of rank x rank. Default: identity."""

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

    rank: Width | None
    """r, width of the bottleneck of every low-rank linear. Default: dim / 4; none for the dense family."""

    ranks: dict[str, Width] = {}
    """Linears of another rank than `rank`, as a table: attn, mlp, one linear (attn.q), or one of one block (layers.3.attn.q);
    the narrower name counts. CoLA's separate ranks are ranks.attn and ranks.mlp."""

    latent_act: Literal["silu", "none"]
    """Activation of the latent, act in y = B act(Ax). Default: silu for cola, none otherwise."""

    factor_init: Literal["none", "cola", "xavier", "spectral"]
    """Initial factors. cola: normal of deviation (rank)^(-1/4) (d_in + d_out)^(-1/4); xavier: each factor by itself; spectral: the
    truncated SVD of the dense linear's initial weight. Default: cola for cola, xavier for svd, none for dense."""

    mlp_silu: bool
    """True keeps SwiGLU's silu on the gate; False is CoLA's down(gate(x) * up(x)) of 350M and up. Default: True."""

    norm_eps: Positive = 1e-6
    """epsilon of RMSNorm, added to the mean square."""

    rope_theta: Positive = 10000.0
    """Base of the rotary position embedding."""

    init_std: Positive = 0.02
    """Standard deviation of the embedding, the head and the dense linears. Factors of low-rank linears have their own."""

    @model_validator(mode="before")
    @classmethod
    def _fill_defaults(cls, values: Any) -> Any:
        """Defaults that follow from other fields, so that a resolved configuration says every value."""
        if not isinstance(values, dict):
            return values
        family = values.get("family", cls.model_fields["family"].default)
        dim = values.get("dim", cls.model_fields["dim"].default)
        low_rank_default = max(dim // 4, 1) if isinstance(dim, int) and family != "dense" else None
        over = values.get("over", "cola") if family == "lax" else "none"
        kind = over if family == "lax" else family
        filled = {
            "over": over,
            "gate": "identity" if family == "lax" else "none",
            "kv_heads": values.get("heads", cls.model_fields["heads"].default),
            "rank": low_rank_default,
            "latent_act": "silu" if kind == "cola" else "none",
            "factor_init": "cola" if kind == "cola" else "xavier" if kind == "svd" else "none",
            "mlp_silu": True,
        }
        if isinstance(values.get("ranks"), dict):
            values = {**values, "ranks": dict(_flat(values["ranks"]))}
        return filled | values

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.heads

    @property
    def low_rank(self) -> bool:
        """Whether the linears are pairs of factors."""
        return self.family != "dense"

    @property
    def title(self) -> str:
        """The family with what was chosen of it, as 'lax over cola, tensor gate'."""
        return f"lax over {self.over}, {self.gate} gate" if self.crosses else self.family

    @property
    def crosses(self) -> bool:
        """Whether latents cross from each block to the next."""
        return self.family == "lax"

    @property
    def mixes(self) -> bool:
        """Whether latents that cross pass a gate that needs them whole."""
        return self.gate in ("tensor", "dense")

    def rank_of(self, layer: int, slot: str) -> int | None:
        """Rank of the linear `slot` (attn.q, ...) of block `layer`; None for the dense family."""
        for name in (f"layers.{layer}.{slot}", slot, slot.partition(".")[0]):
            if name in self.ranks:
                return self.ranks[name]
        return self.rank


def _flat(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Entries of nested tables under dotted names: TOML reads a bare `attn.q = 64` as a table in a table."""
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


class ParallelConfig(Section):
    """How the function is cut over processes. No choice here changes what is computed."""

    layout: LayoutName = "btp"
    """btp: BOOST's bottleneck-aware tensor parallelism; btp-sp: the same with a token-sharded residual stream, half of its
    bytes; vanilla: low-rank factors cut along the rank; megatron, megatron-sp: dense; single: one process (what every
    layout is with tp = 1)."""

    tp: Width = 1
    """Tensor-parallel size: processes that share each layer. Innermost axis of the mesh, best inside one node."""

    pp: Width = 1
    """Pipeline-parallel size: processes that hold consecutive blocks and pass the residual stream on."""

    dp: Width = 1
    """Data-parallel size: replicas that split the global batch."""

    shard: Literal["none", "optimizer", "full"] = "none"
    """What the replicas share instead of holding it dp times. none: nothing, gradients are all-reduced; optimizer: ZeRO-1,
    each updates its rows of every weight, which is gathered once a step; full: FSDP, weights are gathered block by block
    where they are used, gradients are kept in shards too. One replica has nothing to share."""

    shard_outer: bool = False
    """True: factors that every TP process would hold whole (btp-sp's outer ones) are sharded over dp x tp, not dp alone.
    Asks for shard = "optimizer" or "full"."""

    schedule: Literal["gpipe", "1f1b", "interleaved-1f1b", "zero-bubble"] = "1f1b"
    """Order of micro-batches in the pipeline. gpipe: all forward, then all backward; 1f1b: one forward, one backward, fewer
    activations; interleaved-1f1b: several stages a process, smaller bubble, more messages; zero-bubble: weight gradients
    fill the bubble."""

    virtual: Width = 1
    """Stages that each pipeline process holds, pp apart. Default: 2 for interleaved-1f1b, else 1."""

    split: Annotated[tuple[Width, ...], Field(strict=False)] = ()
    """Blocks of each of the pp x virtual stages, as [9, 8, 8, 7]. Empty: balanced by cost, embedding and head counted."""

    norm: Literal["online", "sync"] = "online"
    """btp's RMSNorm: online sends the statistic with the latents; sync all-reduces it by itself (the paper's ablation).
    The other layouts have whole rows, so that their norms need no communication."""

    grouping: bool = True
    """True: projections of one input (q,k,v; gate,up) share one GEMM and one collective; False: each has its own."""

    vanilla: Literal["strong", "published"] = "strong"
    """vanilla only. strong: attention and gated product are cut over the processes; published: each process computes all
    of them, as the baseline of the BOOST paper does."""

    @model_validator(mode="before")
    @classmethod
    def _fill_defaults(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        interleaved = values.get("pp", 1) != 1 and values.get("schedule") == "interleaved-1f1b"
        return {"virtual": 2 if interleaved else 1} | values

    @property
    def stages(self) -> int:
        """Number of pipeline stages."""
        return self.pp * self.virtual

    @property
    def sharded(self) -> bool:
        """Whether there is anything to shard: with one replica there is not, unless TP processes share outer factors."""
        return self.shard != "none" and (self.dp > 1 or (self.shard_outer and self.tp > 1))

    @property
    def axes(self) -> dict[str, int]:
        """Axes of the mesh and their sizes, the outermost first: TP innermost, so that it stays inside a node."""
        return {"pp": self.pp, "dp": self.dp, "tp": self.tp}

    @property
    def world_size(self) -> int:
        """Number of processes of the mesh."""
        return math.prod(self.axes.values())


class OptimConfig(Section):
    """The optimizer and its schedule."""

    name: Literal["adamw", "loro", "muon"] = "adamw"
    """adamw; loro: AdamW whose steps on the factors follow the low-rank manifold (ICLR 2025), svd only; muon: orthogonalised
    momentum for the factors, AdamW for the rest."""

    lr: Positive = 3e-3
    """Peak learning rate."""

    beta1: Decay = 0.9
    """AdamW's decay of the first moment."""

    beta2: Decay = 0.999
    """AdamW's decay of the second moment."""

    eps: Positive = 1e-8
    """AdamW's epsilon. Under loro it is added to sqrt(v) before bias correction, as published."""

    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Decoupled weight decay."""

    decay_on: Literal["all", "matrices"] = "all"
    """What decays: everything (CoLA's recipe), or the linears' matrices only (not embedding, head, norms)."""

    frobenius_decay: Annotated[float, Field(ge=0)] = 0.0
    """adamw only: decoupled decay along the gradient of |BA|^2 / 2 of each low-rank linear, instead of weight_decay on its
    factors (arXiv 2105.01029)."""

    exact_every: Natural
    """loro only, K: the last of every K steps is the exact one, behind which all moments are cleared. Default: 500 for loro."""

    refresh_only: bool = False
    """loro only, an ablation: every K steps moments are cleared, but no step is exact. For any low-rank family."""

    muon_lr: Annotated[float, Field(ge=0)] = 0.0
    """muon only: peak learning rate of the factors, on the same schedule; 0: lr."""

    muon_momentum: Decay = 0.95
    """muon only: momentum."""

    muon_nesterov: bool = True
    """muon only: Nesterov's form of it."""

    muon_adjust: Literal["original", "match_rms_adamw"] = "original"
    """muon only: the rate of a factor of m rows and n columns is multiplied by sqrt(max(1, m / n)), or by 0.2 sqrt(max(m, n)),
    with which rate and decay tuned for AdamW suit."""

    muon_steps: Annotated[int, Field(ge=1, le=99)] = 5
    """muon only: Newton-Schulz iterations."""

    clip: Annotated[float, Field(ge=0)] = 0.5
    """Largest global gradient norm; 0 switches clipping off (the norm is still reported)."""

    schedule: Literal["cosine", "constant", "cosine-restarts"] = "cosine"
    """After the warm-up: cosine falls to min_lr_ratio at the last step; constant stays at lr until the decay;
    cosine-restarts is loro's, a cosine that dips where moments are cleared."""

    warmup_steps: Natural = 0
    """Steps of linear warm-up from 0 (cosine-restarts: from min_lr_ratio) to lr."""

    decay_steps: Natural = 0
    """constant only: the last steps, over which the rate falls linearly to min_lr_ratio * lr."""

    restart_warmup_steps: Natural
    """cosine-restarts only: steps from 0 back to the cosine behind every exact step. Default: 5, as published."""

    restart_delay: Natural = 0
    """cosine-restarts only: steps by which the cosine, and its dips behind the warm-up, come later; a multiple of exact_every."""

    min_lr_ratio: Fraction = 0.1
    """Final learning rate as a fraction of lr."""

    @model_validator(mode="before")
    @classmethod
    def _fill_defaults(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        exact_every = 500 if values.get("name") == "loro" else 0
        warmup = 5 if values.get("schedule") == "cosine-restarts" else 0
        return {"exact_every": exact_every, "restart_warmup_steps": warmup} | values

    def refreshes(self, step: int) -> bool:
        """Whether the optimizer's moments are cleared behind step `step` (0-based): the K-th, 2K-th, ... step of training."""
        return self.exact_every > 0 and (step + 1) % self.exact_every == 0


class TrainConfig(Section):
    """The loop: how long, in which numbers, and how often it looks up."""

    steps: Count = 1000
    """Optimizer steps of the whole run (a resumed run counts from the beginning)."""

    seed: Natural = 0
    """Seed of the initial weights (with each parameter's name) and of the order of the data."""

    seq_len: Count = 256
    """Tokens of one sequence."""

    global_batch: Count = 32
    """Sequences of one optimizer step, over all processes."""

    micro_batch: Count = 8
    """Sequences that one replica takes through the model at once; global_batch / (dp * micro_batch) are accumulated."""

    param_dtype: DType = "float32"
    """Dtype of the stored (master) weights, gradients and optimizer moments."""

    compute_dtype: DType = "float32"
    """Dtype of activations and GEMMs: weights are cast to it where they are used, gradients accumulate in param_dtype."""

    deterministic: bool = False
    """True: only deterministic kernels, so that resuming is bitwise on GPUs too, where it costs speed. On CPUs it always is."""

    compile: bool = False
    """True: each block is compiled by torch.compile into fused kernels, a minute or so at the start (on CPUs: needs g++)."""

    recompute: RecomputeName = "none"
    """Activation checkpointing: what a block computes again in its backward pass. none: nothing. low-rank: all but the
    latents behind its collectives, with no collective. low-rank+attention-output: that, but for attention's kernel.
    low-rank-sharded: btp-sp only, latents kept before they are gathered. full-block: everything, collectives included."""

    recompute_every: Count = 1
    """Every n-th block recomputes: 1 all of them, 2 half of them."""

    eval_every: Natural = 0
    """Steps between evaluations on held-out text; 0: only at the end."""

    eval_tokens: Natural = 0
    """Held-out tokens of a periodic evaluation; 0: all of them. The last evaluation always takes all."""

    save_every: Natural = 0
    """Steps between checkpoints; 0: only at the end (and on SIGTERM)."""

    keep: Count = 3
    """Complete checkpoints kept; older ones are removed after a newer one is complete."""

    log_every: Count = 10
    """Steps between plain lines on a console that is not a terminal. metrics.jsonl has every step."""

    def recompute_by_layer(self, layers: int) -> tuple[RecomputeName, ...]:
        """What each of `layers` blocks recomputes: every n-th from the first on as `recompute` says, the others nothing."""
        return tuple("none" if layer % self.recompute_every else self.recompute for layer in range(layers))


class DataConfig(Section):
    """Where the tokens come from."""

    store: Place = "data/stdlib"
    """Token store made by 'boost prepare'."""

    isolate_documents: bool = False
    """True: tokens attend only to earlier tokens of their own document; False: to all of their sequence."""


class RunConfig(Section):
    """Where the run lives and who is told about it."""

    dir: Place = "runs/demo"
    """Run directory: resolved configuration, metrics, logs, checkpoints."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes the GPU of this process where there is one."""

    timeout_s: Count = 600
    """Seconds after which a collective that hangs ends the run."""

    peak_tflops: Annotated[float, Field(ge=0)] = 0.0
    """Peak of one device in compute_dtype, for MFU, in TFLOP/s; 0: from a table of GPUs, or a GEMM measured on a CPU."""

    wandb: bool = False
    """Also report to Weights & Biases (package wandb, its own login)."""

    trackio: bool = False
    """Also report to trackio (package trackio)."""

    project: str = "boost"
    """Project name for W&B and trackio."""


class Config(Section):
    """A whole run. `boost.config.load` builds it and checks what several sections must agree on."""

    model: ModelConfig = Field(default_factory=lambda: ModelConfig.model_validate({}))
    parallel: ParallelConfig = ParallelConfig()
    optim: OptimConfig = Field(default_factory=lambda: OptimConfig.model_validate({}))
    train: TrainConfig = TrainConfig()
    data: DataConfig = DataConfig()
    run: RunConfig = RunConfig()
