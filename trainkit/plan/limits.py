"""What a job asks of Slurm, held against what a cluster has and allows. Pure.

Slurm itself refuses little of it when a job is submitted: one that can never start waits for ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from trainkit.plan.asked import Asked, features_of, fitting_nodes
from trainkit.plan.cluster import Cluster, NodeKind, Partition, Qos
from trainkit.plan.permissions import (
    Trouble,
    account_troubles,
    did_you_mean,
    listed,
    permission_troubles,
    qos_of,
    unknown_partitions,
    with_source,
)
from trainkit.plan.slurm_words import memory_mib, memory_text, time_limit_s, time_text


def troubles(asked: Asked, cluster: Cluster) -> Iterator[Trouble]:
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


def partition_troubles(asked: Asked, cluster: Cluster, partition: Partition) -> Iterator[Trouble]:
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


def _too_many_nodes(asked: Asked, most: int) -> tuple[str, str]:
    """The key that asks for more nodes than there are, and what it says."""
    if asked.nodes > most:
        return "resources.nodes", f"is {asked.nodes}"
    words = f"is {asked.spare_nodes}: {asked.nodes} + {asked.spare_nodes} = {asked.all_nodes} nodes"
    return "resources.spare_nodes", words


def _holds(limit: Literal["time", "nodes"], qos: Qos | None) -> bool:
    """Whether a limit of the partition is known to hold for the jobs of a QOS."""
    return qos is None or (qos.overrides is not None and limit not in qos.overrides)


def _time_troubles(
    asked: Asked, cluster: Cluster, partition: Partition, qos: Qos | None
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


def _node_troubles(asked: Asked, cluster: Cluster, partition: Partition) -> Iterator[Trouble]:
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


def spare_capacity(asked: Asked, cluster: Cluster) -> int | None:
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


def _single_troubles(asked: Asked, partition: Partition, kinds: tuple[NodeKind, ...]) -> Iterator[Trouble]:
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


def _fitting_partition(asked: Asked, cluster: Cluster, refused: Partition) -> str:
    """A hint at partitions in which the job could start as it is."""
    fitting = [
        item.name
        for item in cluster.partitions
        if item is not refused and not item.is_hidden and _fits(asked, cluster, item)
    ]
    return f"partition {listed(fitting, 'or')} can take it as it is" if fitting else ""


def _fits(asked: Asked, cluster: Cluster, partition: Partition) -> bool:
    """Whether nothing is known that speaks against a partition; hints are not looked for here."""
    alone = replace(cluster, partitions=(partition,))
    return next(partition_troubles(asked, alone, partition), None) is None
