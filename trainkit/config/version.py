"""Refuses configs in a format that this trainkit does not know yet."""

from __future__ import annotations

from trainkit.config.schema import CONFIG_VERSION
from trainkit.config.tree import Entry
from trainkit.errors import ConfigError, Problem


def refuse_newer(entry: Entry) -> None:
    """Raise ConfigError with this one problem when a file has a newer version.

    Whatever else looks wrong in such a file is probably right for the trainkit that it was written for.
    """
    version = entry.value.get("config_version")
    if version is None or not isinstance(version.value, int) or version.value <= CONFIG_VERSION:
        return
    message = (
        f"the file is written for a newer trainkit: it has version {version.value}, "
        f"this trainkit knows {CONFIG_VERSION}"
    )
    raise ConfigError([Problem("config_version", message, version.origin, "update trainkit")])
