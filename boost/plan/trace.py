"""Traces the decoder on tensors without data: operations, memory and collectives in one block, the embedding or the loss.

`boost.models` and the layout's runtime run unchanged under the recomputation policy, forward and backward. GEMM shapes, bytes of
element-wise work, collectives, saved tensors and peak memory all come from one run.
"""

import functools
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch

from boost.config.architecture import first_alike, taken
from boost.config.schema import Config, RecomputeName
from boost.config.stages import Stage
from boost.config.traffic import Collective
from boost.models import kernels
from boost.models.attention import Context
from boost.models.block import interleave
from boost.models.interface import Flow, Layout, Stream
from boost.models.recompute import policies
from boost.plan.categories import LATENTS, LOGITS, RESIDUAL, WIDE
from boost.plan.shape_tensor import ShapeTensor
from boost.plan.structure import MAX_CACHED, altered, traced
from boost.plan.tape import Flight, Operation, ShapeStorage, work_of
from boost.plan.tracer import ONE_PASS, TracedLayout, Tracer
from boost.plan.work import Counted


@dataclass(frozen=True)
class TracedPass:
    """Operations and memory for one micro-batch in one block, the loss or the embedding, on one process; sizes in bytes."""

    log: tuple[Operation, ...]
    collectives: tuple[Collective, ...]
    flights: tuple[Flight, ...]
    """Starts of collectives and waits for them."""
    saved: tuple[tuple[str, int], ...]
    """(category, bytes) of each tensor saved for the backward pass, except what the previous block carries."""
    input_bytes: int
    output_bytes: int
    """Bytes of the outputs; their gradients take as many bytes."""
    forward: int
    """Peak of the forward pass, in addition to memory held at its start (including inputs)."""
    backward: int
    """Peak of the backward pass, in addition to saved tensors and output gradients."""
    first_backward: int
    """The same for a first micro-batch, whose weight gradients stay allocated."""
    new_gradients: int
    """Bytes of weight gradients."""
    prev_saved: tuple[int, ...] = ()
    """Bytes of each tensor carried from the previous block that this block keeps alive; 0 for any other."""
    latents_saved: tuple[bool, ...] = ()
    """Whether each tensor carried to the next block is in `saved`."""
    latents: tuple[tuple[str, int], ...] = ()
    """(category, bytes) of the memory that each of them keeps alive: 0 bytes for a further view of the same."""

    @functools.cached_property
    def work(self) -> Counted:
        """Counts how often each operation runs."""
        return work_of(self.log)

    @functools.cached_property
    def by_category(self) -> Counter[str]:
        """Bytes of `saved` by category."""
        sums: Counter[str] = Counter()
        for category, size in self.saved:
            sums[category] += size
        return sums


def trace_block(config: Config, layer: int, policy: RecomputeName, on_gpu: bool = False) -> TracedPass:
    """Returns the trace of block `layer` under a recomputation policy.

    `on_gpu`: whether the device is a GPU. If so, chains of element-wise operations are fused by default (train.compile).

    Raises NoRuleError if the model uses an operation without a rule.
    """
    key = "block", layer, policy, on_gpu
    return _cached(config, key, on_gpu, lambda tracer: _trace_block(tracer, layer, policy))


def pass_of_block(config: Config, layer: int, on_gpu: bool = False) -> TracedPass:
    """Trace of block `layer` under the configuration's policy. Identical blocks are traced once."""
    model, policy = config.model, config.train.recompute_by_layer(config.model.layers)[layer]
    alike = first_alike(model, layer)  # but no later block uses the latents of the last one
    feeds = [bool(taken(model, n + 1)) for n in (layer, alike)]
    return trace_block(config, alike if feeds[0] == feeds[1] else layer, policy, on_gpu)


def trace_loss(config: Config, on_gpu: bool = False) -> TracedPass:
    """Trace of the final norm, the head and the loss."""
    return _cached(_by_tokens(config), ("loss", on_gpu), on_gpu, _trace_loss)


def trace_embedding(config: Config) -> TracedPass:
    """Trace of the embedding."""
    return _cached(_by_tokens(config), ("embedding",), False, _trace_embedding)


# Cache.


@functools.lru_cache(MAX_CACHED)
def _by_tokens(config: Config) -> Config:
    """A configuration without attention's axes that has the same embedding and loss: they depend only on the number of tokens."""
    parallel, train = config.parallel, config.train
    if parallel.cp > 1 and parallel.tp == 1 and parallel.overlap == "halves":
        return config  # the halves exist because of this axis
    tokens = train.micro_batch * train.seq_len // parallel.cp
    return config.changed(parallel={"cp": 1}, train={"micro_batch": 1, "seq_len": tokens})


_TRACES: dict[tuple[Any, ...], TracedPass] = {}


def _cached(config: Config, key: tuple[object, ...], on_gpu: bool, run: Callable[[Tracer], TracedPass]) -> TracedPass:
    """Caches a trace. Configurations that differ only in UNTRACED fields share the result."""
    gathered = config.parallel.sharded
    config = altered(config, parallel=traced(config.parallel), train=traced(config.train))
    backends = kernels.BACKENDS["eager"], kernels.BACKENDS[ONE_PASS]  # experiments replace both
    whole = config.model, config.parallel, config.train, gathered, backends, key
    if whole not in _TRACES:
        if len(_TRACES) > MAX_CACHED:
            _TRACES.clear()
        _TRACES[whole] = run(Tracer(config, gathered, on_gpu))
    return _TRACES[whole]


def _forward(
    tracer: Tracer, layer: int, policy: RecomputeName
) -> "tuple[int, list[tuple[int, weakref.ref[ShapeStorage | None]]], list[ShapeTensor]]":
    """Runs the forward pass. Returns (bytes of all inputs; bytes of each tensor carried from the previous block, with a weak
    reference to its memory; for each part, the residual stream and what is carried to the next block)."""
    tape, parts = tracer.tape, tracer.parts
    block = tracer.block(layer)
    but_attention = functools.partial(tape.checkpoint, selective=True)
    of_block = functools.partial(tape.checkpoint, to_the_end=tracer.layout.halves)  # blocks communicate
    block.recompute(policies(tape.checkpoint, but_attention, of_block)[policy])
    layout = cast(Layout, TracedLayout(tracer.layout, tape))
    tokens, width = tracer.config.train.seq_len // tracer.parallel.cp, tracer.model.head_dim
    cos, sin = (tracer.without_memory((tokens, 1, n), tracer.dtype) for n in (width, width // 2))
    context = Context(tracer.config.train.micro_batch, cos, sin, share=tracer.layout.sequence_share())
    before = tape.live
    streams = []
    for _ in range(parts):
        x = tracer.new_input(tracer.layout.residual_shape(tracer.tokens), RESIDUAL)
        prev = [
            tracer.new_input(shape, LATENTS if g.kind.carries == "latents" else WIDE if g.side == "enter" else RESIDUAL)
            for g in taken(tracer.config.model, layer)
            for shape in tracer.layout.carried_shapes(g, tracer.tokens)
        ]
        streams.append(Stream(x, tuple(prev)))
    input_bytes = tape.live - before
    tape.begin_pass()
    prev_latents = cast("list[ShapeTensor]", [h for stream in streams for h in stream.latents])
    latents = [(h.nbytes, weakref.ref(h.storage)) for h in prev_latents]
    after = block(layout, streams, context.halves() if parts == 2 else [context])
    return input_bytes, latents, cast("list[ShapeTensor]", [y for stream in after for y in (stream.x, *stream.latents)])


def _trace_block(tracer: Tracer, layer: int, policy: RecomputeName) -> TracedPass:
    tape = tracer.tape
    with tracer.running():
        input_bytes, prev, results = _forward(tracer, layer, policy)
        forward = tape.peak - input_bytes
        storages = [cast(ShapeStorage, x.storage) for x in results]
        sent, outputs = list(map(weakref.ref, storages)), len(results) // tracer.parts  # residual stream and latents
        held = {id(storage): (storage.category, storage.bytes) for storage in storages}
        latents = tuple(held.pop(id(x), ("", 0)) for i, x in enumerate(storages) if i % outputs)
        del storages
        gradients = tracer.gradients(results)
        output_bytes = sum(x.nbytes for x in gradients)
        results = [x.without_storage() for x in results]  # owned by the next block
        others = {id(ref()) for _, ref in prev if ref() is not None} | {id(x.storage) for x in gradients}
        saved = tuple(held for key, held in tape.alive.items() if key not in others)
        latents_saved = tuple(ref() is not None for i, ref in enumerate(sent) if i % outputs)
        prev_saved = tuple(size if ref() is not None else 0 for size, ref in prev)
        backward = tape.backward(results, gradients)
    return TracedPass(
        *tape.record(), saved, input_bytes, output_bytes, forward, *backward,
        prev_saved=prev_saved, latents_saved=latents_saved, latents=latents,
    )  # fmt: skip


def _trace_loss(tracer: Tracer) -> TracedPass:
    tape = tracer.tape
    with tracer.running():
        decoder = tracer.ends(Stage(1, 2))
        shape = tracer.layout.residual_shape(tracer.tokens)
        parts = [Flow(tracer.new_input(shape, RESIDUAL)) for _ in range(tracer.parts)]
        input_bytes = tape.live
        tape.begin_pass()
        targets = tracer.without_memory((tracer.tokens,), torch.int64)
        tape.scope, tape.place = LOGITS, "loss"
        # The input is the residual stream, even if the loss saves it.
        interleave([decoder._loss(flow, targets, None) for flow in parts])
        values = [cast(ShapeTensor, flow.x) for flow in parts]
        while len(values) > 1:
            values.append(values.pop(0) + values.pop(0))
        tape.scope = ""
        forward = tape.peak - input_bytes
        parts.clear()
        total = [values[0].without_storage()]
        saved = tuple(tape.alive.values())
        own = values[0].nbytes
        gradients = tracer.gradients(values)
        values.clear()
        backward = tape.backward(total, gradients)
    return TracedPass(*tape.record(), saved, input_bytes, own, forward, *backward)


def _trace_embedding(tracer: Tracer) -> TracedPass:
    tape = tracer.tape
    with tracer.running():
        decoder = tracer.ends(Stage(0, 2))
        tokens = tracer.without_memory((tracer.tokens,), torch.int64)
        tape.place = "embed"
        parts = [Flow(tokens) for _ in range(tracer.parts)]
        interleave([tracer.layout.embed(flow, decoder.embed, tracer.dtype) for flow in parts])
        forward = tape.peak
        rows = [cast(ShapeTensor, flow.x) for flow in parts]
        parts.clear()
        results = [x.without_storage() for x in rows]
        gradients = tracer.gradients(rows)
        output_bytes = sum(x.nbytes for x in rows)
        rows.clear()
        backward = tape.backward(results, gradients)
    return TracedPass(*tape.record(), (), 0, output_bytes, forward, *backward)
