"""The Python API beyond `boost.nn`: models, training, sharding, and the replacement of linears with low-rank factors."""
