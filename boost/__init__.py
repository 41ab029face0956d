"""BOOST: training low-rank bottleneck LLMs fast on many GPUs."""

__version__ = "0.1.0"
