"""Chooses where a run starts, Slurm or this machine, and finds the description of its cluster."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from trainkit.cluster.bad_nodes import excluded, memory_file
from trainkit.cluster.discovery import query_cluster, query_qos
from trainkit.cluster.model import Cluster, Target
from trainkit.cluster.profile import find_profile
from trainkit.cluster.units import time_limit_s
from trainkit.config import InvalidConfig, LoadedConfig, load_config
from trainkit.errors import ConfigError, SlurmError
from trainkit.slurm.conf_file import cluster_name, conf_file

if TYPE_CHECKING:
    from trainkit.config.running import ResourcesConfig
    from trainkit.config.yamlfile import Entry


def choose_backend(
    backend: str, cluster: str | None = None, environ: Mapping[str, str] = os.environ
) -> tuple[str, str]:
    """Return the backend that `launch.backend` selects here, and why; `cluster` is `launch.cluster`."""
    if backend != "auto":
        return backend, f"launch.backend is {backend}"
    if cluster is not None:
        return "sbatch", f"sbatch: launch.cluster is {cluster}"
    sbatch = shutil.which("sbatch", path=environ.get("PATH", os.defpath))
    if sbatch is None:
        return "local", "local: sbatch is not on PATH"
    if environ.get("SLURM_CONF") or environ.get("SLURM_CONF_SERVER"):
        return "sbatch", f"sbatch: found {sbatch}, and SLURM_CONF is set"
    configured = conf_file(environ)
    if configured is not None:
        return "sbatch", f"sbatch: found {sbatch} and {configured}"
    return "local", f"local: found {sbatch} but no slurm.conf, so no cluster is set up here"


def make_target(
    loaded: LoadedConfig,
    backend: str | None = None,
    environ: Mapping[str, str] = os.environ,
    cwd: Path | None = None,
) -> Target:
    """Return the target of a config and the description of its cluster; `backend` overrides the config's.

    Raises ConfigError for a cluster profile that is invalid or does not exist.
    """
    launch = loaded.config.launch
    chosen, reason = choose_backend(backend or launch.backend, launch.cluster, environ)
    if chosen == "local":
        return Target("local", reason)

    cluster = known_cluster(loaded, environ, cwd)
    return Target("submitit" if chosen == "submitit" else "sbatch", reason, cluster)


def load_with_cluster(
    path: str | Path | None,
    *,
    profile: str | None = None,
    overrides: Sequence[str] = (),
    flags: Mapping[str, tuple[str, object]] | None = None,
    environ: Mapping[str, str] = os.environ,
    cwd: Path | None = None,
) -> LoadedConfig:
    """Load a config like `load_config`, with the `defaults` of its cluster's profile as the lowest layer.

    Raises InvalidConfig as `load_config` does, and ConfigError as `make_target` does.
    """
    load = partial(
        load_config, path, profile=profile, overrides=overrides, flags=flags, environ=environ, cwd=cwd
    )
    invalid = None
    try:
        loaded = load()
    except InvalidConfig as error:
        loaded, invalid = error.rest, error
    try:
        defaults = _cluster_defaults(loaded, environ, cwd)
    except ConfigError as error:
        raise error if invalid is None else invalid.with_problems_of_rest(error.problems) from None
    if defaults is not None:
        return load(defaults=defaults)
    if invalid is not None:
        raise invalid
    return loaded


def _cluster_defaults(loaded: LoadedConfig, environ: Mapping[str, str], cwd: Path | None) -> Entry | None:
    """Return the `defaults` of the profile of a config's cluster; None for a run on this machine."""
    launch = loaded.config.launch
    if choose_backend(launch.backend, launch.cluster, environ)[0] == "local":
        return None
    found = find_profile(loaded, environ, cwd)
    return None if found is None else found.defaults


def known_cluster(
    loaded: LoadedConfig, environ: Mapping[str, str] = os.environ, cwd: Path | None = None
) -> Cluster:
    """Return the cluster of a config, from its profile or Slurm; sets `error` if Slurm does not answer.

    Raises ConfigError for a profile that is invalid or does not exist.
    """
    known = _profile_or_slurm(loaded, environ, cwd)
    name = known.name if known.partitions else cluster_name(environ) or known.name
    bad = excluded(name, environ=environ)
    hint = f"`rm {quote(str(memory_file(name, environ)))}` clears the list"
    return replace(known, bad_nodes=bad, forget_hint=hint) if bad else known


def _profile_or_slurm(loaded: LoadedConfig, environ: Mapping[str, str], cwd: Path | None) -> Cluster:
    found = find_profile(loaded, environ, cwd)
    if found is None:
        return _cluster_from_slurm(loaded, environ)
    hint = f"this is from {found.shown}; if it is out of date, delete it and run `trainkit init`"
    known = found.profile.to_cluster(found.reason, hint)
    if known.partitions:
        return known
    live = _cluster_from_slurm(loaded, environ)
    return replace(
        known,
        partitions=live.partitions,
        accounts=live.accounts if known.accounts is None else known.accounts,
        qos=live.qos if known.qos is None else known.qos,
        reason=f"{known.reason}; it lists no partitions, so Slurm was queried",
        error=live.error,
    )


def _cluster_from_slurm(loaded: LoadedConfig, environ: Mapping[str, str]) -> Cluster:
    """Query Slurm for the cluster; if Slurm does not answer, only `error` and `reason` are set."""
    resources = loaded.config.resources
    try:
        cluster = query_cluster(environ, with_accounts=bool(resources.account or resources.qos))
    except SlurmError as error:
        message = error.message.splitlines()[0]
        reason = f"unknown: Slurm did not answer, so no limits were checked ({message})"
        return Cluster("unknown", reason=reason, error=f"Slurm did not answer ({message})")
    reason = f"{cluster.name}: no profile found, so Slurm was queried (`trainkit init` writes a profile)"
    cluster = replace(cluster, reason=reason)
    if resources.qos is None or not _exceeds_a_partition(resources, cluster):
        return cluster
    # Only accounting knows whether the QOS overrides that limit. It is slow, so query it only if needed.
    qos = query_qos(environ)
    return cluster if qos is None else replace(cluster, qos=qos)


def _exceeds_a_partition(resources: ResourcesConfig, cluster: Cluster) -> bool:
    time_s = None if resources.time is None else time_limit_s(resources.time) or math.inf
    return any(
        (time_s is not None and item.max_time_s is not None and time_s > item.max_time_s)
        or (item.max_nodes is not None and resources.nodes + resources.spare_nodes > item.max_nodes)
        for item in cluster.requested_partitions(resources.partition)
    )
