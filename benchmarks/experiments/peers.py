"""A peer from another library: transformers' LLaMA with its own TP plan and our initial weights, or why it cannot run."""

import json
import shutil
import tempfile
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.experiments.contest import Call
from benchmarks.experiments.plain import PlainStep, whole
from boost.config import Config
from boost.config.load import change, from_tree
from boost.config.schema import Family
from boost.convert.formats import config_json, entries
from boost.convert.tensors import TensorWriter
from boost.errors import StorageError
from boost.models.init import initial_value
from boost.parallel.mesh import Mesh

HF, HF_COMPILED = "transformers LLaMA", "transformers LLaMA, compiled"


def peers(config: Config, mesh: Mesh, names: Sequence[str] = (HF,)) -> tuple[dict[str, Call], dict[str, str]]:
    """Returns ({name: training step of the dense model of the same shape}, {name: why it cannot run}) for each of `names`.

    A step trains on train.global_batch sequences in micro-batches and returns the mean loss before it and the gradient norm.
    Every process of the mesh must call this function and every step. Runs one step to check that it works.
    """
    calls, reasons = dict[str, Call](), dict[str, str]()
    for name in names:
        step, reason = attempt(partial(hugging_face, of_family(config, "dense"), mesh, name == HF_COMPILED), mesh)
        if step is None:
            reasons[name] = reason
        else:
            calls[name] = step
    return calls, reasons


def of_family(config: Config, family: Family) -> Config:
    """The same shape in another family, on one process, without recomputation. Raises ConfigError."""
    tree = config.model_dump()
    change(tree, {"model.family": family})
    if tree["model"].get("rank") is None:
        tree["model"].pop("rank", None)
    tree["parallel"] = {}
    tree["train"] |= {"recompute": "none", "recompute_every": 1}
    return from_tree(tree)


def attempt(build: Callable[[], PlainStep], mesh: Mesh) -> tuple[PlainStep | None, str]:
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


def hugging_face(config: Config, mesh: Mesh, compiled: bool = False) -> PlainStep:
    """transformers' LlamaForCausalLM with its own TP plan, forward pass and loss, and SDPA attention, for a dense configuration.

    Loads the model from a temporary folder that process 0 writes. Does not catch errors from transformers.
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
    if compiled:
        module.compile()
    module.to(mesh.device).train()
    compute = getattr(torch, config.train.compute_dtype)
    narrow = config.train.compute_dtype != config.train.param_dtype

    def passes(tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        with torch.autocast(mesh.device.type, compute, enabled=narrow):
            # Our targets are already shifted; transformers takes them as shift_labels.
            loss = module(input_ids=tokens_BS, labels=targets_BS, shift_labels=targets_BS, use_cache=False).loss
        loss.backward()
        return whole(loss.detach())

    return PlainStep(module, passes, config, mesh.device)


def _transformers(mesh: Mesh) -> Any:
    """Imports transformers and silences it. Raises ModuleNotFoundError, or ValueError if it would run on a different device."""
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
    """Writes our initial weights as a Hugging Face folder on process 0. On failure, raises StorageError on all processes."""
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
