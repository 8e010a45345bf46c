"""The effective config: every key with its value, as a run folder holds it."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from trainkit.config import yaml12
from trainkit.config.schema import RunConfig
from trainkit.config.validation import validation_problems
from trainkit.config.version import refuse_newer
from trainkit.config.yamlfile import read_yaml_file
from trainkit.errors import ConfigError


def dump_effective(config: RunConfig) -> str:
    """The whole config as YAML, in the order of the schema; `read_effective` gives an equal one."""
    return yaml12.dump(config.model_dump(mode="json", by_alias=True))


def read_effective(path: str | Path) -> RunConfig:
    """The config that `dump_effective` wrote; no layer, environment or default changes it.

    Raises ConfigError.
    """
    entry = read_yaml_file(Path(path), str(path))
    refuse_newer(entry)
    try:
        return RunConfig.model_validate(entry.plain())
    except ValidationError as error:
        raise ConfigError(validation_problems(error, entry)) from None
