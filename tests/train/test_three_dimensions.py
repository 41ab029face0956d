"""Three-dimensional meshes (PP x DP x TP): every mesh, schedule and sharding against one process, and its collectives against the
table."""

import itertools
from typing import Any

import pytest
import torch

from boost.config import Config
from boost.config.architecture import parameter_count
from boost.data.batches import Batch
from boost.measure.exactness import ByName
from boost.models.fused import fused_params
from boost.parallel.gradients import GradientReducer
from boost.parallel.mesh import share
from boost.train.prefetch import host_batch, to_device
from boost.train.step import run_passes
from tests import toy
from tests.distributed import run_distributed
from tests.matrices import Row, chosen, ids
from tests.trained import Trained, compare_with_table, made_up_batches, require_one_process

pytestmark = pytest.mark.slow

TRAIN = {"micro_batch": 1, "seq_len": 16}
"""Eight processes share two cores."""


def config_of(parallel: dict[str, Any], dtype: str = "float64", **sections: Any) -> Config:
    sections["model"] = {"layers": 2 * parallel.get("pp", 1), **sections.get("model", {})}
    micro_batches = max(2, parallel.get("pp", 1)) * parallel.get("dp", 1)
    sections["train"] = {**TRAIN, "global_batch": micro_batches, **sections.get("train", {})}
    return toy.toy_config(dtype, parallel=parallel, **sections)


def check(config: Config) -> None:
    require_one_process(config)


MESHES = [dict(zip(("pp", "dp", "tp"), sizes, strict=True)) for sizes in itertools.product((1, 2), repeat=3)][1:]
SCHEDULES: list[Row] = [
    # What is sent between stages depends on the layout, when on the schedule: one of two residual streams each.
    {"layout": "btp", "schedule": "gpipe"},
    {"layout": "btp-sp", "schedule": "interleaved-1f1b"},
    {"layout": "btp", "schedule": "1f1b", "split": [1, 3]},
    {"layout": "btp", "schedule": "interleaved-1f1b"},
]
SHARDED: list[Row] = [
    *({"layout": "btp-sp", "shard": shard} for shard in ("none", "optimizer")),
    {"dp": 1, "layout": "btp-sp", "shard": "optimizer", "shard_outer": True},
    {"dp": 1, "layout": "btp-sp", "shard": "full", "shard_outer": True},  # by TP processes of one replica
    {"tp": 1, "dp": 3, "shard": "full"},
    *({"tp": 1, "pp": 2, "shard": "full", "schedule": schedule} for schedule in ("gpipe", "1f1b")),
    {"tp": 1, "pp": 2, "shard": "full", "schedule": "interleaved-1f1b", "virtual": 3},
    {"tp": 1, "pp": 2, "shard": "optimizer"},
]


@pytest.mark.parametrize(
    "parallel",
    chosen(
        [
            "{'pp': 2, 'dp': 2, 'tp': 1}",
            "{'pp': 2, 'tp': 2, 'layout': 'btp-sp', 'schedule': 'interleaved-1f1b'}",
            "{'pp': 2, 'tp': 2, 'layout': 'btp', 'schedule': '1f1b', 'split': [1, 3]}",
            "{'tp': 2, 'dp': 1, 'layout': 'btp-sp', 'shard': 'full', 'shard_outer': True}",
            "{'tp': 1, 'dp': 2, 'pp': 2, 'shard': 'full', 'schedule': 'interleaved-1f1b', 'virtual': 3}",
            "{'tp': 1, 'dp': 2, 'pp': 2, 'shard': 'optimizer'}",
        ],  # the other meshes have tests of their own
        [*MESHES, *({"pp": 2, "tp": 2, **row} for row in SCHEDULES), *({"tp": 2, "dp": 2, **row} for row in SHARDED)],
    ),
)
def test_every_mesh_schedule_and_sharding_is_one_process(parallel: Row) -> None:
    check(config_of(parallel, model={"layers": parallel.get("pp", 1) * parallel.get("virtual", 2)}))


@pytest.mark.parametrize(
    "mesh", [pytest.param({"tp": 2, "shard": "none"}, marks=pytest.mark.nightly), {"shard": "full"}]
)
def test_in_single_precision_too(mesh: Row) -> None:
    config = config_of({"pp": 2, "dp": 2, "tp": 1, **mesh}, "float32", train={"global_batch": 8})
    for errors in run_distributed(config.parallel.world_size, compare_with_table, config):
        # AdamW's first steps divide a gradient by its own magnitude: a rounded 0 becomes a step of full length.
        # A shard is compared by itself: of a parameter whose gradient is 1e-5 off, some rows are more.
        limit = 1e-5 if mesh["shard"] == "none" else 2e-5
        assert max(errors[what] for what in ("initial", "loss and norm", "first gradients", "table")) <= limit, errors


def test_a_long_pipeline() -> None:
    check(config_of({"pp": 4, "tp": 1}, model={"layers": 6}, train={"global_batch": 6}))


LAYOUTS: list[tuple[str, Row]] = [
    ("svd", {"layout": "btp"}),
    ("cola", {"layout": "btp-sp"}),
    ("cola", {"layout": "btp-sp", "shard_outer": True}),
    ("cola", {"layout": "btp-cp", "shard_outer": True}),
    ("cola", {"layout": "vanilla"}),
    ("dense", {"layout": "megatron"}),
    ("dense", {"layout": "megatron-sp"}),
    ("dense", {"layout": "ulysses", "shard_outer": True}),
]


@pytest.mark.parametrize(
    ("family", "layout", "shard"),
    # Every second row, of which every second one under each way.
    chosen(
        [
            "('svd', {'layout': 'btp'}, 'optimizer')",
            "('cola', {'layout': 'btp-sp', 'shard_outer': True}, 'full')",
            "('cola', {'layout': 'vanilla'}, 'optimizer')",
            "('dense', {'layout': 'megatron-sp'}, 'full')",
        ],
        [(*row, shard) for row in LAYOUTS for shard in ("optimizer", "full")],
    ),
)
def test_every_sharding_of_every_layout_is_one_process(family: str, layout: Row, shard: str) -> None:
    # One key/value head: its weights are held whole by both TP processes, and their gradients are partial.
    model = {"family": family, "kv_heads": 1}
    check(config_of({"tp": 2, "dp": 2, "shard": shard, **layout}, model=model))


def test_rows_that_replicas_cannot_share_equally() -> None:
    """Three replicas: the last one has fewer rows of every weight, and no rows of some."""
    model = {"rank": 4, "heads": 1, "kv_heads": 1, "dim": 4, "ffn_dim": 7, "vocab_size": 4}
    for shard in ("optimizer", "full"):
        check(config_of({"dp": 3, "shard": shard}, model=model))


COMBINED: list[tuple[str, dict[str, Any], str]] = [
    ("cola", {"layout": "btp-sp", "schedule": "interleaved-1f1b", "shard": "full", "shard_outer": True}, "low-rank-sharded"),
    ("cola", {"layout": "btp", "schedule": "1f1b", "shard": "full"}, "low-rank+attention-output"),
    ("svd", {"layout": "vanilla", "schedule": "1f1b", "shard": "optimizer"}, "none"),
    ("dense", {"layout": "megatron-sp", "schedule": "gpipe", "shard": "optimizer"}, "full-block"),
    ("lax", {"layout": "btp-cp", "schedule": "1f1b", "shard": "full", "shard_outer": True, "overlap": "halves"}, "low-rank"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "parallel", "recompute"),
    chosen(["lax-btp-cp-1f1b-full-True-halves-low-rank"], COMBINED, ids(COMBINED)),
)
def test_all_at_once(family: str, parallel: dict[str, Any], recompute: str) -> None:
    mesh = {"pp": 2, "dp": 2, "tp": 2}
    check(config_of(mesh | parallel, model={"family": family}, train={"recompute": recompute}))


@pytest.mark.parametrize("parallel", [{"pp": 2}, {"dp": 2, "shard": "full"}], ids=str)
def test_documents_stay_apart(parallel: dict[str, Any]) -> None:
    isolated, together = (config_of(parallel, data={"isolate_documents": isolate}) for isolate in (True, False))
    check(isolated)
    assert Trained(toy.single(isolated), 1).numbers != Trained(toy.single(together), 1).numbers


def gradients_of_a_frequent_token(config: Config, exact: ByName | None = None) -> tuple[ByName, dict[str, float]]:
    """This process's gradients for a text in which one token is frequent, and their relative errors if the exact ones are given."""
    model, mesh = toy.toy_model(config)
    reducer = GradientReducer(list(fused_params(model)), mesh)
    tokens, targets = toy.toy_tokens(config, batch=config.train.global_batch)
    often = torch.where(torch.rand(tokens.shape, generator=torch.Generator().manual_seed(2)) < 0.5, 3, tokens)
    rows = slice(mesh.dp.rank * 2, mesh.dp.rank * 2 + 2) if mesh.dp.size > 1 else slice(0, 4)
    arrays = (x[rows].numpy() for x in (often, targets, torch.zeros_like(tokens)))
    reducer.begin()
    run_passes(model, [host_batch(Batch(*arrays))], config, tokens.numel())
    reducer.finish()
    found = toy.gradients(model)
    parts = toy.local_parts(model, exact) if exact else {}
    return found, {k: ((found[k].double() - whole).norm() / whole.norm()).item() for k, whole in parts.items()}


def test_gathering_in_bf16_rounds_no_more_than_bf16_does() -> None:
    """Even if thousands of tokens add to one embedding row."""
    train = {"micro_batch": 2, "global_batch": 4, "seq_len": 1024}
    sections: dict[str, Any] = {"model": {"layers": 1}, "train": train}
    exact, _ = gradients_of_a_frequent_token(config_of({}, **sections))
    _, alone = gradients_of_a_frequent_token(config_of({}, "bfloat16", **sections), exact)
    for shard in ("optimizer", "full"):
        config = config_of({"dp": 2, "shard": shard}, "bfloat16", **sections)
        for _, errors in run_distributed(2, gradients_of_a_frequent_token, config, exact):
            assert errors["embed"] <= 1.5 * alone["embed"], errors
            assert max(errors.values()) <= 1.5 * max(alone.values()), errors


def kept(config: Config) -> tuple[int, int]:
    """Elements of matrices and of norms that this process holds after a step."""
    params = list(fused_params(Trained(config, 1).model))
    return tuple(
        sum(s.tensor.numel() for s in params if (s.parameter.ndim == 2) == matrices) for matrices in (True, False)
    )  # type: ignore[return-value]


def test_replicas_keep_each_row_once() -> None:
    parallel = {"tp": 2, "dp": 2, "layout": "btp-sp", "shard": "full", "shard_outer": True}
    config = config_of(parallel)
    each = run_distributed(4, kept, config)
    norms = (2 * config.model.layers + 1) * config.model.dim
    assert sum(matrices for matrices, _ in each) == parameter_count(config.model) - norms
    assert [vectors for _, vectors in each] == [norms] * 4


CROSSING = [
    ({"gate": "identity"}, {"tp": 1}),
    ({"gate": "dense"}, {"layout": "btp-sp"}),
    ({"gate": "tensor"}, {"layout": "ulysses"}),
    ({"gate": "dense", "over": "svd"}, {"layout": "vanilla"}),
    ({"gate": "tensor"}, {"layout": "btp", "schedule": "interleaved-1f1b", "grouping": False}),
    ({"gate": "tensor"}, {"layout": "btp-sp", "pp": 1, "dp": 2, "shard": "full"}),
]


@pytest.mark.parametrize(
    ("model", "parallel"),
    chosen(
        [
            "({'gate': 'tensor'}, {'layout': 'btp', 'schedule': 'interleaved-1f1b', 'grouping': False})",
            "({'gate': 'tensor'}, {'layout': 'btp-sp', 'pp': 1, 'dp': 2, 'shard': 'full'})",
        ],
        CROSSING,
    ),
)
def test_latents_that_cross_blocks_cross_stages(model: dict[str, Any], parallel: dict[str, Any]) -> None:
    check(config_of({"pp": 2, "tp": 2, **parallel}, model={"family": "lax", **model}))


FAMILIES: list[dict[str, Any]] = [
    *({"family": family} for family in ("dense", "svd", "cola")),
    *({"family": "lax", "gate": gate} for gate in ("identity", "tensor", "dense")),
]


@pytest.mark.parametrize(
    ("model", "schedule"),
    chosen(
        [
            "({'family': 'dense'}, 'gpipe')",
            "({'family': 'svd'}, '1f1b')",
            "({'family': 'cola'}, 'interleaved-1f1b')",
            "({'family': 'lax', 'gate': 'identity'}, 'gpipe')",
            "({'family': 'lax', 'gate': 'tensor'}, '1f1b')",
            "({'family': 'lax', 'gate': 'dense'}, 'interleaved-1f1b')",
        ],
        list(itertools.product(FAMILIES, ("gpipe", "1f1b", "interleaved-1f1b"))),
    ),
)
def test_every_family_under_every_schedule_is_one_process(model: dict[str, Any], schedule: str) -> None:
    parallel = {"pp": 2, "schedule": schedule}
    check(config_of(parallel, model={"layers": 2 if schedule in ("gpipe", "1f1b") else 4, **model}))


def without_gradients(config: Config) -> tuple[list[float], list[torch.Tensor]]:
    """Losses of some micro-batches, and logits after a prompt and after one more token."""
    model, mesh = toy.toy_model(config)
    caches = model.make_caches(2, 7)
    tokens = toy.toy_tokens(config, batch=2)[0]
    logits = [model.next_logits(tokens[:, :6], caches), model.next_logits(tokens[:, 6:7], caches)]
    made = made_up_batches(config, 0)
    batches = [made[number] for number in share(len(made), mesh.dp.rank, mesh.dp.size)]
    inputs = [to_device(batch, config.data.isolate_documents, toy.CPU) for batch in batches]
    with torch.no_grad():
        losses = [model(*each).item() for each in inputs]
    return losses, logits


@pytest.mark.parametrize(
    "parallel",
    [
        {"pp": 2, "tp": 2, "layout": "btp-sp"},
        {"pp": 2, "schedule": "interleaved-1f1b"},
        pytest.param({"pp": 4}, marks=pytest.mark.nightly),
        {"dp": 2, "tp": 2, "shard": "full"},
    ],
    ids=str,
)
def test_evaluation_and_generation_through_any_mesh(parallel: dict[str, Any]) -> None:
    config = config_of(parallel)
    expected, logits = without_gradients(toy.single(config))
    results = run_distributed(config.parallel.world_size, without_gradients, config)
    stages, replicas = config.parallel.pp, config.parallel.dp
    for rank, (losses, ours) in enumerate(results):
        stage, rest = divmod(rank, config.parallel.world_size // stages)
        replica = rest // config.parallel.tp
        share = len(expected) // replicas
        mine = expected[replica * share : (replica + 1) * share]
        assert losses == (pytest.approx(mine, rel=1e-12) if stage == stages - 1 else [0.0] * share)
        for a, b in zip(ours, logits, strict=True):
            assert torch.allclose(a, b, rtol=1e-10, atol=1e-12)
