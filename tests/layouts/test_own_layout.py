"""A two-file layout registered from outside: everything that reads layouts supports it."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from boost.cli.inspect import as_json
from boost.config import Config, layouts, load
from boost.config.layouts import layout_names, layout_spec, register_layout
from boost.config.schema import ParallelConfig
from boost.errors import ConfigError
from boost.measure.verify.layouts import is_ours
from boost.models.kernels import scale
from boost.plan import trace
from boost.plan.candidates import Request
from boost.plan.collectives import step_collectives
from boost.plan.inspection import inspect
from boost.plan.memory import memory, peak
from boost.plan.pictures import block_rows
from boost.plan.search import Search
from boost.plan.timing import Predictor
from boost.plan.trace import trace_block
from boost.plan.tracer import Tracer
from tests import toy
from tests.distributed import run_distributed
from tests.fake_memory import measure
from tests.matrices import memory_config
from tests.plan.toys import base, hardware
from tests.trained import compare_with_table

NAME = "btp-rsag"
PACKAGE = Path(__file__).parents[2] / "examples" / "own_layout"


def register() -> None:
    if str(PACKAGE) not in sys.path:  # processes of a pool register it too
        sys.path.insert(0, str(PACKAGE))
    from btp_rsag.spec import RSAGSpec

    if NAME not in layout_names():
        register_layout(RSAGSpec())


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    register()
    yield
    del layouts._specs[NAME], ParallelConfig.choices[NAME]


def trains(sections: dict[str, Any]) -> dict[str, float]:
    register()
    return compare_with_table(toy.toy_config("float64", **sections))


@pytest.mark.parametrize("model", [{"family": "cola"}, {"family": "lax", "gate": "dense"}], ids=str)
def test_it_trains_exactly_and_sends_what_its_spec_says(model: dict[str, Any]) -> None:
    sections = {"model": model, "parallel": {"tp": 2, "layout": NAME}, "train": {"global_batch": 2}}
    for errors in run_distributed(2, trains, sections):
        assert errors["initial"] == errors["table"] == 0
        assert max(errors.values()) <= 1e-10, errors


def config_of(policy: str = "none") -> Config:
    return memory_config("cola", {"layout": NAME}, policy, "bfloat16", kv_heads=2, layers=2)


@pytest.mark.parametrize("policy", ["none", "low-rank", "full-block"])
def test_memory_is_predicted_to_the_byte_and_its_peak_within_two_per_cent(policy: str) -> None:
    config = config_of(policy)
    seen = measure(config)
    predicted = memory(config)
    assert {c: n for c, n in predicted.by_category.items() if c in seen.activations} == seen.activations
    assert peak(config).total == pytest.approx(sum(seen.peak.values()), rel=0.02)


def test_the_planner_counts_its_collectives() -> None:
    config = config_of()
    table = [c for c in step_collectives(config) if c.layer == 1]
    traced = trace_block(config, 1, "none").collectives
    assert [c.on_the_wire for c in traced] == [c.on_the_wire for c in table]
    kinds = {c.kind for c in traced if c.phase == "forward"}
    assert kinds == {"all-reduce", "reduce-scatter", "all-gather"}
    btp = config.model_copy(update={"parallel": config.parallel.model_copy(update={"layout": "btp"})})
    assert sum(c.sent_bytes for c in traced) == sum(c.sent_bytes for c in trace_block(btp, 1, "none").collectives)


def test_an_autograd_function_may_be_defined_where_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    from btp_rsag import runtime

    def leave(self: Any, flow: Any, partial: Any, group: Any) -> Iterator[None]:
        class Late(torch.autograd.Function):
            forward, backward = runtime._Sum.forward, runtime._Sum.backward

        yield
        self.update(flow, Late.apply(partial, self.axis), group)

    config = memory_config("cola", {"layout": NAME}, "none", "bfloat16", layers=3)
    usual = trace_block(config, 1, "none")
    monkeypatch.setattr(runtime.RSAG, "leave", leave)
    monkeypatch.setattr(trace, "_TRACES", {})
    assert trace_block(config, 1, "none") == usual


def test_the_planner_leaves_autograd_functions_as_they_were() -> None:
    config = memory_config("cola", {"layout": NAME}, "none", "bfloat16", layers=4)
    tracer, of_torch = Tracer(config, gathered=False, on_gpu=False), vars(torch.autograd.Function)["apply"]

    with tracer.running():
        assert vars(torch.autograd.Function)["apply"] is not of_torch
        x = torch.ones(2, requires_grad=True)
        scale(x.unsqueeze(0), torch.ones(1, 1)).sum().backward()  # real tensors take the usual path
        assert x.grad is not None
    assert vars(torch.autograd.Function)["apply"] is of_torch


def test_inspect_draws_and_counts_it() -> None:
    found = inspect(config_of())
    assert as_json(found)["layout"] == found.layout == NAME
    assert any("reduce-scatter" in words for row in block_rows(found) for _, words in row.lines)
    assert json.dumps(as_json(found))


def test_the_search_considers_it() -> None:
    search = Search(Request(base(), 2, hardware()))
    plan = search.fastest(of=lambda parallel: parallel.layout == NAME and parallel.tp == 2)
    assert plan is not None
    assert plan.time.seconds == pytest.approx(Predictor(hardware()).predict(plan.config).seconds)


def test_verify_does_not_take_it_for_ours() -> None:
    assert is_ours(load("demo")) and not is_ours(config_of())


def test_unknown_names_raise_everywhere() -> None:
    with pytest.raises(KeyError, match=r"no layout named 'btq'; valid names: btp"):
        layout_spec("btq")
    with pytest.raises(ConfigError, match=r"layout = 'btq' is .*btp-rsag.*; did you mean 'btp'\?"):
        toy.toy_config(parallel={"layout": "btq"})
    with pytest.raises(ValueError, match="already registered"):
        register_layout(layout_spec(NAME))
    assert ParallelConfig.choices[NAME]().norm == "online"  # an option inherited from btp
