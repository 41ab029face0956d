"""From a configuration to a decoder."""

import functools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from boost.config import Config
from boost.errors import ConfigError
from boost.models import kernels
from boost.models.block import TransformerBlock
from boost.models.decoder import Decoder
from boost.parallel.mesh import Mesh
from boost.train import model
from boost.train.model import choose_kernels, compile_blocks
from tests import toy
from tests.train.runs import make_config, started


def losses_and_evaluation(config: Config) -> tuple[list[float], float]:
    trainer = started(config)
    losses = [trainer.step(1e-3).loss for _ in range(3)]
    return losses, trainer.evaluate(256).loss


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++ on a CPU")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)])
@pytest.mark.slow
def test_compiled_blocks_train_and_evaluate_alike(
    store: Path, tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same graphs of the same blocks. Compiling these and the kernels around them takes a minute and is tested nightly."""
    if backend == "aot_eager":
        monkeypatch.setattr(kernels, "use", lambda _: None)
    monkeypatch.setattr(TransformerBlock, "compile", functools.partialmethod(TransformerBlock.compile, backend=backend))
    torch._dynamo.reset()
    sections: dict[str, Any] = {"model": {"layers": 1}, "train": {"global_batch": 2}}
    losses, evaluation = losses_and_evaluation(make_config(store, tmp_path, 1, "float32", **sections))
    torch._dynamo.utils.counters.clear()
    sections["train"]["compile"] = "blocks"
    compiled, compiled_evaluation = losses_and_evaluation(make_config(store, tmp_path, 1, "float32", **sections))
    assert compiled == pytest.approx(losses, rel=1e-5)
    assert compiled_evaluation == pytest.approx(evaluation, rel=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 2, "one with gradients, one without"


@pytest.mark.slow
@pytest.mark.parametrize("family", ["cola", pytest.param("dense", marks=pytest.mark.nightly)])
def test_compiled_blocks_keep_no_more_than_eager_ones(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the partitioner that GPUs use too."""
    compile = functools.partialmethod(TransformerBlock.compile, backend="aot_eager_decomp_partition")
    monkeypatch.setattr(TransformerBlock, "compile", compile)
    config = toy.toy_config("float32", model={"family": family}, train={"seq_len": 128})
    decoder, _ = toy.toy_decoder(config)
    eager = kept_bytes(decoder, config)
    compile_blocks(decoder)
    assert kept_bytes(decoder, config) < eager


def kept_bytes(decoder: Decoder, config: Config) -> int:
    """Bytes that a forward pass saves for the backward pass, without weights."""
    batch = [torch.zeros(config.train.micro_batch, config.train.seq_len, dtype=torch.long)] * 2
    weights = {p.untyped_storage().data_ptr() for p in decoder.parameters()}
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        decoder(*batch).backward()
    return sum(size for place, size in kept.items() if place not in weights)


def test_no_compiler_no_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(ConfigError, match=r"train.compile = 'blocks' needs a C\+\+ compiler"):
        choose_kernels(toy.toy_config(train={"compile": "blocks"}), toy.CPU)


def test_kernels_are_compiled_where_asked_and_where_they_can_be(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    chosen: list[str] = []
    monkeypatch.setattr(kernels, "use", chosen.append)
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    monkeypatch.setattr(model, "has_triton", lambda: True)

    def of(name: str, **parallel: Any) -> Config:
        return toy.toy_config(train={"compile": name}, parallel=parallel)

    halves = of("auto", tp=2, overlap="halves")
    found = [
        config.compiled_part("cuda") for config in (of("auto"), of("auto", tp=2), of("auto", overlap="halves"), halves)
    ]
    assert found == ["blocks", "blocks", "blocks", "kernels"]  # alone, there is nothing to overlap
    for name, device in (("auto", cpu), ("auto", gpu), ("none", gpu), ("kernels", gpu), ("blocks", gpu)):
        choose_kernels(of(name), device)
    assert chosen == ["eager", "inductor or eager", "eager", "inductor", "inductor"]
    monkeypatch.setattr(model, "has_triton", lambda: False)
    with pytest.raises(ConfigError, match="train.compile = 'kernels' needs Triton on device 'cuda'"):
        choose_kernels(of("kernels"), gpu)
    with caplog.at_level("INFO", logger="boost"):
        choose_kernels(halves, gpu)
    assert chosen[-1] == "eager"
    assert "nothing is compiled: train.compile = 'kernels' needs Triton" in caplog.text
    for name in ("torch._dynamo.config.disable", "TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE"):
        # Not by monkeypatch, which hides the attribute from later tests.
        with (
            torch._dynamo.config.patch(disable=True),
            pytest.raises(ConfigError, match=f"train.compile = 'kernels', but {name} is set"),
        ):
            choose_kernels(of("kernels"), cpu)
        monkeypatch.setenv("TORCHDYNAMO_DISABLE" if "." in name else "TORCH_COMPILE_DISABLE", "1")


def test_a_compiler_that_fails_compiles_no_blocks_unless_requested(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: Any) -> None:
        raise RuntimeError("no Python.h\nand more")

    compiled: list[Decoder] = []
    monkeypatch.setattr(torch, "compile", fail)
    monkeypatch.setattr(model, "compile_blocks", compiled.append)
    monkeypatch.setattr(model, "_compiled_part", lambda *_: "blocks")
    model._compiler_error.cache_clear()
    with caplog.at_level("INFO", logger="boost"):
        toy.toy_model(toy.toy_config())
    assert not compiled
    assert caplog.messages == ["blocks are not compiled: torch.compile fails on device 'cpu': no Python.h"]
    decoder, _ = toy.toy_model(toy.toy_config(train={"compile": "blocks"}))
    assert compiled == [decoder]
    model._compiler_error.cache_clear()


def test_a_model_that_no_memory_holds_names_its_dimension_before_anything_is_allocated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(model, "total_memory", lambda _: 10**9)
    config = toy.toy_config("float32", model={"vocab_size": 2**30})
    with pytest.raises(
        ConfigError, match=r"vocab_size = 1073741824: the weights of one process take 275 GB in float32"
    ):
        model.build_model(config, Mesh(toy.CPU))
