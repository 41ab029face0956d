"""Export of dense plans to torchtitan and Megatron-LM."""

import tomllib

import pytest

from boost.config import load
from boost.config.schema import Config
from boost.errors import ConfigError
from boost.plan.export import exported, megatron

LLAMA = ("--train.compute_dtype=bfloat16", "--train.seq_len=8192", "--train.global_batch=64")


def planned(*words: str) -> Config:
    return load("llama3-8b", [*LLAMA, *words])


def test_torchtitan_with_fsdp_and_tp() -> None:
    words = (
        "--parallel.layout=megatron-sp",
        "--parallel.tp=4",
        "--parallel.dp=8",
        "--parallel.shard=full",
        "--parallel.overlap=halves",
    )
    again = (
        "--train.micro_batch=2",
        "--train.recompute=full-block",
        "--train.recompute_every=2",
        "--train.compile=blocks",
    )
    tree = tomllib.loads(exported(planned(*words, *again), "torchtitan"))
    assert tree["model"] == {"name": "llama3", "flavor": "8B"}
    assert (
        tree["training"]["local_batch_size"] == 2
        and tree["training"]["global_batch_size"] == 64
        and tree["training"]["compile"]
    )
    degrees = tree["parallelism"]
    assert (degrees["data_parallel_replicate_degree"], degrees["data_parallel_shard_degree"]) == (1, 8)
    assert degrees["tensor_parallel_degree"] == 4 and degrees["enable_async_tensor_parallel"]
    assert degrees["fsdp_reshard_after_forward"] == "always" and degrees["pipeline_parallel_degree"] == 1
    assert tree["activation_checkpoint"] == {"mode": "selective", "selective_ac_option": "2"}


def test_torchtitan_with_a_pipeline() -> None:
    words = ("--parallel.layout=single", "--parallel.tp=1", "--parallel.pp=4", "--parallel.dp=2", "--parallel.virtual=2",
             "--parallel.schedule=interleaved-1f1b", "--train.micro_batch=1")  # fmt: skip
    tree = tomllib.loads(exported(planned(*words), "torchtitan"))
    degrees = tree["parallelism"]
    assert (
        degrees["pipeline_parallel_schedule"] == "Interleaved1F1B" and degrees["pipeline_parallel_microbatch_size"] == 1
    )
    assert tree["training"]["local_batch_size"] == 32  # per replica, split into micro-batches
    assert (degrees["data_parallel_replicate_degree"], degrees["data_parallel_shard_degree"]) == (2, 1)
    assert tree["activation_checkpoint"] == {"mode": "none"}


def test_megatron_flags() -> None:
    words = ("--parallel.layout=megatron-sp", "--parallel.tp=8", "--parallel.pp=2", "--parallel.dp=4", "--parallel.virtual=2",
             "--parallel.schedule=interleaved-1f1b", "--parallel.shard=optimizer", "--train.micro_batch=2",
             "--train.recompute=full-block")  # fmt: skip
    text = exported(planned(*words), "megatron")
    flags = dict([*line.split(), ""][:2] for line in text.splitlines() if line.startswith("--"))
    expected = {"--num-layers": "32", "--hidden-size": "4096", "--ffn-hidden-size": "14336", "--num-query-groups": "8",
                "--tensor-model-parallel-size": "8", "--pipeline-model-parallel-size": "2", "--context-parallel-size": "1",
                "--num-layers-per-virtual-pipeline-stage": "8", "--micro-batch-size": "2", "--global-batch-size": "64",
                "--recompute-granularity": "full", "--recompute-method": "uniform", "--sequence-parallel": "",
                "--use-distributed-optimizer": "", "--overlap-grad-reduce": "", "--bf16": "",
                "--rotary-base": "500000"}  # fmt: skip
    assert expected.items() <= flags.items()
    assert all(line.startswith(("--", "# ")) for line in text.splitlines())


def test_half_of_the_blocks() -> None:
    words = ("--parallel.layout=single", "--parallel.tp=1", "--train.recompute=full-block", "--train.recompute_every=2")
    text = megatron(planned(*words, "--train.micro_batch=1"))
    assert "--recompute-method block\n--recompute-num-layers 16\n" in text


def test_unsupported_choices_are_listed() -> None:
    single = ("--parallel.layout=single", "--parallel.tp=1", "--parallel.dp=2", "--train.micro_batch=1")
    assert "ZeRO-1" in exported(planned(*single, "--parallel.shard=optimizer"), "torchtitan")
    assert "Weights are not sharded" in exported(planned(*single, "--parallel.shard=full"), "megatron")
    assert "FLAVOR: add one with dim=4096" in exported(planned(*single, "--model.layers=30"), "torchtitan")
    assert "30 blocks do not divide evenly over 4 stages" in exported(
        planned(*single, "--model.layers=30", "--parallel.pp=4"), "megatron"
    )


def test_low_rank_models_cannot_be_exported() -> None:
    with pytest.raises(ConfigError, match="--export megatron: model.family = 'cola' is low-rank"):
        exported(load("boost-7b"), "megatron")
