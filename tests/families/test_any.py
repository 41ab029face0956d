"""Every family of `known.FAMILIES`, whatever its mathematics: one process, all layouts, memory, checkpoints, exports, generation.

python -m pytest tests/families --family NAME     # one of a plugin of your own, installed in this environment
"""

from pathlib import Path
from typing import Any

import pytest
import torch

import boost
from boost.config import Config
from boost.config.load import from_tree
from boost.errors import ConfigError
from boost.plan.collectives import step_collectives
from boost.plan.memory import memory
from boost.plan.trace import trace_block
from boost.train.checkpoint import load_weights, open_checkpoint
from tests import references, toy
from tests.cli.commands import Capture, done
from tests.convert.toys import all_logits, bring, give, loaded, save
from tests.distributed import run_distributed
from tests.fake_memory import measure
from tests.families import known
from tests.matrices import (
    GROUPING,
    LOW_RANK_LAYOUTS,
    Row,
    chosen,
    config_of,
    each_value,
    ids,
    memory_config,
    pairwise,
    policies,
)
from tests.trained import compare_with_table

MESHES: tuple[Row, ...] = ({"tp": 2}, {"tp": 2, "dp": 2, "shard": "full"}, {"pp": 2}, {"cp": 2}, {"tp": 2, "pp": 2})
ROWS = pairwise(
    {
        "layout": LOW_RANK_LAYOUTS,
        "grouping": GROUPING,
        "recompute": ("none", "low-rank", "low-rank+attention-output", "full-block"),
        "overlap": ("none", "halves"),
        "mesh": MESHES,
        "kv_heads": (4, 1),
    }
)

DAILY = {str(row) for row in ({}, {"layout": "btp", "norm": "online"}, {"layout": "btp-sp"}, {"layout": "vanilla"})}


def cell(family: str, row: Row) -> Config:
    mesh = {"tp": 1, **row["mesh"]}
    layout = {**row["layout"], "grouping": row["grouping"]} if mesh["tp"] > 1 else {}
    train = {"recompute": row["recompute"], "global_batch": 8}
    parallel = {**layout, **mesh, "overlap": row["overlap"]}
    return config_of(
        {"family": family, "kv_heads": row["kv_heads"], "layers": 3}, parallel, mesh["tp"], "float64", train=train
    )


def trains(tree: dict[str, Any]) -> dict[str, float]:
    known.register()  # in the processes of a pool, too
    return compare_with_table(from_tree(tree))


def reads(path: Path, whole: dict[str, torch.Tensor], tree: dict[str, Any]) -> None:
    """Loads this process's shards of a checkpoint."""
    known.register()
    decoder, mesh = toy.toy_decoder(from_tree(tree), seed=4)
    load_weights(open_checkpoint(path), decoder, mesh)
    expected, found = toy.local_parts(decoder, whole), toy.weights(decoder)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def test_one_process_computes_its_formula(family: str) -> None:
    if family not in known.REFERENCES:
        pytest.skip("add a reference to known.REFERENCES")
    config = toy.toy_config(model={"family": family, "norm_eps": 1e-3})
    decoder, _ = toy.toy_decoder(config)
    model, batch = config.model, toy.toy_tokens(config)
    shape = references.Shape(model.heads, model.kv_heads, model.norm_eps, model.rope_theta, model.mlp_silu)
    loss = decoder(*batch)
    loss.backward()
    expected, gradients = references.loss_and_gradients(known.REFERENCES[family], toy.weights(decoder), shape, *batch)
    torch.testing.assert_close(loss.detach(), expected, rtol=1e-12, atol=0)
    assert toy.worst_error(toy.gradients(decoder), gradients) < 1e-11


@pytest.mark.parametrize("row", each_value(ROWS, ids([tuple(row.values()) for row in ROWS])))
def test_every_layout_trains_as_one_process_does(family: str, row: Row) -> None:
    config = cell(family, row)
    for errors in run_distributed(config.parallel.world_size, trains, config.model_dump()):
        assert errors["initial"] == errors["table"] == 0, errors
        assert max(errors.values()) <= 1e-10, errors


@pytest.mark.parametrize("layout", chosen(DAILY, [{}, *LOW_RANK_LAYOUTS]))
def test_the_planner_knows_its_memory_and_its_collectives(family: str, layout: Row) -> None:
    for policy in ("none", policies(family, layout)[-2], "full-block"):
        config = memory_config(family, layout, policy, "bfloat16", layers=2)
        seen, predicted = measure(config), memory(config)
        assert {c: n for c, n in predicted.by_category.items() if c in seen.activations} == seen.activations, policy
        table = [c.on_the_wire for c in step_collectives(config) if c.layer == 1]
        assert [c.on_the_wire for c in trace_block(config, 1, policy).collectives] == table, policy


@pytest.mark.parametrize("layout", ["btp", "vanilla"])
def test_a_checkpoint_continues_on_another_mesh(family: str, layout: str, tmp_path: Path, store: Path) -> None:
    config = toy.toy_config("float64", model={"family": family}, parallel={"layout": layout, "tp": 2})
    path = save(tmp_path / "c", toy.single(config), store / "tokenizer.json")
    run_distributed(2, reads, path, toy.weights(loaded(path)[0]), config.model_dump())


@torch.no_grad()
def test_transformers_computes_the_same_from_an_export(family: str, tmp_path: Path, store: Path) -> None:
    config = toy.toy_config("float32", model={"family": family})
    path = save(tmp_path / "c", config, store / "tokenizer.json")
    if not vars(type(config.model)).get("modeling"):
        with pytest.raises(ConfigError, match=f"model.family = '{family}' has no class .*ForCausalLM"):
            give(path, tmp_path / "out")
        return
    transformers: Any = pytest.importorskip("transformers")
    tokens = toy.toy_tokens(config)[0]
    expected = all_logits(loaded(path)[0], tokens)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(give(path, tmp_path / "out"), trust_remote_code=True)
    assert (theirs(tokens).logits - expected).abs().max() <= 1e-5 * expected.abs().max()
    back = bring(tmp_path / "out", tmp_path / "back")
    assert torch.equal(all_logits(loaded(back.path)[0], tokens), expected)


def test_commands_take_it(family: str, tmp_path: Path, store: Path, capsys: Capture) -> None:
    own = ["--model.family", family, "--model.vocab_size", "512"]
    run = ["--data.store", store, "--run.dir", tmp_path / "run", "--run.device", "cpu", "--train.steps", "2"]
    small = toy.TOML.replace('family = "cola"', f'family = "{family}"')
    (tmp_path / "run.toml").write_text(small + "[train]\nseq_len = 32\n[parallel]\ntp = 1\n")
    done(capsys, "train", tmp_path / "run.toml", *run)
    assert len(done(capsys, "generate", tmp_path / "run", "--prompt", "def ", "--max-tokens", 4, "--samples", 2)) > 8
    assert family in done(capsys, "inspect", "demo", *own, "--memory", "--parallel.tp", 2)
    assert f"demo: {family}" in done(capsys, "plan", "--model", "demo", *own, "--gpus", 2, "--gpu", "h100-80g")


def test_boost_nn_is_the_same_model(family: str) -> None:
    config = toy.toy_config("float64", model={"family": family})
    sizes = config.model.model_dump(exclude={"init_std"})
    decoder = boost.nn.Decoder(boost.nn.Spec(**sizes, seed=0, dtype=torch.float64))
    ours, _ = toy.toy_decoder(config)
    tokens, _ = toy.toy_tokens(config)
    assert torch.equal(decoder(tokens).flatten(0, 1), all_logits(ours, tokens).flatten(0, 1))
