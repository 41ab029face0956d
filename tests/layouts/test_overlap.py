"""Two interleaved halves of a micro-batch: twice as many collectives, and work between start and wait. That they are the same
function is in test_options.py."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from boost.config import Config
from boost.config.layouts import layout_spec
from boost.errors import ConfigError
from boost.measure.counting import KINDS
from boost.models.block import interleave
from boost.plan.collectives import step_collectives
from boost.plan.memory import memory, peak
from boost.plan.timing import Predictor
from boost.plan.trace import trace_block
from boost.plan.work import ATTENTION
from tests import toy
from tests.distributed import run_distributed
from tests.fake_memory import measure
from tests.matrices import (
    LAYOUTS,
    LOW_RANK_LAYOUTS,
    ONE_EACH,
    Row,
    config_of,
    each_value,
    family_of,
    ids,
    memory_config,
    pairwise,
    policies,
)
from tests.plan.toys import hardware

HALVES = {"overlap": "halves"}


class Timeline(TorchDispatchMode):
    """For each collective, in order of starts: its payload, and the number of GEMMs between its start and its wait."""

    def __init__(self) -> None:
        super().__init__()
        self.products = 0
        self.started: dict[int, tuple[int, int]] = {}
        """By address of the result: (index of the collective, number of GEMMs before it)."""
        self.sent: list[int] = []
        self.behind: list[int] = []
        self._results: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name == "_c10d_functional::wait_tensor" and args[0].data_ptr() in self.started:
            number, before = self.started.pop(args[0].data_ptr())
            self.behind[number] = self.products - before
        result = func(*args, **(kwargs or {}))
        if name in KINDS:
            self.started[result.data_ptr()] = len(self.behind), self.products
            self.behind.append(0)
            whole = 2 * args[0].numel() if KINDS[name] == "all-reduce" else max(args[0].numel(), result.numel())
            self.sent.append(whole)
            self._results.append(result)  # keeps the address in use
        self.products += name in ("aten::mm", "aten::addmm", "aten::bmm") or "scaled_dot_product" in name
        return result


def hidden_share(config: Config) -> tuple[float, float]:
    """(forward, backward): the fraction of the payload that is overlapped with GEMMs."""
    decoder, _ = toy.toy_decoder(config)
    with Timeline() as forward:
        loss = decoder(*toy.toy_tokens(config, batch=config.train.micro_batch))
    with Timeline() as backward:
        loss.backward()
    shares = []
    for seen in (forward, backward):
        assert not seen.started
        shares.append(sum(n for n, k in zip(seen.sent, seen.behind, strict=True) if k) / sum(seen.sent))
    return shares[0], shares[1]


WIDE = {"dim": 64, "ffn_dim": 128, "vocab_size": 32, "layers": 6}
"""Makes the payload of the embedding and the loss small."""


@pytest.mark.slow
@pytest.mark.parametrize(("model", "parallel"), ONE_EACH, ids=ids(ONE_EACH))
def test_work_runs_behind_collectives_in_both_passes(model: Row, parallel: Row) -> None:
    least = 0.6 if parallel["layout"] == "vanilla" else 0.85  # there is no GEMM between some of its collectives
    rank = {} if model["family"] == "dense" else {"rank": 32}
    for overlap in ("none", "halves"):
        config = config_of({**model, **WIDE, **rank}, {**parallel, "overlap": overlap}, 2, "float64")
        for shares in run_distributed(2, hidden_share, config):
            if overlap == "halves":
                assert min(shares) >= least, shares
            elif parallel["layout"] == "btp":  # the weight gradients of B hide the sums of the latents' gradients
                assert shares[0] == 0 and shares[1] >= 0.8, shares
            else:
                assert max(shares) == 0, shares


def test_the_order_of_two_halves() -> None:
    seen: list[str] = []

    def run(half: str) -> Iterator[None]:
        for number in (1, 2):
            seen.append(f"start {half}{number}")
            yield
            seen.append(f"wait {half}{number}")

    interleave([run("a"), run("b")])
    assert seen == ["start a1", "start b1", "wait a1", "start a2", "wait b1", "start b2", "wait a2", "wait b2"]
    seen.clear()
    interleave([run("a"), run("b")], lag=1)
    assert seen == ["start a1", "start b1", "wait a1", "start a2", "wait a2", "wait b1", "start b2", "wait b2"]


def halved(layout: Row, policy: str, sequences: int = 2) -> Config:
    """Two halves of a micro-batch of `batch` sequences."""
    config = memory_config(family_of(layout), {**layout, **HALVES}, policy, "bfloat16", kv_heads=2, layers=2)
    train = {} if sequences == 2 else {"micro_batch": sequences, "global_batch": sequences, "seq_len": 24}
    return config.model_copy(update={"train": config.train.model_copy(update=train)})


def every(layout: Row) -> Iterator[str]:
    yield from ("none", *policies(family_of(layout), layout))


MEMORY = pairwise(
    {
        "layout": [*LOW_RANK_LAYOUTS, {"layout": "megatron-sp"}],
        "policy": ["none", "low-rank", "full-block"],
        "sequences": [1, 2],
    },
    lambda row: row["policy"] in every(row["layout"]),
)


@pytest.mark.slow
@pytest.mark.parametrize("row", each_value(MEMORY, ids([(row,) for row in MEMORY])))
def test_memory_of_halves_is_predicted(row: Row) -> None:
    layout, config = row["layout"], halved(row["layout"], row["policy"], row["sequences"])
    seen, predicted = measure(config), memory(config)
    assert {c: n for c, n in predicted.by_category.items() if c in seen.activations} == seen.activations
    if not layout_spec(
        layout["layout"]
    ).has_whole_factors:  # they peak where gradients are reduced, which is not measured
        assert peak(config).total == pytest.approx(sum(seen.peak.values()), rel=0.05)


@pytest.mark.parametrize("sequences", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_trace_sends_what_the_table_says(layout: Row, sequences: int) -> None:
    for policy in every(layout):
        config = halved(layout, policy, sequences)
        table = [c for c in step_collectives(config) if c.layer == 1]
        traced = trace_block(config, 1, config.train.recompute)
        assert sorted(c.on_the_wire for c in traced.collectives) == sorted(c.on_the_wire for c in table)
        waited = [flight.number for flight in traced.flights if flight.waited]
        assert sorted(waited) == list(range(len(traced.collectives)))


def test_attention_of_half_a_sequence_is_predicted() -> None:
    """The second half's queries attend to all keys. GPUs compute no unnecessary scores, CPUs a third more."""
    config = halved({"layout": "btp"}, "none", sequences=1)
    unsplit = config.parallel.model_copy(update={"overlap": "none"})
    whole = trace_block(config.model_copy(update={"parallel": unsplit}), 1, "none", True)
    kernels = {
        on_gpu: [work for work in trace_block(config, 1, "none", on_gpu).work.elements() if work.kernel == ATTENTION]
        for on_gpu in (False, True)
    }
    (expected,) = (work for work in whole.work.elements() if work.kernel == ATTENTION)
    assert sorted(work.shape for work in kernels[True]) == [(1, 2, 1, 12, 12), (1, 2, 1, 12, 12, 24)]
    assert sum(work.flops for work in kernels[True]) == expected.flops
    assert sum(work.flops for work in kernels[False]) == expected.flops * 5 // 4


def test_a_predicted_step_hides_communication() -> None:
    plain = memory_config("cola", {"layout": "btp"}, "none", "bfloat16", kv_heads=2, layers=4)
    halved = plain.model_copy(update={"parallel": plain.parallel.model_copy(update=HALVES)})
    without, hidden = (Predictor(hardware()).predict(config) for config in (plain, halved))
    assert without.hidden < hidden.hidden
    assert hidden.parts["TP collectives"] < without.parts["TP collectives"]


def test_what_halves_need() -> None:
    with pytest.raises(ConfigError, match=r"train.micro_batch = 3 .*nearest valid value: 4"):
        toy.toy_config(parallel={"tp": 2, **HALVES}, train={"micro_batch": 3, "global_batch": 3})
    with pytest.raises(
        ConfigError,
        match=r"seq_len = 18 .* by 2 x parallel.tp = 4, .*value: 20",
    ):
        toy.toy_config(parallel={"tp": 2, **HALVES}, train={"micro_batch": 1, "seq_len": 18})
    with pytest.raises(ConfigError, match=r"train.seq_len = 15 must be divisible by parallel.tp = 2"):
        toy.toy_config(parallel={"tp": 2, "layout": "btp-sp", **HALVES}, train={"seq_len": 15})
