"""The decoder itself, run on tensors that have only sizes: what one block, the embedding and the loss do, hold and send.

`boost.models` and the layout's runtime run as they are, under the recomputation policy, forward and backward. GEMM shapes, bytes of
element-wise work, collectives, what is saved and the peak all come from this one run.
"""

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from boost.config.architecture import first_alike
from boost.config.schema import Config, ModelConfig, ParallelConfig, RecomputeName, TrainConfig
from boost.config.stages import Stage
from boost.config.traffic import Collective
from boost.models.attention import Context
from boost.models.decoder import Block, Decoder
from boost.models.interface import NO_RECOMPUTE, Layout, Pending, Saved, Stream
from boost.models.stored import Stored
from boost.parallel import loss
from boost.parallel.layouts import layout_for
from boost.parallel.mesh import Axis, Mesh
from boost.parallel.recompute import policies
from boost.plan import rules
from boost.plan.categories import LATENTS, LOGITS, RESIDUAL, short_role
from boost.plan.sized import RULES, Shape, Sized, contiguous, leaf, make, records
from boost.plan.tape import Held, Node, Tape
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
class Pass:
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
) -> Pass:
    """Block `layer` under a policy. `fused_norm`: on a device where RMSNorm is one kernel. `puts_off`: gradients of weights are made
    in a pass of their own (zero bubble), of which `inputs` and `put_off` then speak.

    Raises NoRuleError if the model uses an operation without a rule.
    """
    traced = _remembered(config, ("block", layer, policy, fused_norm))(
        lambda bare, gathered: _trace_block(_Tracer(bare, gathered, fused_norm), layer, policy)
    )
    if not puts_off:
        return traced
    return _remembered(config, ("zero bubble", layer, policy, fused_norm))(
        lambda bare, gathered: _with_put_off(traced, _Tracer(bare, gathered, fused_norm), layer, policy)
    )


def pass_of_block(config: Config, layer: int, fused_norm: bool = False, puts_off: bool = False) -> Pass:
    """Block `layer` as the configuration runs it; blocks that are alike are traced once."""
    policy = config.train.recompute_by_layer(config.model.layers)[layer]
    return trace_block(config, alike(config.model, layer), policy, fused_norm, puts_off)


def alike(model: ModelConfig, layer: int) -> int:
    """The block that is traced for block `layer`: the last one of a crossing family has no next one that takes its latents."""
    return layer if model.crosses and layer + 1 == model.layers else first_alike(model, layer)


def trace_loss(config: Config, fused_norm: bool = False) -> Pass:
    """Final norm, head and loss."""
    return _remembered(config, ("loss", fused_norm))(
        lambda bare, gathered: _trace_loss(_Tracer(bare, gathered, fused_norm))
    )


def trace_embedding(config: Config) -> Pass:
    """The embedding."""
    return _remembered(config, ("embedding",))(lambda bare, gathered: _trace_embedding(_Tracer(bare, gathered, False)))


# What is remembered.

_KNOWN: dict[Any, Any] = {}
_MODELS: dict[int, ModelConfig] = {}
"""Kept, so that an identity is not given to another."""
_BLOCKS: dict[Any, Block] = {}
"""Modules without weights, by model, [parallel] and block."""
_MOST = 20_000


def _remembered(config: Config, key: Any) -> Callable[[Callable[[Config, bool], Any]], Any]:
    """Computes of a configuration without IGNORED_FIELDS, once for all configurations that differ in those alone."""
    model, gathered = config.model, config.parallel.sharded
    _MODELS.setdefault(id(model), model)
    whole = id(model), gathered, *_told(config.parallel, "parallel"), *_told(config.train, "train"), key

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


def _told(section: ParallelConfig | TrainConfig, name: str) -> Iterator[Any]:
    return (getattr(section, field) for field in _told_fields(type(section), name))


def without_ignored(config: Config) -> Config:
    """The configuration with IGNORED_FIELDS at their defaults."""
    changes = {}
    for name, fields in IGNORED_FIELDS.items():
        section = getattr(config, name)
        usual = type(section)()
        changes[name] = section.model_copy(update={field: getattr(usual, field) for field in fields})
    return config.model_copy(update=changes)


# The tracer.


@dataclass(frozen=True)
class _Group:
    """A process group of which the model asks the name only: its size, for the rules of collectives."""

    group_name: str


class _Tracer:
    """One tape, and what runs on it."""

    def __init__(self, config: Config, gathered: bool, fused_norm: bool) -> None:
        self.config, self.model, self.parallel = config, config.model, config.parallel
        self.key = (id(config.model), *_told(config.parallel, "parallel"))
        train, p = config.train, config.parallel.tp
        self.gathered = gathered
        self.dtype, self.stored = getattr(torch, train.compute_dtype), getattr(torch, train.param_dtype)
        self.device = torch.device("cuda" if fused_norm else "cpu")
        self.tokens = train.micro_batch * train.seq_len
        model = config.model
        self.tape = Tape(self.tokens, max(model.dim, model.ffn_dim, model.vocab_size // p))
        axis = Axis(0, p, _Group(str(p)) if p > 1 else None)  # type: ignore[arg-type]
        self.layout = layout_for(model, config.parallel, Mesh(self.device, {"tp": axis}))

    def new(self, shape: Shape, dtype: torch.dtype, category: str) -> Sized:
        """A tensor that is there."""
        self.tape.scope = category
        made = make(Sized(self.tape, None, shape, contiguous(shape), dtype, self.device), shape, "")
        self.tape.scope = ""
        return made

    def entering(self, shape: Shape, category: str) -> Sized:
        """What a pass begins with, whose gradient is asked for."""
        made = self.new(shape, self.dtype, category)
        made.node = Node(-1, (), 1, None, "")
        return made

    def weigh(self, module: Stored) -> None:
        """Gives a module, and those inside it, weights without numbers."""
        for each in module.modules():
            if isinstance(each, Stored):
                for name, parts in each.parts.items():
                    shape = tuple(each._parameters[name].shape)  # type: ignore[union-attr]
                    dtype = self.dtype if self.gathered and len(shape) > 1 else self.stored
                    role = short_role(parts[0].parameter.role)
                    each._parameters[name] = leaf(self.tape, shape, dtype, self.device, role)  # type: ignore[assignment]

    def gradients(self, results: Sequence[Sized]) -> list[Sized]:
        """Of what a pass returned."""
        return [self.new(each.shape, each.dtype, RESIDUAL) for each in results]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Torch's functions, and those of autograd, on sizes."""
        usual = torch.autograd.Function.__dict__["apply"], loss.chunks
        torch.autograd.Function.apply = classmethod(_apply)  # type: ignore[assignment, method-assign]
        loss.chunks = self._chunks
        try:
            with _Rules(self.tape, self.device):
                yield
        finally:
            torch.autograd.Function.apply, loss.chunks = usual  # type: ignore[method-assign]

    def _chunks(self, tokens: int, step: int) -> Iterator[int]:
        """One of the chunks that are alike, counted as often as there are."""
        whole, rest = divmod(tokens, step)
        for start, times in ((0, whole), (whole * step, int(rest > 0))):
            self.tape.times = times
            if times:
                yield start
        self.tape.times = 1


class _Rules(TorchFunctionMode):
    """Answers every function of torch, those that make tensors of numbers too."""

    def __init__(self, tape: Tape, device: torch.device) -> None:
        super().__init__()
        self._makes = {torch.zeros: functools.partial(rules.zeros, (tape, device))}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rule = self._makes.get(function) or RULES.get(function)
        if rule is None:
            if not any(issubclass(each, Sized) for each in types):
                return function(*args, **(kwargs or {}))
            return Sized.__torch_function__(function, types, args, kwargs)
        return rule(*args, **(kwargs or {}))


class _Ctx:
    """What a hand-written function is given."""

    def __init__(self, inputs: Sequence[Any]) -> None:
        self.needs_input_grad = tuple(isinstance(x, Sized) and x.node is not None for x in inputs)
        self.saved_tensors: Any = ()

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors


_USUAL_APPLY = torch.autograd.Function.__dict__["apply"].__func__


def _apply(cls: Any, *inputs: Any) -> Any:
    """torch.autograd.Function.apply: forward without a graph, then one node that saves what the context was given."""
    sized = [x for x in inputs if isinstance(x, Sized)]
    if not sized:
        return _USUAL_APPLY(cls, *inputs)
    tape, grad = sized[0].tape, records(*inputs)
    ctx, place = _Ctx(inputs), tape.place
    if cls.__name__ == "_RMSNorm":
        tape.place = "norm"
    with torch.no_grad():
        results = cls.forward(ctx, *[x.bare() if isinstance(x, Sized) else x for x in inputs])
    tape.place = place if not grad else tape.place
    if not grad:
        return results
    several = isinstance(results, tuple)
    made = list(results) if several else [results]
    saved = [x for x in ctx.saved_tensors if x is not None]
    pattern = [x is not None for x in ctx.saved_tensors]
    ctx.saved_tensors = ()

    def backward(gradients: Sequence[Any], found: Sequence[Any]) -> Sequence[Any]:
        rest = iter(found)
        ctx.saved_tensors = tuple(next(rest) if there else None for there in pattern)
        back = cls.backward(ctx, *gradients)
        ctx.saved_tensors = ()
        return list(back) if isinstance(back, tuple) else [back]

    node = tape.node([x if isinstance(x, Sized) else None for x in inputs], len(made), backward)
    outputs = [
        x if x is None else Sized(tape, x.storage, x.shape, x.strides, x.dtype, x.device, node, i)
        for i, x in enumerate(made)
    ]
    del made, results
    tape.save(node, saved)
    tape.place = place
    return tuple(outputs) if several else outputs[0]


class _Placed:
    """A layout that tells the tape where it is."""

    def __init__(self, layout: Layout, tape: Tape) -> None:
        self._layout, self._tape = layout, tape

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layout, name)

    def with_options(self, **options: Any) -> "_Placed":
        return _Placed(self._layout.with_options(**options), self._tape)

    def in_proj_comm(self, stream: Stream, gamma: Any, group: Any) -> Pending[tuple[Saved, Stream]]:
        return self._at(group.shape.name, self._layout.in_proj_comm, stream, gamma, group)

    def in_proj_local(self, saved: Saved, group: Any) -> Any:
        self._tape.place = group.shape.name
        found = self._layout.in_proj_local(saved, group)
        self._tape.place = "attention" if group.shape.name == "qkv" else "product"
        return found

    def out_proj_local(self, wide: Any, group: Any) -> Any:
        self._tape.place = group.shape.name
        return self._layout.out_proj_local(wide, group)

    def out_proj_comm(self, stream: Stream, partial: Any, group: Any) -> Pending[Stream]:
        return self._at(group.shape.name, self._layout.out_proj_comm, _ResidualStream(*stream), partial, group)

    def _at(self, place: str, function: Callable[..., Pending[Any]], *arguments: Any) -> Pending[Any]:
        self._tape.place = place
        pending = function(*arguments)

        def wait() -> Any:
            self._tape.place = place
            return pending.wait()

        return Pending(wait)


class _ResidualStream(Stream):
    """A stream whose update has a place of its own."""

    __slots__ = ()

    def add(self, update: Any) -> Stream:
        place, self.x.tape.place = self.x.tape.place, "residual"
        added = super().add(update)
        self.x.tape.place = place
        return added


def _block(tracer: _Tracer, layer: int, policy: RecomputeName) -> tuple[Block, Any]:
    tape, key = tracer.tape, (*tracer.key, layer)
    if key not in _BLOCKS:
        with torch.device("meta"):
            _BLOCKS[key] = Block(tracer.model, layer, tracer.layout, NO_RECOMPUTE, 0)
    block = _BLOCKS[key]
    tracer.weigh(block)
    runs = policies(tape.checkpoint, tape.checkpoint_but_attention)[policy]
    return block, _Placed(tracer.layout, tape).with_options(policy=runs)


def _forward(tracer: _Tracer, layer: int, policy: RecomputeName) -> tuple[list[Sized], list[Any], Stream, int]:
    """(entering latents, their memory, the stream after the block, bytes that entered)."""
    tape, train = tracer.tape, tracer.config.train
    block, layout = _block(tracer, layer, policy)
    context = Context(
        train.micro_batch,
        *(_angles(tracer) for _ in range(2)),
    )
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


def _angles(tracer: _Tracer) -> Sized:
    """Rotary angles, which are there anyway."""
    shape = tracer.config.train.seq_len, tracer.model.head_dim
    return Sized(tracer.tape, None, shape, contiguous(shape), tracer.dtype, tracer.device)


def _trace_block(tracer: _Tracer, layer: int, policy: RecomputeName) -> Pass:
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
    return Pass(
        tape.work, tuple(tape.collectives), kept, entering, handed, forward, backward, first, born,
        prev_kept=prev_kept, latents_kept=latents_kept,
    )  # fmt: skip


def _restart(tape: Tape) -> None:
    tape.peak = tape.first_peak = tape.live
    tape.born = 0


def _with_put_off(traced: Pass, tracer: _Tracer, layer: int, policy: RecomputeName) -> Pass:
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


def _ends(tracer: _Tracer, stage: Stage) -> Decoder:
    with torch.device("meta"):
        decoder = Decoder(tracer.model, tracer.layout, tracer.dtype, stage=stage)
    tracer.weigh(decoder)
    return decoder


def _trace_loss(tracer: _Tracer) -> Pass:
    tape = tracer.tape
    with tracer.running():
        decoder = _ends(tracer, Stage(1, 2))
        x = tracer.entering(tracer.layout.residual_shape(tracer.tokens), RESIDUAL)
        entering = tape.peak = tape.live
        targets = Sized(tape, None, (tracer.tokens,), (1,), torch.int64, tracer.device)
        tape.scope, tape.place = LOGITS, "loss"
        # What enters is the residual stream, also where the loss keeps it.
        value = tracer.layout.loss(x, decoder.final_norm, decoder.head, targets)
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
    return Pass(
        tape.work, tuple(tape.collectives), kept, entering, own, forward, tape.peak - begun, tape.first_peak - begun, tape.born
    )  # fmt: skip


def _trace_embedding(tracer: _Tracer) -> Pass:
    tape = tracer.tape
    with tracer.running():
        decoder = _ends(tracer, Stage(0, 2))
        tokens = Sized(tape, None, (tracer.tokens,), (1,), torch.int64, tracer.device)
        tape.place = "embed"
        rows = tracer.layout.embed(tokens, decoder.embed, tracer.dtype)
        forward = tape.peak
        results = [rows.elsewhere()]
        gradients = tracer.gradients([rows])
        handed = rows.nbytes
        del rows
        begun = tape.live
        _restart(tape)
        tape.backward(results, gradients)
    return Pass(
        tape.work, tuple(tape.collectives), (), 0, handed, forward, tape.peak - begun, tape.first_peak - begun, tape.born
    )  # fmt: skip
