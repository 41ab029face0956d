"""The public names: all documented, and nothing heavy imported."""

import subprocess
import sys

import pytest

import boost
from boost.errors import ConfigError
from boost.families import CoLAConfig


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
    code = "import sys, boost; boost.elementwise_rule(print)\n"
    code += "sys.exit(bool({'torch', 'pydantic', 'boost.plan'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.slow
def test_a_mistake_in_the_configuration_of_a_trainer_needs_no_torch() -> None:
    code = "import sys, boost; boost.Hook, boost.Stopped\ntry: boost.Trainer('dmo')\n"
    code += "except boost.BoostError as error: print(error, file=sys.stderr)\nassert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "did you mean 'demo'?" in done.stderr, done.stderr
