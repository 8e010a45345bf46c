"""Where a run is started: Slurm where there is one, else this machine."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Literal

from trainkit.cluster.bad_nodes import excluded, memory_file
from trainkit.cluster.discovery import QosFacts, query_qos
from trainkit.cluster.model import Account, Cluster, NodeKind, Partition, Qos, Target
from trainkit.cluster.profile import find_profile
from trainkit.cluster.units import time_limit_s
from trainkit.errors import SlurmError
from trainkit.slurm.conf_file import cluster_name, conf_file

if TYPE_CHECKING:
    from trainkit.cluster import discovery
    from trainkit.cluster.discovery import ClusterAnswers
    from trainkit.config import LoadedConfig
    from trainkit.config.running import ResourcesConfig
    from trainkit.config.yamlfile import Entry


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
    from trainkit.cluster.profile import find_profile

    found = find_profile(loaded, environ, cwd)
    return None if found is None else found.defaults


KNOWS_GPU_OPTIONS = "cons_tres"
"""The plugin of Slurm that knows --gpus-per-node; the others take --gres only."""


def known_cluster(
    loaded: LoadedConfig, environ: Mapping[str, str] = os.environ, cwd: Path | None = None
) -> Cluster:
    """The cluster of a config, with the reason why it is known; of one that does not answer, only that.

    Raises ConfigError for a profile that is wrong or that does not exist.
    """
    known = _profile_or_slurm(loaded, environ, cwd)
    name = known.name if known.partitions else cluster_name(environ) or known.name
    bad = excluded(name, environ=environ)
    hint = f"`rm {quote(str(memory_file(name, environ)))}` forgets that"
    return replace(known, bad_nodes=bad, forget_hint=hint) if bad else known


def _profile_or_slurm(loaded: LoadedConfig, environ: Mapping[str, str], cwd: Path | None) -> Cluster:
    found = find_profile(loaded, environ, cwd)
    if found is None:
        return ask_slurm_now(loaded, environ)
    hint = f"{found.shown} says so; moved away, `trainkit init` writes it anew"
    known = found.profile.cluster(found.reason, hint)
    if known.partitions:
        return known
    live = ask_slurm_now(loaded, environ)
    return replace(
        known,
        partitions=live.partitions,
        accounts=live.accounts if known.accounts is None else known.accounts,
        qos=live.qos if known.qos is None else known.qos,
        reason=f"{known.reason}; it has no partitions, so Slurm was asked",
        trouble=live.trouble,
    )


def ask_slurm_now(loaded: LoadedConfig, environ: Mapping[str, str] = os.environ) -> Cluster:
    """What Slurm says of itself; a cluster of which nothing is known when it does not answer."""
    from trainkit.cluster.discovery import query_cluster

    resources = loaded.config.resources
    try:
        seen = query_cluster(environ, with_accounts=bool(resources.account or resources.qos))
    except SlurmError as error:
        words = error.message.splitlines()[0]
        reason = (
            f"unknown: Slurm did not answer, so what its nodes have and allow was not looked at ({words})"
        )
        return Cluster("unknown", reason=reason, trouble=f"Slurm did not answer ({words})")
    cluster = cluster_of(seen)
    if resources.qos is None or not _is_over_a_limit(resources, cluster):
        return cluster
    # Only accounting tells whether the QOS lifts it; its answer takes too long to be asked for without need.
    facts = query_qos(environ)
    return cluster if facts is None else replace(cluster, qos=qos_of(facts))


def _is_over_a_limit(resources: ResourcesConfig, cluster: Cluster) -> bool:
    asked_s = None if resources.time is None else time_limit_s(resources.time) or math.inf
    return any(
        (asked_s is not None and item.max_time_s is not None and asked_s > item.max_time_s)
        or (item.max_nodes is not None and resources.nodes + resources.spare_nodes > item.max_nodes)
        for item in cluster.asked(resources.partition)
    )


def cluster_of(seen: ClusterAnswers) -> Cluster:
    """The cluster that Slurm told of."""
    accounts, qos = seen.associations, seen.qos
    return Cluster(
        name=seen.name,
        partitions=partitions_of(seen.partitions),
        gpu_option=gpu_option(seen.config),
        accounts=None if accounts is None else accounts_of(accounts, with_qos=False),
        # Which limits of a partition a QOS overrides only accounting tells.
        qos=None if qos is None else tuple(Qos(item.name, item.max_time_s, None) for item in qos),
        slurm_version=seen.version,
        reason=f"{seen.name}: there is no profile of it, so Slurm was asked (`trainkit init` writes one)",
    )


def gpu_option(config: Mapping[str, str]) -> Literal["gpus-per-node", "gres"]:
    """How GPUs are asked for, from what `scontrol show config` says."""
    return "gpus-per-node" if KNOWS_GPU_OPTIONS in config.get("SelectType", KNOWS_GPU_OPTIONS) else "gres"


def partitions_of(partitions: Iterable[discovery.Partition]) -> tuple[Partition, ...]:
    """Partitions as plans need them."""
    return tuple(
        Partition(
            name=item.name,
            is_default=item.is_default,
            is_hidden=item.is_hidden,
            is_up=item.is_up,
            max_time_s=item.max_time_s,
            default_time_s=item.default_time_s,
            max_nodes=item.max_nodes,
            max_cpus_per_node=item.max_cpus_per_node,
            nodes=tuple(
                NodeKind(kind.count, kind.cpus or None, kind.memory_mib or None, kind.gpus, kind.features)
                for kind in item.node_types
            ),
            allowed_accounts=item.allowed_accounts,
            denied_accounts=item.denied_accounts,
            allowed_qos=item.allowed_qos,
            denied_qos=item.denied_qos,
            allowed_groups=item.allowed_groups,
        )
        for item in partitions
    )


def qos_of(facts: Iterable[QosFacts]) -> tuple[Qos, ...]:
    """Qualities of service as plans need them."""
    return tuple(
        Qos(
            item.name,
            item.max_time_s,
            (*(("time",) if item.lifts_time else ()), *(("nodes",) if item.lifts_nodes else ())),
        )
        for item in facts
    )


def accounts_of(
    associations: Iterable[discovery.Association], *, with_qos: bool = True
) -> tuple[Account, ...]:
    """Accounts as plans need them, one for each association."""
    return tuple(
        Account(
            item.account,
            item.is_default,
            partitions=(item.partition,) if item.partition else None,
            qos=item.qos if with_qos else None,
        )
        for item in associations
    )
