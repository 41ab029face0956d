"""Small models for tests: a decoder of any configuration in this process or as one of a TP group."""

import functools
from typing import Any

import torch
from torch import Tensor

from boost.config import Config
from boost.config.load import from_tree
from boost.config.schema import ParallelConfig
from boost.models.decoder import Decoder
from boost.models.init import initialize
from boost.models.interface import local_slice
from boost.models.stored import storages
from boost.parallel.mesh import Mesh, mesh_of
from boost.train.model import build_decoder

MODEL = {"vocab_size": 64, "dim": 32, "ffn_dim": 48, "layers": 2, "heads": 8, "kv_heads": 2}
CPU = torch.device("cpu")


def toy_config(dtype: str = "float64", **sections: Any) -> Config:
    """A tiny model in `dtype`; keyword sections (model, parallel, train, ...) override it."""
    family = sections.get("model", {}).get("family", "cola")
    low_rank = {} if family == "dense" else {"rank": 8}
    tree = {
        **sections,
        "model": {**MODEL, **low_rank, **sections.get("model", {})},
        "train": {
            "seq_len": 16, "micro_batch": 2, "global_batch": 4,
            "param_dtype": "float32" if dtype == "bfloat16" else dtype, "compute_dtype": dtype,
            **sections.get("train", {}),
        },
    }  # fmt: skip
    return from_tree(tree)


def single(config: Config) -> Config:
    """The same model on one process."""
    return config.model_copy(update={"parallel": config.parallel.model_copy(update={"tp": 1, "dp": 1})})


def toy_decoder(config: Config, seed: int = 0) -> tuple[Decoder, Mesh]:
    """An initialised decoder and the mesh it stands on: this process group, or no group for one process."""
    mesh = toy_mesh(config.parallel.tp, config.parallel.dp) if config.parallel.world_size > 1 else Mesh(CPU)
    decoder = build_decoder(config, mesh)
    initialize(decoder, seed)
    return decoder, mesh


@functools.cache
def toy_mesh(tp: int, dp: int = 1) -> Mesh:
    """Process groups are made once for each mesh: pools of processes live across tests."""
    return mesh_of(ParallelConfig(tp=tp, dp=dp), CPU)


def toy_tokens(config: Config, seed: int = 1, batch: int | None = None) -> tuple[Tensor, Tensor]:
    """(tokens, targets), [B, S] each."""
    generator = torch.Generator().manual_seed(seed)
    shape = (batch or config.train.micro_batch, config.train.seq_len + 1)
    tokens = torch.randint(0, config.model.vocab_size, shape, generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def gradients(decoder: Decoder) -> dict[str, Tensor]:
    """This process's part of every gradient, by mathematical name."""
    return {part.parameter.name: part.view(s.tensor.grad) for s in storages(decoder) for part in s.parts}


def weights(decoder: Decoder) -> dict[str, Tensor]:
    """This process's part of every weight, by mathematical name."""
    return {part.parameter.name: part.view(s.tensor.detach()) for s in storages(decoder) for part in s.parts}


def local_parts(decoder: Decoder, whole: dict[str, Tensor]) -> dict[str, Tensor]:
    """What this process should hold of tensors of global shape."""
    return {
        part.parameter.name: local_slice(part.parameter, decoder.layout, whole[part.parameter.name])
        for s in storages(decoder)
        for part in s.parts
    }


def worst_error(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest relative error over tensors: largest difference over largest expected magnitude."""
    assert actual.keys() == expected.keys()
    return max(
        ((actual[k] - expected[k]).abs().max() / expected[k].abs().max().clamp_min(1e-300)).item() for k in expected
    )
