"""What a job asks of Slurm, held against what a cluster has and allows. Pure.

Slurm itself refuses little of it when a job is submitted: one that can never start waits for ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Literal

from trainkit.cluster.model import Account, Cluster, NodeKind, Partition, Qos
from trainkit.cluster.resource_request import ResourceRequest, features_of, fitting_nodes
from trainkit.cluster.units import memory_mib, memory_text, time_limit_s, time_text
from trainkit.config.names import near

Trouble = tuple[str, str, str]
"""Key of the config, message, hint."""
SUBACCOUNTS_COUNT_TOO = (23, 2)
"""From this version on a partition that allows an account allows those below it too, which are not known."""


def unknown_partitions(names: list[str] | None, cluster: Cluster) -> Iterator[Trouble]:
    """The named partitions that do not exist; None stands for the default one."""
    known = [item.name for item in cluster.partitions]
    if names is None and cluster.partition(None) is None:
        hint = f"there is {listed(item.name for item in cluster.partitions if not item.is_hidden)}"
        yield "resources.partition", f"is not set, and {cluster.name} has no default partition", hint
    for name in names or []:
        if cluster.partition(name) is None:
            shown = [item.name for item in cluster.partitions if not item.is_hidden]
            hint = f"{did_you_mean(name, known)}there is {listed(shown)}"
            message = f"is {name}, and {cluster.name} has no such partition"
            yield "resources.partition", message, with_source(hint, cluster)


def account_troubles(asked: ResourceRequest, cluster: Cluster) -> Iterator[Trouble]:
    """An account or QOS that does not exist, or that is not yours."""
    account = _account_of(asked, cluster)
    if asked.account is not None and cluster.accounts is not None and account is None:
        names = list(dict.fromkeys(item.name for item in cluster.accounts))
        hint = f"{did_you_mean(asked.account, names)}you have {listed(names) or 'none'}"
        message = f"is {asked.account}, and you have no such account on {cluster.name}"
        yield "resources.account", message, with_source(hint, cluster)
    if asked.qos is None:
        return
    known = None if cluster.qos is None else [item.name for item in cluster.qos]
    if known is not None and not _is_in(asked.qos, known):
        hint = f"{did_you_mean(asked.qos, known)}there is {listed(known)}"
        message = f"is {asked.qos}, and {cluster.name} has no such QOS"
        yield "resources.qos", message, with_source(hint, cluster)
    elif account is not None and account.qos is not None and not _is_in(asked.qos, account.qos):
        message = f"is {asked.qos}, which account {account.name} may not use"
        yield "resources.qos", message, with_source(f"it may use {listed(account.qos) or 'none'}", cluster)


def permission_troubles(asked: ResourceRequest, cluster: Cluster, partition: Partition) -> Iterator[Trouble]:
    """What a partition does not let an account or a QOS do, as far as that is known."""
    account = _account_of(asked, cluster)
    name = asked.account or (account.name if account is not None else None)
    names_are_all = () < cluster.slurm_version < SUBACCOUNTS_COUNT_TOO
    if name is not None and names_are_all and not _allows_account(partition, name):
        key = "resources.partition" if asked.account is None else "resources.account"
        message = f"is {partition.name}, which account {name} may not use"
        if asked.account is not None:
            message = f"is {name}, which may not use partition {partition.name}"
        allowed = partition.allowed_accounts
        yield key, message, f"accounts that may: {listed(allowed)}" if allowed else ""
    elif account is not None and not _is_in(partition.name, account.partitions):
        message = f"is {partition.name}, which account {account.name} may not use"
        hint = with_source(f"it may use {listed(account.partitions or ())}", cluster)
        yield "resources.partition", message, hint
    if asked.qos is not None and not _allows_qos(partition, asked.qos):
        hint = f"it takes {listed(partition.allowed_qos)}" if partition.allowed_qos else ""
        yield "resources.qos", f"is {asked.qos}, which partition {partition.name} does not take", hint


def _allows_account(partition: Partition, name: str) -> bool:
    if partition.allowed_accounts is not None:
        return _is_in(name, partition.allowed_accounts)
    return not _is_in(name, partition.denied_accounts)


def _allows_qos(partition: Partition, name: str) -> bool:
    if partition.allowed_qos is not None:
        return _is_in(name, partition.allowed_qos)
    return not _is_in(name, partition.denied_qos)


def _is_in(name: str, names: Iterable[str] | None) -> bool:
    """Whether names hold a name; None holds all. Slurm's accounting knows no capitals."""
    return names is None or name.lower() in {item.lower() for item in names}


def _account_of(asked: ResourceRequest, cluster: Cluster) -> Account | None:
    """The account that is charged, with everything that it may use in any partition."""
    found = [
        item
        for item in cluster.accounts or ()
        if (item.is_default if asked.account is None else _is_in(asked.account, [item.name]))
    ]
    if not found:
        return None
    partitions, qos = [item.partitions for item in found], [item.qos for item in found]
    return replace(found[0], partitions=_union(partitions), qos=_union(qos))


def _union(items: list[tuple[str, ...] | None]) -> tuple[str, ...] | None:
    if any(item is None for item in items):
        return None
    return tuple(dict.fromkeys(name for item in items for name in item or ()))


def qos_of(asked: ResourceRequest, cluster: Cluster) -> Qos | None:
    """The QOS that was asked for; one that is not known may override anything."""
    if asked.qos is None:
        return None
    unknown = Qos(asked.qos, overrides=None)
    return next((item for item in cluster.qos or () if _is_in(asked.qos, [item.name])), unknown)


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """The beginning of a hint; empty when nothing is like the word."""
    match = near(word, words)
    return f"did you mean {match}? " if match else ""


def listed(names: Iterable[str], last: str = "and") -> str:
    """``a, b and c``."""
    words = list(names)
    return f" {last} ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def with_source(hint: str, cluster: Cluster) -> str:
    """A hint, and what to do should the cluster have changed since."""
    return "; ".join(filter(None, (hint, cluster.out_of_date_hint)))


def troubles(asked: ResourceRequest, cluster: Cluster) -> Iterator[Trouble]:
    """(key, message, hint) for everything that this cluster does not have or allow."""
    if not cluster.partitions:
        return
    names = None if asked.partition is None else [name.strip() for name in asked.partition.split(",")]
    yield from unknown_partitions(names, cluster)
    yield from account_troubles(asked, cluster)
    found = [list(partition_troubles(asked, cluster, item)) for item in cluster.asked(asked.partition)]
    # Of several partitions, one that can start the job is enough.
    if found and all(found):
        yield from found[0]


def partition_troubles(asked: ResourceRequest, cluster: Cluster, partition: Partition) -> Iterator[Trouble]:
    """What keeps a job from ever starting in one partition."""
    qos = qos_of(asked, cluster)
    yield from permission_troubles(asked, cluster, partition)
    yield from _time_troubles(asked, cluster, partition, qos)
    most = partition.max_nodes
    if most is not None and asked.all_nodes > most and _holds("nodes", qos):
        key, words = _too_many_nodes(asked, most)
        message = f"{words}, but a job in partition {partition.name} has at most {most}"
        yield key, message, _fitting_partition(asked, cluster, partition)
        asked = replace(asked, nodes=1, spare_nodes=0)  # that there are not as many goes without saying
    if partition.nodes:
        yield from _node_troubles(asked, cluster, partition)


def _too_many_nodes(asked: ResourceRequest, most: int) -> tuple[str, str]:
    """The key that asks for more nodes than there are, and what it says."""
    if asked.nodes > most:
        return "resources.nodes", f"is {asked.nodes}"
    words = f"is {asked.spare_nodes}: {asked.nodes} + {asked.spare_nodes} = {asked.all_nodes} nodes"
    return "resources.spare_nodes", words


def _holds(limit: Literal["time", "nodes"], qos: Qos | None) -> bool:
    """Whether a limit of the partition is known to hold for the jobs of a QOS."""
    return qos is None or (qos.overrides is not None and limit not in qos.overrides)


def _time_troubles(
    asked: ResourceRequest, cluster: Cluster, partition: Partition, qos: Qos | None
) -> Iterator[Trouble]:
    if asked.time is None:
        return
    asked_s = time_limit_s(asked.time)
    limits = [(qos.max_time_s, f"QOS {qos.name}")] if qos is not None else []
    if _holds("time", qos):
        limits.append((partition.max_time_s, f"partition {partition.name}"))
    known = [(limit_s, owner) for limit_s, owner in limits if limit_s is not None]
    limit_s, owner = min(known, default=(None, ""))
    if limit_s is None or (asked_s is not None and asked_s <= limit_s):
        return
    shown = "asks for no limit" if asked_s is None else f"is {asked.time}"
    message = f"{shown}, but {owner} allows at most {time_text(limit_s)}"
    fitting = _fitting_partition(asked, cluster, partition)
    hint = "; ".join(filter(None, (f"--time {time_text(limit_s)} fits", fitting)))
    yield "resources.time", message, with_source(hint, cluster)


def _node_troubles(asked: ResourceRequest, cluster: Cluster, partition: Partition) -> Iterator[Trouble]:
    features = features_of(asked.constraint)
    known = list(dict.fromkeys(name for kind in partition.nodes for name in kind.features))
    for name in features:
        if name not in known:
            hint = f"{did_you_mean(name, known)}they have {listed(known) or 'no feature at all'}"
            message = f"names {name}, and no node of partition {partition.name} has that feature"
            yield "resources.constraint", message, with_source(hint, cluster)
    types = list(dict.fromkeys(kind for node in partition.nodes for kind in node.gpus if kind))
    if asked.gpus_per_node and asked.gpu_type is not None and asked.gpu_type not in types:
        hint = f"{did_you_mean(asked.gpu_type, types)}they have {listed(types) or 'no type of GPU'}"
        message = f"is {asked.gpu_type}, and no node of partition {partition.name} has such a GPU"
        yield "resources.gpu_type", message, with_source(hint, cluster)
    kinds = fitting_nodes(partition, asked.constraint, asked.gpu_type if asked.gpus_per_node else None)
    if not kinds:
        return
    single = list(_single_troubles(asked, partition, kinds))
    for key, message, hint in single:
        yield key, message, with_source(hint or _fitting_partition(asked, cluster, partition), cluster)
    count = sum(kind.count for kind in kinds if _is_enough(asked, partition, kind))
    if not single and count < asked.all_nodes:
        what = "1 node" if count == 1 else f"{count} nodes"
        key, words = _too_many_nodes(asked, count)
        message = f"{words}, but partition {partition.name} has {what}"
        if count < partition.num_nodes:
            message += f" with {_needs(asked)}"
        hint = _fitting_partition(asked, cluster, partition)
        yield key, message, with_source(hint, cluster)


def spare_capacity(asked: ResourceRequest, cluster: Cluster) -> int | None:
    """How many nodes a job could do without where it may run; None when that is not known."""
    partitions = cluster.asked(asked.partition)
    if not partitions or not all(partition.nodes for partition in partitions):
        return None
    gpu_type = asked.gpu_type if asked.gpus_per_node else None
    counts = []
    for item in partitions:
        kinds = fitting_nodes(item, asked.constraint, gpu_type)
        counts.append(sum(kind.count for kind in kinds if _is_enough(asked, item, kind)))
    return max(0, max(counts) - asked.all_nodes)


def _single_troubles(
    asked: ResourceRequest, partition: Partition, kinds: tuple[NodeKind, ...]
) -> Iterator[Trouble]:
    """What no node has, one thing at a time."""
    owners = f"the nodes of partition {partition.name} have"
    gpus = max(kind.num_gpus(asked.gpu_type) for kind in kinds)
    wanted = asked.gpus_per_node
    too_many_gpus = wanted is not None and wanted > gpus
    if wanted is not None and too_many_gpus:
        what = f"at most {gpus} GPUs" if gpus else "no GPU"
        hint = ""
        if gpus and asked.nodes * wanted % gpus == 0:
            hint = f"--nodes {asked.nodes * wanted // gpus} --gpus-per-node {gpus} has as many"
        yield "resources.gpus_per_node", f"is {wanted}, but {owners} {what}", hint
    cpus = [_cpus(partition, kind) for kind in kinds]
    most = max((number for number in cpus if number is not None), default=None)
    if not too_many_gpus and asked.cpus_per_node and most is not None and asked.cpus_per_node > most:
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


def _is_enough(asked: ResourceRequest, partition: Partition, kind: NodeKind) -> bool:
    cpus, mem = _cpus(partition, kind), None if asked.mem is None else memory_mib(asked.mem)
    return (
        kind.num_gpus(asked.gpu_type) >= (asked.gpus_per_node or 0)
        and (cpus is None or cpus >= (asked.cpus_per_node or 0))
        and (kind.mem_mib is None or kind.mem_mib >= (mem or 0))
    )


def _needs(asked: ResourceRequest) -> str:
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


def _fitting_partition(asked: ResourceRequest, cluster: Cluster, refused: Partition) -> str:
    """A hint at partitions in which the job could start as it is."""
    fitting = [
        item.name
        for item in cluster.partitions
        if item is not refused and not item.is_hidden and _fits(asked, cluster, item)
    ]
    return f"partition {listed(fitting, 'or')} can take it as it is" if fitting else ""


def _fits(asked: ResourceRequest, cluster: Cluster, partition: Partition) -> bool:
    """Whether nothing is known that speaks against a partition; hints are not looked for here."""
    alone = replace(cluster, partitions=(partition,))
    return next(partition_troubles(asked, alone, partition), None) is None
