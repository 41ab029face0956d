"""The operations that the performance model counts match those that the runtime dispatches."""

import math
from collections import Counter, defaultdict
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from boost.config.load import from_tree
from boost.config.stages import whole
from boost.parallel.weights import WorkingCopies
from boost.plan.timing import block_work, ends_work, step_work
from boost.plan.work import ATTENTION, ATTENTION_BACKWARD, GEMM, SILU, SILU_BACKWARD, Work, gemm
from boost.train.model import build_decoder
from tests.fake_memory import fake_mesh
from tests.matrices import first

LAYERS = 2
KERNELS = {
    "mm": GEMM, "addmm": GEMM, "addmm_": GEMM, "bmm": GEMM, "silu": SILU, "silu_backward": SILU_BACKWARD,
    "_scaled_dot_product_flash_attention_for_cpu": ATTENTION,
    "_scaled_dot_product_flash_attention_for_cpu_backward": ATTENTION_BACKWARD,
}  # fmt: skip
PLACES = {"qkv", "attention", "o", "gate_up", "product", "down", "norm", "residual"}
MADE, FEW = {"zeros_like", "ones_like", "zeros"}, {"empty_like", "new_empty", "gather", "scatter_add_"}
"""Operations that read little or nothing."""
BROADCAST = {"mul", "mul_", "addcmul_"}
"""Operations with broadcast operands, which are not counted."""
SENT = {"all_reduce", "all_gather_into_tensor", "all_gather", "reduce_scatter", "all_to_all", "wait_tensor", "device"}


class Seen(TorchDispatchMode):
    """GEMM shapes, and bytes read and written by every other operation that makes or changes a tensor, by phase."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = "forward"
        self.gemms: Counter[tuple[Any, ...]] = Counter()
        self.bytes: dict[str, Counter[str]] = defaultdict(Counter)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        read = {key: value for key, value in (kwargs or {}).items() if key != "out"}  # `out` is counted as an output
        inputs = [x for x in _pytree.tree_leaves((args, read)) if isinstance(x, torch.Tensor)]
        outputs = [x for x in _pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]
        if name in BROADCAST:
            inputs = [x for x in inputs if x.numel() == outputs[0].numel()]
        stored = {x.untyped_storage()._cdata for x in inputs}
        view = not func._schema.is_mutable and all(x.untyped_storage()._cdata in stored for x in outputs)
        if name in SENT or (view and outputs):
            return result
        kernel = KERNELS.get(name, "others")
        if kernel == GEMM:
            a, b = args[-2:] if name.startswith("addmm") else args[:2]
            batch = a.shape[0] if a.dim() == 3 else 1
            self.gemms[(self.phase, batch, *sorted((a.shape[-2], b.shape[-1])), a.shape[-1])] += 1
        else:
            tensors = outputs if name in MADE else outputs * 2 if name == "embedding" else [*inputs, *outputs]
            moved = sum(x.numel() * x.element_size() for x in tensors) if name not in FEW else 0
            self.bytes[self.phase][kernel] += moved
        return result


def configuration(model: dict[str, Any], parallel: dict[str, Any], train: dict[str, Any]) -> Any:
    shape = {"vocab_size": 1024, "dim": 256, "ffn_dim": 688, "heads": 4, "layers": LAYERS}
    low_rank = {} if model.get("family") == "dense" else {"rank": 64}
    return from_tree(
        {
            "model": shape | low_rank | model,
            "parallel": {"tp": 2} | parallel,
            "train": {"micro_batch": 4, "global_batch": 8, "seq_len": 256} | train,
        }
    )


def run(config: Any) -> Seen:
    """Runs one micro-batch of one process on fake tensors."""
    seen = Seen()
    with FakeTensorMode():
        decoder = build_decoder(config, fake_mesh(config.parallel.tp))
        tokens = torch.zeros(config.train.micro_batch, config.train.seq_len, dtype=torch.long)
        with seen, _Copies(decoder, config, seen).in_use():
            seen.phase = "forward"
            loss = decoder(tokens, tokens)
            seen.phase = "backward"
            loss.backward()
    return seen


class _Copies(WorkingCopies):
    """Working copies whose casts are recorded as a separate phase."""

    def __init__(self, decoder: Any, config: Any, seen: Seen) -> None:
        super().__init__(decoder, config, lambda _: None)
        self.seen = seen
        seen.phase = "step"

    def _add_gradient(self, weight: Any, copy: Any) -> None:
        phase, self.seen.phase = self.seen.phase, "step"
        super()._add_gradient(weight, copy)
        self.seen.phase = phase


def casts_of_a_step(config: Any) -> float:
    """Bytes of casts that are counted with the step instead of the micro-batch."""
    stages = [whole(config.model)]

    def moved(copies: bool) -> float:
        train = config.train.model_copy(update={"working_copies": copies, "global_batch": config.train.micro_batch})
        work = step_work(config.model_copy(update={"train": train}), stages)
        return sum(operation.bytes * times for operation, times in work.items())

    return moved(config.train.working_copies) - moved(False)


DENSE, COLA, SVD = {"family": "dense"}, {"family": "cola"}, {"family": "svd"}
LAX = {"family": "lax", "gate": "dense"}
ALONE, APART = {"tp": 1, "layout": "single"}, {"grouping": False}
LOW, FULL = {"recompute": "low-rank"}, {"recompute": "full-block"}
BF16 = {"compute_dtype": "bfloat16", "param_dtype": "bfloat16"}
KEPT = {"recompute": "low-rank+attention-output", "compute_dtype": "bfloat16"}
PUBLISHED = {"layout": "vanilla", "vanilla": "published"}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "single": (COLA, ALONE, {}),
    "single, ungrouped, recomputing": (COLA, ALONE | APART, LOW),
    "single, dense": (DENSE, ALONE, FULL),
    "megatron": (DENSE, {"layout": "megatron"} | APART, {}),
    "megatron-sp": (DENSE, {"layout": "megatron-sp"}, FULL),
    "megatron-sp, one key/value head": (DENSE | {"kv_heads": 1}, {"layout": "megatron-sp"}, {}),
    "btp": (COLA, {"layout": "btp"}, {}),
    "btp, sync, low-rank": (COLA, {"layout": "btp", "norm": "sync"}, LOW),
    "btp, ungrouped, svd, full-block": (SVD, {"layout": "btp"} | APART, FULL),
    "btp, bf16, keeping attention": (COLA, {"layout": "btp"}, KEPT),
    "btp-sp": (COLA | {"kv_heads": 1}, {"layout": "btp-sp"}, {"compute_dtype": "bfloat16"}),
    "btp-sp, sharded latents": (COLA, {"layout": "btp-sp"}, {"recompute": "low-rank-sharded"}),
    "btp-sp, ungrouped, every second": (COLA, {"layout": "btp-sp"} | APART, LOW | {"recompute_every": 2}),
    "vanilla": (COLA, {"layout": "vanilla"}, LOW),
    "vanilla, published": (COLA, PUBLISHED, LOW),
    "lax, btp-sp": (LAX | {"gate": "tensor"}, {"layout": "btp-sp"}, LOW),
    "lax, vanilla, published, bf16": (LAX, PUBLISHED | APART, BF16),
    "ranks of single linears": ({"ranks": {"attn.q": 32, "layers.1.mlp.up": 128}}, {"layout": "btp"}, {}),
    "vanilla, ungrouped, full-block": (COLA, {"layout": "vanilla"} | APART, FULL),
    "lax, btp": (LAX, {"layout": "btp"}, {}),
    "btp, sync, bf16": (COLA, {"layout": "btp", "norm": "sync"}, BF16),
    "lax, vanilla": (LAX, {"layout": "vanilla"}, {}),
}


@pytest.mark.parametrize("case", first(18, list(CASES)))
@pytest.mark.slow
def test_every_gemm_and_the_bytes_of_everything_else_are_those_dispatched(case: str) -> None:
    config = configuration(*CASES[case])
    seen = run(config)
    policies = config.train.recompute_by_layer(LAYERS)
    predicted = ends_work(config, True, True, on_gpu=False)
    for layer in range(LAYERS):
        predicted += block_work(config, layer, policies[layer], on_gpu=False)
    gemms: Counter[tuple[Any, ...]] = Counter()
    moved: dict[str, Counter[str]] = defaultdict(Counter)
    for work, times in predicted.items():
        phase = "forward" if work.phase == "forward" else "backward"
        if work.kernel == GEMM:
            batch, m, n, k = work.shape
            gemms[(phase, batch, *sorted((m, n)), k)] += times
            assert work.flops == 2 * math.prod(work.shape)
        else:
            kernel = work.kernel if work.kernel in KERNELS.values() else "others"
            moved[phase][kernel] += times * work.bytes
    assert gemms == seen.gemms
    assert seen.bytes.pop("step", Counter()).total() == casts_of_a_step(config)
    for phase, kernels in seen.bytes.items():
        for kernel, size in kernels.items():
            assert moved[phase][kernel] == pytest.approx(size, rel=0.05), (phase, kernel)


def test_flops_are_those_that_mfu_counts() -> None:
    """Except for attention: its backward pass recomputes scores, which MFU does not count."""
    from boost.config.architecture import flops_per_token

    config = configuration(COLA, {"tp": 1, "layout": "single"}, {})
    total: Counter[Work] = ends_work(config, True, True, on_gpu=True)
    for layer in range(LAYERS):
        total += block_work(config, layer, "none", on_gpu=True)
    tokens = config.train.micro_batch * config.train.seq_len
    again = sum(n * w.flops // 5 for w, n in total.items() if w.kernel == ATTENTION_BACKWARD)
    assert sum(n * w.flops for w, n in total.items()) - again == tokens * flops_per_token(config.model, 256)
    assert whole(config.model).layers == LAYERS


def test_recomputation_has_its_own_phase_and_stops_before_the_last_gemm() -> None:
    config = configuration(COLA, {"tp": 1, "layout": "single"}, {})

    def passes(policy: Any) -> dict[str, Counter[Work]]:
        found: dict[str, Counter[Work]] = defaultdict(Counter)
        for work, times in block_work(config, 0, policy, on_gpu=True).items():
            assert work.place in PLACES
            found[work.phase][work._replace(phase="")] += times
        return found

    none, full, kept = (passes(policy) for policy in ("none", "full-block", "low-rank+attention-output"))
    assert set(none) == {"forward", "backward"}
    assert all(none[phase] == kept[phase] for phase in none)

    def products(works: Counter[Work]) -> Counter[Work]:
        return Counter({work: times for work, times in works.items() if work.kernel == GEMM})

    # Element-wise work differs: without full recomputation, a node that saves only latents recomputes some of it internally.
    assert all(products(none[phase]) == products(full[phase]) for phase in none)
    (last,) = (work for work in (none["forward"] - full["recompute"]) if work.kernel == GEMM)
    assert (last.place, last.shape) == ("down", (1, 1024, 256, 64))
    assert not full["recompute"] - none["forward"]
    assert ATTENTION in {work.kernel for work in full["recompute"]}
    assert ATTENTION not in {work.kernel for work in kept["recompute"]}


def test_intensity_is_flops_for_each_byte() -> None:
    product = gemm(128, 256, 64, "bfloat16")
    assert product.flops == 2 * 128 * 256 * 64
    assert product.bytes == 2 * (128 * 64 + 64 * 256 + 128 * 256)
    assert product.intensity == product.flops / product.bytes
