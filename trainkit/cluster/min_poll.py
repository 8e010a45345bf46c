"""Reads the site's minimum interval between two queries about jobs.

A site sets the minimum in the profile of a cluster (`min_poll_s`) or in the environment
(`TRAINKIT_MIN_POLL_S`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from trainkit.errors import ConfigError, Problem
from trainkit.folders import config_folder, shown_path

FOLDER = "clusters"
KEY = "min_poll_s"
VARIABLE = "TRAINKIT_MIN_POLL_S"


def min_poll_s(cluster: str | None) -> float:
    """Return the minimum number of seconds between two queries about jobs on a cluster; 0 for no minimum.

    If both the environment and a profile set a minimum, the larger one applies. If the name of the cluster is
    unknown (None), the minimum of every profile applies. Raises ConfigError if a minimum is not a number of
    seconds.
    """
    text = os.environ.get(VARIABLE, "")
    found = [_seconds(text, VARIABLE)] if text else []
    folders = [config_folder() / FOLDER]
    with suppress(FileNotFoundError):  # the working directory may have been deleted
        folders.append(Path.cwd() / FOLDER)
    for folder in folders:
        for path in folder.glob("*.yaml"):
            with suppress(OSError):  # `submit` reports unreadable profiles.
                found += _in_profile(path, path.stat().st_mtime_ns, cluster)
    return max(found, default=0.0)


@lru_cache(maxsize=64)
def _in_profile(path: Path, mtime_ns: int, cluster: str | None) -> tuple[float, ...]:
    return tuple(_read(path, cluster))


def _read(path: Path, cluster: str | None) -> Iterator[float]:
    # `status` would start more slowly if it parsed profiles that do not contain the key.
    if KEY.encode() not in path.read_bytes():
        return
    from trainkit.config.yamlfile import read_yaml_file

    try:
        profile = read_yaml_file(path, shown_path(path))
    except ConfigError:
        return  # `submit` reports unreadable profiles.
    name, entry = profile.find(("name",)), profile.find((KEY,))
    own = (path.stem if name is None else str(name.value)).lower()
    if entry is not None and entry.value is not None and (cluster is None or cluster.lower() == own):
        yield _seconds(entry.plain(), entry.origin)


def _seconds(value: object, origin: str) -> float:
    with suppress(ValueError):
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            seconds = float(value)
            if 0 <= seconds < float("inf"):
                return seconds
    hint = "use a number of seconds such as 120, or 0 for no minimum"
    raise ConfigError([Problem(KEY, f"is {value}, which is not a number of seconds", origin, hint)])
