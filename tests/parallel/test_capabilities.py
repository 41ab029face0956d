"""Features that an older torch lacks are detected before anything starts."""

import pytest

from boost.config import load
from boost.errors import ConfigError
from boost.models import documents
from boost.parallel import capabilities
from boost.parallel.capabilities import require_torch

ZERO_BUBBLE = ["--parallel.pp", "2", "--parallel.schedule", "zero-bubble"]
OUTER = [
    "--parallel.tp",
    "2",
    "--parallel.layout",
    "btp-sp",
    "--parallel.shard",
    "full",
    "--parallel.shard_outer",
    "true",
]


def test_what_an_older_torch_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capabilities, "SHARDS_OVER_SEVERAL_MESHES", False)
    monkeypatch.setattr(capabilities, "SPLITS_BACKWARD_PASSES", False)
    with pytest.raises(ConfigError, match="'zero-bubble' needs a newer torch than .*; use 'interleaved-1f1b'"):
        require_torch(load(None, ZERO_BUBBLE).parallel)
    with pytest.raises(ConfigError, match="shard_outer = true needs a newer torch than .*; set it to false"):
        require_torch(load(None, OUTER).parallel)
    require_torch(load(None, ["--parallel.pp", "2", "--parallel.dp", "2", "--parallel.shard", "full"]).parallel)


def test_the_tested_torch_has_all() -> None:
    import torch

    if tuple(int(n) for n in torch.__version__.split("+")[0].split(".")[:2]) >= (2, 13):
        for words in (ZERO_BUBBLE, OUTER):
            require_torch(load(None, words).parallel)
        assert documents._has_varlen()
