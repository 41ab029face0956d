import math
import mmap
from pathlib import Path

import pytest
import torch

from boost.config import ModelConfig
from boost.config.architecture import flops_per_token
from boost.train.hardware import gpu_peak_flops, memory_bytes, mfu, peak_flops

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "bf16", "fp32"),
    [
        ("NVIDIA A100-SXM4-80GB", 312, 19.5),
        ("NVIDIA H100 80GB HBM3", 989.4, 66.9),
        ("NVIDIA H100 PCIe", 756, 51),
        ("NVIDIA H200", 989.4, 66.9),
        ("NVIDIA H20", 148, 44),
        ("NVIDIA GH200 480GB", 989.4, 66.9),
        ("NVIDIA B200", 2250, 75),
        ("NVIDIA GB200", 2500, 80),
        ("NVIDIA L40S", 362.05, 91.6),
        ("NVIDIA L4", 121, 30.3),
        ("NVIDIA A10", 125, 31.2),
        ("NVIDIA A10G", 70, 35),
        ("NVIDIA GeForce RTX 4090", 165.2, 82.6),
        ("Tesla V100-SXM2-16GB", 125, 15.7),
    ],
)
def test_known_gpus(name: str, bf16: float, fp32: float) -> None:
    assert gpu_peak_flops(name, torch.bfloat16) == bf16 * 1e12
    assert gpu_peak_flops(name, torch.float32) == fp32 * 1e12


@pytest.mark.parametrize(
    "name", ["NVIDIA RTX A4000", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "Some GPU"]
)
def test_a_gpu_that_only_looks_like_a_known_one_has_no_peak(name: str) -> None:
    assert math.isnan(gpu_peak_flops(name, torch.bfloat16))


@pytest.mark.parametrize("api", ["old", "new"])
def test_tf32_counts_only_where_it_is_allowed(api: str) -> None:
    products, before = torch.backends.cuda.matmul, torch.get_float32_matmul_precision()
    try:
        if api == "old":
            torch.set_float32_matmul_precision("high")
        else:  # after it, torch's old functions raise
            products.fp32_precision = "tf32"
        assert gpu_peak_flops("NVIDIA A100-SXM4-80GB", torch.float32) == 156e12
    finally:
        products.fp32_precision = "ieee"
        torch.set_float32_matmul_precision(before)
    assert gpu_peak_flops("NVIDIA A100-SXM4-80GB", torch.float32) == 19.5e12


def test_the_configuration_overrides_everything() -> None:
    assert math.isnan(peak_flops(CPU, torch.float32)), "a busy CPU once had an MFU of 350%"
    assert peak_flops(CPU, torch.float32, 1.5) == 1.5e12
    assert peak_flops(torch.device("cuda", 0), torch.bfloat16, 2.0) == 2e12


def test_memory_grows_by_what_is_allocated() -> None:
    before = memory_bytes(CPU)
    # Mapped here: malloc may serve a tensor of this size from resident memory that an earlier test freed.
    with mmap.mmap(-1, 64 << 20) as block:
        block.write(bytes(64 << 20))
        after = memory_bytes(CPU)
    assert after - before > 48 << 20
    assert before > 10 << 20


def test_without_proc_memory_is_the_largest_resident_set(monkeypatch: pytest.MonkeyPatch) -> None:
    if not Path("/proc/self/statm").exists():
        pytest.skip("this system has no /proc")
    now = memory_bytes(CPU)

    def missing(*args: object, **kwargs: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr("builtins.open", missing)
    largest = memory_bytes(CPU)
    monkeypatch.undo()
    # Both in bytes: a mistaken unit would be off by 1024.
    assert 0.5 * now < largest < 100 * now


def test_mfu_is_the_documented_formula() -> None:
    assert mfu(1000.0, 6e9, 2, 1e13) == pytest.approx(0.3)
    model = ModelConfig.model_validate({})
    assert mfu(100.0, flops_per_token(model, 256), 1, 100.0 * flops_per_token(model, 256)) == pytest.approx(1.0)
    assert math.isnan(mfu(1000.0, 6e9, 2, math.nan))
