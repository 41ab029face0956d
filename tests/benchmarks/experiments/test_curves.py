"""The experiment follows losses under several layouts and reports any layout that drifts."""

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.experiments import curves
from boost.config import Config
from boost.errors import ConfigError
from boost.train.loop import Trainer
from tests import toy
from tests.distributed import run_distributed


def make_config(store: Path, run: Path, steps: int) -> Config:
    return toy.toy_config(
        model={"vocab_size": 300, "layers": 1},
        # At 1e-2 the toy model itself amplifies a difference of one bit to 1e-6 within 100 steps.
        optim={"lr": 3e-3, "warmup_steps": 3},
        train={"steps": steps, "seq_len": 32, "micro_batch": 4, "global_batch": 4},
        data={"store": str(store)},
        run={"dir": str(run), "device": "cpu"},
    )


def run_experiment(config: Config, out: Path) -> tuple[int, str]:
    """With two layouts; `python -m benchmarks curves` runs all."""
    said = io.StringIO()
    two = [each for each in curves.every_layout("cola") if each.name in ("btp-sp", "vanilla")]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
        patch.setattr(curves, "every_layout", lambda _: two)
        patch.setattr(curves, "open_mesh", lambda *_: toy.mesh(tp=2))
        patch.setattr(curves, "close_mesh", lambda: None)
        if "drifting" in out.name:
            usual = curves.losses

            def drifting(trainer: Trainer) -> list[float]:
                factor = 1.01 if trainer.config.parallel.layout == "btp-sp" else 1
                return [loss * factor for loss in usual(trainer)]

            patch.setattr(curves, "losses", drifting)
        return curves.curves_process(config, ["cola"], out), said.getvalue()


@pytest.mark.parametrize("drifts", [False, True])
def test_the_experiment_leaves_numbers_and_names_a_layout_that_drifts(
    drifts: bool, store: Path, tmp_path: Path
) -> None:
    config = make_config(store, tmp_path, 3).changed(parallel={"tp": 2})
    (tmp_path / "checkpoints" / "step-00000002").mkdir(parents=True)
    out = tmp_path / "out" / ("drifting" if drifts else "usual")
    (code, said), (_, silence) = run_distributed(2, run_experiment, config, out)
    assert (code, silence) == (drifts, "")
    assert [line.split(" | ")[1] for line in said.splitlines() if "does not hold" in line] == ["btp-sp"] * drifts
    left = [path.name for path in (tmp_path / "checkpoints").iterdir()]
    assert left == ["step-00000002"], "a run there is left alone"
    facts: dict[str, Any] = json.loads(out.with_suffix(".json").read_text())
    assert set(facts["losses"]) == set(facts["worst_relative_difference"]) == {"float64", "float32"}
    assert len(facts["losses"]["float32"]["cola"]["vanilla"]) == 3


def test_a_family_that_cannot_be_cut_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model.rank = 8"):
        curves.configuration(toy.toy_config(), "cola", "float64", {"layout": "vanilla", "tp": 16})
