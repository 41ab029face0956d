"""One thread a process, as in every multi-process run; nothing on the network; one small token store for all tests."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# No verdict depends on how fast a machine is.
settings.register_profile("boost", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("boost")


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A token store of a few modules of the standard library, with a tokenizer of 300 tokens."""
    import argparse
    import ast
    import json.decoder
    import textwrap

    from boost.data.prepare import PrepareOptions, prepare

    path = tmp_path_factory.mktemp("corpus") / "store"
    inputs = tuple(str(module.__file__) for module in (argparse, ast, json.decoder, textwrap))
    prepare(PrepareOptions(out=path, inputs=inputs, tokenizer="train:300", heldout=0.1))
    return path
