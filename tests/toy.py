"""Small models for tests: a decoder of any configuration, on one process or as one rank of a TP group."""

import functools
from typing import Any

import torch
from torch import Tensor

from boost.config import Config
from boost.config.load import from_tree
from boost.config.schema import ModelConfig, ParallelConfig
from boost.measure import exactness
from boost.models.decoder import Decoder
from boost.models.init import initialize
from boost.parallel.mesh import Mesh, mesh_of
from boost.train import run
from boost.train.model import Model, build_decoder, build_model, initialize_model

run.SAMPLE_TOKENS = 8  # over TP, 120 tokens take longer than a short run

MODEL = {"vocab_size": 64, "dim": 32, "ffn_dim": 48, "layers": 2, "heads": 8, "kv_heads": 2}
CPU = torch.device("cpu")
ALONE, single = exactness.ALONE, exactness.alone
gradients, weights, local_parts = exactness.gradients, exactness.weights, exactness.local_parts
worst_error = exactness.worst_error
TOML = """
[model]
family = "cola"
vocab_size = 300
dim = 32
ffn_dim = 48
layers = 2
heads = 4
rank = 8
"""
"""A tiny model for whole commands, on the corpus of the tests."""


def toy_config(dtype: str = "float64", **sections: Any) -> Config:
    """A tiny model in `dtype`; keyword sections (model, parallel, train, ...) override it."""
    family = ModelConfig.choice(sections.get("model", {}))
    tree = {
        **sections,
        "model": {**MODEL, **family.smallest(MODEL["dim"]), **sections.get("model", {})},
        "train": {
            "seq_len": 16, "micro_batch": 2, "global_batch": 4,
            "param_dtype": "float32" if dtype == "bfloat16" else dtype, "compute_dtype": dtype,
            **sections.get("train", {}),
        },
    }  # fmt: skip
    return from_tree(tree)


def toy_decoder(config: Config, seed: int = 0) -> tuple[Decoder, Mesh]:
    """An initialized decoder and its mesh: the current process group, or none for one process."""
    place = toy_mesh(config)
    decoder = build_decoder(config, place)
    initialize(decoder, seed)
    return decoder, place


def toy_model(config: Config, seed: int = 0) -> tuple[Model, Mesh]:
    """The same model as trained: split into pipeline stages and sharded over replicas, if `config` says so."""
    place = toy_mesh(config)
    model = build_model(config, place)
    initialize_model(model, seed)
    return model, place


def toy_mesh(config: Config) -> Mesh:
    """The mesh of a configuration."""
    parallel = config.parallel
    return mesh(parallel.tp, parallel.dp, parallel.pp, parallel.cp) if parallel.world_size > 1 else Mesh(CPU)


@functools.cache
def mesh(tp: int, dp: int = 1, pp: int = 1, cp: int = 1) -> Mesh:
    """Creates process groups once per mesh and pool call (`tests/distributed.py`)."""
    return mesh_of(ParallelConfig(tp=tp, dp=dp, pp=pp, cp=cp), CPU)


def toy_tokens(config: Config, seed: int = 1, batch: int | None = None) -> tuple[Tensor, Tensor]:
    """(tokens, targets), [B, S] each."""
    tokens, targets = exactness.made_up_tokens(config, seed, batch or config.train.micro_batch)
    return torch.from_numpy(tokens), torch.from_numpy(targets)


def flip(tensor: Tensor, element: int, bit: int) -> None:
    """Inverts one bit of one element in place."""
    integers = {8: torch.int64, 4: torch.int32, 2: torch.int16}[tensor.element_size()]
    width = tensor.element_size() * 8
    tensor.detach().view(-1).view(integers)[element] ^= (1 << bit) - (1 << width if bit == width - 1 else 0)
