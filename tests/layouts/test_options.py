"""What acts between projections and heads (biases, qk-norm, blocks without RoPE, heads of any width), and a table that is both
embedding and head, are the same function under every layout, recomputation policy, overlap, and way to divide layers, replicas and
sequences."""

import pytest
import torch

from boost.config import Config
from boost.config.attention import crosses_as_heads
from boost.models.decoder import Decoder
from boost.models.fused import fused_params, local_slice
from boost.optim.adamw import decays
from tests import toy
from tests.distributed import run_distributed
from tests.matrices import (
    GROUPING,
    LAYOUTS,
    ONE_EACH,
    Row,
    config_of,
    each_value,
    family_of,
    ids,
    one_in,
    pairwise,
    policies,
)
from tests.trained import require_one_process

ALL: Row = {"attn_bias": "qkvo", "qk_norm": True, "nope_layers": [1], "head_dim": 6}
SPREAD: dict[str, Row] = {
    "": {},
    "pp": {"pp": 2},
    "interleaved": {"pp": 2, "schedule": "interleaved-1f1b"},
    "cp": {"cp": 2},
    "cp 4": {"cp": 4},
    "dp": {"dp": 2},
    "optimizer": {"dp": 2, "shard": "optimizer"},
    "full": {"dp": 2, "shard": "full"},
    "outer": {"dp": 2, "shard": "full", "shard_outer": True},
}


MODELS = pairwise(
    {
        "attn_bias": ("none", "qkv", "qkvo"),
        "qk_norm": (False, True),
        "nope_layers": ([], [1]),
        "head_dim": (None, 6),
        "tied": (False, True),
    },
    # A bias of keys has no gradient if neither RoPE nor a norm follows it: softmax ignores what all keys of a query share.
    lambda row: row["attn_bias"] == "none" or not row["nope_layers"] or row["qk_norm"],
)


BATCHES = pairwise({"overlap": ("none", "halves"), "sequences": (1, 2), "documents": (False, True)})


def is_legal(row: Row) -> bool:
    tp, _ = row["heads"]
    if tp == 1 and not (row["spread"].startswith("cp") and row["layout"] in (LAYOUTS[0], LAYOUTS[-1])):
        return False  # without TP all layouts are the same
    if row["spread"] == "outer" and row["layout"]["layout"] not in ("btp-sp", "btp-cp", "ulysses"):
        return False
    allowed = ("none", *policies(family_of(row["layout"]), row["layout"]))
    return row["policy"] in allowed and not (tp == 4 and row["spread"]) and not (tp == 2 and row["spread"] == "cp 4")


ROWS = pairwise(
    {
        "layout": LAYOUTS,
        "model": MODELS,
        "heads": ((2, 8), (2, 1), (4, 2), (1, 8), (1, 1)),
        "grouping": GROUPING,
        "policy": ("none", "low-rank", "low-rank+attention-output", "low-rank-sharded", "full-block"),
        "batch": BATCHES,
        "spread": tuple(SPREAD),
    },
    is_legal,
)


def configured(row: Row) -> Config:
    (tp, kv_heads), batch, spread = row["heads"], row["batch"], SPREAD[row["spread"]]
    model = {"family": family_of(row["layout"]), "kv_heads": kv_heads, "layers": 4 if spread.get("schedule") else 2}
    model |= {name: value for name, value in row["model"].items() if value}
    parallel = {**row["layout"], **spread, "grouping": row["grouping"], "overlap": batch["overlap"]}
    train = {"micro_batch": batch["sequences"], "global_batch": 4, "recompute": row["policy"]}
    data = {"isolate_documents": batch["documents"]}
    return config_of(model, parallel, tp, "float64", train=train, data=data)


@pytest.mark.slow
@pytest.mark.parametrize("row", each_value(ROWS, ids([(row,) for row in ROWS])))
def test_every_pair_of_options_is_the_single_process_function(row: Row) -> None:
    require_one_process(configured(row))


def test_rows_exchange_heads_and_gather_keys() -> None:
    ways = {
        crosses_as_heads(config.model, config.parallel) for config in map(configured, ROWS) if config.parallel.cp > 1
    }
    assert ways == {True, False}


def biased(config: Config) -> Decoder:
    """A decoder with biases as training would have moved them from zero."""
    decoder, _ = toy.toy_decoder(config)
    for fused in fused_params(decoder):
        (*_, last) = fused.slices
        if last.parameter.role.startswith("bias."):
            whole = torch.linspace(-1, 1, last.parameter.size, dtype=torch.float64)
            fused.parameter.data.copy_(local_slice(last.parameter, decoder.layout, whole))
    return decoder


def next_logits(config: Config) -> torch.Tensor:
    """Logits after a prompt and one more token."""
    decoder, (tokens, _) = biased(config), toy.toy_tokens(config)
    caches = decoder.make_caches(2, 16)
    decoder.next_logits(tokens[:, :7], caches)
    return decoder.next_logits(tokens[:, 7:8], caches)


@pytest.mark.parametrize("family", ["cola", "dense"])
def test_generation_continues_what_a_whole_pass_computes(family: str) -> None:
    config = config_of({"family": family, "kv_heads": 2, **ALL}, {}, 1, "float64")
    tokens, _ = toy.toy_tokens(config)
    whole = biased(config).logits_of(tokens[:, :8], torch.tensor([7, 15]))
    torch.testing.assert_close(next_logits(config), whole, rtol=1e-12, atol=1e-12)


GENERATING = [(*each, 2 + 2 * (number % 2)) for number, each in enumerate(ONE_EACH)]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "parallel", "tp"), one_in(2, GENERATING, ids(GENERATING)))
def test_a_layout_generates_from_the_same_logits(model: Row, parallel: Row, tp: int) -> None:
    config = config_of({**model, **ALL, "kv_heads": 2}, parallel, tp, "float64")
    expected = next_logits(toy.single(config))
    for actual in run_distributed(tp, next_logits, config):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


def test_biases_and_norms_of_heads_do_not_decay_and_start_neutral() -> None:
    config = config_of({"family": "dense", **ALL}, {}, 1, "float64", optim={"decay_on": "matrices"})
    decoder, _ = toy.toy_decoder(config)
    small = {p.slices[0].parameter.name: p for p in fused_params(decoder) if len(p.parameter.shape) == 1}
    named = [f"layers.1.attn.{name}" for name in ("q.bias", "k.bias", "v.bias", "o.bias", "q.norm", "k.norm")]
    assert set(named) <= small.keys()
    assert not any(decays(fused, config.optim) for fused in small.values())
    assert all(decays(fused, type(config.optim)()) for fused in small.values()), "the default, decay_on = 'all'"
    assert {name: small[name].parameter.unique().item() for name in named} == {
        n: float(n.endswith("norm")) for n in named
    }
