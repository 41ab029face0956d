"""`import boost` exposes the public names and imports nothing heavy."""

import subprocess
import sys

import pytest

import boost


def test_every_public_name_exists_and_is_documented() -> None:
    for name in boost.__all__:
        found = getattr(boost, name)
        assert found.__doc__, name
        assert name in dir(boost)
    with pytest.raises(AttributeError, match="module 'boost' has no attribute 'modle'"):
        boost.modle  # noqa: B018


def test_nn_is_documented() -> None:
    for name in boost.nn.__all__:
        assert getattr(boost.nn, name).__doc__, name


@pytest.mark.slow
def test_it_imports_no_torch() -> None:
    code = "import sys, boost; sys.exit('torch' in sys.modules or 'pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
