"""Runs the decoder on shape tensors by intercepting torch functions, autograd functions and layout calls."""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from boost.config.layouts import spec_of
from boost.config.schema import Config, ModelConfig, ParallelConfig
from boost.config.stages import Stage
from boost.config.traffic import chunk_tokens
from boost.layouts.runtime import layout_for
from boost.models import documents, kernels
from boost.models.attention import Context
from boost.models.block import TransformerBlock
from boost.models.decoder import Decoder
from boost.models.fused import FusedModule
from boost.models.group import LinearGroup, Outputs
from boost.models.interface import Arrived, Flow, Layout
from boost.models.kernels import Kernel, RMSNorm
from boost.models.recompute import NO_RECOMPUTE
from boost.parallel import loss
from boost.parallel.mesh import Axis, Mesh
from boost.plan import rules
from boost.plan.categories import RESIDUAL, short_role
from boost.plan.shape_tensor import RULES, Shape, ShapeTensor, contiguous, leaf, make, records
from boost.plan.structure import MAX_CACHED
from boost.plan.tape import Gradients, GraphNode, Tape, Tensors
from boost.plan.work import REDUCE, SILU, SILU_BACKWARD, STREAM


def _axis(name: str, size: int) -> Axis:
    """The name of its process group holds the axis and the size, which the rules for collectives read."""
    return Axis(0, size, SimpleNamespace(group_name=f"{name} {size}") if size > 1 else None)  # type: ignore[arg-type]


# The modules of a model under a layout, built by the runtime's code on the meta device. `parallel` is `traced`.


@functools.lru_cache(MAX_CACHED)
def _layout_of(model: ModelConfig, parallel: ParallelConfig) -> Layout:
    axes = {"cp": _axis("cp", parallel.cp), "tp": _axis("tp", parallel.tp)}
    return layout_for(model, parallel, Mesh(torch.device("meta"), axes))


@functools.lru_cache(MAX_CACHED)
def _block_of(model: ModelConfig, parallel: ParallelConfig, layer: int) -> TransformerBlock:
    with torch.device("meta"):
        return TransformerBlock(model, layer, _layout_of(model, parallel), NO_RECOMPUTE, 0)


@functools.lru_cache(MAX_CACHED)
def _ends_of(model: ModelConfig, parallel: ParallelConfig, stage: Stage) -> Decoder:
    with torch.device("meta"):
        return Decoder(model, _layout_of(model, parallel), stage=stage)


class Tracer:
    """Runs modules and records them on a tape."""

    def __init__(self, config: Config, gathered: bool, on_gpu: bool) -> None:
        self.config, self.model, self.parallel = config, config.model, config.parallel
        train, p = config.train, config.parallel.tp
        self.gathered, self.copied = gathered, not gathered and config.has_working_copies
        self.dtype, self.stored = getattr(torch, train.compute_dtype), getattr(torch, train.param_dtype)
        self.device = torch.device("cuda" if on_gpu else "cpu")
        part = config.compiled_part(self.device.type)
        self.backend = kernels.BACKENDS["eager" if part == "none" else ONE_PASS]
        """Kernel backend: eager operations, or one operation per kernel."""
        self.parts = 2 if self.parallel.overlap == "halves" and p * self.parallel.cp > 1 else 1
        """Number of interleaved parts in a micro-batch."""
        self.tokens = train.micro_batch * train.seq_len // self.parallel.cp // self.parts
        """Tokens in one part."""
        model = config.model
        self.tape = Tape(self.tokens, max(model.dim, model.heads_dim, model.ffn_dim, model.vocab_size // p), p)
        self.layout = _layout_of(model, config.parallel)

    def new(self, shape: Shape, dtype: torch.dtype, category: str) -> ShapeTensor:
        self.tape.scope = category
        made = make(ShapeTensor(self.tape, None, shape, contiguous(shape), dtype, self.device), shape, "")
        self.tape.scope = ""
        return made

    def new_input(self, shape: Shape, category: str) -> Tensor:
        """Allocates an input to a pass, with requires_grad."""
        made = self.new(shape, self.dtype, category)
        made.node = GraphNode(-1, (), 1, None, "")
        return cast(Tensor, made)

    def without_memory(self, shape: Shape, dtype: torch.dtype) -> Tensor:
        """A tensor whose memory is counted elsewhere."""
        return cast(Tensor, ShapeTensor(self.tape, None, shape, contiguous(shape), dtype, self.device))

    def block(self, layer: int) -> TransformerBlock:
        """Block `layer`, with weights for this trace."""
        block = _block_of(self.model, self.parallel, layer)
        self._attach_weights(block)
        return block

    def ends(self, stage: Stage) -> Decoder:
        """The parts of a stage other than its blocks, with weights for this trace."""
        ends = _ends_of(self.model, self.parallel, stage)
        self._attach_weights(ends)
        return ends

    def _attach_weights(self, module: FusedModule) -> None:
        """Replaces the weights of a module and its children with shape tensors."""
        for part in module.modules():
            if isinstance(part, FusedModule):
                for name, slices in part.slices.items():
                    parameter = slices[0].parameter
                    held: dict[str, Any] = part._buffers if parameter.is_index else part._parameters
                    shape, role = tuple(held[name].shape), parameter.role
                    short = short_role(role, parameter.makes_outputs)
                    copied = self.copied and spec_of(self.parallel).may_have_copy(role)
                    dtype = self.dtype if copied or (self.gathered and len(shape) > 1) else self.stored
                    if parameter.is_index:
                        held[name] = leaf(self.tape, shape, torch.int64, self.device, short).without_graph()
                        continue
                    held[name] = leaf(self.tape, shape, dtype, self.device, short, self.stored if copied else None)

    def gradients(self, results: Tensors) -> list[ShapeTensor]:
        """Allocates gradients for the outputs of a pass."""
        return [self.new(result.shape, result.dtype, RESIDUAL) for result in results]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Intercepts torch functions and autograd functions."""
        usual = loss.chunks, documents.last_queries, Flow.add
        try:
            torch.autograd.Function.apply = classmethod(_apply)  # type: ignore[assignment, method-assign]
            loss.chunks, documents.last_queries = self._chunks, _last_queries
            Flow.add = _add  # type: ignore[assignment, method-assign]
            with _Rules(self.tape, self.device), kernels.using(self.backend):
                yield
        finally:
            torch.autograd.Function.apply = _USUAL_APPLY  # type: ignore[method-assign]
            loss.chunks, documents.last_queries, Flow.add = usual  # type: ignore[method-assign]

    def _chunks(self, tokens: int, vocabulary: int) -> Iterator[slice]:
        """Replaces `loss.chunks`: runs only one of several identical chunks, and counts it once for each of them."""
        step = chunk_tokens(vocabulary)
        whole, rest = divmod(tokens, step)
        for start, times in ((0, whole), (whole * step, int(rest > 0))):
            self.tape.times = times
            if times:
                yield slice(start, start + step)
        self.tape.times = 1


def _last_queries(q_BHSE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor) -> Tensor:
    """Replaces `documents.last_queries`, whose kernel needs no mask. The mask here only marks that keys outnumber queries."""
    grouped = q_BHSE.shape[1] != k_BKSE.shape[1]
    return F.scaled_dot_product_attention(q_BHSE, k_BKSE, v_BKSE, attn_mask=torch.empty(0), enable_gqa=grouped)


_KERNELS: dict[tuple[object, ...], tuple[bool, list[tuple[Shape, Shape, torch.dtype]], str]] = {}
"""Whether a kernel returns several results, their (shape, strides, dtype), and its slowest operation; by sizes of arguments."""


def one_pass(kernel: Kernel, arguments: tuple[object, ...]) -> Any:
    """Runs a kernel as one operation, which reads its arguments (once, unless the kernel specifies otherwise), writes its results
    once, and allocates nothing else. The operation is as fast as the slowest kind of operation in the kernel."""
    inputs = [x for x in arguments if isinstance(x, ShapeTensor)]
    tape = inputs[0].tape
    sizes = (x.shape + x.strides + (x.dtype,) if isinstance(x, ShapeTensor) else x for x in arguments)
    key = kernel, tape.tokens, tape.small, tape.statistic, *sizes
    if key not in _KERNELS:
        with tape.unrecorded() as done:
            outputs = kernel.function(*arguments)
            several = isinstance(outputs, tuple)
            results = [(x.shape, x.strides, x.dtype) for x in (outputs if several else (outputs,))]
            del outputs
        kinds = {operation.kernel for operation in done}
        slowest = next((kind for kind in (SILU_BACKWARD, SILU, STREAM, REDUCE) if kind in kinds), STREAM)
        if len(_KERNELS) > MAX_CACHED:
            _KERNELS.clear()
        _KERNELS[key] = several, results, slowest
    several, results, slowest = _KERNELS[key]
    made = [
        make(inputs[0], shape, kernel.name, dtype=dtype, inputs=inputs, strides=strides)
        for shape, strides, dtype in results
    ]
    largest = max(inputs, key=lambda x: x.numel_)
    numel, dtype = largest.numel_, largest.dtype
    moved = sum(
        n * x.nbytes for n, tensors in ((kernel.reads, inputs), (1, made)) for x in tensors if x.numel_ == numel
    )
    tape.record_op(slowest, (numel,), dtype, moved / (numel * dtype.itemsize))
    return tuple(made) if several else made[0]


ONE_PASS = "one pass"
kernels.BACKENDS[ONE_PASS] = one_pass


class _Rules(TorchFunctionMode):
    """Applies rules to every torch function, including factory functions."""

    def __init__(self, tape: Tape, device: torch.device) -> None:
        super().__init__()
        zeros = functools.partial(rules.zeros, (tape, device))
        self._without_tensors: dict[object, Callable[..., ShapeTensor]] = {torch.zeros: zeros}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rule, kwargs = self._without_tensors.get(function) or RULES.get(function), kwargs or {}
        if rule is None and any(issubclass(kind, ShapeTensor) for kind in types):
            return ShapeTensor.__torch_function__(function, types, args, kwargs)
        if rule is None:  # a real tensor, such as a mask; this machine may have no GPU
            return function(*args, **(kwargs | ({"device": "cpu"} if "device" in kwargs else {})))
        return rule(*args, **kwargs)


class _Ctx:
    """Context (ctx) of a custom autograd function."""

    def __init__(self, inputs: Sequence[object]) -> None:
        self.needs_input_grad = tuple(isinstance(x, ShapeTensor) and x.node is not None for x in inputs)
        self.saved_tensors: Gradients = ()
        self.without_gradient: Gradients = ()

    def save_for_backward(self, *tensors: ShapeTensor | None) -> None:
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *tensors: ShapeTensor | None) -> None:
        self.without_gradient = tensors


_USUAL_APPLY: Any = vars(torch.autograd.Function)["apply"]
_USUAL_ADD = Flow.add


def _apply(cls: Any, *inputs: object) -> Any:
    """Replaces `apply` of autograd functions: runs forward without autograd, then adds one node with the saved tensors."""
    sized = [x for x in inputs if isinstance(x, ShapeTensor)]
    if not sized:
        return _USUAL_APPLY.__get__(None, cls)(*inputs)
    tape, grad = sized[0].tape, records(*inputs)
    ctx, place = _Ctx(inputs), tape.place
    tape.place = "norm" if cls is RMSNorm else place
    if not grad:
        results = cls.forward(ctx, *inputs)
        tape.place = place
        return results
    with torch.no_grad():
        results = cls.forward(ctx, *[x.without_graph() if isinstance(x, ShapeTensor) else x for x in inputs])
    several = isinstance(results, tuple)
    made = list(results) if several else [results]
    saved = [x for x in ctx.saved_tensors if x is not None]
    pattern = [x is not None for x in ctx.saved_tensors]
    ctx.saved_tensors = ()

    def backward(gradients: Tensors, saved: Tensors) -> Gradients:
        rest = iter(saved)
        ctx.saved_tensors = tuple(next(rest) if there else None for there in pattern)
        back = cls.backward(ctx, *gradients)
        ctx.saved_tensors = ()
        return list(back) if isinstance(back, tuple) else [back]

    node = tape.node([x if isinstance(x, ShapeTensor) else None for x in inputs], len(made), backward)
    outputs = [
        x
        if x is None or any(x is other for other in ctx.without_gradient)
        else ShapeTensor(tape, x.storage, x.shape, x.strides, x.dtype, x.device, node, i)
        for i, x in enumerate(made)
    ]
    ctx.without_gradient = ()
    del made, results
    tape.save(node, saved)
    tape.place = place
    return tuple(outputs) if several else outputs[0]


class TracedLayout:
    """Wraps a layout, and tells the tape which group of linears is running."""

    def __init__(self, layout: Layout, tape: Tape) -> None:
        self._layout, self._tape = layout, tape

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layout, name)

    def enter(self, flow: Flow, gamma: Tensor, group: LinearGroup) -> Iterator[None]:
        return self._at(group.shape.name, self._layout.enter, flow, gamma, group)

    def up(self, arrived: Arrived, group: LinearGroup) -> Outputs:
        self._tape.place = group.shape.name
        wide = self._layout.up(arrived, group)
        self._tape.place = "attention" if group.shape.name == "qkv" else "product"
        return wide

    def enter_attention(self, flow: Flow, qkv: Sequence[Tensor], context: Context) -> Iterator[None]:
        return self._at("attention", self._layout.enter_attention, flow, qkv, context)

    def leave_attention(self, flow: Flow, attended: Tensor, context: Context) -> Iterator[None]:
        return self._at("attention", self._layout.leave_attention, flow, attended, context)

    def down(self, wide: Tensor, group: LinearGroup) -> Tensor:
        self._tape.place = group.shape.name
        return self._layout.down(wide, group)

    def leave(self, flow: Flow, partial: Tensor, group: LinearGroup) -> Iterator[None]:
        return self._at(group.shape.name, self._layout.leave, flow, partial, group)

    def _at(self, place: str, run: Callable[..., Iterable[None]], *arguments: object) -> Iterator[None]:
        self._tape.place = place
        for _ in run(*arguments):
            yield
            self._tape.place = place


def _add(flow: Flow, update: Any, group: LinearGroup) -> None:
    """Replaces `Flow.add`: updates of the residual stream are recorded under 'residual'."""
    tape = update.tape
    place, tape.place = tape.place, "residual"
    _USUAL_ADD(flow, update, group)
    tape.place = place
