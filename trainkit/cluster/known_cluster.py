"""Finds the description of a config's cluster: its profile, or what Slurm answers."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from trainkit.cluster.bad_nodes import excluded, memory_file
from trainkit.cluster.discovery import query_cluster, query_qos
from trainkit.cluster.model import Cluster
from trainkit.cluster.profile import find_profile
from trainkit.cluster.units import time_limit_s
from trainkit.config import LoadedConfig
from trainkit.errors import SlurmError
from trainkit.slurm.conf_file import cluster_name

if TYPE_CHECKING:
    from trainkit.config.running import ResourcesConfig


def known_cluster(
    loaded: LoadedConfig,
    environ: Mapping[str, str] = os.environ,
    cwd: Path | None = None,
    run: Path | None = None,
) -> Cluster:
    """The cluster of a config, from its profile or Slurm; sets `error` if Slurm does not answer.

    `run` is the folder of a run that starts again: its bad nodes include those on which a start of it failed.
    Raises ConfigError for a profile that is invalid or does not exist.
    """
    known = _profile_or_slurm(loaded, environ, cwd)
    name = known.name if known.partitions else cluster_name(environ) or known.name
    bad = excluded(name, environ=environ, run=None if run is None else str(run))
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
