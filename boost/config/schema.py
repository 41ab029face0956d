"""What a run is: typed, frozen, validated. No torch here, so that a mistake is answered before anything heavy starts.

Every field carries its documentation as the string below it: `boost config --fields` and `boost train --help` print it.
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, SerializeAsAny

from boost.config.compiling import CompileName, from_boolean
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
    """How the model is parallelized. No choice here changes what is computed."""

    key = "parallel.layout"
    absent: ClassVar[dict[str, Any]] = {"norm": "online", "vanilla": "strong"}
    if TYPE_CHECKING:  # every layout has a value for these: its own field's, or that of `absent`
        norm: str = "online"
        vanilla: str = "strong"

    layout: str = "btp"
    """How each layer is sharded over TP ranks. With tp = 1, every layout is single."""

    tp: Width = 1
    """Tensor-parallel size: TP ranks that shard each layer. Innermost mesh axis; keep it within one node."""

    pp: Width = 1
    """Pipeline-parallel size: ranks that hold consecutive blocks and send the residual stream to the next stage."""

    dp: Width = 1
    """Data-parallel size: replicas that split the global batch."""

    cp: Width = 1
    """Context-parallel size: processes that split every sequence, two chunks of it each, for sequences that one process cannot
    hold. Of attention, heads or keys and values cross, whatever is less. Weights are those of one replica: sums of gradients and
    parallel.shard go over dp x cp."""

    shard: Literal["none", "optimizer", "full"] = "none"
    """What is sharded over replicas. none: nothing, gradients are all-reduced; optimizer: ZeRO-1, each replica updates its
    rows of every weight, weights are gathered once per step; full: FSDP, weights are gathered block by block when used,
    gradients are sharded too. No effect with one replica."""

    shard_outer: bool = False
    """True: factors replicated over TP (btp-sp's outer ones) are sharded over dp x tp, not dp alone.
    Requires shard = "optimizer" or "full"."""

    schedule: Literal["gpipe", "1f1b", "interleaved-1f1b", "zero-bubble"] = "1f1b"
    """Pipeline schedule. gpipe: all forward, then all backward; 1f1b: one forward, one backward, fewer activations;
    interleaved-1f1b: several stages per rank, smaller bubble, more messages; zero-bubble: weight gradients fill the bubble."""

    virtual: Width = 1
    """Stages per pipeline rank, pp apart. Default: 2 for interleaved-1f1b, else 1."""

    split: Annotated[tuple[Width, ...], Field(strict=False)] = ()
    """Blocks per stage (pp x virtual numbers), such as [9, 8, 8, 7]. Empty: balanced by cost, including embedding and head."""

    overlap: Literal["none", "halves"] = "none"
    """Communication of TP behind computation. halves: each micro-batch runs as two halves of its sequences (of one sequence: of its
    tokens), and one computes while the other's collectives are in flight, in both passes. none: every collective is waited for."""

    grouping: bool = True
    """True: linears with one input (q,k,v; gate,up) share one GEMM and one collective; False: each has its own."""

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
        """Whether anything is sharded over replicas: not with one replica, unless outer factors are sharded over TP."""
        return self.shard != "none" and (self.dp > 1 or self.cp > 1 or (self.shard_outer and self.tp > 1))

    @property
    def dp_cp(self) -> int:
        """Number of processes that hold the same weights for other tokens: dp x cp."""
        return self.dp * self.cp

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of inputs and of weights are computed in passes of their own (zero bubble)."""
        return self.pp > 1 and self.schedule == "zero-bubble"

    @property
    def axes(self) -> dict[str, int]:
        """Mesh axes and their sizes, outermost first: TP is innermost, so that it stays within a node. No cp where it is 1."""
        context = {"cp": self.cp} if self.cp > 1 else {}
        return {"pp": self.pp, "dp": self.dp, **context, "tp": self.tp}

    @property
    def world_size(self) -> int:
        """Number of processes of the mesh."""
        return math.prod(self.axes.values())


class TrainConfig(Section):
    """The training loop: length, precision, and intervals."""

    steps: Count = 1000
    """Total optimizer steps (a resumed run counts from the start)."""

    seed: Natural = 0
    """Seed of the initial weights (combined with each parameter's name) and of the data order."""

    seq_len: Count = 256
    """Tokens per sequence."""

    global_batch: Count = 32
    """Sequences per optimizer step, over all processes."""

    micro_batch: Count = 8
    """Sequences per replica and forward pass; gradients accumulate over global_batch / (dp * micro_batch) micro-batches."""

    param_dtype: DType = "float32"
    """Dtype of master weights, gradients and optimizer state."""

    compute_dtype: DType = "float32"
    """Dtype of activations and GEMMs: weights are cast to it, gradients accumulate in param_dtype."""

    working_copies: bool = True
    """True: weights are cast to compute_dtype once a step, and their gradients added up in param_dtype in one pass; the copies are
    held while passes run. False: each use casts a weight. Same bits, but for weights that one pass uses twice (parallel.overlap).
    No effect where the dtypes are equal, where weights are sharded (cast before they are gathered), and under zero bubble."""

    reduce_dtype: Literal["param_dtype", "bfloat16"] = "param_dtype"
    """Dtype in which gradients are summed over processes once a step (btp-sp's whole factors, replicas). bfloat16: half of the
    bytes of fp32 sums, each rounded to 8 bits; moments and updates keep param_dtype."""

    deterministic: bool = False
    """True: deterministic kernels only, so resuming is bitwise exact on GPUs too, at some cost in speed. On CPUs it always is."""

    compile: Annotated[CompileName, BeforeValidator(from_boolean)] = "auto"
    """What torch.compile compiles. none: nothing. kernels: element-wise work, each piece into one kernel. blocks: each block into
    one graph, which takes a minute at startup and cannot hide communication between blocks. auto: kernels on GPUs, none on CPUs,
    where the other two need g++."""

    recompute: RecomputeName = "none"
    """Activation checkpointing: what a block recomputes in its backward pass. none: nothing. low-rank: all but the latents
    after its collectives, so no collective is repeated. low-rank+attention-output: the same without attention's kernel.
    low-rank-sharded: btp-sp only, latents are saved before they are gathered. full-block: everything, including collectives."""

    recompute_every: Count = 1
    """Recompute every n-th block: 1 all of them, 2 half of them."""

    eval_every: Natural = 0
    """Steps between evaluations on held-out text; 0: only at the end."""

    eval_tokens: Natural = 0
    """Held-out tokens per periodic evaluation; 0: all of them. The final evaluation always uses all."""

    sample_tokens: Natural = 0
    """Tokens to generate for each prompt at each evaluation; the text goes to TensorBoard and metrics.jsonl. 0: no samples."""

    sample_prompts: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Prompts of the samples, such as ["Once upon a time"]. Empty: the start of the held-out text."""

    save_every: Natural = 0
    """Steps between checkpoints; 0: by wall clock only (save_minutes). There is always one at the end and on a stop signal."""

    save_minutes: NonNegative = 30.0
    """Minutes between checkpoints, in addition to save_every; 0: none by wall clock."""

    async_save: bool = True
    """True: a checkpoint is copied to host memory (pinned on GPUs) and written in the background; training stalls for the copy
    only. Needs host memory for one copy of this process's share of weights and optimizer state, none on the GPU. False:
    training waits until it is written. The last checkpoint of a run is always waited for."""

    keep: Count = 3
    """Number of complete checkpoints to keep; older ones are removed once a newer one is complete. The newest one that a later
    healthy step has proven stays in any case."""

    keep_every: Natural = 0
    """Checkpoints of every so many steps are never removed; 0: of none."""

    keep_best: bool = False
    """True: also save whenever the held-out loss of a periodic evaluation is the lowest so far, and keep that checkpoint.
    Commands that take a checkpoint find it as RUN@best, such as runs/demo@best."""

    early_stopping_patience: Natural = 0
    """Stop after this many periodic evaluations in a row without an improvement of the held-out loss, with a final evaluation and
    checkpoint as after the last step. 0: never."""

    early_stopping_threshold: NonNegative = 0.0
    """Nats per token by which the held-out loss must fall below the lowest so far to count as an improvement."""

    spike_sigma: NonNegative = 6.0
    """A loss or gradient norm that is more than this many standard deviations above the mean of the last 128 healthy steps is a
    spike: a warning, and no periodic checkpoint until it is over; 0: never. Losses above 1.5 ln(vocab_size) count as diverged."""

    on_spike: Literal["warn", "rollback"] = "warn"
    """What a spike or divergence does. warn: the run continues. rollback: it returns to the newest checkpoint from before, skips
    the data since then, and gives up if three rollbacks do not bring it past the trouble."""

    check_replicas_every: Natural = 100
    """Steps between checks that all replicas hold the same weights, bit for bit, and only finite ones; also made before the first
    step and before each checkpoint. Reads the weights three times and exchanges 32 bytes per process. 0: never."""

    profile: Annotated[tuple[Count, ...], Field(strict=False)] = ()
    """First and last step of a timeline of every process, such as [10, 13]: run.dir/profile/rank<R>.json, which ui.perfetto.dev
    shows. Recorded steps are slower. Empty: none."""

    log_every: Count = 10
    """Steps between log lines when stdout is not a terminal. metrics.jsonl has every step."""

    @property
    def sum_dtype(self) -> DType:
        """Dtype in which gradients are summed over processes."""
        return self.param_dtype if self.reduce_dtype == "param_dtype" else self.reduce_dtype

    def recompute_by_layer(self, layers: int) -> tuple[RecomputeName, ...]:
        """The policy of each of `layers` blocks: `recompute` for every n-th, starting with the first, else none."""
        return tuple("none" if layer % self.recompute_every else self.recompute for layer in range(layers))


class DataConfig(Section):
    """Where the tokens come from."""

    store: Place = "data/stdlib"
    """Token store made by 'boost prepare'."""

    isolate_documents: bool = False
    """True: tokens attend only to earlier tokens of their own document; False: to all earlier tokens of their sequence."""

    verify: bool = True
    """True: every byte of the store is verified before the first step, once per machine as long as size, modification time and
    inode of its files stay the same (1 to 2 GB/s per core, up to 8 cores); False: only the sizes of files are."""

    recheck_every: Natural = 100
    """Steps between samples in training: each process verifies one random block of 4 MB of the training tokens (about 5 ms).
    0: never."""


class RunConfig(Section):
    """Run directory, device and experiment trackers."""

    dir: Place = "runs/demo"
    """Run directory: resolved configuration, metrics, logs, checkpoints."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU for each process if any is visible, else the CPU."""

    fallback_dir: str = ""
    """Folder for the last checkpoint of a run if run.dir cannot be written (under the absolute path of run.dir, so several runs
    may share it); all nodes must share it. '--resume auto' looks there too. Empty: none."""

    save_retry_minutes: NonNegative = 30.0
    """How long the last save of a run retries when it cannot write, such as on a full disk: one warning per attempt, then
    fallback_dir if there is one (at once where a signal stops the run). 0: no retry."""

    timeout_s: Count = 600
    """Timeout in seconds of a collective of a step; one that hangs ends the run, which names the process that did not respond."""

    startup_timeout_s: Count = 1800
    """The same before the first step: joining, loading weights, verifying a checkpoint."""

    eval_timeout_s: Count = 1800
    """The same during an evaluation."""

    save_timeout_s: Count = 1800
    """The same during a save, while processes wait for those that write."""

    recovery: Literal["restart", "in-step"] = "restart"
    """What happens when a process dies. restart: the run ends, and '--resume auto' goes on from the latest checkpoint; in-step: its
    replica (pp x cp x tp processes) is left out, the others finish the same step on the same global batch, and the replica comes
    back when its processes are started again, which 'boost train' on one machine does (docs/recovery.md). Needs parallel.dp > 1;
    not with parallel.shard = full."""

    replica_restarts: Natural = 100
    """With in-step recovery on one machine: how often the launcher starts each replica again. 0: never."""

    silence_s: Count = 10
    """With in-step recovery: seconds without a sign of life after which a process that the others wait for counts as lost."""

    slow_steps: Natural = 20
    """With in-step recovery: steps in a row for which a replica takes 3 times as long as the others, before it is reported.
    0: never."""

    put_out_slow: bool = False
    """With in-step recovery: whether a replica that is reported as slow is left out, and started again."""

    peak_tflops: NonNegative = 0.0
    """Peak TFLOP/s of one device in compute_dtype, for MFU; 0: from a table of GPUs, or a measured GEMM on a CPU."""

    wandb: bool = False
    """Also report to Weights & Biases (package wandb, its own login). A resumed run continues the same W&B run."""

    trackio: bool = False
    """Also report to trackio (package trackio). A resumed run continues the same trackio run."""

    project: str = "boost"
    """Project name for W&B and trackio."""


class Config(Section):
    """A whole run. `boost.config.load` builds it and checks constraints across sections."""

    model: SerializeAsAny[ModelConfig] = Field(default_factory=lambda: ModelConfig.model_validate({}))
    parallel: SerializeAsAny[ParallelConfig] = Field(default_factory=lambda: ParallelConfig.model_validate({}))
    optim: SerializeAsAny[OptimConfig] = Field(default_factory=OptimConfig)
    train: TrainConfig = TrainConfig()
    data: DataConfig = DataConfig()
    run: RunConfig = RunConfig()

    @property
    def shards_weights(self) -> bool:
        """Whether replicas keep and gather parts of weights (FSDP2): not with in-step recovery, where each has them whole."""
        return self.parallel.sharded and self.run.recovery == "restart"

    @property
    def divides_moments(self) -> bool:
        """Whether replicas keep parts of moments beside whole weights: ZeRO-1 with in-step recovery."""
        return self.parallel.sharded and self.run.recovery == "in-step"
