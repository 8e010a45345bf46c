"""A config with the origin of every value."""

from __future__ import annotations

from trainkit.config.schema import RunConfig
from trainkit.errors import Problem
from trainkit.frozen import dataclass

DEFAULT = "default"


@dataclass(frozen=True)
class LoadedConfig:
    """A config and where each of its values came from."""

    config: RunConfig
    origins: dict[str, str]
    """Dotted key to ``file:line``, the flag, the variable's name, or ``default``."""

    def set_by_user(self, key: str) -> bool:
        """True when the value was written somewhere, even if it equals the default."""
        return self.origins.get(key, DEFAULT) != DEFAULT

    def problem(self, key: str, message: str, hint: str = "") -> Problem:
        """A problem of a key, with the key's origin where it is not the default."""
        origin = self.origins.get(key, DEFAULT)
        return Problem(key, message, "" if origin == DEFAULT else origin, hint)
