"""`--family NAME`: the families that these tests run."""

from collections.abc import Iterator

import pytest

from tests.families import known


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--family", action="append", default=[], help="a registered family, such as one of an installed plugin"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "family" in metafunc.fixturenames:
        own = metafunc.config.getoption("--family")
        late = known.NIGHTLY + known.MORE_BY_NIGHT * bool({"row", "layout"} & set(metafunc.fixturenames))
        usual = [pytest.param(name, marks=[pytest.mark.nightly] * (name in late)) for name in known.REFERENCES]
        metafunc.parametrize("family", own or usual)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    with known.registered():
        yield
