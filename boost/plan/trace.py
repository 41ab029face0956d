"""Traces the decoder on tensors without data: operations, memory and collectives of one block, the embedding or the loss.

`boost.models` and the layout's runtime run unchanged under the recomputation policy, forward and backward. GEMM shapes, bytes of
element-wise work, collectives, saved tensors and peak memory all come from one run.
"""

import functools
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from boost.config.architecture import first_alike
from boost.config.schema import Config, ModelConfig, ParallelConfig, RecomputeName, TrainConfig
from boost.config.stages import Stage
from boost.models import kernels
from boost.models.attention import Context
from boost.models.decoder import Decoder, TransformerBlock
from boost.models.interface import NO_RECOMPUTE, Stream, interleave
from boost.parallel.recompute import policies
from boost.plan.categories import LATENTS, LOGITS, RESIDUAL
from boost.plan.shape_tensor import ShapeTensor, contiguous
from boost.plan.traced import Lives, TracedPass, scaled_pass
from boost.plan.tracer import TracedLayout, Tracer

IGNORED_FIELDS = {
    "parallel": ("pp", "dp", "shard", "shard_outer", "schedule", "virtual", "split"),
    "train": (
        "steps", "seed", "global_batch", "reduce_dtype", "deterministic", "recompute", "recompute_every", "eval_every",
        "eval_tokens", "save_every", "save_minutes", "async_save", "keep", "keep_every", "keep_best", "spike_sigma", "on_spike",
        "check_replicas_every", "log_every", "profile",
    ),
}  # fmt: skip
"""Fields that do not affect a micro-batch on one TP group; traces are cached without them."""


def trace_block(
    config: Config, layer: int, policy: RecomputeName, on_gpu: bool = False, split_backward: bool = False
) -> TracedPass:
    """Returns the trace of block `layer` under a recomputation policy.

    `on_gpu`: the device fuses each chain of element-wise operations into one kernel by default (train.compile). `split_backward`:
    the backward pass defers weight gradients (zero bubble), which sets `input_backward` and `deferred`.

    Large micro-batches are not run, but derived from two smaller ones (`scaled_pass`).

    Raises NoRuleError if the model uses an operation without a rule.
    """
    micro_batch, run = config.train.micro_batch, run_micro_batches(config)
    if micro_batch <= max(run):
        return run_block(config, layer, policy, on_gpu, split_backward)

    def compute(bare: Config, gathered: bool) -> TracedPass:
        small, large = (run_block(with_micro_batch(config, n), layer, policy, on_gpu, split_backward) for n in run)
        scaled = scaled_pass(small, large, run, micro_batch)
        return scaled or run_block(config, layer, policy, on_gpu, split_backward)

    traced: TracedPass = cached_trace(config, ("scaled", layer, policy, on_gpu, split_backward))(compute)
    return traced


def run_block(
    config: Config, layer: int, policy: RecomputeName, on_gpu: bool = False, split_backward: bool = False
) -> TracedPass:
    """Runs block `layer` on tensors without data. Arguments are those of `trace_block`."""
    traced = cached_trace(config, ("block", layer, policy, on_gpu))(
        lambda bare, gathered: _trace_block(Tracer(bare, gathered, on_gpu), layer, policy)
    )
    if not split_backward:
        return traced
    return cached_trace(config, ("zero bubble", layer, policy, on_gpu))(
        lambda bare, gathered: _with_split_backward(traced, Tracer(bare, gathered, on_gpu), layer, policy)
    )


def pass_of_block(config: Config, layer: int, on_gpu: bool = False, split_backward: bool = False) -> TracedPass:
    """Trace of block `layer` under the configuration's policy. Identical blocks are traced once."""
    policy = config.train.recompute_by_layer(config.model.layers)[layer]
    return trace_block(config, alike(config.model, layer), policy, on_gpu, split_backward)


def alike(model: ModelConfig, layer: int) -> int:
    """Returns the block to trace instead of block `layer`. With latent gates, the last block differs: no block uses its latents."""
    return layer if model.has_latent_gates and layer + 1 == model.layers else first_alike(model, layer)


def trace_loss(config: Config, on_gpu: bool = False) -> TracedPass:
    """Trace of final norm, head and loss."""
    return cached_trace(_with_whole_backward(config), ("loss", on_gpu))(
        lambda bare, gathered: _trace_loss(Tracer(bare, gathered, on_gpu))
    )


def trace_embedding(config: Config) -> TracedPass:
    """Trace of the embedding; for large micro-batches, derived as for blocks."""
    config = _with_whole_backward(config)
    micro_batch, run = config.train.micro_batch, run_micro_batches(config)

    def compute(bare: Config, gathered: bool) -> TracedPass:
        if micro_batch > max(run):
            small, large = (trace_embedding(with_micro_batch(config, n)) for n in run)
            if scaled := scaled_pass(small, large, run, micro_batch):
                return scaled
        return _trace_embedding(Tracer(bare, gathered, False))

    traced: TracedPass = cached_trace(config, ("embedding",))(compute)
    return traced


def _with_whole_backward(config: Config) -> Config:
    """Replaces zero bubble by 1F1B without working copies, for the trace of embedding and loss. Only blocks split their backward
    pass, and zero bubble has no working copies."""
    if not config.parallel.splits_backward:
        return config
    parallel = config.parallel.model_copy(update={"schedule": "1f1b"})
    return config.model_copy(
        update={"parallel": parallel, "train": config.train.model_copy(update={"working_copies": False})}
    )


# Other micro-batches.

RUN_MICRO_BATCHES = (2, 4)
"""Micro-batches that are run, to see how sizes scale. Not 1: a dimension of size 1 avoids copies that all others need."""


def run_micro_batches(config: Config) -> tuple[int, int]:
    """RUN_MICRO_BATCHES of this configuration, doubled if a micro-batch runs as two halves."""
    parts = 1 if config.parallel.overlap == "none" else 2
    low, high = RUN_MICRO_BATCHES
    return parts * low, parts * high


def with_micro_batch(config: Config, micro_batch: int) -> Config:
    """Returns the configuration with another micro-batch."""
    return config.model_copy(update={"train": config.train.model_copy(update={"micro_batch": micro_batch})})


# Cache.

_TRACES: dict[Any, Any] = {}
_MODULES: dict[Any, Any] = {}
"""Modules on the meta device, by model, [parallel] and module."""
_MAX_TRACES = 20_000


def cached_trace(config: Config, key: Any) -> Callable[[Callable[[Config, bool], Any]], Any]:
    """Caches a computation on a configuration. Configurations that differ only in IGNORED_FIELDS share the result."""
    model, gathered = config.model, config.parallel.sharded
    whole = (
        model,
        gathered,
        kernels.BACKENDS["eager"],  # experiments replace it
        config.parallel.splits_backward,
        *traced_values(config.parallel, "parallel"),
        *traced_values(config.train, "train"),
        key,
    )

    def once(compute: Callable[[Config, bool], Any]) -> Any:
        if whole not in _TRACES:
            if len(_TRACES) > _MAX_TRACES:
                _TRACES.clear()
                _MODULES.clear()
            _TRACES[whole] = compute(without_ignored(config), gathered)
        return _TRACES[whole]

    return once


@functools.cache
def _traced_fields(section: type[ParallelConfig] | type[TrainConfig], name: str) -> tuple[str, ...]:
    return tuple(field for field in section.model_fields if field not in IGNORED_FIELDS[name])


@functools.lru_cache(_MAX_TRACES)
def traced_values(section: ParallelConfig | TrainConfig, name: str) -> tuple[Any, ...]:
    """All values of [parallel] or [train] that affect a micro-batch on one TP group."""
    return tuple(getattr(section, field) for field in _traced_fields(type(section), name))


def without_ignored(config: Config) -> Config:
    """Resets IGNORED_FIELDS to their defaults, but keeps zero bubble."""
    changes = {}
    for name, fields in IGNORED_FIELDS.items():
        section = getattr(config, name)
        usual = type(section)()
        changes[name] = section.model_copy(update={field: getattr(usual, field) for field in fields})
    if config.parallel.splits_backward:
        changes["parallel"] = changes["parallel"].model_copy(update={"pp": 2, "schedule": config.parallel.schedule})
    return config.model_copy(update=changes)


def _module(tracer: Tracer, name: Any, make: Callable[[], Any]) -> Any:
    """Returns a module of the decoder with the weights of this trace."""
    key = tracer.model, *traced_values(tracer.parallel, "parallel"), name
    if key not in _MODULES:
        with torch.device("meta"):
            _MODULES[key] = make()
    tracer.attach_weights(_MODULES[key])
    return _MODULES[key]


def _block(tracer: Tracer, layer: int, policy: RecomputeName) -> tuple[TransformerBlock, Any]:
    tape = tracer.tape
    block: TransformerBlock = _module(
        tracer, layer, lambda: TransformerBlock(tracer.model, layer, tracer.layout, NO_RECOMPUTE, 0)
    )
    runs = policies(tape.checkpoint, tape.checkpoint_but_attention, tape.checkpoint_block)[policy]
    return block, TracedLayout(tracer.layout, tape).with_options(policy=runs)


class _BlockInputs(NamedTuple):
    """Inputs of a block. The parts of a micro-batch are concatenated."""

    prev_bytes: list[int]
    """Bytes of each latent of the previous block."""
    prev_memory: list[Any]
    """Weak references to the memory of these latents."""
    bytes: int
    """Total bytes of all inputs."""


def _forward(tracer: Tracer, layer: int, policy: RecomputeName) -> tuple[_BlockInputs, list[Any]]:
    """Runs the forward pass. Returns (inputs, residual stream and latents for the next block of each part)."""
    tape, parts = tracer.tape, tracer.parts
    block, layout = _block(tracer, layer, policy)
    angles = _angles(tracer), _angles(tracer)
    context = Context(tracer.config.train.micro_batch, *angles, share=tracer.layout.sequence_share())
    before = tape.live
    streams = []
    for _ in range(parts):
        x = tracer.new_input(tracer.layout.residual_shape(tracer.tokens), RESIDUAL)
        prev = [
            tracer.new_input(shape, LATENTS)
            for group in block.groups
            for shape in (group.latent_shapes(tracer.layout, tracer.tokens) if group.latent_gate is not None else ())
        ]
        streams.append(Stream(x, tuple(prev)))
    input_bytes = tape.live - before
    tape.begin_pass()
    latents = [h for stream in streams for h in stream.prev_latents]
    inputs = _BlockInputs([h.nbytes for h in latents], [weakref.ref(h.storage) for h in latents], input_bytes)
    after = block(layout, streams, context.halves() if parts == 2 else [context])
    return inputs, [y for stream in after for y in (stream.x, *stream.prev_latents)]


def _angles(tracer: Tracer) -> Any:
    """Rotary angles; their memory is counted elsewhere."""
    shape = tracer.config.train.seq_len // tracer.parallel.cp, tracer.model.head_dim
    return ShapeTensor(tracer.tape, None, shape, contiguous(shape), tracer.dtype, tracer.device)


def _trace_block(tracer: Tracer, layer: int, policy: RecomputeName) -> TracedPass:
    tape = tracer.tape
    with tracer.running():
        inputs, results = _forward(tracer, layer, policy)
        forward = tape.lives_above(inputs.bytes)
        sent = [weakref.ref(x.storage) for x in results]
        gradients = tracer.gradients(results)
        output_bytes = sum(x.nbytes for x in gradients)
        for_next = {id(x.storage) for x in gradients}
        results = [x.without_storage() for x in results]  # owned by the next block
        own = {id(ref()) for ref in inputs.prev_memory if ref() is not None}
        saved = tuple(held for key, held in tape.alive.items() if key not in own and key not in for_next)
        outputs = len(sent) // tracer.parts  # residual stream and latents of one part
        latents_saved = tuple(ref() is not None for i, ref in enumerate(sent) if i % outputs)
        held = zip(inputs.prev_memory, inputs.prev_bytes, strict=True)
        prev_saved = tuple(size if ref() is not None else 0 for ref, size in held)
        before = tape.live
        tape.begin_pass()
        tape.backward(results, gradients)
        lives = Lives(forward, tape.lives_above(before), tape.first_lives_above(before))
    return TracedPass(
        *tape.record(), saved, inputs.bytes, output_bytes, lives, tape.new_gradients,
        prev_saved=prev_saved, latents_saved=latents_saved,
    )  # fmt: skip


def _with_split_backward(traced: TracedPass, tracer: Tracer, layer: int, policy: RecomputeName) -> TracedPass:
    tape = tracer.tape
    with tracer.running():
        _, results = _forward(tracer, layer, policy)
        gradients = tracer.gradients(results)
        results = [x.without_storage() for x in results]
        before = tape.live
        tape.begin_pass()
        tape.backward(results, gradients, inputs_only=True)
        deferred = sum({id(g.storage): g.storage.bytes for g in tape.deferred}.values())
        lives = traced.lives._replace(input_backward=tape.lives_above(before))
    return replace(traced, lives=lives, deferred=deferred)


def _ends(tracer: Tracer, stage: Stage) -> Decoder:
    decoder: Decoder = _module(tracer, stage, lambda: Decoder(tracer.model, tracer.layout, torch.float32, stage=stage))
    return decoder


def _trace_loss(tracer: Tracer) -> TracedPass:
    tape = tracer.tape
    with tracer.running():
        decoder = _ends(tracer, Stage(1, 2))
        shape = tracer.layout.residual_shape(tracer.tokens)
        parts = [tracer.new_input(shape, RESIDUAL) for _ in range(tracer.parts)]
        input_bytes = tape.live
        tape.begin_pass()
        targets: Any = ShapeTensor(tape, None, (tracer.tokens,), (1,), torch.int64, tracer.device)
        layout, norm, head = tracer.layout, decoder.final_norm, decoder.head
        tape.scope, tape.place = LOGITS, "loss"
        # The input is the residual stream, even if the loss saves it.
        values: list[Any] = interleave([layout.loss(x, norm, head, targets) for x in parts])
        while len(values) > 1:
            values.append(values.pop(0) + values.pop(0))
        tape.scope = ""
        forward = tape.lives_above(input_bytes)
        parts.clear()
        total = [values[0].without_storage()]
        saved = tuple(tape.alive.values())
        own = values[0].nbytes
        before = tape.live
        tape.begin_pass()
        gradients = tracer.gradients(values)
        values.clear()
        tape.backward(total, gradients)
        lives = Lives(forward, tape.lives_above(before), tape.first_lives_above(before))
    return TracedPass(*tape.record(), saved, input_bytes, own, lives, tape.new_gradients)


def _trace_embedding(tracer: Tracer) -> TracedPass:
    tape = tracer.tape
    with tracer.running():
        decoder = _ends(tracer, Stage(0, 2))
        tokens: Any = ShapeTensor(tape, None, (tracer.tokens,), (1,), torch.int64, tracer.device)
        tape.place = "embed"
        embed, parts = tracer.layout.embed, range(tracer.parts)
        rows: list[Any] = interleave([embed(tokens, decoder.embed, tracer.dtype) for _ in parts])
        forward = tape.lives_above(0)
        results = [x.without_storage() for x in rows]
        gradients = tracer.gradients(rows)
        output_bytes = sum(x.nbytes for x in rows)
        rows.clear()
        before = tape.live
        tape.begin_pass()
        tape.backward(results, gradients)
        lives = Lives(forward, tape.lives_above(before), tape.first_lives_above(before))
    return TracedPass(*tape.record(), (), 0, output_bytes, lives, tape.new_gradients)
