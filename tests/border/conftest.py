"""transformers copies modeling files to a temporary folder of this session, not to the user's cache; datasets is quiet."""

import os
import tempfile
from collections.abc import Iterator

import datasets
import pytest

os.environ["HF_MODULES_CACHE"] = tempfile.mkdtemp(prefix="boost-test-hf-")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    datasets.disable_progress_bars()
    level = datasets.utils.logging.get_verbosity()
    datasets.utils.logging.set_verbosity(datasets.utils.logging.CRITICAL)
    yield
    datasets.utils.logging.set_verbosity(level)
