"""Working copies: weights in train.compute_dtype, cast once per step (train.working_copies)."""

from boost.config.layouts import spec_of
from boost.config.schema import Config, ParallelConfig


def has_working_copies(config: Config) -> bool:
    """Whether a run uses working copies. It does not if the dtypes are equal, if weights are sharded (they are cast before the
    all-gather), or with a zero-bubble schedule (it needs the gradients of the stage's own parameters)."""
    parallel, train = config.parallel, config.train
    is_cast = train.compute_dtype != train.param_dtype
    return train.working_copies and is_cast and not config.shards_weights and not parallel.splits_backward


def may_have_copy(role: str, parallel: ParallelConfig) -> bool:
    """Whether weights of this role can have a working copy: factors, dense weights and the head, unless the layout scales them
    before the cast (`LayoutSpec.scaled`). The embedding has none because a step casts only some of its rows; norms and latent
    gates are small."""
    return role.endswith((".A", ".B", ".W", "head")) and role not in spec_of(parallel).scaled
