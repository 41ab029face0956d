"""Configuration of a run: typed, frozen, validated, without torch."""

from boost.config.load import for_weights, load, presets, to_toml
from boost.config.schema import Config, ModelConfig, ParallelConfig

__all__ = ["Config", "ModelConfig", "ParallelConfig", "for_weights", "load", "presets", "to_toml"]
