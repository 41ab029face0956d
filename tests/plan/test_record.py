"""The public record: consistency of its rows, and predictions of held-out ones."""

import pytest

from boost.plan.hardware import load_hardware
from boost.plan.record import configurations, record, score
from boost.plan.stack import Reached, stacks, with_reached, with_stack
from boost.plan.work import Work


def test_rows_are_consistent() -> None:
    """Every row has a source, a hardware profile, a batch that replicas divide, and one speed."""
    rows = record().rows
    assert len(rows) > 200
    for row in rows:
        assert row.source in record().sources and load_hardware(row.gpu).is_gpu
        assert row.dp * row.tp * row.pp == row.gpus and row.global_batch % row.dp == 0
        assert (row.tokens_per_s is None) != (row.tflops is None)
        assert 0.005 < row.seconds < 1000
    facts = [row.model_dump_json() for row in rows]
    assert len(set(facts)) == len(facts)


def test_flops_are_counted_as_the_source_counts_them() -> None:
    """Megatron-LM's 177B on 2,304 GPUs: 432.8 TFLOP/s per GPU are 15.6 s for 1,152 sequences of 4,096 tokens."""
    (row,) = (row for row in record().rows if row.model == "GPT-177B")
    flops = 72 * 1152 * 4096 * 96 * 12288**2 * (1 + 4096 / (6 * 12288) + 131072 / (12 * 12288 * 96))
    assert row.seconds == pytest.approx(flops / (432.8e12 * 2304))


def test_unpublished_choices_are_tried() -> None:
    (row,) = (row for row in record().rows if row.model == "GPT-177B")
    tried = [(c.train.micro_batch, c.parallel.virtual) for c in configurations(row)]
    assert len(tried) == len(set(tried)) > 1
    (row,) = (row for row in record().rows if row.model == "MPT-70b" and row.gpus == 512)
    (config,) = configurations(row)
    assert (config.train.recompute, config.parallel.shard, config.train.compile) == ("full-block", "full", "none")
    assert config.model.ffn_dim == pytest.approx(8 / 3 * row.dim, rel=0.01)


def test_stacks_change_only_their_own_fields() -> None:
    hardware = load_hardware("h100-80g")
    assert list(stacks()) == ["boost", "eager", "compiled", "nanotron", "fused"]
    eager = with_stack(hardware, "eager")
    reached = stacks()["eager"].reached["h100"].gemm
    assert eager.speeds.gemm["bfloat16"].fraction == hardware.speeds.gemm["bfloat16"].fraction * reached
    assert [a.forward for a in eager.speeds.attention["bfloat16"]] == [284.0, 319.0]
    halved = with_reached(eager.speeds, Reached(gemm=0.5, attention=0.5))
    assert halved.gemm["bfloat16"].fraction == eager.speeds.gemm["bfloat16"].fraction / 2
    assert [a.forward for a in halved.attention["bfloat16"]] == [142.0, 159.5]
    assert (
        with_stack(hardware, "fused").pipeline.hides_sends and with_stack(hardware, "nanotron").pipeline.blocking == 1.0
    )
    paper = load_hardware("a100-80g")
    assert with_stack(paper) == paper  # this profile has the speeds of the BOOST paper
    calibrated = hardware.model_copy(update={"architecture": ""})
    assert with_stack(calibrated) == calibrated


def test_fusion_applies_to_passes_only() -> None:
    """Other software moves fewer bytes in a block, but not in its optimizer and GEMMs."""
    speeds = load_hardware("h100-80g").speeds
    fused = speeds.model_copy(update={"fusion": 2.0})
    shape = (2**28,)
    passing, stepping = (Work.of("elementwise", shape, "bfloat16", 2, phase=phase) for phase in ("forward", "step"))
    product = Work.of("gemm", (1, 16, 2**20, 16), "bfloat16")
    launch = speeds.kernel_us * 1e-6
    assert fused.seconds(passing) - launch == pytest.approx((speeds.seconds(passing) - launch) / 2)
    assert fused.seconds(stepping) == speeds.seconds(stepping) and fused.seconds(product) == speeds.seconds(product)


def test_the_paper_is_part_of_it() -> None:
    rows = [row for row in record().rows if row.source == "boost"]
    assert len(rows) == 15 and {row.gpus for row in rows} == {1, 2, 4, 8, 16}
    (row,) = (row for row in rows if row.model == "7B BOOST")
    assert row.seconds == pytest.approx(0.72)
    assert [c.train.micro_batch for c in configurations(row)] == [1, 2, 4]
    assert {c.model.family for c in configurations(row)} != {"dense"}


def test_llama_3_on_16_384_gpus() -> None:
    """The largest published run: 405B on 2,048 nodes at 400 TFLOP/s per GPU, predicted within 20 %."""
    (row,) = (row for row in record().rows if row.gpus == 16384)
    assert row.seconds == pytest.approx(6.46, rel=0.01)
    (scored,) = score([row])
    assert scored.predicted_s == pytest.approx(row.seconds, rel=0.2)


def test_a_long_sequence_takes_longer_than_its_tokens() -> None:
    """MPT-7b on eight A100s at 2,048 and 65,536 tokens: measured 4.6 times the time per token, predicted within 10 %."""
    rows = [
        row for row in record().rows if (row.model, row.gpu) == ("MPT-7b", "a100-80g-8") and row.seq in (2048, 65536)
    ]
    short, long = ((each.predicted_s, each.row.seconds) for each in sorted(score(rows), key=lambda each: each.row.seq))
    per_token = [long[i] * 96 * 2048 / (short[i] * 16 * 65536) for i in (0, 1)]
    assert per_token[0] == pytest.approx(per_token[1], rel=0.1)
