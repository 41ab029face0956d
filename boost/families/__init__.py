"""The families that come with BOOST. Each describes itself as a family of another package does, and is known elsewhere by that
description alone: nothing imports this package but by name (`boost.config.section`)."""

# Messages list them in this order.
# isort: off
from boost.families.dense import DenseConfig
from boost.families.svd import SVDConfig
from boost.families.cola import CoLAConfig
from boost.families.lax import LaXConfig

__all__ = ["DenseConfig", "SVDConfig", "CoLAConfig", "LaXConfig"]
