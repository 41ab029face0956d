"""Text samples at evaluations: on every mesh, and without effect on training."""

from pathlib import Path
from typing import Any

import pytest

from boost.train.metrics import MetricsHook, read_metrics
from boost.train.samples import heldout_prompt
from tests.distributed import run_distributed
from tests.train.runs import fitted, losses, make_config

PROMPTS = ("import ", "def ")


def fit(store: Path, folder: Path, tokens: int, prompts: tuple[str, ...] = PROMPTS, **parallel: Any) -> list[Any]:
    """Losses of the steps, and (step, prompt, text) of samples: those of the main process."""
    train = {"steps": 4, "eval_every": 2, "eval_tokens": 640, "sample_tokens": tokens}
    train["sample_prompts"] = prompts if tokens else ()
    config = make_config(store, folder, train=train, parallel=parallel)
    folder.mkdir(exist_ok=True)
    trainer = fitted(config, MetricsHook())
    if not trainer.mesh.is_main:
        return []
    samples = [line for line in read_metrics(folder / "metrics.jsonl") if line["kind"] == "sample"]
    return [losses(folder), [(line["step"], line["prompt"], line["text"]) for line in samples]]


@pytest.mark.slow
def test_samples_do_not_depend_on_the_mesh_and_change_no_step(store: Path, tmp_path: Path) -> None:
    alone, samples = fit(store, tmp_path / "one", 8)
    assert [(step, prompt) for step, prompt, _ in samples] == [(step, prompt) for step in (2, 4) for prompt in PROMPTS]
    assert all(text for *_, text in samples)
    meshes: list[dict[str, Any]] = [{"tp": 2, "layout": "btp-sp"}, {"dp": 2, "shard": "full"}, {"pp": 2}]
    for parallel in meshes:
        (found, seen), _ = run_distributed(2, fit_with, store, tmp_path / str(parallel), 8, parallel)
        assert seen == samples and found == pytest.approx(alone, rel=1e-9), parallel
        if "shard" in parallel:  # a sample gathers weights between two steps
            (plain, none), _ = run_distributed(2, fit_with, store, tmp_path / "plain", 0, parallel)
            assert found == plain and none == []


def fit_with(store: Path, folder: Path, tokens: int, parallel: dict[str, Any]) -> list[Any]:
    return fit(store, folder, tokens, **parallel)


def test_without_prompts_held_out_text_is_continued(store: Path, tmp_path: Path) -> None:
    from boost.data.store import TokenStore

    _, samples = fit(store, tmp_path / "run", 4, ())
    text, ids = heldout_prompt(TokenStore.open(store))
    assert [(step, text) for step, text, _ in samples] == [(2, text), (4, text)]
    assert len(ids) == 24
