"""Configuration of a run: typed, frozen, validated. Does not import torch, so that errors appear before anything slow starts.

The docstring below each field is its documentation: `boost config --fields` and `boost train --help` print it.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, SerializeAsAny

from boost.config.families import Family, ModelConfig
from boost.config.optimizers import OptimConfig
from boost.config.section import (
    UNTRACED,
    Count,
    Fraction,
    Home,
    Natural,
    NonNegative,
    Place,
    Positive,
    Section,
    Tagged,
    Values,
    Width,
)

__all__ = [
    "CompileName", "CompiledPart", "Config", "DType", "DataConfig", "Family", "ModelConfig", "OptimConfig", "ParallelConfig",
    "Positive", "RecomputeName", "RunConfig", "Section", "TrainConfig",
]  # fmt: skip

DType = Literal["float32", "bfloat16", "float64"]
RecomputeName = Literal["none", "low-rank", "low-rank+attention-output", "low-rank-sharded", "full-block"]
CompiledPart = Literal["none", "kernels", "blocks"]
CompileName = Literal["auto", "none", "kernels", "blocks"]


class ParallelConfig(Tagged):
    """Parallelism. No option in this section changes the computed function."""

    key = "parallel.layout"
    absent: ClassVar[Values] = {"norm": "online", "vanilla": "strong"}
    if TYPE_CHECKING:  # every layout has these attributes: from a field of its own, or from `absent`
        norm: str = "online"
        vanilla: str = "strong"

    layout: str = "btp"
    """How each layer is sharded over TP ranks. With tp = 1, every layout is equivalent to 'single'."""

    tp: Width = 1
    """Tensor-parallel size: number of TP ranks that shard each layer. TP is the innermost mesh axis; keep it within one node."""

    pp: Annotated[Width, UNTRACED] = 1
    """Pipeline-parallel size: number of PP ranks. Each stage of consecutive blocks sends the residual stream to the next stage."""

    dp: Annotated[Width, UNTRACED] = 1
    """Data-parallel size: number of replicas that split the global batch."""

    cp: Width = 1
    """Context-parallel size: number of processes that split each sequence, two chunks per process. Use it for sequences that
    do not fit in one process's memory. Attention communicates either heads or keys and values, whichever is smaller. Gradient
    reduction and parallel.shard span dp x cp processes."""

    shard: Annotated[Literal["none", "optimizer", "full"], UNTRACED] = "none"
    """What is sharded over replicas. none: nothing; gradients are all-reduced. optimizer: ZeRO-1; each replica updates its rows of
    every weight, and weights are gathered once per step. full: FSDP; weights are gathered block by block as they are used, and
    gradients are sharded too. No effect with one replica."""

    shard_outer: Annotated[bool, UNTRACED] = False
    """True: shard factors that are replicated over TP (the outer factors of btp-sp) over dp x tp instead of dp.
    Requires shard = "optimizer" or "full"."""

    schedule: Annotated[Literal["gpipe", "1f1b", "interleaved-1f1b"], UNTRACED] = "1f1b"
    """Pipeline schedule. gpipe: all forward passes, then all backward passes. 1f1b: alternates forward and backward passes, which
    takes less activation memory. interleaved-1f1b: several stages per PP rank, for a smaller bubble but more messages."""

    virtual: Annotated[Width, UNTRACED] = 1
    """Virtual stages per PP rank: rank i holds stages i, i + pp, i + 2 pp, ... Default: 2 for interleaved-1f1b, else 1."""

    split: Annotated[tuple[Width, ...], Field(strict=False), UNTRACED] = ()
    """Number of blocks in each of the pp x virtual stages, such as [9, 8, 8, 7]. Empty: balanced by cost, including the embedding
    and the head."""

    overlap: Literal["none", "halves"] = "none"
    """Overlap of TP communication with computation, forward and backward. none: computation waits for every collective.
    halves: each micro-batch is split in two, by sequence (or by token if it has one sequence); one half computes while the
    collectives of the other are in flight."""

    grouping: bool = True
    """True: linears with the same input (q,k,v; gate,up) share one GEMM and one collective. False: each linear has its own."""

    @classmethod
    def derived(cls, values: Values) -> dict[str, object]:
        interleaved = values.get("pp", 1) != 1 and values.get("schedule") == "interleaved-1f1b"
        return {"virtual": 2 if interleaved else 1}

    @property
    def stages(self) -> int:
        """Number of pipeline stages."""
        return self.pp * self.virtual

    @property
    def sharded(self) -> bool:
        """Whether anything is sharded over replicas. With one replica, only outer factors can be sharded (over TP)."""
        return self.shard != "none" and (self.dp > 1 or self.cp > 1 or (self.shard_outer and self.tp > 1))

    @property
    def dp_cp(self) -> int:
        """dp x cp: number of processes that hold the same weights and process different tokens."""
        return self.dp * self.cp

    @property
    def axes(self) -> dict[str, int]:
        """Mesh axes and their sizes, outermost first. TP is innermost, so that it stays within a node. Omits cp if it is 1."""
        context = {"cp": self.cp} if self.cp > 1 else {}
        return {"pp": self.pp, "dp": self.dp, **context, "tp": self.tp}

    @property
    def world_size(self) -> int:
        """Number of processes in the mesh."""
        return self.pp * self.dp * self.cp * self.tp


BF16_WEIGHTS_COST = "held-out loss 8.18 instead of 7.30 after 200 steps at lr 2e-4, 5.95 instead of 5.93 at 3e-3"
"""Measured with a small model whose weights and moments are in bfloat16 (benchmarks/precision.json)."""

TOKENS_PER_PARAMETER = 20
"""Tokens per parameter in a compute-optimal run (arXiv 2203.15556)."""


class TrainConfig(Section):
    """The training loop: length, precision, and intervals."""

    steps: Annotated[Count, UNTRACED] = 1000
    """Total number of optimizer steps, including those before a resume."""

    seed: Annotated[Natural, UNTRACED] = 0
    """Seed for the initial weights (combined with each parameter's name) and the data order."""

    seq_len: Count = 256
    """Tokens per sequence."""

    global_batch: Annotated[Count, UNTRACED] = 32
    """Sequences per optimizer step, summed over all processes."""

    micro_batch: Count = 8
    """Sequences per forward pass of a replica. Gradients accumulate over global_batch / (dp x micro_batch) micro-batches."""

    param_dtype: DType = "float32"
    """Dtype of master weights, gradients and optimizer state. bfloat16 loses updates smaller than its rounding: a warning says what
    this cost in a measurement."""

    compute_dtype: DType = "float32"
    """Dtype of activations and GEMMs. Weights are cast to it; gradients accumulate in param_dtype."""

    working_copies: bool = True
    """True: cast weights to compute_dtype once per step, use these copies in all forward and backward passes, and accumulate their
    gradients over micro-batches in param_dtype. False: cast a weight each time it is used. Both give bitwise identical results,
    except that gradients of weights that are used twice per micro-batch (parallel.overlap, model.tied) are first added in
    compute_dtype. No effect if the dtypes are equal, or if weights are sharded (they are cast before the all-gather)."""

    reduce_dtype: Annotated[Literal["param_dtype", "bfloat16"], UNTRACED] = "param_dtype"
    """Dtype of the gradient reduction over processes at the end of each step (over replicas; over TP for factors that btp-sp
    replicates). bfloat16: half the bytes of fp32, with sums rounded to 8 significant bits. Optimizer state and updates stay in
    param_dtype."""

    deterministic: Annotated[bool, UNTRACED] = False
    """True: use only deterministic kernels, which makes resuming bitwise exact on GPUs too (on CPUs it always is), at some cost
    in speed."""

    compile: CompileName = "auto"
    """What torch.compile compiles. none: nothing. kernels: element-wise operations, each group fused into one kernel. blocks: each
    block as one graph; this takes about a minute at startup, and collectives cannot overlap with the next block. auto: on GPUs,
    blocks, or kernels if halves overlap (parallel.overlap) or documents are isolated; on CPUs, none. On CPUs, compiling needs
    g++."""

    cuda_graphs: Annotated[Literal["auto", "on", "off"], UNTRACED] = "auto"
    """on: capture the forward and backward passes of a step, with their collectives, as a CUDA graph after three steps, and launch
    it with one call in every later step, so that the GPU does not wait for Python. Compatible with every value of compile. Does
    not support pipelines, isolated documents, parallel.shard and in-step recovery. Hooks on modules run only during the capture.
    auto: off, until measurements show where graphs are faster."""

    recompute: Annotated[RecomputeName, UNTRACED] = "none"
    """Activation checkpointing: what each block recomputes in the backward pass. none: nothing. low-rank: everything except the
    latents, which are saved after their collectives, so no collective is repeated. low-rank+attention-output: like low-rank, but
    also saves the attention output, so the attention kernel is not repeated. low-rank-sharded: btp-sp only; like low-rank, but
    saves latents before the all-gather and repeats the all-gather. full-block: everything, including collectives."""

    recompute_every: Annotated[Count, UNTRACED] = 1
    """Recompute every n-th block. 1: all blocks; 2: half of them."""

    eval_every: Annotated[Natural, UNTRACED] = 0
    """Steps between evaluations on the held-out split. 0: only at the end."""

    eval_tokens: Annotated[Natural, UNTRACED] = 0
    """Held-out tokens per periodic evaluation. 0: all. The final evaluation always uses all of them."""

    sample_tokens: Natural = 0
    """Tokens to generate for each prompt at each evaluation. The text is written to TensorBoard and metrics.jsonl.
    0: no samples."""

    sample_prompts: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Prompts for the text samples, such as ["Once upon a time"]. Empty: the start of the held-out text."""

    save_every: Annotated[Natural, UNTRACED] = 0
    """Steps between checkpoints. 0: by wall clock only (save_minutes). A checkpoint is always saved at the end of a run and on a
    stop signal."""

    save_minutes: Annotated[NonNegative, UNTRACED] = 30.0
    """Minutes between checkpoints, in addition to save_every. 0: no checkpoints by wall clock."""

    async_save: Annotated[bool, UNTRACED] = True
    """True: copy each checkpoint to host memory (pinned for GPUs) and write it in the background, so that training stalls only for
    the copy. This takes host memory for one copy of each process's shard of weights and optimizer state, but no GPU memory.
    False: training waits until the checkpoint is written. The last checkpoint of a run is always written before exit."""

    keep: Annotated[Count, UNTRACED] = 3
    """Number of complete checkpoints to keep. Older ones are deleted once a newer one is complete. The newest checkpoint proven
    healthy by a later step is always kept."""

    keep_every: Annotated[Natural, UNTRACED] = 0
    """Never delete checkpoints whose step is a multiple of this number. 0: disabled."""

    keep_best: Annotated[bool, UNTRACED] = False
    """True: also save a checkpoint whenever a periodic evaluation reaches the lowest held-out loss so far, and keep it.
    Commands that take a checkpoint accept it as RUN@best, such as runs/demo@best."""

    spike_sigma: Annotated[NonNegative, UNTRACED] = 6.0
    """A loss more than this many standard deviations above the mean over the last 128 healthy steps is a spike. Half as many are
    enough if the gradient norm is more than this many above its own mean. A spike triggers a warning, and checkpoints are marked as
    unproven until it is over. 0: no spike detection. A loss above 1.5 ln(vocab_size) counts as diverged."""

    on_spike: Annotated[Literal["warn", "rollback"], UNTRACED] = "warn"
    """What to do on a spike or divergence. warn: continue. rollback: return to the newest checkpoint from before it and skip the
    data since then; the run fails if three rollbacks do not get past it."""

    check_replicas_every: Annotated[Natural, UNTRACED] = 100
    """Steps between checks that weights are finite and that weights and moments are bitwise identical on all replicas. Checks also
    run before the first step and each checkpoint. Each reads the weights three times and sends 32 bytes per process. 0: none."""

    profile: Annotated[tuple[Count, ...], Field(strict=False), UNTRACED] = ()
    """First and last step to profile, such as [10, 13]. Each process writes its timeline to run.dir/profile/rank<R>.json; open it
    at ui.perfetto.dev. Profiled steps are slower. Empty: no profile."""

    log_every: Annotated[Count, UNTRACED] = 10
    """Steps between log lines if stdout is not a terminal. metrics.jsonl has every step."""

    @property
    def sum_dtype(self) -> DType:
        """Dtype of the gradient reduction over processes."""
        return self.param_dtype if self.reduce_dtype == "param_dtype" else self.reduce_dtype

    def recompute_by_layer(self, layers: int) -> tuple[RecomputeName, ...]:
        """Recompute policy for each of `layers` blocks: `recompute` for every n-th block, starting with the first; else none."""
        return tuple("none" if layer % self.recompute_every else self.recompute for layer in range(layers))


class DataConfig(Section):
    """Training and held-out data."""

    store: Place = "data/stdlib"
    """Token store written by 'boost prepare'. Not used with data.mixture."""

    mixture: dict[Place, Positive] = Field(default={})
    """Several token stores and their weights, such as { "data/c4" = 0.7, "data/code" = 0.3 }. Divided by their sum, the weights are
    the stores' shares of the training sequences. All stores need the same tokenizer. The held-out loss is the weighted mean of the
    stores' losses. Empty: data.store alone."""

    isolate_documents: bool = False
    """True: tokens attend only to earlier tokens in the same document. False: they attend to all earlier tokens in the sequence."""

    verify: bool = True
    """True: verify the checksums of the whole store before the first step, at 1 to 2 GB/s per core on up to 8 cores. The result is
    cached per machine until the size, modification time or inode of a file changes. False: verify only file sizes."""

    @property
    def sources(self) -> dict[str, float]:
        """Weight of each token store: data.mixture, or data.store alone."""
        return dict(self.mixture) or {self.store: 1.0}


class DistillConfig(Section):
    """Distillation: the model also learns from the predictions of a frozen teacher on the same tokens."""

    teacher: Annotated[str, Home] = ""
    """Checkpoint of the teacher: a run directory (its latest checkpoint; RUN@best: its best one) or a checkpoint folder. The
    teacher needs the same tokenizer and model.vocab_size; its family may differ. --distill-from sets it. Empty: no distillation."""

    weight: Fraction = 0.5
    """w in the loss per token, (1 - w) cross-entropy + w T^2 KL(teacher || model). 0: the text only; 1: the teacher only."""

    temperature: Positive = 1.0
    """T: both models' logits are divided by it in the KL divergence."""

    hidden: NonNegative = 0.0
    """Weight of a second loss per token: the mean squared difference between the two models' inputs to the head (final hidden
    states after the norm). Requires a teacher with the same model.dim."""

    def problems(self, config: "Config") -> Iterator[str]:
        """Rules of this section that the configuration violates, one line each."""
        if not self.teacher:
            for name in type(self).model_fields:
                if (value := getattr(self, name)) != type(self).model_fields[name].default:
                    yield (
                        f"distill.{name} = {value} has no effect without distill.teacher; set distill.teacher to a checkpoint "
                        f"(--distill-from), or remove distill.{name}"
                    )
            return
        if config.parallel.pp > 1:
            yield (
                f"distill.teacher does not support pipelines, but parallel.pp = {config.parallel.pp}; nearest valid value: 1"
            )
        if config.run.recovery != "restart":
            yield (
                f"distill.teacher does not support run.recovery = '{config.run.recovery}', because a replica that rejoins would "
                "load the teacher while the other replicas train; set run.recovery = 'restart'"
            )
        if self.weight == 0 and self.hidden == 0:
            yield (
                "distill.weight = 0 and distill.hidden = 0 leave nothing to learn from distill.teacher; set distill.weight, for "
                "example to 0.5, or remove distill.teacher"
            )


class RunConfig(Section):
    """Run directory, device, timeouts, recovery and experiment trackers."""

    dir: Place = "runs/demo"
    """Run directory. Holds the resolved configuration, metrics, logs and checkpoints."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to train on. auto: one GPU per process if any GPU is visible, otherwise the CPU."""

    fallback_dir: Annotated[str, Home] = ""
    """Fallback folder for a run's last checkpoint if run.dir is not writable. All nodes must share it. Several runs can use one
    folder: each writes to a subfolder with the absolute path of its run.dir. '--resume auto' also looks there. Empty: none."""

    save_retry_minutes: NonNegative = 30.0
    """Minutes to keep retrying the last save of a run if writing fails, for example on a full disk. Each failed attempt logs a
    warning. After this time, or immediately if a signal stopped the run, the save goes to fallback_dir if set. 0: no retries."""

    timeout_s: Count = 600
    """Timeout of each collective in a training step, in seconds. A hang ends the run; the error names the process that did not
    respond."""

    startup_timeout_s: Count = 1800
    """Timeout in seconds before the first step: rendezvous, loading weights, verifying a checkpoint."""

    eval_timeout_s: Count = 1800
    """Timeout in seconds during an evaluation."""

    save_timeout_s: Count = 1800
    """Timeout in seconds for processes that wait for others to write a checkpoint."""

    recovery: Literal["restart", "in-step"] = "restart"
    """What to do when a process dies. restart: the run ends; '--resume auto' resumes from the latest checkpoint. in-step: drop that
    process's replica (pp x cp x tp processes); the other replicas finish the same step on the same global batch. The lost replica
    rejoins once its processes are restarted ('boost train' restarts them on one machine; see docs/recovery.md). in-step requires
    parallel.dp > 1 and does not support parallel.shard = "full"."""

    replica_restarts: Natural = 100
    """In-step recovery on one machine: how many times the launcher restarts each replica at most. 0: never."""

    heartbeat_timeout_s: Count = 10
    """In-step recovery: seconds without a heartbeat after which a process that others wait for counts as lost."""

    slow_steps: Natural = 20
    """In-step recovery: report a replica as slow after this many consecutive steps in which its micro-batches take 3 times as long
    as the median of the other replicas. 0: never."""

    exclude_slow: bool = False
    """In-step recovery: drop and restart a replica that is reported as slow."""

    peak_tflops: NonNegative = 0.0
    """Peak TFLOP/s of one device in compute_dtype, for MFU. 0: look up the GPU in a built-in table; on CPUs, MFU is unknown."""

    wandb: bool = False
    """Also log to Weights & Biases (requires the wandb package and a W&B login). A resumed run continues the same W&B run."""

    project: str = "boost"
    """Project name for W&B."""


class Config(Section):
    """Configuration of a run. `boost.config.load` builds it and checks the constraints between sections."""

    model: SerializeAsAny[ModelConfig] = Field(default_factory=lambda: ModelConfig.model_validate({}))
    parallel: SerializeAsAny[ParallelConfig] = Field(default_factory=lambda: ParallelConfig.model_validate({}))
    optim: SerializeAsAny[OptimConfig] = Field(default_factory=OptimConfig)
    train: TrainConfig = TrainConfig()
    data: DataConfig = DataConfig()
    distill: DistillConfig = DistillConfig()
    run: RunConfig = RunConfig()

    def changed(self, **sections: Values) -> "Config":
        """A copy with new values in some sections, such as `changed(train={"steps": 5})`. Checks neither values nor rules."""
        updated = {name: getattr(self, name).model_copy(update=values) for name, values in sections.items()}
        return self.model_copy(update=updated)

    @property
    def shards_weights(self) -> bool:
        """Whether replicas shard and gather weights (FSDP2). False with in-step recovery: each replica holds all weights."""
        return self.parallel.sharded and self.run.recovery == "restart"

    @property
    def divides_moments(self) -> bool:
        """Whether replicas hold all weights but shard the optimizer state: ZeRO-1 with in-step recovery."""
        return self.parallel.sharded and self.run.recovery == "in-step"

    def compiled_part(self, device: str) -> CompiledPart:
        """Resolves train.compile for a device ("cpu", "cuda"). An H200's host launches an operation in about
        58 us in compiled blocks and in 130 us with compiled kernels (benchmarks/gpu/h200.json). The latter pays only where the
        collectives of one half hide behind the other half. On CPUs, compiled kernels save 1% of a step and take 30 s to compile."""
        if self.train.compile != "auto":
            return self.train.compile
        if device != "cuda":
            return "none"
        halves = self.parallel.overlap == "halves" and self.parallel.tp * self.parallel.cp > 1
        return "kernels" if halves or self.data.isolate_documents else "blocks"

    @property
    def captures_passes(self) -> bool:
        """Resolves train.cuda_graphs. auto captures nothing. What is known (benchmarks/gpu/h200.json) says where graphs could help:
        a step of cola-350m takes 700 ms on an H200, but its kernels 508 ms by prediction; a `btp-sp` share of TP 4 at 7B takes 35.3
        ms, but its kernels 29.4. No captured step has been timed, so nothing says that they do."""
        return self.train.cuda_graphs == "on"

    @property
    def has_working_copies(self) -> bool:
        """Whether the run keeps copies of weights in compute_dtype (train.working_copies). Sharded weights have none: they
        are cast before the all-gather."""
        is_cast = self.train.compute_dtype != self.train.param_dtype
        return self.train.working_copies and is_cast and not self.shards_weights

    def get(self, name: str, default: object = None) -> object:
        """As in a dict, which peft takes a model's config for."""
        return getattr(self, name, default)
