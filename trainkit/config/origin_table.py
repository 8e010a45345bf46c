"""Every value of a config beside where it came from, as lines to read."""

from __future__ import annotations

from trainkit.config.allowed import show_value
from trainkit.config.loaded import LoadedConfig
from trainkit.config.names import flatten

MAX_VALUE_WIDTH = 40


def origin_lines(loaded: LoadedConfig) -> list[str]:
    """One line a key in three columns: key, value, origin."""
    values = [
        (key, show_value(value))
        for key, value in flatten(loaded.config.model_dump(mode="json", by_alias=True))
    ]
    key_width = max(len(key) for key, _ in values)
    value_width = min(MAX_VALUE_WIDTH, max(len(value) for _, value in values))
    return [f"{key:{key_width}}  {value:{value_width}}  {loaded.origins[key]}" for key, value in values]
