"""Chooses whether a run starts on Slurm or on this machine."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from trainkit.config import InvalidConfig, LoadedConfig, load_config
from trainkit.errors import ConfigError, SlurmError
from trainkit.slurm.environment import conf_file, finds_cluster

if TYPE_CHECKING:
    from trainkit.cluster.model import Cluster
    from trainkit.config.yamlfile import Entry


@dataclass(frozen=True)
class Target:
    """Where a job runs: a backend and, for Slurm, the cluster."""

    backend: Literal["local", "launcher", "sbatch", "submitit", "srun"]
    reason: str
    """Why this backend was chosen, in one sentence."""
    cluster: Cluster | None = None
    """The cluster, or None if the backend does not use Slurm."""
    node_sizes: tuple[int, ...] | None = None
    """The number of workers on each node, if a Slurm step or a launcher such as torchrun has already started
    the processes."""
    per: Literal["gpu", "node"] | None = None
    """Whether the running Slurm step has one task per GPU or one task per node, or None outside a step."""
    finds_cluster: bool = True
    """True if a cluster's profile may set defaults; False for ranks that a launcher such as torchrun
    started."""

    @property
    def submits_job(self) -> bool:
        return self.cluster is not None


LOCAL = Target("local", "this machine")


def choose_backend(backend: str, cluster: str | None = None) -> tuple[str, str]:
    """Return the backend that `launch.backend` selects here, and why. `cluster` is `launch.cluster`.

    Raises SlurmError if it is unclear whether this machine belongs to a cluster.
    """
    if backend != "auto":
        return backend, f"launch.backend is {backend}"
    if cluster is not None:
        return "sbatch", f"sbatch: launch.cluster is {cluster}"
    sbatch = shutil.which("sbatch")
    if sbatch is None:
        return "local", "local: sbatch is not on PATH"
    if os.environ.get("SLURM_CONF") or os.environ.get("SLURM_CONF_SERVER"):
        return "sbatch", f"sbatch: found {sbatch}, and SLURM_CONF is set"
    configured = conf_file()
    if configured is not None:
        return "sbatch", f"sbatch: found {sbatch} and {configured}"
    finds = finds_cluster()  # checked last, because it runs an external command
    if finds is None:
        # Never train on a login node just because slurm.conf was not found.
        raise SlurmError(
            f"cannot tell whether this machine belongs to a Slurm cluster: found {sbatch} but no slurm.conf, "
            "and `sbatch --version` did not show whether a cluster exists",
            hint="`--set launch.backend=sbatch` submits to Slurm, "
            "`--set launch.backend=local` trains on this machine",
        )
    if finds:
        return "sbatch", f"sbatch: found {sbatch}, which finds a cluster"
    return "local", f"local: found {sbatch} but no slurm.conf, so no cluster is set up here"


def is_cluster_of_host(cluster: str | None) -> bool:
    """Return whether a job runs on this host's cluster, rather than on one that only a profile describes.

    `cluster` is the value of `launch.cluster`.
    """
    return shutil.which("sbatch") is not None and (cluster is None or conf_file() is not None)


def make_target(loaded: LoadedConfig, backend: str | None = None, run: Path | None = None) -> Target:
    """Return a config's target, including a description of its cluster. `backend` overrides `launch.backend`.

    `run` is the folder of a run that is being restarted; see `known_cluster`. Raises ConfigError if a cluster
    profile is invalid or does not exist, or if the clusters cannot be reached by Slurm commands.
    """
    launch = loaded.config.launch
    chosen, reason = choose_backend(backend or launch.backend, launch.cluster)
    if chosen == "local":
        return Target("local", reason)

    # Import this module only for Slurm, because a run on this machine needs neither profiles nor Slurm
    # commands.
    from trainkit.cluster.profile import known_cluster

    if chosen == "submitit" and loaded.config.resources.clusters:
        message = "cannot be used with submitit, which does not report the cluster that accepted the job"
        raise ConfigError([loaded.problem("resources.clusters", message, "use --backend sbatch")])
    cluster = known_cluster(loaded, run)
    return Target("submitit" if chosen == "submitit" else "sbatch", reason, cluster)


def load_with_cluster(
    path: str | Path | None,
    *,
    profile: str | None = None,
    overrides: Sequence[str] = (),
    flags: Mapping[str, tuple[str, object]] | None = None,
    defaults: Sequence[Entry] = (),
) -> LoadedConfig:
    """Load a config like `load_config`, but the cluster profile's `defaults` override the given `defaults`.

    Raises the same InvalidConfig as `load_config` and the same ConfigError as `make_target`.
    """
    load = partial(load_config, path, profile=profile, overrides=overrides, flags=flags)
    invalid = None
    try:
        loaded = load(defaults=defaults)
    except InvalidConfig as error:
        loaded, invalid = error.rest, error
    try:
        of_cluster = _cluster_defaults(loaded)
    except ConfigError as error:
        raise error if invalid is None else invalid.with_problems_of_rest(error.problems) from None
    if of_cluster is not None:
        return load(defaults=(*defaults, of_cluster))
    if invalid is not None:
        raise invalid
    return loaded


def _cluster_defaults(loaded: LoadedConfig) -> Entry | None:
    """Return the `defaults` in the profile of a config's cluster, or None for a run on this machine."""
    launch = loaded.config.launch
    if choose_backend(launch.backend, launch.cluster)[0] == "local":
        return None
    from trainkit.cluster.profile import find_profile

    found = find_profile(loaded)
    return None if found is None else found.defaults
