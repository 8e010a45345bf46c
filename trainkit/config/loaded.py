"""A config with the origin of every value."""

from __future__ import annotations

from dataclasses import dataclass, replace

from trainkit.config.names import flatten, show_value
from trainkit.config.schema import RunConfig
from trainkit.errors import Problem
from trainkit.tables import table

DEFAULT = "default"


@dataclass(frozen=True)
class LoadedConfig:
    """A config and where each of its values came from."""

    config: RunConfig
    origins: dict[str, str]
    """Dotted key to ``file:line``, the flag, the variable's name, or ``default``."""
    adjustable: frozenset[str] = frozenset()
    """Keys with a value that nobody chose for this run, such as those of shipped configs."""

    def set_by_user(self, key: str) -> bool:
        """Whether the user wrote the value; a plan may adapt it otherwise."""
        return key not in self.adjustable and self.origins.get(key, DEFAULT) != DEFAULT

    def adjusting(self, *keys: str, origin: str) -> LoadedConfig:
        """The config with values from `origin`, a file, that a plan may adapt."""
        found = {key for key in keys if self.origins.get(key, "").startswith(f"{origin}:")}
        return replace(self, adjustable=self.adjustable | found)

    def problem(self, key: str, message: str, hint: str = "") -> Problem:
        """A problem of a key, with the key's origin where it is not the default."""
        origin = self.origins.get(key, DEFAULT)
        return Problem(key, message, "" if origin == DEFAULT else origin, hint)


MAX_COLUMN_WIDTH = 40


def origin_lines(loaded: LoadedConfig) -> list[str]:
    """One line a key in three columns: key, value, origin."""
    values = [
        (key, show_value(value))
        for key, value in flatten(loaded.config.model_dump(mode="json", by_alias=True))
    ]
    rows = [(key, value, loaded.origins[key]) for key, value in values]
    return table(rows, max_width=MAX_COLUMN_WIDTH).splitlines()
