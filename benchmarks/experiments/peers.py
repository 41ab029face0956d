"""Other tensor-parallel libraries: transformers' LLaMA with its own TP plan, and plain PyTorch modules under DTensor's
`parallelize_module`. Each starts from our initial weights.

The DTensor plans follow torchtitan's for LLaMA (github.com/pytorch/torchtitan, models/llama3/infra/parallelize.py): one
redistribution per input that linears share, embedding and head sharded along the vocabulary, and a loss on sharded logits.
Libraries that are not installed or cannot run are skipped with a reason.
"""

import json
import shutil
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from benchmarks.experiments.contest import Call
from benchmarks.experiments.plain import PlainDecoder, PlainStep, build_plain, mean_loss, whole
from boost.config import Config
from boost.config.load import change_family, from_tree
from boost.convert.formats import config_json
from boost.convert.names import entries
from boost.convert.tensors import TensorWriter
from boost.errors import StorageError
from boost.models.init import initial_value
from boost.parallel.mesh import Mesh

HF = "transformers LLaMA"
DENSE, DENSE_SP = "DTensor dense", "DTensor dense, sequence-parallel"
LOW_RANK, LOW_RANK_CUT = "DTensor low-rank", "DTensor low-rank, heads cut"


def peers(config: Config, mesh: Mesh) -> tuple[dict[str, Call], dict[str, str]]:
    """Returns ({name: training step} of peers that can run on this mesh, {name: reason} of those that cannot).

    For the dense model of the same shape: HF, DENSE, DENSE_SP. For a low-rank model also LOW_RANK, with the standard sharding of a
    pair (A column-wise, B row-wise), and LOW_RANK_CUT, in which B produces sharded heads and channels instead of full sums.
    A step trains on train.global_batch sequences in micro-batches and returns the mean loss before it and the gradient norm.
    Every process of the mesh must call this function and every step. Runs one step of each peer to check that it works.
    """
    dense = _dense(config)
    builders: dict[str, Callable[[], PlainStep]] = {HF: lambda: hugging_face(dense, mesh)}
    if mesh.tp.size > 1:
        builders |= {
            DENSE: lambda: with_dtensor(dense, mesh, sequence=False),
            DENSE_SP: lambda: with_dtensor(dense, mesh, sequence=True),
        }
        if config.model.low_rank:
            builders |= {
                LOW_RANK: lambda: with_dtensor(config, mesh),
                LOW_RANK_CUT: lambda: with_dtensor(config, mesh, heads_cut=True),
            }
    calls: dict[str, Call] = {}
    reasons: dict[str, str] = {}
    for name, build in builders.items():
        step, reason = _attempt(build, mesh)
        if step is None:
            reasons[name] = reason
        else:
            calls[name] = step
    return calls, reasons


def _dense(config: Config) -> Config:
    """The dense model of the same shape, with default [parallel] (these libraries shard it themselves)."""
    tree = config.model_dump()
    change_family(tree["model"], "dense")
    tree["parallel"] = {}
    tree["train"] |= {"recompute": "none", "recompute_every": 1}
    return from_tree(tree)


def _attempt(build: Callable[[], PlainStep], mesh: Mesh) -> tuple[PlainStep | None, str]:
    """Returns (step, '') or (None, reason); the reason is the first line of the error on the first process that raised."""
    step, reason = None, ""
    if mesh.size > mesh.tp.size:
        return None, "runs under tensor parallelism only; set parallel.pp and parallel.dp to 1"
    try:
        step = build()
        step()
    except Exception as error:  # other libraries may raise anything
        lines = str(error).strip().splitlines() or [""]
        reason = f"{type(error).__name__}: {lines[0]}"
    reasons = [reason]
    if mesh.size > 1:
        reasons = [""] * mesh.size
        dist.all_gather_object(reasons, reason)
    reason = next(filter(None, reasons), "")
    return (None, reason) if reason else (step, "")


def with_dtensor(config: Config, mesh: Mesh, sequence: bool = False, heads_cut: bool = False) -> PlainStep:
    """Plain modules under `parallelize_module`. `sequence` shards norms and residual stream along the sequence (dense only)."""
    assert mesh.device_mesh is not None
    if (heads_cut or not config.model.low_rank) and config.model.kv_heads % mesh.tp.size:
        raise ValueError(f"{config.model.kv_heads} key/value heads cannot be sharded over {mesh.tp.size} processes")
    module = build_plain(config, mesh.device, merged=False)
    tp = mesh.device_mesh["tp"]
    if config.model.low_rank:
        _cut_low_rank(module, tp, heads_cut)
    else:
        _cut_dense(module, tp, sequence)

    def passes(tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        with loss_parallel():
            loss = mean_loss(module(tokens_BS), targets_BS)
            loss.backward()
        return whole(loss.detach())

    return PlainStep(module, passes, config, mesh.device)


def _cut_dense(module: PlainDecoder, tp: DeviceMesh, sequence: bool) -> None:
    """Column-wise, then row-wise linears, so heads and channels are sharded."""
    residual = Shard(1) if sequence else Replicate()
    _cut_ends(module, tp, residual, sequence)
    for block in module.blocks:
        plan: dict[str, ParallelStyle] = {
            "qkv": _prepare(residual),
            "gate_up": _prepare(residual),
            "qkv.parts.*.W": ColwiseParallel(),
            "gate_up.parts.*.W": ColwiseParallel(),
            "o.parts.0.W": RowwiseParallel(output_layouts=residual),
            "down.parts.0.W": RowwiseParallel(output_layouts=residual),
        }
        if sequence:
            plan |= {"attn_norm": SequenceParallel(), "mlp_norm": SequenceParallel()}
        parallelize_module(block, tp, plan)


def _cut_low_rank(module: PlainDecoder, tp: DeviceMesh, heads_cut: bool) -> None:
    """Every pair along the bottleneck rank, so latents are sharded and outputs are reduced at full width."""
    wide = Shard(-1) if heads_cut else Replicate()
    _cut_ends(module, tp, Replicate(), False)
    for block in module.blocks:
        plan: dict[str, ParallelStyle] = {
            "qkv": _prepare(Replicate()),
            "gate_up": _prepare(Replicate()),
            "qkv.parts.*.A": ColwiseParallel(),
            "gate_up.parts.*.A": ColwiseParallel(),
            "qkv.parts.*.B.0": RowwiseParallel(output_layouts=wide),
            "gate_up.parts.*.B.0": RowwiseParallel(output_layouts=wide),
            "o.parts.0.A": ColwiseParallel(input_layouts=wide),
            "down.parts.0.A": ColwiseParallel(input_layouts=wide),
            "o.parts.0.B.0": RowwiseParallel(),
            "down.parts.0.B.0": RowwiseParallel(),
        }
        parallelize_module(block, tp, plan)


def _cut_ends(module: PlainDecoder, tp: DeviceMesh, residual: Any, sequence: bool) -> None:
    """Shards embedding and head along the vocabulary; logits stay sharded."""
    head = ColwiseParallel(input_layouts=residual, output_layouts=Shard(-1), use_local_output=False)
    plan: dict[str, ParallelStyle] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=residual),
        "head": head,
    }
    if sequence:
        plan["final_norm"] = SequenceParallel()
    parallelize_module(module, tp, plan)


def _prepare(residual: Any) -> PrepareModuleInput:
    """One collective for all linears that share an input, forward and backward."""
    return PrepareModuleInput(input_layouts=(residual,), desired_input_layouts=(Replicate(),))


def hugging_face(config: Config, mesh: Mesh) -> PlainStep:
    """transformers' LlamaForCausalLM with its own TP plan, forward pass and loss, and SDPA attention, for a dense configuration.

    Loads it from a temporary folder that process 0 writes. Propagates all transformers errors.
    """
    transformers = _transformers(mesh)
    folder = _write_folder(config, mesh)
    try:
        plan = {"tp_plan": "auto"} if mesh.tp.size > 1 else {}
        module = transformers.AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="sdpa", dtype=getattr(torch, config.train.param_dtype), **plan
        )
    finally:
        mesh.barrier()
        if mesh.is_main:
            shutil.rmtree(folder, ignore_errors=True)
    module.to(mesh.device).train()
    compute = getattr(torch, config.train.compute_dtype)
    narrow = config.train.compute_dtype != config.train.param_dtype

    def passes(tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        with torch.autocast(mesh.device.type, compute, enabled=narrow):
            # Our targets are already shifted; transformers takes those as shift_labels.
            loss = module(input_ids=tokens_BS, labels=targets_BS, shift_labels=targets_BS, use_cache=False).loss
        loss.backward()
        return whole(loss.detach())

    return PlainStep(module, passes, config, mesh.device)


def _transformers(mesh: Mesh) -> Any:
    """Imports transformers and silences it. Raises ModuleNotFoundError, or ValueError if it would run on another device."""
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error}: pip install -e '.[bench]'") from None
    if mesh.tp.size > 1 and mesh.device.type == "cpu" and torch.accelerator.is_available():
        raise ValueError("transformers runs tensor parallelism on the visible GPU, but this run is on the CPU")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", message=".*`?tp_plan`?.*", category=FutureWarning)  # the only name in 4.x
    return transformers


def _write_folder(config: Config, mesh: Mesh) -> Path:
    """Writes our initial weights as a Hugging Face folder on process 0. Raises StorageError on all processes on failure."""
    outcome = [("", "")]
    if mesh.is_main:
        folder = Path(tempfile.mkdtemp(prefix="boost-peer-"))
        try:
            writer = TensorWriter(folder, "model", 2**62)
            for entry in entries(config.model, "llama"):
                value = initial_value(entry.parameters[0], config.model, config.train.seed)
                writer.add(entry.name, value.to(getattr(torch, config.train.param_dtype)))
            writer.close()
            content = config_json(config.model, "llama", config.train.param_dtype, config.train.seq_len, None, None)
            (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
            outcome = [(str(folder), "")]
        except (OSError, StorageError) as error:
            outcome = [(str(folder), str(error))]
    if mesh.size > 1:
        dist.broadcast_object_list(outcome, 0)
    path, reason = outcome[0]
    if reason:
        raise StorageError(reason)
    return Path(path)
