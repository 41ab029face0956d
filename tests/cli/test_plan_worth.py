"""`boost plan --worth`: dense models of equal shape, parameters, FLOPs and time next to a low-rank model."""

import itertools
import json

import pytest

from boost.cli.plan_worth import scaled
from boost.config import load
from boost.config.architecture import flops_per_token, parameter_count
from boost.config.load import from_tree
from boost.config.schema import Config
from tests.cli.commands import Capture, done, refused

WORDS = (
    "--model cola-60m --gpus 2 --gpu h100 --global-batch 64 --parallel.tp 1 --parallel.pp 1 --train.steps 1000 --worth"
)


@pytest.mark.slow
def test_dense_models_are_equal_in_one_respect_each(capsys: Capture) -> None:
    ours, shape, parameters, flops, time = json.loads(done(capsys, "plan", *WORDS.split(), "--json"))["answers"]
    config, of_shape, of_parameters, of_flops = (
        from_tree({name: {k: v for k, v in table.items() if v is not None} for name, table in each["config"].items()})
        for each in (ours, shape, parameters, flops)
    )
    assert all(each["config"]["model"]["family"] == "dense" for each in (shape, parameters, flops, time))
    assert (of_shape.model.dim, of_shape.model.layers) == (config.model.dim, config.model.layers)
    assert parameter_count(of_parameters.model) == pytest.approx(parameter_count(config.model), rel=0.02)
    assert per_token(of_flops) == pytest.approx(per_token(config), rel=0.02)
    assert time["step_seconds"] <= ours["step_seconds"] and time["fits"]
    assert all(each["tokens"] == 1000 * 64 * 256 for each in (ours, shape, parameters, flops, time))
    # Published perplexities belong to one model; nothing is claimed about the others.
    assert ours["perplexity"].startswith("34.04 on C4 after 1.31B tokens (CoLA, ")
    assert shape["perplexity"].startswith("34.06 on C4 ") and parameters["perplexity"] == "not known"


def per_token(config: Config) -> int:
    return flops_per_token(config.model, config.train.seq_len)


@pytest.mark.slow
def test_the_comparison_as_text(capsys: Capture) -> None:
    out = done(capsys, "plan", *WORDS.split())
    assert all(f"dense, equal {what}" in out for what in ("shape", "parameters", "FLOPs", "time"))
    assert "In the GPU-hours of the low-rank model" in out
    assert "Losses are not predicted." in out


def test_a_dense_model_has_nothing_to_compare(capsys: Capture) -> None:
    words = "--model cola-60m --gpus 2 --gpu h100 --model.family dense --worth"
    err = refused(capsys, "plan", *words.split())
    assert "--worth compares" in err and "model.family = 'dense'" in err


@pytest.mark.slow
def test_scaled_models_grow_in_small_steps() -> None:
    sizes = [parameter_count(config.model) for config in scaled(load("cola-1b"))]
    assert sizes == sorted(sizes) and max(b / a for a, b in itertools.pairwise(sizes)) < 1.03
