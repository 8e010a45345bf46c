"""Finds the profile of the cluster that a run goes to.

Profiles are files `clusters/NAME.yaml`: in the folder that one submits from, and in the user's config folder.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from trainkit.config.names import near
from trainkit.config.tree import Entry
from trainkit.config.yamlfile import read_yaml_file
from trainkit.errors import ConfigError
from trainkit.frozen import dataclass
from trainkit.resources import shipped_configs
from trainkit.slurm.conf_file import cluster_name

if TYPE_CHECKING:
    from trainkit.config import LoadedConfig
    from trainkit.submit.cluster_schema import ClusterProfile

FOLDER = "clusters"
KEY = "launch.cluster"


@dataclass(frozen=True)
class FoundProfile:
    """A profile and why it is the one."""

    path: Path
    shown: str
    """The file's name as messages show it."""
    profile: ClusterProfile
    defaults: Entry | None
    """What it lays below run configs."""
    reason: str


def user_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Where `trainkit init` writes profiles."""
    home = environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(home) / "trainkit" / FOLDER


def find_profile(
    loaded: LoadedConfig, environ: Mapping[str, str] = os.environ, cwd: Path | None = None
) -> FoundProfile | None:
    """The profile that `launch.cluster` names, else the one of the cluster that Slurm's configuration names,
    else the only one there is where that name is not known. None when there is none.

    Raises ConfigError when the named one does not exist, when it cannot be told which one is meant, and with
    every problem of the file.
    """
    cwd = Path.cwd() if cwd is None else cwd
    folders = [cwd / FOLDER, user_folder(environ)]
    named = loaded.config.launch.cluster
    if named is not None:
        return _found(_named(loaded, named, folders), cwd, f"launch.cluster: {named} was asked for")
    files = [sorted(folder.glob("*.yaml")) for folder in folders]
    if not any(files):
        return None
    name = cluster_name(environ)
    if name is None:
        if len(alone := [path for paths in files for path in paths]) > 1:
            return None
        return _found(alone[0], cwd, "it is the only profile, and no slurm.conf names the cluster")
    for paths in files:
        own = _own_profile(loaded, paths, name)
        if own is not None:
            return _found(own, cwd, f"slurm.conf calls the cluster {name}")
    return None


def _named(loaded: LoadedConfig, name: str, folders: Sequence[Path]) -> Path:
    folders = [*folders, shipped_configs() / FOLDER]
    for folder in folders:
        if "/" not in name and (folder / f"{name}.yaml").is_file():
            return folder / f"{name}.yaml"
    known = sorted({path.stem for folder in folders for path in folder.glob("*.yaml")})
    match = near(name, known)
    hint = f"did you mean {match}? " if match else ""
    hint += f"there is {', '.join(known)}; `trainkit init` writes one of the cluster that it is typed on"
    raise ConfigError([loaded.problem(KEY, f"is {name}, and there is no such cluster profile", hint)])


def _own_profile(loaded: LoadedConfig, paths: Sequence[Path], name: str) -> Path | None:
    """The profile of the cluster of this name."""
    own = [path for path in paths if _name_in(path) == name]
    if len(own) > 1:
        same = [path for path in own if path.stem == name]
        if not same:
            names = " and ".join(path.stem for path in own)
            message = f"is not set, and {names} are both profiles of {name}"
            raise ConfigError([loaded.problem(KEY, message, f"--cluster {own[0].stem} takes the first")])
        own = same
    return own[0] if own else None


def _name_in(path: Path) -> str | None:
    """The name in a profile; the file's own where it cannot be read, which is told should it be taken."""
    try:
        found = read_yaml_file(path, str(path)).find(("name",))
    except ConfigError:
        return path.stem
    return str(found.value).lower() if found is not None else path.stem


def _found(path: Path, cwd: Path, reason: str) -> FoundProfile:
    shown = str(path.relative_to(cwd)) if path.is_relative_to(cwd) else str(path)
    profile, defaults = _read(path, shown, path.stat().st_mtime_ns)
    return FoundProfile(path, shown, profile, defaults, f"{profile.name}: {shown}, because {reason}")


@lru_cache(maxsize=4)
def _read(path: Path, shown: str, mtime_ns: int) -> tuple[ClusterProfile, Entry | None]:
    # Its classes take a while to make, which nobody pays who has no profile.
    from trainkit.submit.cluster_schema import read_profile

    return read_profile(path, shown)
