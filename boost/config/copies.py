"""Whether the passes of a step use working copies: weights in train.compute_dtype, cast once a step (train.working_copies)."""

from boost.config.layouts import spec_of
from boost.config.schema import Config, ParallelConfig


def has_working_copies(config: Config) -> bool:
    """Whether some weights of a run have working copies. Not where dtypes are equal; not where weights are sharded, because they
    are cast before they are gathered; not under zero bubble, which looks for the gradients of a stage's own parameters."""
    parallel, train = config.parallel, config.train
    is_cast = train.compute_dtype != train.param_dtype
    return train.working_copies and is_cast and not config.shards_weights and not parallel.splits_backward


def may_have_copy(role: str, parallel: ParallelConfig) -> bool:
    """Whether weights of this role have one: factors, dense weights and the head, unless the layout scales them before it casts
    them (`LayoutSpec.scaled`). Not the embedding, of which only some rows are cast, nor norms and latent gates: they are small."""
    return role.endswith((".A", ".B", ".W", "head")) and role not in spec_of(parallel).scaled
