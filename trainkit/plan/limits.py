"""What a job asks of Slurm, held against what a cluster has and allows. Pure.

Slurm itself refuses little of it when a job is submitted: one that can never start waits for ever.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from trainkit.config.names import near
from trainkit.config.running import ResourcesConfig
from trainkit.plan.cluster import Account, Cluster, NodeKind, Partition, Qos
from trainkit.plan.slurm_words import memory_mib, memory_text, time_limit_s, time_text

Trouble = tuple[str, str, str]
"""Key of the config, message, hint."""
_NO_FEATURE = re.compile(r"[&|,()\[\]]|\*\d+")


@dataclass(frozen=True)
class Asked:
    """What a job asks for; None where it asks for nothing."""

    nodes: int
    workers_per_node: int
    gpus_per_node: int | None = None
    gpu_type: str | None = None
    cpus_per_node: int | None = None
    mem: str | None = None
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None


def asked_of(
    resources: ResourcesConfig, *, workers_per_node: int, device: str, threads: int | None, per: str
) -> Asked:
    """What a job asks for: its section of the config, and what was derived from it."""
    cpus = None if threads is None else threads * workers_per_node
    if cpus is None and per == "gpu":
        cpus = workers_per_node  # a task gets at least one
    return Asked(
        nodes=resources.nodes,
        workers_per_node=workers_per_node,
        gpus_per_node=workers_per_node if device == "cuda" else None,
        gpu_type=resources.gpu_type,
        cpus_per_node=None if "overcommit" in resources.extra else cpus,
        mem=resources.mem,
        time=resources.time,
        partition=resources.partition,
        account=resources.account,
        qos=resources.qos,
        constraint=resources.constraint,
    )


def features_of(constraint: str | None) -> tuple[str, ...]:
    """The names of features in a constraint such as ``[rack1*2&rack2]``."""
    return tuple(word.strip() for word in _NO_FEATURE.split(constraint or "") if word.strip())


def fitting_nodes(partition: Partition, constraint: str | None, gpu_type: str | None) -> tuple[NodeKind, ...]:
    """The nodes of a partition that a job may get, as far as its constraint can be told without Slurm."""
    # With an "or" any node may do; all features together are asked for with "and" only.
    needed = set() if re.search(r"[|,\[(*]", constraint or "") else set(features_of(constraint))
    return tuple(
        kind
        for kind in partition.nodes
        if needed <= set(kind.features) and (gpu_type is None or kind.num_gpus(gpu_type))
    )


def troubles(asked: Asked, cluster: Cluster) -> Iterator[Trouble]:
    """(key, message, hint) for everything that this cluster does not have or allow."""
    if not cluster.partitions:
        return
    names = None if asked.partition is None else [name.strip() for name in asked.partition.split(",")]
    yield from _unknown_partitions(names, cluster)
    yield from _account_troubles(asked, cluster)
    found = [list(partition_troubles(asked, cluster, item)) for item in cluster.asked(asked.partition)]
    # Of several partitions, one that can start the job is enough.
    if found and all(found):
        yield from found[0]


def partition_troubles(asked: Asked, cluster: Cluster, partition: Partition) -> Iterator[Trouble]:
    """What keeps a job from ever starting in one partition."""
    qos = _qos_of(asked, cluster)
    overrides = () if qos is None else qos.overrides
    yield from _permission_troubles(asked, cluster, partition)
    if overrides is not None and "time" not in overrides:
        yield from _time_troubles(asked, cluster, partition)
    if overrides is not None and "nodes" not in overrides:
        most = partition.max_nodes
        if most is not None and asked.nodes > most:
            message = f"is {asked.nodes}, but a job in partition {partition.name} has at most {most}"
            yield "resources.nodes", message, _fitting_partition(asked, cluster, partition)
    if partition.nodes:
        yield from _node_troubles(asked, cluster, partition)


def _unknown_partitions(names: list[str] | None, cluster: Cluster) -> Iterator[Trouble]:
    known = [item.name for item in cluster.partitions]
    if names is None and cluster.partition(None) is None:
        hint = f"there is {_listed(item.name for item in cluster.partitions if not item.is_hidden)}"
        yield "resources.partition", f"is not set, and {cluster.name} has no default partition", hint
    for name in names or []:
        if cluster.partition(name) is None:
            shown = [item.name for item in cluster.partitions if not item.is_hidden]
            hint = f"{_did_you_mean(name, known)}there is {_listed(shown)}"
            message = f"is {name}, and {cluster.name} has no such partition"
            yield "resources.partition", message, _with_source(hint, cluster)


def _account_troubles(asked: Asked, cluster: Cluster) -> Iterator[Trouble]:
    account = _account_of(asked, cluster)
    if asked.account is not None and cluster.accounts is not None and account is None:
        names = list(dict.fromkeys(item.name for item in cluster.accounts))
        hint = f"{_did_you_mean(asked.account, names)}you have {_listed(names) or 'none'}"
        message = f"is {asked.account}, and you have no such account on {cluster.name}"
        yield "resources.account", message, _with_source(hint, cluster)
    if asked.qos is None:
        return
    known = None if cluster.qos is None else [item.name for item in cluster.qos]
    if known is not None and asked.qos not in known:
        hint = f"{_did_you_mean(asked.qos, known)}there is {_listed(known)}"
        message = f"is {asked.qos}, and {cluster.name} has no such QOS"
        yield "resources.qos", message, _with_source(hint, cluster)
    elif account is not None and account.qos is not None and asked.qos not in account.qos:
        message = f"is {asked.qos}, which account {account.name} may not use"
        yield "resources.qos", message, _with_source(f"it may use {_listed(account.qos) or 'none'}", cluster)


def _permission_troubles(asked: Asked, cluster: Cluster, partition: Partition) -> Iterator[Trouble]:
    account = _account_of(asked, cluster)
    name = asked.account or (account.name if account is not None else None)
    if name is not None and not _is_allowed(name, partition.allowed_accounts, partition.denied_accounts):
        key = "resources.partition" if asked.account is None else "resources.account"
        message = f"is {partition.name}, which account {name} may not use"
        if asked.account is not None:
            message = f"is {name}, which may not use partition {partition.name}"
        allowed = partition.allowed_accounts
        yield key, message, f"accounts that may: {_listed(allowed)}" if allowed else ""
    elif account is not None and account.partitions is not None and partition.name not in account.partitions:
        message = f"is {partition.name}, which account {account.name} may not use"
        hint = _with_source(f"it may use {_listed(account.partitions)}", cluster)
        yield "resources.partition", message, hint
    qos = asked.qos
    if qos is not None and not _is_allowed(qos, partition.allowed_qos, partition.denied_qos):
        allowed = partition.allowed_qos
        hint = f"it takes {_listed(allowed)}" if allowed else ""
        yield "resources.qos", f"is {qos}, which partition {partition.name} does not take", hint


def _is_allowed(name: str, allowed: tuple[str, ...] | None, denied: tuple[str, ...]) -> bool:
    return name not in denied if allowed is None else name in allowed


def _time_troubles(asked: Asked, cluster: Cluster, partition: Partition) -> Iterator[Trouble]:
    if asked.time is None:
        return
    asked_s, limit_s, what = time_limit_s(asked.time), partition.max_time_s, f"partition {partition.name}"
    qos = _qos_of(asked, cluster)
    if qos is not None and qos.max_time_s is not None and (limit_s is None or qos.max_time_s < limit_s):
        limit_s, what = qos.max_time_s, f"QOS {qos.name}"
    if limit_s is not None and (asked_s is None or asked_s > limit_s):
        shown = "no limit" if asked_s is None else asked.time
        message = f"is {shown}, but {what} allows at most {time_text(limit_s)}"
        hint = f"--time {time_text(limit_s)} fits"
        if what.startswith("partition"):
            hint = "; ".join(filter(None, (hint, _fitting_partition(asked, cluster, partition))))
        yield "resources.time", message, _with_source(hint, cluster)


def _node_troubles(asked: Asked, cluster: Cluster, partition: Partition) -> Iterator[Trouble]:
    features = features_of(asked.constraint)
    known = list(dict.fromkeys(name for kind in partition.nodes for name in kind.features))
    for name in features:
        if name not in known:
            hint = f"{_did_you_mean(name, known)}they have {_listed(known) or 'no feature at all'}"
            message = f"names {name}, and no node of partition {partition.name} has that feature"
            yield "resources.constraint", message, _with_source(hint, cluster)
    types = list(dict.fromkeys(kind for node in partition.nodes for kind in node.gpus if kind))
    if asked.gpus_per_node and asked.gpu_type is not None and asked.gpu_type not in types:
        hint = f"{_did_you_mean(asked.gpu_type, types)}they have {_listed(types) or 'no type of GPU'}"
        message = f"is {asked.gpu_type}, and no node of partition {partition.name} has such a GPU"
        yield "resources.gpu_type", message, _with_source(hint, cluster)
    kinds = fitting_nodes(partition, asked.constraint, asked.gpu_type if asked.gpus_per_node else None)
    if not kinds:
        return
    single = list(_single_troubles(asked, partition, kinds))
    for key, message, hint in single:
        yield key, message, _with_source(hint or _fitting_partition(asked, cluster, partition), cluster)
    count = sum(kind.count for kind in kinds if _is_enough(asked, partition, kind))
    if not single and count < asked.nodes:
        what = "1 node" if count == 1 else f"{count} nodes"
        message = f"is {asked.nodes}, but partition {partition.name} has {what}"
        if count < partition.num_nodes:
            message += f" with {_needs(asked)}"
        hint = _fitting_partition(asked, cluster, partition)
        yield "resources.nodes", message, _with_source(hint, cluster)


def _single_troubles(asked: Asked, partition: Partition, kinds: tuple[NodeKind, ...]) -> Iterator[Trouble]:
    """What no node has, one thing at a time."""
    owners = f"the nodes of partition {partition.name} have"
    gpus = max(kind.num_gpus(asked.gpu_type) for kind in kinds)
    wanted = asked.gpus_per_node
    if wanted is not None and wanted > gpus:
        what = f"at most {gpus} GPUs" if gpus else "no GPU"
        hint = ""
        if gpus and asked.nodes * wanted % gpus == 0:
            hint = f"--nodes {asked.nodes * wanted // gpus} --gpus-per-node {gpus} has as many"
        yield "resources.gpus_per_node", f"is {wanted}, but {owners} {what}", hint
    cpus = [_cpus(partition, kind) for kind in kinds]
    most = max((number for number in cpus if number is not None), default=None)
    if asked.cpus_per_node is not None and most is not None and asked.cpus_per_node > most:
        if asked.cpus_per_node == asked.workers_per_node:
            message = f"is {asked.workers_per_node}, but {owners} {most} CPUs, and every process needs one"
            yield "resources.gpus_per_node", message, ""
        else:
            each = asked.cpus_per_node // asked.workers_per_node
            message = f"is {each}: {asked.workers_per_node} x {each} = {asked.cpus_per_node}"
            yield "resources.cpus_per_gpu", f"{message} CPUs a node, but {owners} {most}", ""
    mem = None if asked.mem is None else memory_mib(asked.mem)
    largest = max((kind.mem_mib for kind in kinds if kind.mem_mib is not None), default=None)
    if mem is not None and largest is not None and mem > largest:
        yield "resources.mem", f"is {asked.mem}, but {owners} {memory_text(largest)}", ""


def _is_enough(asked: Asked, partition: Partition, kind: NodeKind) -> bool:
    cpus, mem = _cpus(partition, kind), None if asked.mem is None else memory_mib(asked.mem)
    return (
        kind.num_gpus(asked.gpu_type) >= (asked.gpus_per_node or 0)
        and (cpus is None or cpus >= (asked.cpus_per_node or 0))
        and (kind.mem_mib is None or kind.mem_mib >= (mem or 0))
    )


def _needs(asked: Asked) -> str:
    needs = []
    if asked.gpus_per_node:
        kind = f" of type {asked.gpu_type}" if asked.gpu_type else ""
        needs.append(f"{asked.gpus_per_node} GPUs{kind}")
    if asked.cpus_per_node:
        needs.append(f"{asked.cpus_per_node} CPUs")
    if asked.mem:
        needs.append(f"{asked.mem} of memory")
    return " and ".join([*needs, *features_of(asked.constraint)])


def _cpus(partition: Partition, kind: NodeKind) -> int | None:
    limits = [number for number in (kind.cpus, partition.max_cpus_per_node) if number is not None]
    return min(limits, default=None)


def _account_of(asked: Asked, cluster: Cluster) -> Account | None:
    """The account that is charged, with everything that it may use in any partition."""
    found = [
        item
        for item in cluster.accounts or ()
        if (item.name == asked.account if asked.account is not None else item.is_default)
    ]
    if not found:
        return None
    partitions, qos = [item.partitions for item in found], [item.qos for item in found]
    return replace(found[0], partitions=_union(partitions), qos=_union(qos))


def _union(items: list[tuple[str, ...] | None]) -> tuple[str, ...] | None:
    if any(item is None for item in items):
        return None
    return tuple(dict.fromkeys(name for item in items for name in item or ()))


def _qos_of(asked: Asked, cluster: Cluster) -> Qos | None:
    """The QOS that was asked for; one that is not known may override anything."""
    if asked.qos is None:
        return None
    unknown = Qos(asked.qos, overrides=None)
    return next((item for item in cluster.qos or () if item.name == asked.qos), unknown)


def _fitting_partition(asked: Asked, cluster: Cluster, refused: Partition) -> str:
    """A hint at partitions in which the job could start as it is."""
    fitting = [
        item.name
        for item in cluster.partitions
        if item is not refused and not item.is_hidden and _fits(asked, cluster, item)
    ]
    return f"partition {_listed(fitting, 'or')} can take it as it is" if fitting else ""


def _fits(asked: Asked, cluster: Cluster, partition: Partition) -> bool:
    """Whether nothing is known that speaks against a partition; hints are not looked for here."""
    alone = replace(cluster, partitions=(partition,))
    return next(partition_troubles(asked, alone, partition), None) is None


def _did_you_mean(word: str, words: Iterable[str]) -> str:
    match = near(word, words)
    return f"did you mean {match}? " if match else ""


def _listed(names: Iterable[str], last: str = "and") -> str:
    words = list(names)
    return f" {last} ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def _with_source(hint: str, cluster: Cluster) -> str:
    return "; ".join(filter(None, (hint, cluster.out_of_date_hint)))
