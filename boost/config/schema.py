"""What a run is: typed, frozen, validated. No torch here, so that a mistake is answered before anything heavy starts.

Every field carries its documentation as the string below it: `boost config --fields` and `boost train --help` print it.
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, SerializeAsAny

from boost.config.families import Family, ModelConfig
from boost.config.optimizers import OptimConfig
from boost.config.section import Count, Natural, NonNegative, Place, Positive, Section, Tagged, Width

__all__ = [
    "Config", "DType", "DataConfig", "Family", "ModelConfig", "OptimConfig", "ParallelConfig", "Positive",
    "RecomputeName", "RunConfig", "Section", "TrainConfig",
]  # fmt: skip

DType = Literal["float32", "bfloat16", "float64"]
RecomputeName = Literal["none", "low-rank", "low-rank+attention-output", "low-rank-sharded", "full-block"]


class ParallelConfig(Tagged):
    """How the function is spread over processes. No choice here changes what is computed."""

    key = "parallel.layout"
    absent: ClassVar[dict[str, Any]] = {"norm": "online", "vanilla": "strong"}
    if TYPE_CHECKING:  # every layout has a value for these: its own field's, or that of `absent`
        norm: str = "online"
        vanilla: str = "strong"

    layout: str = "btp"
    """How tensor-parallel processes share each layer. With tp = 1 every layout is single."""

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

    grouping: bool = True
    """True: projections of one input (q,k,v; gate,up) share one GEMM and one collective; False: each has its own."""

    @classmethod
    def find(cls, value: object) -> type[Self] | None:
        found = super().find(value)
        if found is None and isinstance(value, str):
            from boost.config import layouts  # whose classes are made from this one

            layouts.load_entry_points()
            found = super().find(value)
        return found

    @classmethod
    def derived(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        interleaved = values.get("pp", 1) != 1 and values.get("schedule") == "interleaved-1f1b"
        return {"virtual": 2 if interleaved else 1}

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

    peak_tflops: NonNegative = 0.0
    """Peak of one device in compute_dtype, for MFU, in TFLOP/s; 0: from a table of GPUs, or a GEMM measured on a CPU."""

    wandb: bool = False
    """Also report to Weights & Biases (package wandb, its own login)."""

    trackio: bool = False
    """Also report to trackio (package trackio)."""

    project: str = "boost"
    """Project name for W&B and trackio."""


class Config(Section):
    """A whole run. `boost.config.load` builds it and checks what several sections must agree on."""

    model: SerializeAsAny[ModelConfig] = Field(default_factory=lambda: ModelConfig.model_validate({}))
    parallel: SerializeAsAny[ParallelConfig] = Field(default_factory=lambda: ParallelConfig.model_validate({}))
    optim: SerializeAsAny[OptimConfig] = Field(default_factory=OptimConfig)
    train: TrainConfig = TrainConfig()
    data: DataConfig = DataConfig()
    run: RunConfig = RunConfig()
