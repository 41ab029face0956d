"""Checks every layout against one process: losses, gradients, updates and collectives of a small model.

There is one row per layout and option, and one per mesh axis; each row has one cell per way to run it. A cell contains:

- float64: the largest relative error of any loss, gradient norm, gradient or weight over two optimizer steps;
- float32: the largest relative error of the first step's loss, gradient norm and gradients (AdamW amplifies rounding in gradients
  that are close to zero);
- bfloat16: the error of the gradients against float32, divided by the error of one process in bfloat16.
"""

import contextlib
import functools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from boost.config import Config
from boost.config.layouts import layout_spec, layouts_of, spec_of
from boost.config.load import from_tree
from boost.config.schema import ModelConfig
from boost.errors import ConfigError
from boost.measure.exactness import (
    Observed,
    TrainedModel,
    alone,
    local_parts,
    matches_table,
    mean_error,
    relative_errors,
)
from boost.measure.verify.report import Found, Verifier, worst_of
from boost.parallel.mesh import Mesh, mesh_of, temporary_groups
from boost.text import JsonObject

LIMITS = {"float64": 1e-9, "float32": 1e-5}
"""Maximum relative errors. AdamW amplifies rounding; otherwise, float64 errors would be below 1e-12."""

LIMIT_BF16 = 2.0
"""Maximum error of bfloat16 gradients, as a multiple of the error of one process."""

STEPS = 2
HEADS = 8
"""Attention heads of the model: one per rank at TP 8. With two key/value heads, ranks share them at TP 4."""


@dataclass(frozen=True)
class Cell:
    """One way to run a row, such as in another dtype or with recomputation."""

    name: str
    dtype: str = "float32"
    sections: dict[str, JsonObject] = field(default_factory=dict)
    """Overrides of configuration fields, by section."""


@dataclass(frozen=True)
class Row:
    """A layout with options on a mesh, or a single mesh axis."""

    name: str
    parallel: JsonObject
    cells: tuple[Cell, ...]


def sized_down(model: ModelConfig, parallel: JsonObject) -> JsonObject:
    """Fields of [model] for a small model of the same family, with one block per pipeline stage, but at least two."""
    layers = max(2, parallel.get("pp", 1) * parallel.get("virtual", 1))
    wide = math.lcm(HEADS, parallel.get("tp", 1) * parallel.get("cp", 1))
    facts = {"family": model.family, "dim": 16 * wide, "ffn_dim": 24 * wide, "heads": wide, "kv_heads": wide // 4}
    return facts | {"layers": layers, "vocab_size": 64 * wide, **type(model).smallest(16 * wide)}


def config_of(model: ModelConfig, parallel: JsonObject, cell: Cell) -> Config:
    """The configuration of a cell. Raises ConfigError if it is invalid."""
    mesh = parallel | cell.sections.get("parallel", {})
    exact = cell.dtype == "float64"
    # Two chunks per process, each split in half across processes.
    tokens = 4 * mesh.get("cp", 1) * mesh.get("tp", 1)
    train = {
        "seq_len": tokens * math.ceil(32 / tokens),
        "micro_batch": 2,
        "global_batch": 2 * max(2, mesh.get("pp", 1)) * mesh.get("dp", 1),
        "param_dtype": "float64" if exact else "float32",
        "compute_dtype": cell.dtype,
        "compile": "none",
        **cell.sections.get("train", {}),
    }
    small = sized_down(model, mesh)
    return from_tree({"model": small, "parallel": mesh, "train": train})


def rows(model: ModelConfig, processes: int, on_gpu: bool, compiled: str) -> Iterator[Row]:
    """Yields the rows to check on `processes` processes. `compiled`: rows that also run with train.compile: all | first | none."""
    tp = next(n for n in (8, 4, 2, 1) if processes % n == 0)
    dp = processes // tp
    number = 0
    for layout in layouts_of(model) if tp > 1 else ():
        for options in _options(layout):
            parallel = {"layout": layout, "tp": tp, "dp": dp, **options}
            name = ", ".join([layout, *(str(value) for value in options.values())])
            also = compiled == "all" or (compiled == "first" and number == 0)
            yield Row(name, parallel, tuple(_cells(model, layout, parallel, on_gpu, also)))
            number += 1
    if processes > 1:
        plain = (Cell("float64", "float64"), Cell("float32"), Cell("bfloat16", "bfloat16"))
        yield Row("dp: all-reduced", {"dp": processes}, plain)
        yield Row("dp: ZeRO-1", {"dp": processes, "shard": "optimizer"}, plain)
        yield Row("dp: FSDP", {"dp": processes, "shard": "full"}, plain)
        yield Row("cp", {"cp": processes}, plain)
        yield Row("pp: 1F1B", {"pp": processes}, plain)
        yield Row("pp: interleaved", {"pp": processes, "schedule": "interleaved-1f1b", "virtual": 2}, plain[:2])
    else:
        parallel = {"layout": layouts_of(model)[0]}
        yield Row(
            "one process", parallel, tuple(_cells(model, layouts_of(model)[0], parallel, on_gpu, compiled != "none"))
        )


def _options(layout: str) -> Iterator[JsonObject]:
    """Yields each value of each of the layout's own options, one option at a time."""
    spec = layout_spec(layout)
    defaults = {name: spec.config.model_fields[name].default for name in spec.options}
    yield dict(defaults)
    for name in spec.options:
        annotation = spec.config.model_fields[name].annotation
        for value in getattr(annotation, "__args__", ()):
            if value != defaults[name]:
                yield {**defaults, name: value}


def _cells(model: ModelConfig, layout: str, parallel: JsonObject, on_gpu: bool, compiled: bool) -> Iterator[Cell]:
    spec, tp, dp = layout_spec(layout), parallel.get("tp", 1), parallel.get("dp", 1)
    yield Cell("float64", "float64")
    yield Cell("float32")
    yield Cell("bfloat16", "bfloat16")
    if tp > 1:
        yield Cell("halves", sections={"parallel": {"overlap": "halves"}})
    yield Cell("recompute", sections={"train": {"recompute": "low-rank" if model.low_rank else "full-block"}})
    if tp > 1 and spec.gathers_latents:
        yield Cell("sharded latents", sections={"train": {"recompute": "low-rank-sharded"}})
    if tp > 1 and spec.has_whole_factors:
        yield Cell("FSDP of TP", sections={"parallel": {"shard": "full", "shard_outer": True}})
    elif dp > 1:
        yield Cell("FSDP", sections={"parallel": {"shard": "full"}})
    if dp % 2 == 0:
        yield Cell("pipeline", sections={"parallel": {"pp": 2, "dp": dp // 2}})
    if compiled:
        yield Cell("kernels compiled", sections={"train": {"compile": "kernels"}})
        yield Cell("blocks compiled", sections={"train": {"compile": "blocks"}})
    elif on_gpu:
        yield Cell("kernels compiled", sections={"train": {"compile": "kernels"}})


@functools.cache
def _reference(description: str, device: torch.device) -> Observed:
    return TrainedModel(Config.model_validate_json(description), Mesh(device), STEPS).seen()


def reference(config: Config, device: torch.device, dtype: str = "") -> Observed:
    """Trains the whole model in this process, in eager mode, without recomputation, and in `dtype` or the configuration's dtype."""
    plain = {"recompute": "none", "compile": "none", **({"compute_dtype": dtype} if dtype else {})}
    whole = config.changed(train=plain, parallel={"overlap": "none", "schedule": "1f1b"})
    return _reference(alone(whole).model_dump_json(), device)


def compare(config: Config, mesh: Mesh) -> dict[str, float]:
    """Errors of this process's results against one process; 'table' is 0 if the step issued the collectives in the table."""
    actual = TrainedModel(config, mesh, STEPS - (mesh.size > 1))  # `collectives` runs the last step
    table = 0.0 if mesh.size == 1 or matches_table(config, actual.collectives(), mesh.pp.rank) else 1.0
    if config.train.compute_dtype != "bfloat16":
        expected = reference(config, mesh.device)
        errors = relative_errors(actual, expected)
        if config.train.compute_dtype == "float32":
            numbers = zip(actual.numbers[0], expected.numbers[0], strict=True)
            errors = {"gradients": errors["first gradients"], "numbers": max(abs(a / e - 1) for a, e in numbers)}
        return {"error": max(errors.values()), "table": table}
    exact = reference(config, mesh.device, "float32")
    due = local_parts(actual.model, exact.gradients[0])
    ours = mean_error(actual.gradients[0], due)
    theirs = mean_error(local_parts(actual.model, reference(config, mesh.device).gradients[0]), due)
    return {"ratio": ours / theirs if theirs else float(ours > 0), "table": table}


Results = dict[str, dict[str, float] | str]
"""Errors by cell, or the reason why the cell cannot run."""


def run_row(model: ModelConfig, row: Row, mesh: Mesh) -> Results:
    results: Results = {}
    for cell in row.cells:
        try:
            config = config_of(model, row.parallel, cell)
        except ConfigError as error:
            results[cell.name] = str(error)
            continue
        if config.train.compile != "none":
            torch.compiler.reset()  # the cells' dtypes would exceed a kernel's recompilation limit
        with temporary_groups() if mesh.size > 1 else contextlib.nullcontext():
            of_its_own = mesh_of(config.parallel, mesh.device) if mesh.size > 1 else mesh
            results[cell.name] = compare(config, of_its_own)
    return results


def judged(cells: Sequence[Cell], by_rank: list[Results]) -> Found:
    worst: dict[str, dict[str, float]] = {}
    refused, texts, wrong = dict[str, str](), dict[str, str](), list[str]()
    for cell in cells:
        outcomes = [results[cell.name] for results in by_rank]
        numbers = [outcome for outcome in outcomes if isinstance(outcome, dict)]
        if not numbers:
            refused[cell.name] = str(outcomes[0])
            continue
        errors = worst[cell.name] = worst_of(numbers)
        if "ratio" in errors:
            value, holds = f"{errors['ratio']:.2f}x", errors["ratio"] <= LIMIT_BF16
        else:
            value, holds = f"{errors['error']:.0e}".replace("0e+00", "0"), errors["error"] <= LIMITS[cell.dtype]
        texts[cell.name] = f"{cell.name} {value}"
        if errors["table"]:
            texts[cell.name] = f"{cell.name}: COLLECTIVES DIFFER FROM THE TABLE"
        if errors["table"] or not holds:
            wrong.append(cell.name)
    text = " · ".join(texts[name] for name in wrong or texts)
    numbers_of: dict[str, object] = {"cells": worst, "refused": refused}
    if wrong:
        return Found("failed", text, numbers=numbers_of)
    if not worst:
        return Found("skipped", next(iter(refused.values())), numbers=numbers_of)
    return Found("ok", text, numbers=numbers_of)


def verify(
    verifier: Verifier, model: ModelConfig, compiled: str, own: Config | None, only: Collection[str] = ()
) -> None:
    """Runs one check per row. `own`: the user's configuration, whose mesh and options are also checked. `only`: see
    `process.Request.layouts`."""
    mesh = verifier.mesh
    verifier.section(f"Layouts: {model.family}, against one process ({STEPS} steps; errors are relative)")
    every = rows(model, mesh.size, mesh.device.type == "cuda", compiled)
    listed = [row for row in every if not only or row.parallel.get("layout", row.name.partition(":")[0]) in only]
    own_row = _own_row(own) if own is not None and own.parallel.world_size == mesh.size else None
    if own_row is not None and not only:
        listed.insert(0, own_row)
    for row in listed:
        advice = "this layout computes wrong results on these machines: report this with the command's JSON report"
        if row is own_row and own is not None and not is_ours(own):
            advice = (
                f"'{own.parallel.layout}' does not reproduce the results of one process: a sum over TP ranks may be missing "
                "in its forward or backward pass (docs/extend.md)"
            )
        verifier.check(
            row.name, functools.partial(run_row, model, row, mesh), functools.partial(judged, row.cells), advice
        )


def is_ours(config: Config) -> bool:
    """Whether a configuration's layout is built into boost."""
    return type(layout_spec(config.parallel.layout)).__module__.startswith("boost.")


def _own_row(own: Config) -> Row:
    """A row with the mesh, layout and options of the user's configuration."""
    parallel = own.parallel.model_dump(exclude_unset=False)
    parallel["split"] = ()  # the small model has a different number of blocks
    train = {name: getattr(own.train, name) for name in ("recompute", "recompute_every", "compile", "reduce_dtype")}
    sections = {"train": train}
    names = [spec_of(own.parallel).name, *(f"{name} {size}" for name, size in own.parallel.axes.items() if size > 1)]
    exact = {"train": train | {"reduce_dtype": "param_dtype"}}
    cells = (
        Cell("float64", "float64", exact),
        Cell("float32", "float32", exact),
        Cell("bfloat16", "bfloat16", sections),
    )
    return Row(f"yours: {', '.join(names)}", parallel, cells)
