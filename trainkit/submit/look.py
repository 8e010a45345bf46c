"""A long look at this cluster, for its profile."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from trainkit.errors import UsageError
from trainkit.plan.cluster import Account, Cluster, NodeKind, Partition, Qos
from trainkit.plan.permissions import listed
from trainkit.plan.slurm_words import memory_text, time_text, version_text
from trainkit.submit.known_cluster import accounts_of, gpu_option, partitions_of, qos_of

MAX_KINDS = 20
"""More kinds of nodes in a partition are not written out: nobody would read on."""


def look_at_cluster(environ: Mapping[str, str] = os.environ) -> Cluster | None:
    """This cluster with everything that Slurm and accounting tell; None where there is no Slurm.

    Raises SlurmUnreachable when Slurm does not answer.
    """
    from trainkit.slurm.control import has_expedited_requeue
    from trainkit.slurm.discover import cluster_facts, has_slurm
    from trainkit.slurm.qos import query_qos

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
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  " + "  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip()
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
