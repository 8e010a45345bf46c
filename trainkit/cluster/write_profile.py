"""A long look at this cluster, for its profile."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import date
from pathlib import Path
from textwrap import indent
from typing import Any

import yaml

from trainkit.cluster.limits import listed
from trainkit.cluster.model import Account, Cluster, NodeKind, Partition, Qos
from trainkit.cluster.target import accounts_of, gpu_option, partitions_of, qos_of
from trainkit.cluster.units import memory_text, time_text, version_text
from trainkit.config.yamlfile import Dumper
from trainkit.errors import UsageError
from trainkit.tables import table

MAX_KINDS = 20
"""More kinds of nodes in a partition are not written out: nobody would read on."""


def query_profile(environ: Mapping[str, str] = os.environ) -> Cluster | None:
    """This cluster with everything that Slurm and accounting tell; None where there is no Slurm.

    Raises SlurmUnreachable when Slurm does not answer.
    """
    from trainkit.cluster.discovery import cluster_facts, has_slurm, query_qos
    from trainkit.slurm.control import has_expedited_requeue

    if not has_slurm(environ):
        return None
    facts = cluster_facts(environ)
    is_enforced = "associations" in facts.config.get("AccountingStorageEnforce", "")
    qos = None if facts.associations is None else query_qos(environ)
    return Cluster(
        name=facts.name,
        partitions=tuple(map(_shortened, partitions_of(facts.partitions))),
        gpu_option=gpu_option(facts.config),
        accounts=accounts_of(facts.associations) if facts.associations and is_enforced else None,
        qos=None if qos is None else qos_of(qos),
        slurm_version=facts.version,
        containers=(*(("pyxis",) if facts.has_pyxis else ()), *facts.containers),
        has_modules=facts.has_modules,
        expedited_requeue=False if has_expedited_requeue(facts.version, facts.config) else None,
    )


def _shortened(partition: Partition) -> Partition:
    """A partition whose nodes are not told apart by their features where nearly every one has others."""
    if len(partition.nodes) <= MAX_KINDS:
        return partition
    merged: dict[tuple[object, ...], NodeKind] = {}
    for kind in partition.nodes:
        key = (kind.cpus, kind.mem_mib, *kind.gpus.items())
        before = merged.get(key, replace(kind, count=0, features=()))
        features = tuple(dict.fromkeys((*before.features, *kind.features)))
        merged[key] = replace(before, count=before.count + kind.count, features=features)
    return replace(partition, nodes=tuple(merged.values()))


def describe_cluster(cluster: Cluster) -> str:
    """A cluster as lines to read."""
    return "\n".join(_lines(cluster))


def _lines(cluster: Cluster) -> Iterator[str]:
    yield f"{cluster.name}, Slurm {version_text(cluster.slurm_version)}"
    rows = [("partition", "nodes", "a node has", "longest job")]
    for partition in cluster.partitions:
        if not partition.is_hidden:
            rows += _rows(partition)
    yield indent(table(rows), "  ")
    default = {item.name for item in cluster.accounts or () if item.is_default}
    names = dict.fromkeys(item.name for item in cluster.accounts or ())
    accounts = [f"{name} (default)" if name in default else name for name in names]
    yield f"  accounts: {listed(accounts) or 'not checked'}"
    yield f"  QOS: {listed(item.name for item in cluster.qos or ()) or 'not checked'}"
    yield f"  containers: {listed(cluster.containers) or 'none found here'}"
    yield f"  modules: {'yes' if cluster.has_modules else 'none found here'}"


def _rows(partition: Partition) -> Iterator[tuple[str, str, str, str]]:
    limit = "no limit" if partition.max_time_s is None else time_text(partition.max_time_s)
    name = partition.name + (" (default)" if partition.is_default else "")
    name += "" if partition.is_up else " (not up)"
    alike: dict[str, int] = {}
    for kind in partition.nodes:
        what = _kind_words(kind)
        alike[what] = alike.get(what, 0) + kind.count
    for what, count in alike.items() or [("not known", 0)]:
        yield name, str(count), what, limit
        name = limit = ""


def _kind_words(kind: NodeKind) -> str:
    words = [f"{count} {gpu_type or 'GPU'}" for gpu_type, count in kind.gpus.items()]
    words += [] if kind.cpus is None else [f"{kind.cpus} CPUs"]
    words += [] if kind.mem_mib is None else [memory_text(kind.mem_mib)]
    return ", ".join(words)


def differences(profile: Cluster, found: Cluster) -> list[str]:
    """The sections of a profile that do not hold any more; what either leaves out is not compared."""
    is_up = {item.name: item.is_up for item in found.partitions}
    known = {item.name: replace(item, is_up=is_up.get(item.name, True)) for item in profile.partitions}
    now = {item.name: _shortened(item) for item in found.partitions}
    names = {**known, **now} if known and now else {}
    different = [f"partition {name}" for name in names if known.get(name) != now.get(name)]
    if None not in (profile.accounts, found.accounts) and _names(profile.accounts) != _names(found.accounts):
        different.append("accounts")
    if None not in (profile.qos, found.qos) and _names(profile.qos) != _names(found.qos):
        different.append("qos")
    return different


def _names(items: Iterable[Account] | Iterable[Qos] | None) -> set[str]:
    return {item.name for item in items or ()}


def write_new(path: Path, text: str) -> bool:
    """Write a file that is not there yet; False when it is.

    Raises UsageError when its place cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            try:
                file.write(text)
                file.flush()
            except BaseException:
                path.unlink()  # it was made here, a moment ago, and half of it would be in the way
                raise
    except FileExistsError:
        if path.parent.is_dir():
            return False
        raise UsageError(f"{path.parent} is a file", hint="choose another folder with --dir") from None
    except OSError as error:
        raise UsageError(
            f"cannot write {path}: {error.strerror or error}",
            hint="--dir DIR is where the run config goes, and XDG_CONFIG_HOME where the profile does",
        ) from error
    return True


COMMENT_COLUMN = 32
UNBOUNDED = 10**6


def profile_text(cluster: Cluster, today: date) -> str:
    """The profile of a cluster; `trainkit.cluster.profile` reads it back."""
    return "\n".join(_profile_lines(cluster, today)) + "\n"


def flow(value: Any) -> str:
    """A value as YAML on one line."""
    text: str = yaml.dump(
        [value],
        Dumper=Dumper,
        default_flow_style=True,
        sort_keys=False,
        allow_unicode=True,
        width=UNBOUNDED,
    )
    return text.strip()[1:-1]


def commented(line: str, comment: str) -> str:
    """A line with a comment behind it, in a column with others."""
    return f"{line:<{COMMENT_COLUMN - 2}}  # {comment}" if comment else line


def _profile_lines(cluster: Cluster, today: date) -> Iterator[str]:
    yield f"# The cluster {cluster.name}, as Slurm described it to `trainkit init` on {today}."
    yield "#"
    yield "# Configs are held against what stands here, and Slurm is not asked. Change what is not so."
    yield "# What you take out is not checked; without `partitions` Slurm is asked each time."
    yield "profile_version: 1"
    yield commented(f"name: {flow(cluster.name)}", "ClusterName of the slurm.conf whose cluster this is")
    if cluster.slurm_version:
        yield f"slurm_version: {flow(version_text(cluster.slurm_version))}"
    yield commented(f"gpu_option: {cluster.gpu_option}", "gpus-per-node or gres: what sbatch knows here")
    yield commented(f"containers: {flow(list(cluster.containers))}", "found here; nodes may have others")
    yield commented(f"modules: {flow(cluster.has_modules)}", "whether there is a `module` command")
    if cluster.expedited_requeue is not None:
        yield "# Whether a job whose host fails starts again before all others (sbatch --requeue=expedite)."
        yield "# One that fails for another reason then stays in the queue, held, until you cancel it."
        yield f"expedited_requeue: {flow(cluster.expedited_requeue)}"
    yield ""
    yield from _default_lines(cluster)
    yield ""
    yield from _account_lines(cluster)
    yield ""
    yield "# Times as Slurm writes them. Nodes that are alike stand together, with those out of service."
    yield "partitions:"
    for partition in cluster.partitions:
        yield from _partition_lines(partition)


def _default_lines(cluster: Cluster) -> Iterator[str]:
    yield "# Keys of a run config that hold for every run here, below your own configs and options."
    yield "# `trainkit check CONFIG --show-origin` shows what came from here."
    yield "defaults:"
    yield "  launch:"
    yield commented("    network: auto", "ib, socket, debug, or the name of an interface")
    yield commented("    env: {}", "of every process, such as {NCCL_SOCKET_IFNAME: ib0}")
    runtimes = [
        name
        for name in ("pyxis", "apptainer")
        if name in cluster.containers or _is_singularity(name, cluster)
    ]
    if len(runtimes) == 1:
        yield commented(f"    container_runtime: {runtimes[0]}", "what launch.container is run with")
    else:
        yield commented("    # container_runtime: pyxis", "or apptainer: what launch.container is run with")
    yield commented("    # modules: [cuda]", "loaded before every run")
    yield "  # resources:"
    account = next((item.name for item in cluster.accounts or () if item.is_default), None)
    yield commented(f"  #   account: {flow(account or 'NAME')}", "charged when a config names none")
    default = cluster.partition(None)
    yield commented(f"  #   partition: {flow(default.name if default else 'NAME')}", "taken likewise")


def _is_singularity(name: str, cluster: Cluster) -> bool:
    return name == "apptainer" and "singularity" in cluster.containers


def _account_lines(cluster: Cluster) -> Iterator[str]:
    if cluster.accounts is None:
        yield "# Accounts are not checked: the cluster does not insist on them, or accounting did not answer."
        yield "# accounts: {NAME: {default: true}}"
    else:
        yield "# What you, and maybe nobody else, may charge; and with which QOS."
        yield "accounts:"
        for account in _merged(cluster.accounts):
            yield f"  {flow(account.name)}: {flow(_account_value(account))}"
    if cluster.qos:
        yield "qos:"
        for qos in cluster.qos:
            yield f"  {flow(qos.name)}: {flow(_qos_value(qos))}"


def _merged(accounts: tuple[Account, ...]) -> list[Account]:
    """One of each name: an account can be yours once for every partition."""
    merged: dict[str, Account] = {}
    for account in accounts:
        before = merged.get(account.name)
        if before is not None:
            account = Account(
                account.name,
                account.is_default or before.is_default,
                _union(before.partitions, account.partitions),
                _union(before.qos, account.qos),
            )
        merged[account.name] = account
    return list(merged.values())


def _union(one: tuple[str, ...] | None, other: tuple[str, ...] | None) -> tuple[str, ...] | None:
    return None if one is None or other is None else tuple(dict.fromkeys((*one, *other)))


def _account_value(account: Account) -> dict[str, Any]:
    value: dict[str, Any] = {"default": True} if account.is_default else {}
    if account.partitions is not None:
        value["partitions"] = list(account.partitions)
    return value | ({} if account.qos is None else {"qos": list(account.qos)})


def _qos_value(qos: Qos) -> dict[str, Any]:
    value: dict[str, Any] = {} if qos.max_time_s is None else {"max_time": time_text(qos.max_time_s)}
    return value | ({"overrides": list(qos.overrides)} if qos.overrides else {})


def _partition_lines(partition: Partition) -> Iterator[str]:
    yield f"  {flow(partition.name)}:"
    if partition.is_default:
        yield "    default: true"
    if partition.is_hidden:
        yield commented("    hidden: true", "Slurm lists it only when it is asked to")
    if partition.max_time_s is None:
        yield commented("    max_time: null", "no limit")
    else:
        yield f"    max_time: {flow(time_text(partition.max_time_s))}"
    if partition.default_time_s is not None:
        comment = "of a job with resources.time: null"
        yield commented(f"    default_time: {flow(time_text(partition.default_time_s))}", comment)
    for key, number, comment in (
        ("max_nodes", partition.max_nodes, "of one job"),
        ("max_cpus_per_node", partition.max_cpus_per_node, "that its jobs may use"),
    ):
        if number is not None:
            yield commented(f"    {key}: {number}", comment)
    for key, names in (
        ("accounts", partition.allowed_accounts),
        ("denied_accounts", partition.denied_accounts or None),
        ("qos", partition.allowed_qos),
        ("denied_qos", partition.denied_qos or None),
        ("groups", partition.allowed_groups),
    ):
        if names is not None:
            yield f"    {key}: {flow(list(names))}"
    if partition.nodes:
        yield "    nodes:"
        for kind in partition.nodes:
            yield f"      - {flow(_kind_value(kind))}"


def _kind_value(kind: NodeKind) -> dict[str, Any]:
    value: dict[str, Any] = {"count": kind.count}
    if kind.cpus is not None:
        value["cpus"] = kind.cpus
    if kind.mem_mib is not None:
        value["memory"] = memory_text(kind.mem_mib)
    if kind.gpus:
        value["gpus"] = kind.gpus[""] if set(kind.gpus) == {""} else kind.gpus
    return value | ({"features": list(kind.features)} if kind.features else {})
