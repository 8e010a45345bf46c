"""Where a run is started: Slurm where there is one, else this machine."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from trainkit.plan.cluster import Target
from trainkit.slurm.conf_file import conf_file

if TYPE_CHECKING:
    from trainkit.config import LoadedConfig
    from trainkit.config.tree import Entry


def choose_backend(
    asked: str, cluster: str | None = None, environ: Mapping[str, str] = os.environ
) -> tuple[str, str]:
    """The backend that `launch.backend` means here, and why in one sentence; `cluster`: `launch.cluster`."""
    if asked != "auto":
        return asked, f"launch.backend: {asked} was asked for"
    if cluster is not None:
        return "sbatch", f"sbatch: launch.cluster is {cluster}"
    sbatch = shutil.which("sbatch", path=environ.get("PATH", os.defpath))
    if sbatch is None:
        return "local", "local: there is no sbatch on PATH"
    if environ.get("SLURM_CONF") or environ.get("SLURM_CONF_SERVER"):
        return "sbatch", f"sbatch: {sbatch} is there, and SLURM_CONF names a cluster"
    configured = conf_file(environ)
    if configured is not None:
        return "sbatch", f"sbatch: {sbatch} and {configured} are there"
    return "local", f"local: {sbatch} is there, but no slurm.conf: no cluster is set up here"


def make_target(
    loaded: LoadedConfig,
    backend: str | None = None,
    environ: Mapping[str, str] = os.environ,
    cwd: Path | None = None,
) -> Target:
    """The target of a config, with what is known about its cluster; `backend` goes before the config's.

    Raises ConfigError for a cluster profile that is wrong or does not exist.
    """
    launch = loaded.config.launch
    chosen, reason = choose_backend(backend or launch.backend, launch.cluster, environ)
    if chosen == "local":
        return Target("local", reason)
    from trainkit.submit.known_cluster import known_cluster

    cluster = known_cluster(loaded, environ, cwd)
    return Target("submitit" if chosen == "submitit" else "sbatch", reason, cluster)


def cluster_defaults(
    loaded: LoadedConfig, environ: Mapping[str, str] = os.environ, cwd: Path | None = None
) -> Entry | None:
    """What the profile of a config's cluster lays below it; None for a run on this machine.

    Raises ConfigError as `make_target` does.
    """
    launch = loaded.config.launch
    if choose_backend(launch.backend, launch.cluster, environ)[0] == "local":
        return None
    from trainkit.submit.cluster_profile import find_profile

    found = find_profile(loaded, environ, cwd)
    return None if found is None else found.defaults
