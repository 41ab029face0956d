"""The layout that evaluates a checkpoint: its own if it fits the processes, else another that computes the same function."""

from argparse import Namespace
from typing import Any

import pytest

from boost.cli.inference import inference_config
from boost.config import Config
from boost.config.schema import ParallelConfig
from boost.errors import ConfigError
from tests import toy


def layout_of(parallel: dict[str, Any], tp: int, batch: int = 0, **sections: Any) -> str:
    return on_cpus(toy.toy_config(parallel=parallel, **sections), tp, batch).layout


def on_cpus(saved: Config, tp: int, batch: int = 0) -> ParallelConfig:
    return inference_config(saved, Namespace(tp=tp, device="cpu", batch=batch, seq_len=0)).parallel


def test_a_checkpoint_keeps_its_layout_and_its_choices() -> None:
    saved = toy.toy_config(parallel={"layout": "btp", "norm": "sync", "grouping": False, "tp": 2, "dp": 2})
    parallel = on_cpus(saved, 4)
    assert (parallel.layout, parallel.norm, parallel.grouping, parallel.tp, parallel.dp) == ("btp", "sync", False, 4, 1)
    saved = toy.toy_config(parallel={"layout": "vanilla", "vanilla": "published", "tp": 2})
    assert on_cpus(saved, 4).vanilla == "published"


@pytest.mark.parametrize(
    ("family", "trained_with", "expected"),
    [
        ("cola", "single", "btp"),
        ("cola", "megatron", "btp"),
        ("dense", "btp", "megatron-sp"),
        ("svd", "btp-sp", "btp-sp"),
    ],
)
def test_what_one_process_trained_is_cut_as_its_family_allows(family: str, trained_with: str, expected: str) -> None:
    assert layout_of({"layout": trained_with}, 2, model={"family": family}) == expected


def test_choices_of_a_layout_that_one_process_never_used_do_not_stand_in_the_way() -> None:
    assert layout_of({"layout": "btp", "norm": "sync"}, 2, model={"family": "dense"}) == "megatron-sp"
    assert layout_of({"layout": "vanilla", "vanilla": "published"}, 2, model={"rank": 7}) == "btp"


def test_tokens_or_a_rank_that_the_processes_cannot_share_take_a_layout_that_does_not_cut_them() -> None:
    assert layout_of({"layout": "vanilla", "tp": 2}, 4, model={"rank": 6}) == "btp"
    odd = {"train": {"seq_len": 15, "micro_batch": 2, "global_batch": 2}}
    assert layout_of({"layout": "btp-sp", "tp": 2}, 2, **odd) == "btp-sp"
    assert layout_of({"layout": "btp-sp", "tp": 2}, 4, **odd) == "btp"
    assert layout_of({"layout": "btp-sp", "tp": 2}, 4, batch=4, **odd) == "btp-sp"
    assert layout_of({"layout": "megatron-sp", "tp": 2}, 4, model={"family": "dense"}, **odd) == "megatron"


@pytest.mark.parametrize("tp", [0, 3])
def test_a_number_of_processes_that_cannot_be(tp: int) -> None:
    with pytest.raises(ConfigError, match=f"tp = {tp}"):
        on_cpus(toy.toy_config(), tp)
