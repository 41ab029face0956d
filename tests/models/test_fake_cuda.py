"""GPU code paths without a GPU: forward passes and generation of every layout on fake CUDA tensors, with the kernels that torch
would choose.

Needs a CUDA build of torch: other builds have no CUDA operators to trace. No backward passes: autograd needs a device stream.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from boost.config import Config
from boost.models import documents
from boost.models.kernels import BACKENDS, using
from boost.parallel.mesh import Mesh
from boost.plan.collectives import micro_batch_collectives
from boost.train.model import build_decoder
from tests import toy
from tests.fake_memory import fake_mesh
from tests.matrices import ONE_EACH, Row

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(torch.version.cuda is None, reason="torch was built without CUDA"),
]

TP = 4
SIZE = {"dim": 512, "ffn_dim": 1024, "heads": 8}
DOCUMENTS = ((5, 11), (16,))
"""Document lengths by sequence."""

COLLECTIVES = {
    "all_reduce": "all-reduce",
    "all_gather_into_tensor": "all-gather",
    "reduce_scatter_tensor": "reduce-scatter",
    "all_to_all_single": "all-to-all",
}


class OnGpu(TorchDispatchMode):
    """Records the names and counts of operations, and checks that they stay on the GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        for tensor in _pytree.tree_leaves(result):
            assert not isinstance(tensor, Tensor) or tensor.is_cuda or tensor.dim() <= 1, (
                f"{name} is on {tensor.device}"
            )
        self.operations[name] += 1
        return result

    @property
    def collectives(self) -> Counter[str]:
        """Counts by kind of operation."""
        return Counter({kind: self.operations[name] for name, kind in COLLECTIVES.items() if self.operations[name]})


@contextmanager
def fake_gpu() -> Iterator[Mesh]:
    with FakeTensorMode(), using(BACKENDS["eager"]):
        yield replace(fake_mesh(TP), device=torch.device("cuda", 0))


def configured(model: Row, parallel: Row) -> Config:
    rank = {} if model["family"] == "dense" else {"rank": 128}
    train = {"micro_batch": 2, "seq_len": 16, "compute_dtype": "bfloat16", "compile": "none"}
    return toy.toy_config("float32", model={**model, **SIZE, **rank}, parallel={**parallel, "tp": TP}, train=train)


def made(config: Config) -> Tensor:
    return torch.zeros(config.train.micro_batch, config.train.seq_len, dtype=torch.long, device="cuda")


@pytest.mark.parametrize("isolated", [False, True], ids=["whole", "documents"])
@pytest.mark.parametrize("halves", [False, True], ids=["", "halves"])
@pytest.mark.parametrize(("model", "parallel"), ONE_EACH, ids=str)
def test_a_forward_pass(
    model: Row, parallel: Row, halves: bool, isolated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if halves and parallel.get("vanilla") == "published":
        pytest.skip("has no halves")
    config = configured(model, {**parallel, "overlap": "halves" if halves else "none"})
    monkeypatch.setattr(documents, "_lengths", lambda _: DOCUMENTS)  # the host reads real ids
    table = micro_batch_collectives(config.model, config.parallel, 2 * 16, "bfloat16")
    with fake_gpu() as mesh:
        decoder, tokens = build_decoder(config, mesh), made(config)
        with OnGpu() as seen:
            loss = decoder(tokens, tokens, tokens if isolated else None)
    assert (loss.device.type, loss.dtype, loss.shape) == ("cuda", torch.float32, ())
    assert seen.collectives == Counter(each.kind for each in table if each.phase == "forward")
    # For whole sequences, torch queries the device to choose the kernel.
    assert any("varlen" in name for name in seen.operations) == isolated, seen.operations


@pytest.mark.parametrize(("model", "parallel"), ONE_EACH, ids=str)
def test_generation(model: Row, parallel: Row) -> None:
    config = configured(model, parallel)
    with fake_gpu() as mesh:
        decoder, tokens = build_decoder(config, mesh), made(config)
        caches = decoder.make_caches(2, 32)
        with OnGpu():
            for given in (tokens, tokens[:, :1], tokens[:, :1]):
                logits = decoder.next_logits(given, caches)
                assert (logits.device.type, tuple(logits.shape)) == ("cuda", (2, config.model.vocab_size))
        assert caches[0].length == 18
