"""Both norms are timed in the block and alone; the norms alone compute what the layout computes."""

from pathlib import Path

import pytest
import torch

from benchmarks.experiments import norms
from benchmarks.experiments.blocks import BTP, block_config
from boost.config import Config
from boost.measure.results import Facts, as_markdown, figures
from boost.parallel.counting import CollectiveCounter
from tests import toy
from tests.distributed import run_distributed

SHAPE = {"dim": 32, "ffn_dim": 64, "heads": 4, "kv_heads": 4, "layers": 1, "rank": 8, "vocab_size": 64}


def make_config() -> Config:
    return toy.toy_config("float32", model=SHAPE)


def measured() -> tuple[Facts, dict[str, list[int]]]:
    mesh, counts = toy.mesh(tp=2), {}
    part = norms.NormPart(block_config(make_config(), BTP, 2, 1), mesh)
    for form in (norms.BARE, *norms.NORMS):
        counter = CollectiveCounter()
        with counter:
            part.call(form, backward=True)()
        counts[form] = [each.elements for each in counter.collectives]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(norms, "LEAST_S", 0.0)
        patch.setattr(norms, "SMALL", {"layers": 1, "vocab_size": 64})
        return norms.measure(make_config(), mesh, [1], 7), counts


def test_the_experiment(tmp_path: Path) -> None:
    facts, counts = run_distributed(2, measured)[0]
    tokens, r = 16, 8
    qkv, gate_up = 3 * r * tokens, 2 * r * tokens  # each forward and back
    assert counts[norms.BARE] == [qkv, qkv, gate_up, gate_up]
    assert counts["online"] == [qkv + tokens, qkv, gate_up + tokens, gate_up]
    assert counts["sync"] == [tokens, qkv, qkv, tokens, tokens, gate_up, gate_up, tokens]
    found = {(row["what"], row["form"], row["passes"]): row for row in facts["rows"]}
    assert [found["block", norm, "forward"]["collectives"] for norm in norms.NORMS] == [6, 4]
    assert [found["block", norm, "forward and backward"]["collectives"] for norm in norms.NORMS] == [12, 8]
    assert all(0 < row[norm] < 0.1 for row in facts["precision"] for norm in norms.NORMS)
    assert len({row["sync"] for row in facts["precision"]}) == len(norms.SEEDS)
    (goal,) = norms.goals(facts)
    assert goal.what == "online norm against sync, measured" and "the worst of 2" in goal.where
    text = as_markdown(facts, norms.section(facts))
    assert "0.375 / 0.145" in text and "at every seed" in text
    (figure,) = figures(norms.section(facts))
    figure.draw(tmp_path / "norms.svg")
    assert (tmp_path / "norms.svg").stat().st_size > 1000


def test_both_forms_alone_commute_with_a_linear_map() -> None:
    """On one process with the whole width, scaling x before A and scaling A x after it are the same function."""
    x, a = torch.randn(5, 8, dtype=torch.float64), torch.randn(3, 8, dtype=torch.float64)
    c = norms.inverse_rms(norms.sum_of_squares(x), 8, 1e-6)
    assert torch.allclose(norms.scale(x, c) @ a.t(), norms.scale(x @ a.t(), c))
