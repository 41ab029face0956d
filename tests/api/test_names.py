"""The public names: all documented, and nothing heavy imported; families from other packages."""

import subprocess
import sys
from collections.abc import Iterator
from typing import Literal

import pytest
import torch

import boost
from boost.config.families import CoLAConfig, ModelConfig
from boost.config.load import from_tree
from boost.config.section import Width
from boost.errors import ConfigError


@pytest.fixture
def family() -> Iterator[type[ModelConfig]]:
    @boost.register_family
    class Narrow(CoLAConfig):
        """CoLA with a fixed rank."""

        family: Literal["narrow-cola"] = "narrow-cola"
        rank: Width = 4

        @classmethod
        def derived(cls, values):  # type: ignore[no-untyped-def]
            return super().derived(values) | {"rank": 4}

    yield Narrow
    del ModelConfig.choices["narrow-cola"]


def test_a_family_of_ones_own_is_known_everywhere(family: type[ModelConfig]) -> None:
    model = boost.nn.Decoder(family="narrow-cola", vocab_size=64, dim=32, ffn_dim=48, layers=1, heads=4)
    assert model.layers[0].attn.q_proj.rank == 4
    tokens = torch.arange(8).view(1, 8)
    model(tokens, tokens).backward()
    assert type(from_tree({"model": {"family": "narrow-cola"}}).model) is family


def test_a_class_without_a_name_of_its_own_is_refused() -> None:
    class Nameless(CoLAConfig):
        """CoLA again."""

    with pytest.raises(ConfigError, match="Nameless does not define its own family name"):
        boost.register_family(Nameless)


def test_every_public_name_exists_and_is_documented() -> None:
    for package in (boost, boost.nn):
        for name in package.__all__:
            assert getattr(package, name).__doc__, name
            assert name in dir(package)
    with pytest.raises(AttributeError, match="module 'boost' has no attribute 'modle'"):
        boost.modle  # noqa: B018


@pytest.mark.slow
def test_it_imports_no_torch() -> None:
    code = "import sys, boost; sys.exit('torch' in sys.modules or 'pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.slow
def test_a_mistake_in_the_configuration_of_a_trainer_needs_no_torch() -> None:
    code = "import sys, boost; boost.Hook, boost.Stopped\ntry: boost.Trainer('dmo')\n"
    code += "except boost.BoostError as error: print(error, file=sys.stderr)\nassert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "did you mean 'demo'?" in done.stderr, done.stderr
