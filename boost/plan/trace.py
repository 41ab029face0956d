"""The decoder itself, run on tensors that have only sizes: what one block, the embedding and the loss do, hold and send.

`boost.models` and the layout's runtime run as they are, under the recomputation policy, forward and backward. GEMM shapes, bytes of
element-wise work, collectives, what is saved and the peak all come from this one run.
"""

import functools
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from boost.config.architecture import first_alike
from boost.config.schema import Config, ModelConfig, ParallelConfig, RecomputeName, TrainConfig
from boost.config.stages import Stage
from boost.config.traffic import Collective
from boost.models.attention import Context
from boost.models.decoder import Decoder, TransformerBlock
from boost.models.interface import NO_RECOMPUTE, Stream
from boost.parallel.recompute import policies
from boost.plan.categories import LATENTS, LOGITS, RESIDUAL
from boost.plan.sized import Sized, contiguous
from boost.plan.tape import Held, Tape
from boost.plan.tracer import Placed, Tracer
from boost.plan.work import Counted

IGNORED_FIELDS = {
    "parallel": ("pp", "dp", "shard", "shard_outer", "schedule", "virtual", "split"),
    "train": (
        "steps", "seed", "global_batch", "deterministic", "compile", "recompute", "recompute_every", "eval_every",
        "eval_tokens", "save_every", "keep", "log_every",
    ),
}  # fmt: skip
"""Fields that a micro-batch on one TP group knows nothing of: a trace is made, and remembered, without them."""


@dataclass(frozen=True)
class TracedPass:
    """One micro-batch through one block, or through the loss or the embedding: bytes on one process, operations, collectives."""

    work: Counted
    collectives: tuple[Collective, ...]
    kept: tuple[Held, ...]
    """What lives from the forward to the backward pass, but for latents that the previous block made."""
    entering: int
    """What it is given."""
    sent: int
    """What it returns, and gets the gradients of."""
    forward: int
    """The most above what is there when it begins, its input included."""
    backward: int
    """The same of its backward pass, when all it kept and the gradients of its results are there."""
    first: int
    """The same where gradients of weights are new, and stay."""
    born: int
    """Those gradients."""
    inputs: int = 0
    """The same as `backward` where gradients of weights are put off."""
    put_off: int = 0
    """What then stays for them, in addition to what is kept."""
    prev_kept: tuple[int, ...] = ()
    """Bytes of each latent of the previous block that lives on because of this block; 0: not because of it."""
    latents_kept: tuple[bool, ...] = ()
    """Of each latent for the next block, whether it is among `kept`."""

    @functools.cached_property
    def by_category(self) -> Counter[str]:
        """Bytes of `kept`."""
        sums: Counter[str] = Counter()
        for held in self.kept:
            sums[held.category] += held.bytes
        return sums


def trace_block(
    config: Config, layer: int, policy: RecomputeName, fused_norm: bool = False, puts_off: bool = False
) -> TracedPass:
    """Block `layer` under a policy. `fused_norm`: on a device where RMSNorm is one kernel. `puts_off`: weight gradients are made
    in a pass of their own (zero bubble), of which `inputs` and `put_off` then speak.

    Raises NoRuleError if the model uses an operation without a rule.
    """
    traced = remembered(config, ("block", layer, policy, fused_norm))(
        lambda bare, gathered: _trace_block(Tracer(bare, gathered, fused_norm), layer, policy)
    )
    if not puts_off:
        return traced
    return remembered(config, ("zero bubble", layer, policy, fused_norm))(
        lambda bare, gathered: _with_put_off(traced, Tracer(bare, gathered, fused_norm), layer, policy)
    )


def pass_of_block(config: Config, layer: int, fused_norm: bool = False, puts_off: bool = False) -> TracedPass:
    """Block `layer` as the configuration runs it; blocks that are alike are traced once."""
    policy = config.train.recompute_by_layer(config.model.layers)[layer]
    return trace_block(config, alike(config.model, layer), policy, fused_norm, puts_off)


def alike(model: ModelConfig, layer: int) -> int:
    """The block that is traced for block `layer`: the last one of a crossing family has no next one that takes its latents."""
    return layer if model.has_latent_gates and layer + 1 == model.layers else first_alike(model, layer)


def trace_loss(config: Config, fused_norm: bool = False) -> TracedPass:
    """Final norm, head and loss."""
    return remembered(config, ("loss", fused_norm))(
        lambda bare, gathered: _trace_loss(Tracer(bare, gathered, fused_norm))
    )


def trace_embedding(config: Config) -> TracedPass:
    """The embedding."""
    return remembered(config, ("embedding",))(lambda bare, gathered: _trace_embedding(Tracer(bare, gathered, False)))


# What is remembered.

_KNOWN: dict[Any, Any] = {}
_MODELS: dict[int, ModelConfig] = {}
"""Kept, so that an identity is not given to another."""
_BLOCKS: dict[Any, TransformerBlock] = {}
"""Modules without weights, by model, [parallel] and block."""
_MOST = 20_000


def remembered(config: Config, key: Any) -> Callable[[Callable[[Config, bool], Any]], Any]:
    """Computes of a configuration without IGNORED_FIELDS, once for all configurations that differ in those alone."""
    model, gathered = config.model, config.parallel.sharded
    _MODELS.setdefault(id(model), model)
    whole = id(model), gathered, *told(config.parallel, "parallel"), *told(config.train, "train"), key

    def once(compute: Callable[[Config, bool], Any]) -> Any:
        if whole not in _KNOWN:
            if len(_KNOWN) > _MOST:
                _KNOWN.clear()
                _MODELS.clear()
                _BLOCKS.clear()
                _MODELS[id(model)] = model
            _KNOWN[whole] = compute(without_ignored(config), gathered)
        return _KNOWN[whole]

    return once


@functools.cache
def _told_fields(section: type[ParallelConfig] | type[TrainConfig], name: str) -> tuple[str, ...]:
    return tuple(field for field in section.model_fields if field not in IGNORED_FIELDS[name])


def told(section: ParallelConfig | TrainConfig, name: str) -> tuple[Any, ...]:
    """All values of [parallel] or [train] that a micro-batch on one TP group knows of."""
    return tuple(getattr(section, field) for field in _told_fields(type(section), name))


def without_ignored(config: Config) -> Config:
    """The configuration with IGNORED_FIELDS at their defaults."""
    changes = {}
    for name, fields in IGNORED_FIELDS.items():
        section = getattr(config, name)
        usual = type(section)()
        changes[name] = section.model_copy(update={field: getattr(usual, field) for field in fields})
    return config.model_copy(update=changes)


def _block(tracer: Tracer, layer: int, policy: RecomputeName) -> tuple[TransformerBlock, Any]:
    tape, key = tracer.tape, (id(tracer.model), *told(tracer.parallel, "parallel"), layer)
    if key not in _BLOCKS:
        with torch.device("meta"):
            _BLOCKS[key] = TransformerBlock(tracer.model, layer, tracer.layout, NO_RECOMPUTE, 0)
    block = _BLOCKS[key]
    tracer.weigh(block)
    runs = policies(tape.checkpoint, tape.checkpoint_but_attention)[policy]
    return block, Placed(tracer.layout, tape).with_options(policy=runs)


def _forward(tracer: Tracer, layer: int, policy: RecomputeName) -> tuple[list[Any], list[Any], Any, int]:
    """(entering latents, their memory, the stream after the block, bytes that entered)."""
    tape, train = tracer.tape, tracer.config.train
    block, layout = _block(tracer, layer, policy)
    context = Context(train.micro_batch, _angles(tracer), _angles(tracer))
    before = tape.live
    x = tracer.entering(tracer.layout.residual_shape(tracer.tokens), RESIDUAL)
    prev = []
    for group in block.groups:
        for shape in group.latent_shapes(tracer.layout, tracer.tokens) if group.latent_gate is not None else ():
            prev.append(tracer.entering(shape, LATENTS))
    entering = tape.live - before
    tape.peak = tape.live
    memory = [each.storage for each in prev]
    stream = block(layout, Stream(x, tuple(prev)), context)
    return prev, memory, stream, entering


def _angles(tracer: Tracer) -> Any:
    """Rotary angles, which are there anyway."""
    shape = tracer.config.train.seq_len, tracer.model.head_dim
    return Sized(tracer.tape, None, shape, contiguous(shape), tracer.dtype, tracer.device)


def _trace_block(tracer: Tracer, layer: int, policy: RecomputeName) -> TracedPass:
    tape = tracer.tape
    with tracer.running():
        prev, memory, stream, entering = _forward(tracer, layer, policy)
        forward = tape.peak - entering
        entered = [weakref.ref(each) for each in memory]
        bytes_of = [each.nbytes for each in prev]
        results = [stream.x, *stream.prev_latents]
        sent = [weakref.ref(each.storage) for each in results]
        del prev, memory, stream
        gradients = tracer.gradients(results)
        handed = sum(each.nbytes for each in gradients)
        for_next = {id(each.storage) for each in gradients}
        results = [each.elsewhere() for each in results]  # the next block has them
        own = {id(ref()) for ref in entered if ref() is not None}
        kept = tuple(held for key, held in tape.alive.items() if key not in own and key not in for_next)
        latents_kept = tuple(ref() is not None for ref in sent[1:])
        prev_kept = tuple(size if ref() is not None else 0 for ref, size in zip(entered, bytes_of, strict=True))
        begun = tape.live
        _restart(tape)
        tape.backward(results, gradients)
        backward, first, born = tape.peak - begun, tape.first_peak - begun, tape.born
    return TracedPass(
        tape.work, tuple(tape.collectives), kept, entering, handed, forward, backward, first, born,
        prev_kept=prev_kept, latents_kept=latents_kept,
    )  # fmt: skip


def _restart(tape: Tape) -> None:
    tape.peak = tape.first_peak = tape.live
    tape.born = 0


def _with_put_off(traced: TracedPass, tracer: Tracer, layer: int, policy: RecomputeName) -> TracedPass:
    tape = tracer.tape
    with tracer.running():
        _, _, stream, _ = _forward(tracer, layer, policy)
        results = [stream.x, *stream.prev_latents]
        del stream
        gradients = tracer.gradients(results)
        results = [each.elsewhere() for each in results]
        begun = tape.live
        _restart(tape)
        tape.backward(results, gradients, inputs_only=True)
        put_off = sum({id(g.storage): g.storage.bytes for g in tape.put_off}.values())
        inputs = tape.peak - begun
    return replace(traced, inputs=inputs, put_off=put_off)


def _ends(tracer: Tracer, stage: Stage) -> Decoder:
    with torch.device("meta"):
        decoder = Decoder(tracer.model, tracer.layout, tracer.dtype, stage=stage)
    tracer.weigh(decoder)
    return decoder


def _trace_loss(tracer: Tracer) -> TracedPass:
    tape = tracer.tape
    with tracer.running():
        decoder = _ends(tracer, Stage(1, 2))
        x = tracer.entering(tracer.layout.residual_shape(tracer.tokens), RESIDUAL)
        entering = tape.peak = tape.live
        targets: Any = Sized(tape, None, (tracer.tokens,), (1,), torch.int64, tracer.device)
        tape.scope, tape.place = LOGITS, "loss"
        # What enters is the residual stream, also where the loss keeps it.
        value: Any = tracer.layout.loss(x, decoder.final_norm, decoder.head, targets)
        tape.scope = ""
        forward = tape.peak - entering
        del x
        total = [value.elsewhere()]
        kept = tuple(tape.alive.values())
        own = value.nbytes
        begun = tape.live
        _restart(tape)
        gradients = tracer.gradients([value])
        del value
        tape.backward(total, gradients)
    return TracedPass(
        tape.work, tuple(tape.collectives), kept, entering, own, forward, tape.peak - begun, tape.first_peak - begun, tape.born
    )  # fmt: skip


def _trace_embedding(tracer: Tracer) -> TracedPass:
    tape = tracer.tape
    with tracer.running():
        decoder = _ends(tracer, Stage(0, 2))
        tokens: Any = Sized(tape, None, (tracer.tokens,), (1,), torch.int64, tracer.device)
        tape.place = "embed"
        rows: Any = tracer.layout.embed(tokens, decoder.embed, tracer.dtype)
        forward = tape.peak
        results = [rows.elsewhere()]
        gradients = tracer.gradients([rows])
        handed = rows.nbytes
        del rows
        begun = tape.live
        _restart(tape)
        tape.backward(results, gradients)
    return TracedPass(
        tape.work, tuple(tape.collectives), (), 0, handed, forward, tape.peak - begun, tape.first_peak - begun, tape.born
    )  # fmt: skip
