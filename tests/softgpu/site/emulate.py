"""Computes ATen's CUDA operations on the CPU, on the same bytes: memory of the software GPU is memory of the host.

Every operation that has a CUDA kernel gets a Python function instead, which calls the CPU's kernel on tensors that share the
operands' memory. Attention has no such kernel on CPUs and is implemented here. Compiled code runs Dynamo's and AOTAutograd's graphs
with these operations; its Triton kernels are built by tests that run without the emulation.

Legend: B sequences, H query heads and K key/value heads, S queries and C keys of a sequence, T of all, E width of a head.
"""

import bisect
import ctypes
import math
import os
import traceback
import warnings
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

CPU = torch.device("cpu")

USUAL = {
    "_efficientzerotensor", "_local_scalar_dense", "_pin_memory", "_reshape_alias", "_resize_output_", "as_strided",
    "empty.memory_format", "empty_strided", "is_pinned", "is_set_to", "record_stream", "resize_", "set_", "set_.source_Storage",
    "set_.source_Storage_storage_offset", "set_.source_Tensor", "set_.source_Tensor_storage_offset", "unfold", "view",
    "view_as_complex", "view_as_real",
}  # fmt: skip
"""Operations that allocate, create views, or copy to the host, which the runtime implements."""

_libraries: list[torch.library.Library] = []
"""Registrations last as long as these libraries."""


def shared(x: Tensor) -> Tensor:
    """A CPU tensor on the memory of a CUDA tensor."""
    storage = x.untyped_storage()
    if storage.nbytes() == 0 or storage.data_ptr() == 0:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
    host = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), CPU, storage.nbytes())
    return torch.empty(0, dtype=x.dtype).set_(host, x.storage_offset(), x.shape, x.stride())


def copied(x: Tensor, device: torch.device) -> Tensor:
    """A CUDA tensor with the values of a CPU tensor."""
    made = torch.empty_like(x, device=device)
    shared(made).copy_(x)
    return made


def device_of(arguments: Any) -> torch.device:
    """The device on which an operation with these arguments runs."""
    leaves = tree_leaves(arguments)
    on = [x.device if isinstance(x, Tensor) else x for x in leaves if isinstance(x, Tensor | torch.device)]
    return next((device for device in on if device.type == "cuda"), torch.device("cuda", torch.cuda.current_device()))


def on_the_cpu(op: Any, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """The implementation of an operation on CUDA tensors: its CPU kernel, or `function`, on tensors that share their memory."""
    types = [str(argument.type) for argument in op._schema.arguments]

    def number(value: Any, kind: str, double: bool) -> Any:
        """Python numbers in place of tensors, which the dispatcher has unwrapped, become tensors again."""
        if function or kind != "Tensor" or not isinstance(value, bool | int | float):
            return value
        wide = {bool: torch.bool, int: torch.int64, float: torch.float64 if double else torch.get_default_dtype()}
        return torch.scalar_tensor(value, dtype=wide[type(value)])

    def compute(args: Any, kwargs: Any) -> Any:
        if function:
            return function(*args, **kwargs)
        try:
            return op(*args, **kwargs)
        except NotImplementedError:  # it has a kernel for GPUs only
            return torch._decomp.decomposition_table[op](*args, **kwargs)

    def run(*args: Any, **kwargs: Any) -> Any:
        double = any(isinstance(x, Tensor) and x.is_floating_point() for x in args)
        args = tuple(number(value, kind, double) for value, kind in zip(args, types, strict=False))
        device, capturing = device_of((args, kwargs)), torch.cuda.is_current_stream_capturing()
        given: dict[int, tuple[Tensor, Tensor]] = {}
        if capturing and op is torch.ops.aten.copy_.default and args[0].device != args[1].device and not any(args[2:]):
            torch.cuda.current_stream().synchronize()  # as the kernel does: an error

        def enter(x: Any) -> Any:
            if isinstance(x, torch.device):
                return CPU
            if not isinstance(x, Tensor) or not x.is_cuda:
                return x
            twin = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).zero_() if capturing else shared(x)
            given[id(twin)] = twin, x
            return twin

        def leave(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            if id(x) in given:
                return given[id(x)][1]
            return copied(x, device) if x.device.type == "cpu" else x

        with torch._C._AutoDispatchBelowAutograd():
            outer = args, kwargs
            result = compute(*(inner := tree_map(enter, outer)))
            for twin, x in given.values():  # an operation may have resized its `out`
                if twin.shape != x.shape:
                    x.resize_(twin.shape)
                    shared(x).copy_(twin)
            left = tree_map(leave, result)
            if capturing:
                record(compute, inner, given, result, left)
            return left

    return run


# Graphs. During a capture, nothing is computed: an operation on zeros says which results there are, and they are NaN until a graph
# is launched.

_runtime = ctypes.CDLL(None)
_Call = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_long)
_recorded: list[Callable[[], None]] = []
_usable: list[tuple[int, int]] = []
"""First and last addresses that the graph which is launched may use: allocated tensors, and the memory of graphs."""


def _launch(graph: Any) -> None:
    """In place of `CUDAGraph.replay`."""
    _usable.clear()
    for segment in torch.cuda.memory_snapshot():
        whole = tuple(segment["segment_pool_id"]) != (0, 0)
        parts = [(segment["address"], segment["total_size"])] if whole else [
            (block["address"], block["size"]) for block in segment["blocks"] if block["state"] == "active_allocated"
        ]  # fmt: skip
        _usable.extend((start, start + size) for start, size in parts)
    _usable.sort()
    torch._C._CUDAGraph.replay(graph)


def _require_allocated(x: Tensor) -> None:
    place = bisect.bisect(_usable, (x.data_ptr(), math.inf)) - 1
    if x.numel() and not (place >= 0 and x.data_ptr() < _usable[place][1]):
        raise RuntimeError("a graph uses memory that was freed after the capture")


@_Call
def _replay(number: int) -> int:
    try:
        _recorded[number]()
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # as after an illegal access, the device is lost
    return 0


def record(
    compute: Callable[..., Any], inner: Any, given: dict[int, tuple[Tensor, Tensor]], result: Any, left: Any
) -> None:
    """Records an operation on the current stream. It knows addresses only; the tensors may be freed."""
    at = {key: shared(x) for key, (_, x) in given.items()}
    made = [
        (place, shared(x))
        for place, (value, x) in enumerate(zip(tree_leaves(result), tree_leaves(left), strict=True))
        if isinstance(value, Tensor) and id(value) not in given
    ]
    for _, to in made:
        to.fill_(math.nan if to.is_floating_point() else 1)
    twins = tree_map(lambda x: at.get(id(x), x), inner)

    def again() -> None:
        with torch._C._AutoDispatchBelowAutograd():
            for x in at.values():
                _require_allocated(x)
            results = tree_leaves(compute(*twins))
            for place, to in made:
                to.copy_(results[place])

    _recorded.append(again)
    _runtime.softgpu_launch(ctypes.c_void_p(torch.cuda.current_stream().cuda_stream), _replay, len(_recorded) - 1)


# Attention: softmax(scale q k^T) v, where causal queries belong to the last keys.


def _probabilities(q: Tensor, k: Tensor, causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    """[B, H, S, C], and the logarithms of their sums, [B, H, S]. Grouped keys are repeated before."""
    scores = q @ k.mT * (scale or q.shape[-1] ** -0.5)
    if causal:
        queries, keys = scores.shape[-2:]
        scores = scores.masked_fill(torch.ones(queries, keys, dtype=torch.bool).triu(keys - queries + 1), -math.inf)
    sums = scores.logsumexp(-1)
    return (scores - sums.unsqueeze(-1)).exp(), sums


def _repeated(q: Tensor, *grouped: Tensor) -> tuple[Tensor, ...]:
    return (q.float(), *(x.float().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in grouped))


def _attended(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    q, k, v = _repeated(q, k, v)
    p, sums = _probabilities(q, k, causal, scale)
    return p @ v, sums


def _gradients(d: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> tuple[Tensor, ...]:
    wide_q, wide_k, wide_v = _repeated(q, k, v)
    p, _ = _probabilities(wide_q, wide_k, causal, scale)
    d, scale = d.float(), scale or q.shape[-1] ** -0.5
    dp = d @ wide_v.mT
    ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * scale
    dk, dv = (x.unflatten(1, (k.shape[1], -1)).sum(2) for x in (ds.mT @ wide_q, p.mT @ d))
    return ds @ wide_k, dk, dv


def _state() -> tuple[Tensor, Tensor]:
    """Of random numbers, which no dropout has used."""
    return tuple(torch.zeros(shape, dtype=torch.uint64) for shape in (2, ()))  # type: ignore[return-value]


def sdpa(
    q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, causal: bool = False, *_: Any, scale: Any = None
) -> Any:
    out, sums = _attended(q, k, v, causal, scale)
    by_tokens = out.to(q.dtype).transpose(1, 2).contiguous().transpose(1, 2)  # as the kernel lays it out
    return (by_tokens, sums, None, None, q.shape[2], k.shape[2], *_state(), q.new_empty(0))


def sdpa_backward(d: Tensor, q: Tensor, k: Tensor, v: Tensor, *saved: Any, scale: Any = None) -> Any:
    *_, causal, _, _ = saved  # and the state of random numbers
    made = _gradients(d, q, k, v, causal, scale)
    return tuple(
        torch.empty_like(x).copy_(dx) for x, dx in zip((q, k, v), made, strict=True)
    )  # as the kernel lays it out


def _documents(starts_q: Tensor, starts_k: Tensor) -> Iterator[tuple[slice, slice]]:
    """Queries and keys of each document that has any."""
    bounds = (pairwise(starts.tolist()) for starts in (starts_q, starts_k))
    return ((slice(*rows), slice(*columns)) for rows, columns in zip(*bounds, strict=True) if rows[0] < rows[1])


def varlen(query: Tensor, key: Tensor, value: Tensor, *more: Any, scale: Any = None, **options: Any) -> Any:
    starts_q, starts_k, _, _, _, causal, *_ = more
    causal = causal or options["window_size_right"] == 0
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))  # [1, H, T, E]
    out, sums = torch.zeros(q.shape), torch.zeros(q.shape[1:3])
    for rows, columns in _documents(starts_q, starts_k):
        parts = q[:, :, rows], k[:, :, columns], v[:, :, columns]
        out[:, :, rows], sums[:, rows] = _attended(*parts, causal, scale)
    return (out[0].transpose(0, 1).to(q.dtype).contiguous(), sums, *_state(), query.new_empty(0))


def varlen_backward(
    d: Tensor, query: Tensor, key: Tensor, value: Tensor, *saved: Any, scale: Any = None, **options: Any
) -> Any:
    _, _, starts_q, starts_k, _, _, _, causal, *_ = saved
    causal = causal or options["window_size_right"] == 0
    d, q, k, v = (x.transpose(0, 1)[None] for x in (d, query, key, value))
    made = [torch.zeros(x.shape) for x in (q, k, v)]
    for rows, columns in _documents(starts_q, starts_k):
        results = _gradients(d[:, :, rows], q[:, :, rows], k[:, :, columns], v[:, :, columns], causal, scale)
        for whole, result, where in zip(made, results, (rows, columns, columns), strict=True):
            whole[:, :, where] += result
    return tuple(x[0].transpose(0, 1).to(q.dtype).contiguous() for x in made)


ATTENTION: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_flash_attention": sdpa,
    "_scaled_dot_product_flash_attention_backward": sdpa_backward,
    "_flash_attention_forward": varlen,
    "_flash_attention_backward": varlen_backward,
}


def install() -> None:
    """Replaces every CUDA kernel."""
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("CUDA")
    names = {name.removeprefix("aten::") for name in registered if name.startswith("aten::")} | {"copy_"}
    aten, fsdp = _libraries[:] = [torch.library.Library(name, "IMPL", "CUDA") for name in ("aten", "fsdp")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about replaced kernels, which are intended
        for name in sorted(names - USUAL - ATTENTION.keys()):
            base, _, overload = name.partition(".")
            op = getattr(getattr(torch.ops.aten, base, None), overload or "default", None)
            if op is not None:  # some are for TorchScript only
                aten.impl(name, on_the_cpu(op), "CUDA", allow_override=True)
        for name, function in ATTENTION.items():
            aten.impl(name, on_the_cpu(getattr(torch.ops.aten, name).default, function), "CUDA", allow_override=True)
        if "fsdp::chunk_cat_mixed_dtype" in registered:  # torch 2.15: a kernel outside ATen
            op = torch.ops.fsdp.chunk_cat_mixed_dtype.default
            fsdp.impl("chunk_cat_mixed_dtype", on_the_cpu(op), "CUDA", allow_override=True)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.cuda.CUDAGraph.replay = _launch  # type: ignore[method-assign]

    def without_inductor(_: Any, graph: Any, inputs: Any) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        return aot_eager(graph, inputs)

    torch._TorchCompileInductorWrapper.__call__ = without_inductor  # type: ignore[method-assign]
