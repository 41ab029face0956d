"""Hardware profiles from datasheet lines."""

import pytest

from boost.config import load
from boost.errors import ConfigError
from boost.plan.hardware import load_hardware, origin
from boost.plan.step_time import spread_of
from boost.plan.timing import predict

CARD = "tflops=165,mem=24,bw=1008,link=pcie4"


def test_a_line_is_a_profile() -> None:
    card = load_hardware(CARD)
    assert card.peak_flops("bfloat16") == 165e12 and card.speeds.memory_gb_s == 1008 and card.per_node == 8
    assert card.memory_gb == pytest.approx(25.5) and card.node.name == "PCIe" and card.node.gb_s == 22
    assert origin(card, "memory_gb") == "datasheet"
    assert origin(card, "speeds.gemm.bfloat16") == origin(card, "node.gb_s") == "estimate"
    wide = load_hardware("tflops=165, mem=24, bw=1008, link=300, net=400, per_node=4, fp32=80")
    assert (wide.node.name, wide.node.gb_s, wide.network.gb_s, wide.per_node) == ("NVLink", 300, 45, 4)
    assert wide.peak_flops("float32") == 80e12
    far = load_hardware(f"{CARD},site=10,nodes_per_site=2")
    assert far.per_site == 16 and far.site is not None and far.site.gb_s == pytest.approx(1.125)


def test_estimates_are_close_to_measurements() -> None:
    """An H100 built from its datasheet is within 20 % of its profile with the compiled PyTorch stack."""
    line = load_hardware("tflops=989.4,mem=80,bw=3350,link=nvlink4,net=400,fp32=66.9")
    config = load("boost-7b", ["--parallel.layout=btp-sp", "--parallel.tp=4", "--train.micro_batch=4", "--train.seq_len=4096",
                               "--train.compute_dtype=bfloat16"])  # fmt: skip
    ratio = predict(config, line).seconds / predict(config, load_hardware("h100-80g")).seconds
    assert 1.0 < ratio < 1.35
    spread = spread_of(config, line)
    assert spread.high - spread.low > 0.5  # nothing in it was validated against measurements


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("tflops=165", "lacks mem (memory in GB)"),
        ("tflops=fast,mem=24,bw=1", "tflops = fast must be a number above 0"),
        ("tflops=1,mem=-24,bw=1", "mem = -24 must be a number above 0"),
        ("tflops=1,mem=24,bw=1,link=pcie9", "link = pcie9 must be pcie3"),
        ("tflops=1,mem=24,bw=1,cores=3", "'cores=3' must be KEY=VALUE with one of the keys tflops,"),
        ("tflops=1,mem=24,bw=1,nodes_per_site=2", "nodes_per_site needs site"),
        ("tflops=1,mem=24,bw=1,per_node=1.5", "per_node = 1.5 must be an integer"),
    ],
)
def test_lines_that_are_wrong(line: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_hardware(line)
    assert says in str(caught.value) and "\n" not in str(caught.value)
