"""Defines run configs: their schema, loading, and the origin of each value."""

from trainkit.config.load import dump_effective, load_config, read_effective
from trainkit.config.loaded import InvalidConfig, LoadedConfig
from trainkit.config.schema import RunConfig

__all__ = ["InvalidConfig", "LoadedConfig", "RunConfig", "dump_effective", "load_config", "read_effective"]
