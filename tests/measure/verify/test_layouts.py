"""Layouts against one process, and detection of wrong ones."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch

from boost.config import load
from boost.config.families import ModelConfig
from boost.config.layouts import layouts_of
from boost.config.section import Natural, Values
from boost.families import CoLAConfig
from boost.layouts import btp
from boost.measure import steps
from boost.measure.verify import layouts, runs
from boost.measure.verify.layouts import Cell, Results, Row, config_of, judged, rows, run_row
from boost.parallel.mesh import Mesh
from tests import toy
from tests.distributed import run_distributed

COLA = load(None).model


def row(name: str, processes: int = 2) -> Row:
    return next(each for each in rows(COLA, processes, False, "none") if each.name == name)


def results(name: str) -> Results:
    return run_row(COLA, row(name), toy.mesh(2))


def results_with_a_wrong_norm() -> Results:
    usual = btp.inverse_rms
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(btp, "inverse_rms", lambda s_T, width, eps: usual(s_T, width, 2 * eps + 1e-3))
        return results("btp, online")


@pytest.mark.slow
def test_a_wrong_norm_is_found_in_every_cell() -> None:
    found = judged(row("btp, online").cells, run_distributed(2, results_with_a_wrong_norm))
    assert found.verdict == "failed"
    assert all(name in found.detail for name in ("float64", "float32", "halves", "recompute"))


def results_with_another_collective() -> Results:
    """Adds a barrier, which changes no result."""
    usual = btp.BTP.down
    with pytest.MonkeyPatch.context() as patch:

        def more(self: btp.BTP, *arguments: torch.Tensor) -> torch.Tensor:
            torch.ops._c10d_functional.wait_tensor(
                torch.ops._c10d_functional.all_reduce(torch.zeros(1), "sum", self.axis.name)
            )
            return usual(self, *arguments)

        patch.setattr(btp.BTP, "down", more)
        return run_row(COLA, replace(row("btp, online"), cells=(Cell("float32"),)), toy.mesh(2))


@pytest.mark.slow
def test_a_collective_that_the_table_does_not_have_is_found() -> None:
    found = judged([Cell("float32")], run_distributed(2, results_with_another_collective))
    assert found.verdict == "failed" and "COLLECTIVES DIFFER FROM THE TABLE" in found.detail


@pytest.mark.parametrize("processes", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("family", ["cola", "lax", "dense"])
def test_every_layout_and_every_cell_is_legal(family: str, processes: int) -> None:
    model = load(None, [f"--model.family={family}"]).model
    listed = list(rows(model, processes, True, "all"))
    for each in listed:
        for cell in each.cells:
            assert config_of(model, each.parallel, cell).parallel.world_size == processes, (each.name, cell.name)
    if processes % 2 == 0:
        assert {each.parallel.get("layout") for each in listed} >= set(layouts_of(model))


def test_a_family_says_what_its_small_models_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ModelConfig, "choices", dict(ModelConfig.choices))

    class Selecting(CoLAConfig):
        family: Literal["selecting"] = "selecting"
        channels: Natural = 512

        @classmethod
        def smallest(cls, dim: int) -> Values:
            return {**super().smallest(dim), "channels": dim // 2}

        def problems(self, config: Any) -> Iterator[str]:
            if self.channels > self.dim:
                yield "too many channels"

    model = load(None, ["--model.family=selecting"]).model
    listed = list(rows(model, 2, True, "all"))
    assert len([config_of(model, row.parallel, cell) for row in listed for cell in row.cells]) > 8
    monkeypatch.setattr("boost.data.prepare.prepare", lambda options: None)
    monkeypatch.setattr(runs._Trial, "_succeeds", lambda *_: None)
    trial = runs._Trial(tmp_path, model, 2, "cpu")
    trial.first()
    small = load(str(trial.config)).model.model_dump()
    assert (small["family"], small["rank"], small["channels"]) == ("selecting", 8, 16)
    assert "--model.channels=32" in steps.shape(64, 2, 176, 2, family="selecting")
    assert not any("rank" in word for word in steps.shape(64, 2, 176, 2, family="dense"))
    assert toy.toy_config(model={"family": "selecting"}).model.model_dump()["channels"] == 16


def test_the_users_mesh_is_checked_first() -> None:
    own = load(None, ["--parallel.tp=2", "--parallel.layout=btp-sp", "--train.recompute=low-rank-sharded"])
    first = layouts._own_row(own)
    assert first.name == "yours: btp-sp, tp 2"
    for cell in first.cells:
        config = config_of(own.model, first.parallel, cell)
        assert (config.parallel.layout, config.train.recompute) == ("btp-sp", "low-rank-sharded")


@pytest.mark.slow
def test_one_process_has_a_row_of_its_own() -> None:
    (only,) = rows(COLA, 1, False, "none")
    assert not any("compiled" in cell.name for cell in only.cells)
    found = judged(only.cells, [run_row(COLA, only, Mesh(toy.CPU))])
    assert found.verdict == "ok", found.detail


def test_cells_that_cannot_run_are_skipped_with_the_reason() -> None:
    cell = Cell("float32")
    assert judged([cell], [{"float32": "not here"}]).verdict == "skipped"
    assert judged([cell], [{"float32": "not here"}]).detail == "not here"


def groups_of_cells() -> tuple[int, list[int], int]:
    """Number of process groups before, in each cell of a row, and after."""
    mesh, seen = toy.mesh(2), list[int]()
    groups = torch.distributed.distributed_c10d._world.pg_map
    before = len(groups)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            layouts,
            "compare",
            lambda config, mesh: seen.append(len(groups)) or {"error": 0.0, "ratio": 1.0, "table": 0.0},
        )
        run_row(COLA, row("btp, online"), mesh)
    return before, seen, len(groups)


def test_the_groups_of_a_cell_end_with_it() -> None:
    """On GPUs each of them holds most of a GB."""
    for before, seen, after in run_distributed(2, groups_of_cells):
        assert len(seen) > 2 and set(seen) == {seen[0]} and seen[0] > before == after


@pytest.mark.parametrize(("only", "expected"), [(["btp"], {"btp"}), (["pp", "cp"], {"pp", "cp"}), ([], None)])
def test_layouts_are_checked_by_name(only: list[str], expected: set[str] | None) -> None:
    seen: list[str] = []
    verifier: Any = SimpleNamespace(
        mesh=Mesh(toy.CPU, size=2), section=lambda title: None, check=lambda name, *rest: seen.append(name)
    )
    layouts.verify(verifier, COLA, "none", None, only)
    assert {name.partition(",")[0].partition(":")[0] for name in seen} == (
        expected or {*layouts_of(COLA), "dp", "pp", "cp"}
    )


def test_no_cell_inherits_the_compiled_kernels_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the dtypes of all of them, a kernel would exceed its limit of recompilations, and all would run in eager mode."""
    log: list[str] = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: log.append("reset"))
    monkeypatch.setattr(layouts, "compare", lambda config, mesh: log.append(config.train.compute_dtype) or {})
    compiled = {"train": {"compile": "kernels"}}
    cells = (Cell("a", "float32", compiled), Cell("b", "bfloat16", compiled), Cell("c", "float64"))
    run_row(COLA, Row("one process", {}, cells), Mesh(toy.CPU))
    assert log == ["reset", "float32", "reset", "bfloat16", "float64"]
