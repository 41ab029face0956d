"""Configuration of a run: typed, frozen, validated, without torch."""

from boost.config.load import load, presets, to_toml
from boost.config.schema import Config, ModelConfig, ParallelConfig

__all__ = ["Config", "ModelConfig", "ParallelConfig", "load", "presets", "to_toml"]
