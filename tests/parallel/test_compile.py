"""Collectives work under torch.compile: every layout's block is one graph and computes the same function."""

from typing import Any

import pytest
import torch

from boost.config import Config
from boost.measure.counting import KINDS
from boost.plan.collectives import micro_batch_collectives
from tests import toy
from tests.distributed import run_distributed
from tests.matrices import ONE_EACH, chosen, ids, one_in

pytestmark = pytest.mark.slow


class CountingBackend:
    """Backend that runs eager kernels after autograd tracing, and records the collectives of both graphs."""

    def __init__(self) -> None:
        self.collectives: list[tuple[str, str]] = []

    def __call__(self, graph: Any, inputs: Any) -> Any:
        from functorch.compile import min_cut_rematerialization_partition
        from torch._dynamo.backends.common import aot_autograd

        return aot_autograd(
            fw_compiler=self._noting("forward"),
            bw_compiler=self._noting("backward"),
            partition_fn=min_cut_rematerialization_partition,  # as inductor does; respects recomputation
        )(graph, inputs)

    def _noting(self, phase: str) -> Any:
        from functorch.compile import make_boxed_func

        def compiler(graph: Any, inputs: Any) -> Any:
            for node in graph.graph.nodes:
                name = getattr(getattr(node.target, "_schema", None), "name", "")
                if name in KINDS:
                    self.collectives.append((phase, KINDS[name]))
            return make_boxed_func(graph.forward)

        return compiler


def compare(config: Config, ids: torch.Tensor | None = None) -> tuple[float, float, bool, int]:
    """Relative errors of loss and gradients of a model of compiled blocks, whether their graphs contain the table's collectives of
    a block, and the number of graphs."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    decoder, _ = toy.toy_decoder(config)
    tokens, backend = toy.toy_tokens(config, batch=config.train.micro_batch), CountingBackend()
    found = []
    for compiled in (False, True):
        for block in decoder.blocks if compiled else ():
            block.compile(fullgraph=True, backend=backend)
        decoder.zero_grad()
        loss = decoder(*tokens, ids)
        loss.backward()
        found.append((loss.item(), {name: value.clone() for name, value in toy.gradients(decoder).items()}))
    (loss, gradients), (compiled_loss, compiled_gradients) = found
    recompute = config.train.recompute_by_layer(config.model.layers)
    table = micro_batch_collectives(
        config.model, config.parallel, tokens[0].numel(), config.train.compute_dtype, recompute=recompute
    )
    same = backend.collectives == [(c.on_the_wire[0], c.kind) for c in table if c.layer is not None]
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return abs(compiled_loss / loss - 1), toy.worst_error(compiled_gradients, gradients), same, graphs


def config_of(family: str, parallel: dict[str, Any], recompute: str = "none") -> Config:
    """Recomputing blocks also have biases and norms of heads."""
    heads = {"attn_bias": "qkvo", "qk_norm": True} if recompute != "none" else {}
    model, train = {"family": family, "layers": 1, **heads}, {"recompute": recompute}
    return toy.toy_config("float64", model=model, parallel={**parallel, "tp": 2}, train=train)


@pytest.mark.parametrize(("model", "parallel"), chosen(["cola-4-ulysses-True"], ONE_EACH, ids(ONE_EACH)))
def test_a_block_is_one_graph(model: dict[str, Any], parallel: dict[str, Any]) -> None:
    """On every commit, those whose collectives and functions no recomputing block below has."""
    for loss, gradients, same, _ in run_distributed(2, compare, config_of(model["family"], parallel)):
        assert max(loss, gradients) <= 1e-12
        assert same


@pytest.mark.nightly
def test_blocks_with_biases_and_norms_of_heads_are_one_graph_each() -> None:
    """One for blocks with RoPE, and one for those without."""
    model = {"layers": 4, "attn_bias": "qkvo", "qk_norm": True, "nope_layers": [1, 3], "head_dim": 6}
    config = toy.toy_config("float64", model=model, parallel={"tp": 2})
    for loss, gradients, _, graphs in run_distributed(2, compare, config):
        assert max(loss, gradients) <= 1e-12
        assert graphs == 2


RECOMPUTING = [
    ({"layout": "btp"}, "low-rank+attention-output"),
    ({"layout": "btp", "norm": "sync"}, "low-rank"),
    ({"layout": "btp-sp"}, "low-rank"),
    ({"layout": "btp-sp"}, "low-rank-sharded"),
    ({"layout": "vanilla"}, "low-rank+attention-output"),
    ({"layout": "vanilla", "vanilla": "published"}, "low-rank"),
]
"""Every layout and every policy. test_recompute.py covers every pair of them, without a compiler."""


@pytest.mark.parametrize(("parallel", "policy"), one_in(3, RECOMPUTING))
def test_a_recomputing_block_is_one_graph(parallel: dict[str, Any], policy: str) -> None:
    """The graphs also contain the table's collectives; under the low-rank policies, recomputation adds none."""
    config = config_of("cola", parallel, policy)
    for loss, gradients, same, _ in run_distributed(2, compare, config):
        assert max(loss, gradients) <= 1e-12
        assert same


@pytest.mark.nightly
@pytest.mark.parametrize("layout", ["btp", "btp-sp"])
def test_blocks_with_halves_of_one_sequence_are_one_graph(layout: str) -> None:
    """The keys and values passed from the first half to the second stay inside the graph."""
    parallel, train = {"tp": 2, "layout": layout, "overlap": "halves"}, {"micro_batch": 1, "global_batch": 1}
    config = toy.toy_config("float64", model={"layers": 3}, parallel=parallel, train=train)
    ids = torch.arange(config.train.seq_len)[None] // 7
    for loss, gradients, _, graphs in run_distributed(2, compare, config, ids):
        assert max(loss, gradients) <= 1e-12
        assert graphs == 1


@pytest.mark.parametrize(("recompute_every", "graphs"), [pytest.param(1, 1, marks=pytest.mark.nightly), (2, 2)])
@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_blocks_share_their_graphs(recompute_every: int, graphs: int, tp: int) -> None:
    """Blocks share graphs: otherwise a model of 80 blocks would compile for an hour and hit torch's limit."""
    train = {"recompute": "low-rank", "recompute_every": recompute_every}
    parallel = {"layout": "btp", "tp": 2} if tp == 2 else {}
    config = toy.toy_config("float64", model={"layers": 4}, parallel=parallel, train=train)
    for loss, gradients, _, made in run_distributed(tp, compare, config):
        assert max(loss, gradients) <= 1e-12
        assert made <= graphs, made
