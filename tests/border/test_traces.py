"""The planner runs the decoder on an autograd of its own (`boost.plan.tape`). Torch's, on fake tensors, is its oracle: for random
models, meshes and policies, the same tensors are saved, the same products run, and the same collectives are sent."""

import random
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from boost.config import Config
from boost.errors import BoostError
from boost.plan.categories import SAVED
from boost.plan.collectives import step_collectives
from boost.plan.memory import memory
from boost.plan.timing import block_work, ends_work
from boost.plan.trace import pass_of_block
from boost.plan.work import GEMM
from tests import toy
from tests.border.draws import Seeds, drawn, run
from tests.fake_memory import measure
from tests.matrices import DENSE_LAYOUTS, LOW_RANK_LAYOUTS

aten = torch.ops.aten
PRODUCTS = (aten.mm, aten.addmm, aten.addmm_, aten.bmm)
IN_PLACE = {aten.addmm_: lambda _, a, b, **__: 2 * a[0] * a[1] * b[1]}
"""FLOPs by the shapes of the operands, for a product that torch's counter does not know."""


def draw_config(draw: random.Random) -> Config:
    """A legal configuration."""
    while True:
        family = draw.choice(["cola", "svd", "lax", "dense"])
        heads, micro_batch = draw.choice([4, 8]), draw.randint(1, 4)
        model: dict[str, Any] = {
            "family": family, "dim": draw.choice([64, 96, 128]), "ffn_dim": draw.choice([160, 192, 352]), "heads": heads,
            "kv_heads": draw.choice([1, 2, heads]), "layers": draw.randint(1, 3), "vocab_size": draw.choice([56, 1024]),
            "attn_bias": draw.choice(["none", "qkv", "qkvo"]), "qk_norm": draw.random() < 0.3, "tied": draw.random() < 0.3,
            "mlp_silu": draw.random() < 0.7, "nope_layers": [0] * draw.randint(0, 1),
        }  # fmt: skip
        if draw.random() < 0.3:
            model["head_dim"] = draw.choice([8, 16, 20])
        if family != "dense":
            model |= {"rank": draw.choice([16, 20, 32]), "ranks": draw.choice([{}, {"attn.q": 8, "mlp.up": 24}])}
        if family == "lax":
            model |= {"over": draw.choice(["svd", "cola"]), "gate": draw.choice(["identity", "tensor", "dense"])}
        layout = draw.choice([{"layout": "single"}, *(DENSE_LAYOUTS if family == "dense" else LOW_RANK_LAYOUTS)])
        parallel = {**layout, "grouping": draw.random() < 0.7, "overlap": draw.choice(["none", "halves"])}
        parallel |= {"tp": draw.choice([1, 2, 4]), "cp": draw.choice([1, 2, 4])}
        train = {
            "seq_len": draw.choice([12, 16, 24, 64]), "micro_batch": micro_batch, "global_batch": micro_batch * draw.randint(1, 2),
            "recompute": draw.choice(["none", "low-rank", "low-rank+attention-output", "low-rank-sharded", "full-block"]),
            "recompute_every": draw.randint(1, 2), "working_copies": draw.random() < 0.5,
        }  # fmt: skip
        try:
            return toy.toy_config(draw.choice(["bfloat16", "float32"]), model=model, parallel=parallel, train=train)
        except BoostError:
            continue


def compare(seed: int) -> str:
    config = draw_config(random.Random(seed))
    with FlopCounterMode(display=False, custom_mapping=IN_PLACE) as counter:
        saved = measure(config).activations
    predicted = memory(config).by_category
    assert saved == {category: size for category, size in predicted.items() if category in SAVED and size}, config

    train, layers = config.train, range(config.model.layers)
    work = ends_work(config, True, True, on_gpu=False)
    for layer, policy in zip(layers, train.recompute_by_layer(len(layers)), strict=True):
        work += block_work(config, layer, policy, on_gpu=False)
    flops = counter.get_flop_counts()["Global"]
    products = sum(times * each.flops for each, times in work.items() if each.kernel == GEMM)
    assert products == sum(flops.get(product, 0) for product in PRODUCTS), config

    table = [sent for sent in step_collectives(config) if sent.phase != "step"]
    for layer in layers:
        traced = [sent.on_the_wire for sent in pass_of_block(config, layer).collectives]
        listed = [sent.on_the_wire for sent in table if sent.layer == layer]
        listed = listed[: len(listed) * train.micro_batch // train.global_batch]  # those of one micro-batch
        if config.parallel.overlap == "halves":  # the table does not say how halves interleave
            traced, listed = sorted(traced, key=str), sorted(listed, key=str)
        assert traced == listed, (layer, config)
    return "equal"


@pytest.mark.slow
@drawn(6, 400)
def test_traces_are_those_of_torch(seeds: Seeds) -> None:
    run(compare, seeds, at_least=0.99)
