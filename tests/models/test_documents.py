"""Attention within documents: every form matches masked attention in float64 and computes no more than it should."""

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.bias import causal_lower_right
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from boost.config.attention import document_form
from boost.models import documents
from boost.models.attention import Context, attend, make_context
from boost.models.documents import Documents, causal
from tests import toy

HEADS, KV_HEADS, WIDTH, BATCH, LENGTH = 4, 2, 8, 3, 24
IDS = torch.tensor([[0] * 5 + [1] * 18 + [0], [7] * LENGTH, list(range(LENGTH))], dtype=torch.int32)
"""Long and short documents, of which two have the same id, a document that fills its sequence, and documents of one token."""
MODEL = toy.toy_config(model={"dim": HEADS * WIDTH, "heads": HEADS, "kv_heads": KV_HEADS}).model


def context(ids: Tensor | None = IDS, compiled: bool = False) -> Context:
    positions = torch.arange(LENGTH)
    return make_context(BATCH, positions, MODEL, torch.float64, ids, compiled)


def results(of: Context, kv_heads: int = KV_HEADS) -> Iterator[Tensor]:
    """The output and the gradients of the inputs."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, upstream = (
        torch.randn(BATCH, LENGTH, heads, WIDTH, generator=generator, dtype=torch.float64)
        for heads in (HEADS, kv_heads, kv_heads, HEADS)
    )
    inputs: Any = [x.requires_grad_() for x in (q, k, v)]
    attended, keys_values = attend(*inputs, context=of)
    assert not keys_values
    yield attended
    yield from torch.autograd.grad(attended, inputs, upstream.view(attended.shape))


def reference_varlen(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, starts_k: Tensor, *longest: int, **options: Any):
    """FlashAttention on packed documents, in plain operations: queries are the last ones of their document."""
    assert starts.dtype == starts_k.dtype == torch.int32 and longest[0] == longest[1] >= starts_k.diff().max()
    assert options == {"window_size": (-1, 0), "enable_gqa": q.shape[1] != k.shape[1]}
    places = []
    for x, begin in ((q, starts), (k, starts_k)):
        number = torch.bucketize(torch.arange(x.shape[0]), begin, right=True)
        # Before the document's end.
        places.append((number[:, None], (torch.arange(x.shape[0]) - begin[number])[:, None]))
    (number_q, end_q), (number_k, end_k) = places
    allowed = (number_q == number_k.T) & (end_q >= end_k.T)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("the,she->hts", q, k) / WIDTH**0.5
    return torch.einsum("hts,she->the", scores.masked_fill(~allowed, -torch.inf).softmax(-1), v)


@pytest.mark.parametrize("kv_heads", [HEADS, KV_HEADS, 1])
def test_segments_are_the_masked_attention(kv_heads: int) -> None:
    masked, segments = context(compiled=True), context()
    assert (masked.documents.form, segments.documents.form) == ("mask", "segments")
    for expected, actual in zip(results(masked, kv_heads), results(segments, kv_heads), strict=True):
        assert torch.allclose(expected, actual, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kv_heads", [HEADS, KV_HEADS])
def test_arguments_of_the_varlen_kernel(kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    varlen = importlib.import_module("torch.nn.attention.varlen")
    monkeypatch.setattr(varlen, "varlen_attn", reference_varlen)
    monkeypatch.setattr(documents, "document_form", lambda *_: "varlen")
    packed = context()
    ends = [0, 5, 23, 24, 48, *range(49, 73)]
    assert packed.documents.starts_N.tolist() == ends + [72] * (32 - len(ends))
    monkeypatch.undo()
    monkeypatch.setattr(varlen, "varlen_attn", reference_varlen)
    for expected, actual in zip(results(context(compiled=True), kv_heads), results(packed, kv_heads), strict=True):
        assert torch.allclose(expected, actual, rtol=1e-12, atol=1e-12)


def test_no_score_between_documents_is_computed() -> None:
    def flops(of: Context) -> int:
        with FlopCounterMode(display=False) as counter:
            list(results(of))
        return counter.get_total_flops()

    assert context(torch.zeros(BATCH, LENGTH)).documents is None, "one document a sequence: usual attention"
    halves = torch.arange(LENGTH).expand(BATCH, -1) // (LENGTH // 2)
    assert flops(context(halves)) == flops(context(None)) / 2


@pytest.mark.parametrize("form", ["segments", "varlen", "mask"])
def test_parts_have_their_own_documents(form: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "document_form", lambda *_: form)
    whole = context().documents
    for part, rows in zip(whole.split([2, 1]), (slice(0, 2), slice(2, 3)), strict=True):
        alone = documents.documents_of(IDS[rows], torch.device("cpu"), torch.float64, False)
        assert isinstance(alone, Documents)
        assert (part.form, part.lengths) == (alone.form, alone.lengths)
        for a, b in ((part.starts_N, alone.starts_N), (part.mask, alone.mask)):
            assert (a is None) == (b is None) and (a is None or torch.equal(a, b))


@pytest.mark.parametrize("form", ["segments", "varlen", "mask"])
@pytest.mark.parametrize("lengths", [(24,), (12, 12), (3, 6, 15), (5, 6, 8, 5), (1, 1, 22), (12, 1, 11)], ids=str)
def test_documents_of_half_a_sequence(lengths: tuple[int, ...], form: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if form == "varlen":
        monkeypatch.setattr(importlib.import_module("torch.nn.attention.varlen"), "varlen_attn", reference_varlen)
    monkeypatch.setattr(documents, "document_form", lambda *_: form)
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
    whole = make_context(1, torch.arange(LENGTH), MODEL, torch.float64, ids)
    q, k, v = (torch.randn(1, LENGTH, n, WIDTH, dtype=torch.float64) for n in (HEADS, KV_HEADS, KV_HEADS))
    upstream = torch.randn(LENGTH, HEADS * WIDTH, dtype=torch.float64)
    inputs: Any = [x.requires_grad_() for x in (q, k, v)]
    first, second = zip(whole.halves(), *(x.split(LENGTH // 2, dim=1) for x in inputs), strict=True)
    of_first, (keys_values,) = attend(*first[1:], context=first[0])
    of_second, needed = attend(*second[1:], context=second[0], before=keys_values)
    assert not needed
    attended, halved = attend(*inputs, context=whole)[0], torch.cat((of_first, of_second))
    expected = (attended, *torch.autograd.grad(attended, inputs, upstream))
    actual = (halved, *torch.autograd.grad(halved, inputs, upstream))
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kv_heads", [HEADS, KV_HEADS, 1])
def test_queries_of_the_last_tokens(kv_heads: int) -> None:
    """Reference for torch's mask of the same name, which is a kernel on GPUs."""
    q, k, v = (torch.randn(BATCH, heads, n, WIDTH) for heads, n in ((HEADS, 7), (kv_heads, LENGTH), (kv_heads, LENGTH)))
    bias, grouped = causal_lower_right(7, LENGTH), kv_heads != HEADS
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=grouped)
    torch.testing.assert_close(causal(q, k, v), expected)


def test_the_form_follows_from_device_dtype_and_compile() -> None:
    assert document_form("cpu", "bfloat16", False) == "segments"
    assert document_form("cpu", "float32", True) == "mask"
    assert document_form("cuda", "bfloat16", True) == document_form("cuda", "float16", False) == "varlen"
    assert document_form("cuda", "float32", False) == "mask"


class Operations(TorchDispatchMode):
    """Records the names of operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("how", ["a dispatch mode", "compiled"])
@pytest.mark.parametrize(
    ("width", "capability", "fused"), [(16, (9, 0), True), (12, (9, 0), False), (16, (7, 5), False)]
)
def test_queries_of_the_last_tokens_on_gpus(
    how: str, width: int, capability: tuple[int, int], fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under modes, such as that of selective recomputation, and in compiled blocks, no subclass of Tensor can be created."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with FakeTensorMode():
        q, k, v = (
            torch.empty(1, heads, n, width, dtype=torch.bfloat16, device="cuda")
            for heads, n in ((HEADS, 12), (KV_HEADS, LENGTH), (KV_HEADS, LENGTH))
        )
        function = torch.compile(causal, backend="eager", fullgraph=True) if how == "compiled" else causal
        with Operations() if how != "compiled" else contextlib.nullcontext() as seen:
            attended = function(q, k, v)
        assert attended.shape == q.shape and attended.device.type == "cuda"
    if seen is not None:
        assert ("aten::_scaled_dot_product_flash_attention" in seen.names) == fused
