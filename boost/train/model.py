"""Builds a configuration's model on a mesh's device, for training, evaluation and generation."""

import functools
import logging
import os
import shutil
from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch._functorch import config as functorch_config
from torch.utils._triton import has_triton

from boost.config import Config
from boost.config.architecture import parameter_count
from boost.config.rules import out_of_proportion
from boost.config.schema import CompiledPart
from boost.config.stages import Stage, stages_of
from boost.errors import ConfigError
from boost.format import format_bytes
from boost.layouts.runtime import layout_for
from boost.models import kernels
from boost.models.block import TransformerBlock
from boost.models.decoder import Decoder
from boost.models.fused import FusedParam
from boost.models.init import initialize
from boost.models.recompute import POLICIES
from boost.parallel.mesh import Mesh
from boost.parallel.pipeline import Pipeline, StageModule
from boost.parallel.weights import shard
from boost.train.hardware import total_memory
from boost.train.progress import progress

log = logging.getLogger("boost")

Model = Decoder | Pipeline
"""The part of the model that this process runs."""


def require_called(model: Model) -> None:
    """Raises ConfigError for hooks that a step does not call: it calls the model, and its blocks without gradients as results."""
    for name, module in model.named_modules():
        if isinstance(module, Decoder | StageModule | Pipeline):
            continue
        forward = module._forward_hooks, module._forward_pre_hooks
        backward = module._backward_hooks, module._backward_pre_hooks
        if any(backward if isinstance(module, TransformerBlock) else (*forward, *backward)):
            raise ConfigError(
                f"hooks of '{name}' would not be called; attach forward hooks to a block and backward hooks to parameters, or "
                "train a boost.nn.Decoder in a loop of your own"
            )


def require_trained(model: Model, fused_params: Sequence[FusedParam]) -> None:
    """Raises ConfigError for parameters that hooks have replaced or added: a step updates those that the run built. Does not look
    at weights that `fully_shard` has replaced."""
    if any(fused.shard for fused in fused_params):
        return
    now = {id(parameter) for parameter in (*model.parameters(), *model.buffers())}
    built = {id(fused.parameter): fused.slices[0].parameter.name for fused in fused_params}
    added = [
        name for name, parameter in model.named_parameters() if id(parameter) not in built and parameter.requires_grad
    ]
    if changed := [name for key, name in built.items() if key not in now] + added:
        raise ConfigError(
            f"a hook has replaced or added the parameter '{changed[0]}', which no step would train; change values in place "
            "(copy_, or load_state_dict without assign)"
        )


def build_model(config: Config, mesh: Mesh) -> Model:
    """Builds this process's model (or pipeline stages) for training. Compiles blocks and shards weights if configured.

    Does not initialize weights. Raises ConfigError if a requested option is not available here, or if the weights alone
    exceed the device's memory size.
    """
    # Check before allocation, because a process builds its part unsharded and then shards it over replicas.
    dtype, available = getattr(torch, config.train.param_dtype), total_memory(mesh.device)
    needed = parameter_count(config.model) // (config.parallel.tp * config.parallel.pp) * dtype.itemsize
    if needed > available:
        field, value = out_of_proportion(config.model)
        raise ConfigError(
            f"{field} = {value}: the weights of one process take {format_bytes(needed)} in {config.train.param_dtype}, but "
            f"its device has {format_bytes(available)}; use a smaller model, or more processes (parallel.tp, parallel.pp)"
        )
    if config.parallel.pp == 1:
        whole = build_decoder(config, mesh)
        _compile_and_shard(whole, whole, config, mesh)
        return whole
    modules = [StageModule(build_decoder(config, mesh, stage)) for stage in stages_of(config, mesh.pp.rank)]
    for module in modules:
        _compile_and_shard(module, module.decoder, config, mesh)
    pipeline = Pipeline(modules, mesh.pp)
    train = config.train
    count = train.global_batch // (config.parallel.dp * train.micro_batch)
    pipeline.prepare(config.parallel, count, (train.micro_batch, train.seq_len // config.parallel.cp))
    return pipeline


def initialize_model(model: Model, seed: int, show: bool = False) -> None:
    """Initializes this process's weights. `show`: shows a progress bar, because initializing a large model takes minutes."""

    def over(params: list[FusedParam]) -> Iterable[FusedParam]:
        return progress(params, "initial weights", enabled=show)

    for decoder in model.decoders if isinstance(model, Pipeline) else [model]:
        initialize(decoder, seed, over)


def _compile_and_shard(root: nn.Module, decoder: Decoder, config: Config, mesh: Mesh) -> None:
    if _compiled_part(config, mesh.device) == "blocks":
        reason = _compiler_error(mesh.device) if config.train.compile == "auto" else ""
        if reason:
            log.info("blocks are not compiled: torch.compile fails on device '%s': %s", mesh.device.type, reason)
        else:
            compile_blocks(decoder)
    if config.shards_weights:
        shard(root, decoder, config.parallel, mesh, getattr(torch, config.train.sum_dtype))


def compile_blocks(decoder: Decoder) -> None:
    """Compiles each block for training and evaluation into one graph that all blocks share. Generation stays eager."""
    # These settings apply to the whole process. Without them, a compiled btp block keeps 65% more bytes for the backward pass.
    functorch_config.ban_recompute_used_far_apart = False
    functorch_config.ban_recompute_long_fusible_chains = False
    functorch_config.ban_recompute_materialized_backward = False
    for block in decoder.blocks:
        block.compile(fullgraph=True)


def choose_kernels(config: Config, device: torch.device) -> None:
    """Chooses the backend of this process's element-wise kernels (if blocks are compiled, only of those outside blocks).
    Without a compiler, raises ConfigError or, with train.compile = 'auto', logs the problem and uses eager kernels."""
    compiled = "inductor or eager" if config.train.compile == "auto" else "inductor"
    kernels.use("eager" if _compiled_part(config, device) == "none" else compiled)


def _compiled_part(config: Config, device: torch.device) -> CompiledPart:
    part = config.compiled_part(device.type)
    try:
        if part != "none":
            _require_compiler(part, device)
    except ConfigError as error:
        if config.train.compile != "auto":
            raise
        log.info("nothing is compiled: %s", error)
        return "none"
    return part


@functools.cache
def _compiler_error(device: torch.device) -> str:
    """Compiles an addition as a trial. Returns the error (for example, Triton finds no C compiler or Python.h), or '' on success.
    Kernels need no such trial, because each falls back to eager if it fails."""
    try:
        torch.compile(lambda x: x + 1)(torch.zeros(8, device=device))
    except Exception as error:  # from Dynamo, inductor, Triton or a subprocess
        return (str(error).strip().splitlines() or [type(error).__name__])[0]
    return ""


def _require_compiler(part: CompiledPart, device: torch.device) -> None:
    names = [name for name in ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE") if os.environ.get(name) == "1"]
    if names or torch._dynamo.config.disable:
        raise ConfigError(
            f"train.compile = '{part}', but {(*names, 'torch._dynamo.config.disable')[0]} is set, which disables torch.compile; "
            "unset it, or set train.compile = 'none'"
        )
    compilers = (os.environ.get("CXX", "g++"), "g++", "clang++", "cl")
    if device.type == "cuda":
        missing = "" if has_triton() else "Triton"
    else:
        missing = "" if any(shutil.which(compiler) for compiler in compilers) else "a C++ compiler (g++)"
    if missing:
        raise ConfigError(
            f"train.compile = '{part}' needs {missing} on device '{device.type}'; install it, or set train.compile = 'none'"
        )


def build_decoder(config: Config, mesh: Mesh, stage: Stage | None = None) -> Decoder:
    """Builds a decoder, or one of its pipeline stages, with weights in train.param_dtype and computation in train.compute_dtype.
    Does not initialize weights. Also chooses this process's element-wise kernels (`choose_kernels`).
    """
    layout = layout_for(config.model, config.parallel, mesh)
    train = config.train
    choose_kernels(config, mesh.device)
    policies = [POLICIES[name] for name in train.recompute_by_layer(config.model.layers)]
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, train.param_dtype))
    try:
        with mesh.device:
            return Decoder(config.model, layout, getattr(torch, train.compute_dtype), policies, stage)
    finally:
        torch.set_default_dtype(default_dtype)
