"""Exports a plan of a dense model to other frameworks: a torchtitan TOML file or Megatron-LM flags.

Setting names follow torchtitan 0.2 (`torchtitan/config/job_config.py`) and Megatron-LM core 0.12
(`megatron/training/arguments.py`). A comment in the output lists every choice that the framework cannot express.
"""

from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args

import tomli_w

from boost.config.layouts import spec_of
from boost.config.schema import Config
from boost.errors import ConfigError

Framework = Literal["torchtitan", "megatron"]
FRAMEWORKS = get_args(Framework)

FLAVORS = {(4096, 32): "8B", (8192, 80): "70B", (16384, 126): "405B"}
"""torchtitan's Llama 3 flavors by (hidden size, number of blocks)."""

_SCHEDULES = {
    "gpipe": "GPipe", "1f1b": "1F1B", "interleaved-1f1b": "Interleaved1F1B", "zero-bubble": "InterleavedZeroBubble",
}  # fmt: skip


def exported(config: Config, framework: Framework) -> str:
    """Returns the settings as text. Raises ConfigError for a low-rank model, which neither framework supports."""
    if config.model.low_rank:
        raise ConfigError(
            f"--export {framework}: model.family = '{config.model.family}' is low-rank, which only boost trains; "
            "use --family dense, or drop --export"
        )
    write, gaps = _WRITERS[framework]
    first = f"From a boost plan for {config.parallel.world_size} GPUs; add your own tokenizer and data."
    return "".join(f"# {line}\n" for line in (first, *gaps(config))) + write(config)


def torchtitan(config: Config) -> str:
    """Returns a torchtitan job file."""
    model, parallel, train, optim = config.model, config.parallel, config.train, config.optim
    piped = parallel.pp > 1
    sharded = parallel.sharded and parallel.shard != "none"
    degrees: dict[str, Any] = {
        "data_parallel_replicate_degree": 1 if sharded else parallel.dp,
        "data_parallel_shard_degree": parallel.dp if sharded else 1,
        "fsdp_reshard_after_forward": "always" if parallel.shard == "full" else "never",
        "tensor_parallel_degree": parallel.tp,
        "enable_async_tensor_parallel": parallel.overlap != "none" and parallel.tp > 1,
        "pipeline_parallel_degree": parallel.pp,
        "context_parallel_degree": parallel.cp,
    }
    if piped:
        degrees["pipeline_parallel_schedule"] = _SCHEDULES[parallel.schedule]
        degrees["pipeline_parallel_microbatch_size"] = train.micro_batch
    every = train.recompute_every
    mode = "none" if train.recompute == "none" else "full" if every == 1 else "selective"
    tree: dict[str, Any] = {
        "model": {"name": "llama3", "flavor": FLAVORS.get((model.dim, model.layers), "FLAVOR")},
        "optimizer": {"name": "AdamW", "lr": optim.lr},
        "lr_scheduler": {"warmup_steps": optim.warmup_steps},
        "training": {
            # With PP, a local batch is split into micro-batches; without PP, each micro-batch is one local batch.
            "local_batch_size": train.global_batch // parallel.dp if piped else train.micro_batch,
            "global_batch_size": train.global_batch,
            "seq_len": train.seq_len,
            "max_norm": optim.clip,
            "steps": train.steps,
            "compile": train.compile != "none",
        },
        "parallelism": degrees,
        "activation_checkpoint": {"mode": mode} | ({"selective_ac_option": str(every)} if mode == "selective" else {}),
    }
    return tomli_w.dumps(tree)


def megatron(config: Config) -> str:
    """Returns flags for `pretrain_gpt.py`, one per line."""
    return "\n".join(" ".join(flag) for flag in _megatron_flags(config)) + "\n"


def _megatron_flags(config: Config) -> Iterator[tuple[str, ...]]:
    model, parallel, train, optim = config.model, config.parallel, config.train, config.optim
    yield "--num-layers", f"{model.layers}"
    yield "--hidden-size", f"{model.dim}"
    yield "--ffn-hidden-size", f"{model.ffn_dim}"
    yield "--num-attention-heads", f"{model.heads}"
    if model.kv_heads != model.heads:
        yield ("--group-query-attention",)
        yield "--num-query-groups", f"{model.kv_heads}"
    yield from (("--swiglu",), ("--disable-bias-linear",), ("--untie-embeddings-and-output-weights",))
    yield "--normalization", "RMSNorm"
    yield "--position-embedding-type", "rope"
    yield "--rotary-base", f"{model.rope_theta:g}"
    yield "--seq-length", f"{train.seq_len}"
    yield "--max-position-embeddings", f"{train.seq_len}"
    yield "--tensor-model-parallel-size", f"{parallel.tp}"
    yield "--pipeline-model-parallel-size", f"{parallel.pp}"
    yield "--context-parallel-size", f"{parallel.cp}"
    if parallel.virtual > 1:
        yield "--num-layers-per-virtual-pipeline-stage", f"{max(model.layers // parallel.stages, 1)}"
    if parallel.tp > 1 and spec_of(parallel).residual == "tokens":
        yield ("--sequence-parallel",)
    if parallel.tp > 1 and parallel.overlap != "none":
        yield ("--tp-comm-overlap",)
    if parallel.sharded:
        yield ("--use-distributed-optimizer",)
        yield ("--overlap-param-gather",)
    if parallel.dp > 1:
        yield ("--overlap-grad-reduce",)
    yield "--micro-batch-size", f"{train.micro_batch}"
    yield "--global-batch-size", f"{train.global_batch}"
    if train.compute_dtype == "bfloat16":
        yield ("--bf16",)
    if train.recompute != "none":
        yield "--recompute-granularity", "full"
        # uniform, 1: every block; block, n: the first n blocks of each stage.
        yield "--recompute-method", "uniform" if train.recompute_every == 1 else "block"
        count = 1 if train.recompute_every == 1 else -(-model.layers // (parallel.stages * train.recompute_every))
        yield "--recompute-num-layers", f"{count}"
    yield "--lr", f"{optim.lr:g}"
    yield "--clip-grad", f"{optim.clip:g}"
    yield "--train-iters", f"{train.steps}"


def _torchtitan_gaps(config: Config) -> Iterator[str]:
    """Choices of the plan that torchtitan cannot express."""
    model, parallel = config.model, config.parallel
    if (model.dim, model.layers) not in FLAVORS:
        yield f"FLAVOR: add one with dim={model.dim}, n_layers={model.layers}, n_heads={model.heads}, n_kv_heads={model.kv_heads}"
    if parallel.shard == "optimizer" and parallel.sharded:
        yield "ZeRO-1 is not available: weights are sharded too, and stay gathered after the first forward pass."
    if parallel.tp > 1 and spec_of(parallel).residual != "tokens":
        yield "torchtitan's TP uses sequence parallelism; the plan does not."


def _megatron_gaps(config: Config) -> Iterator[str]:
    """Choices of the plan that Megatron-LM cannot express."""
    model, parallel = config.model, config.parallel
    if parallel.shard == "full" and parallel.sharded:
        yield "Weights are not sharded (the distributed optimizer shards optimizer state and gradients): more memory than planned."
    if parallel.schedule == "zero-bubble" and parallel.pp > 1:
        yield "Zero bubble is not available: 1F1B is used, with a larger bubble than planned."
    if model.layers % parallel.stages:
        yield f"{model.layers} blocks do not divide evenly over {parallel.stages} stages: set the pipeline layout by hand."


_WRITERS: dict[Framework, tuple[Callable[[Config], str], Callable[[Config], Iterator[str]]]] = {
    "torchtitan": (torchtitan, _torchtitan_gaps),
    "megatron": (megatron, _megatron_gaps),
}
