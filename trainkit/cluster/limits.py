"""Checks the request of a job against the limits of a cluster. Pure.

sbatch itself rejects few of these requests: it accepts the job, which then stays pending forever.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from trainkit.cluster.model import (
    Account,
    Cluster,
    NodeKind,
    Partition,
    Qos,
    ResourceRequest,
    features_of,
    matching_nodes,
    merged_accounts,
)
from trainkit.config.names import near
from trainkit.formats import memory_mib, memory_text, plural, time_limit_s, time_text

SUBACCOUNTS_VERSION = (23, 2)
"""Since this version, AllowAccounts also allows subaccounts, which are not known here."""


class LimitProblem(NamedTuple):
    """A config key whose value the cluster cannot satisfy."""

    key: str
    message: str
    hint: str = ""


def limit_problems(request: ResourceRequest, cluster: Cluster) -> Iterator[LimitProblem]:
    """A problem for each key of a request that this cluster cannot satisfy."""
    if not cluster.partitions:
        return
    names = None if request.partition is None else [name.strip() for name in request.partition.split(",")]
    yield from _unknown_partitions(names, cluster)
    yield from _account_problems(request, cluster)
    partitions = cluster.requested_partitions(request.partition)
    visible = [item for item in cluster.partitions if not item.is_hidden]
    if not partitions and visible:
        # None of the names exists: a time beyond the longest limit is wrong in any partition.
        longest = max(visible, key=lambda item: item.max_time_s or math.inf)
        yield from _time_problems(request, cluster, longest)
    found = [list(partition_problems(request, cluster, item)) for item in partitions]
    # Of several partitions, one that can start the job is enough.
    if found and all(found):
        yield from found[0]


def partition_problems(
    request: ResourceRequest, cluster: Cluster, partition: Partition
) -> Iterator[LimitProblem]:
    """The problems that prevent a job from ever starting in a partition; each message names the limit."""
    found = list(_violations(request, cluster, partition))
    other = _partition_suggestion(request, cluster, partition) if found else ""
    for key, message, hint in found:
        yield LimitProblem(key, message, with_source("; ".join(filter(None, (hint, other))), cluster))
        other = ""


def spare_capacity(request: ResourceRequest, cluster: Cluster) -> int | None:
    """How many of the nodes that fit a job it does not need; None if that is unknown."""
    partitions = cluster.requested_partitions(request.partition)
    if not partitions or not all(partition.nodes for partition in partitions):
        return None
    counts = [
        _num_fitting(request, item, matching_nodes(item, request.constraint, request.needed_gpu_type))
        for item in partitions
    ]
    return max(0, max(counts) - request.all_nodes)


def _num_fitting(request: ResourceRequest, partition: Partition, kinds: Iterable[NodeKind]) -> int:
    return sum(kind.count for kind in kinds if request.fits_node(partition, kind))


# Names: partitions, accounts and QOS.


def _unknown_partitions(names: list[str] | None, cluster: Cluster) -> Iterator[LimitProblem]:
    """The requested partitions that do not exist; `names` is None for the default partition."""
    listing = f"{cluster.name} has {listed(item.name for item in cluster.partitions if not item.is_hidden)}"
    if names is None and cluster.partition(None) is None:
        message = f"is not set, and {cluster.name} has no default partition"
        yield LimitProblem("resources.partition", message, listing)
    for name in names or []:
        if cluster.partition(name) is None:
            hint = f"{did_you_mean(name, [item.name for item in cluster.partitions])}{listing}"
            message = f"is {name}, but {cluster.name} has no such partition"
            yield LimitProblem("resources.partition", message, with_source(hint, cluster))


def _account_problems(request: ResourceRequest, cluster: Cluster) -> Iterator[LimitProblem]:
    """An account or QOS that does not exist or that this user may not use."""
    account = _account_of(request, cluster)
    if request.account is not None and cluster.accounts is not None and account is None:
        names = list(dict.fromkeys(item.name for item in cluster.accounts))
        hint = f"{did_you_mean(request.account, names)}your accounts: {listed(names) or 'none'}"
        message = f"is {request.account}, but you have no such account on {cluster.name}"
        yield LimitProblem("resources.account", message, with_source(hint, cluster))
    if request.qos is None:
        return
    known = None if cluster.qos is None else [item.name for item in cluster.qos]
    if known is not None and not _is_in(request.qos, known):
        hint = f"{did_you_mean(request.qos, known)}{cluster.name} has {listed(known)}"
        message = f"is {request.qos}, but {cluster.name} has no such QOS"
        yield LimitProblem("resources.qos", message, with_source(hint, cluster))
    elif account is not None and account.qos is not None and not _is_in(request.qos, account.qos):
        message = f"is {request.qos}, which account {account.name} may not use"
        hint = f"it may use {listed(account.qos) or 'none'}"
        yield LimitProblem("resources.qos", message, with_source(hint, cluster))


def _permission_problems(
    request: ResourceRequest, cluster: Cluster, partition: Partition
) -> Iterator[LimitProblem]:
    """A partition that the account or QOS is known not to be allowed in."""
    account = _account_of(request, cluster)
    name = request.account or (account.name if account is not None else None)
    names_are_complete = () < cluster.slurm_version < SUBACCOUNTS_VERSION
    if (
        name is not None
        and names_are_complete
        and not _allows(partition.allowed_accounts, partition.denied_accounts, name)
    ):
        key = "resources.partition" if request.account is None else "resources.account"
        message = f"is {partition.name}, which account {name} may not use"
        if request.account is not None:
            message = f"is {name}, which may not use partition {partition.name}"
        allowed = partition.allowed_accounts
        yield LimitProblem(key, message, f"accounts that may: {listed(allowed)}" if allowed else "")
    elif account is not None and not _is_in(partition.name, account.partitions):
        message = f"is {partition.name}, which account {account.name} may not use"
        hint = f"it may use {listed(account.partitions or ())}"
        yield LimitProblem("resources.partition", message, hint)
    if request.qos is not None and not _allows(partition.allowed_qos, partition.denied_qos, request.qos):
        hint = f"it accepts {listed(partition.allowed_qos)}" if partition.allowed_qos else ""
        message = f"is {request.qos}, which partition {partition.name} does not accept"
        yield LimitProblem("resources.qos", message, hint)


def _allows(allowed: Iterable[str] | None, denied: Iterable[str], name: str) -> bool:
    return not _is_in(name, denied) if allowed is None else _is_in(name, allowed)


def _is_in(name: str, names: Iterable[str] | None) -> bool:
    """Whether a name is in `names`, ignoring case as Slurm's accounting does; None allows every name."""
    return names is None or name.lower() in {item.lower() for item in names}


def _account_of(request: ResourceRequest, cluster: Cluster) -> Account | None:
    """The account that is charged, merged over its partitions; None if unknown."""
    own = (
        item
        for item in cluster.accounts or ()
        if (item.is_default if request.account is None else _is_in(request.account, [item.name]))
    )
    return next(iter(merged_accounts(own)), None)


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """The start of a hint; empty if no name is similar."""
    match = near(name, names)
    return f"did you mean {match}? " if match else ""


def listed(names: Iterable[str], last: str = "and") -> str:
    """Join names as in ``a, b and c``."""
    items = list(names)
    return f" {last} ".join(filter(None, (", ".join(items[:-1]), *items[-1:])))


def with_source(hint: str, cluster: Cluster) -> str:
    """Append to a hint what to do if the description of the cluster is out of date."""
    return "; ".join(filter(None, (hint, cluster.out_of_date_hint)))


# Amounts: time, nodes, GPUs, CPUs and memory.


def _violations(request: ResourceRequest, cluster: Cluster, partition: Partition) -> Iterator[LimitProblem]:
    """(key, message, hint) for the limits that a request exceeds."""
    yield from _permission_problems(request, cluster, partition)
    yield from _time_problems(request, cluster, partition)
    max_nodes = partition.max_nodes if _applies("nodes", _qos_of(request, cluster)) else None
    if max_nodes is not None and request.all_nodes > max_nodes:
        key, shown = _too_many_nodes(request, max_nodes)
        limit = plural(max_nodes, "node")
        message = f"{shown}, but a job in partition {partition.name} can have at most {limit}"
        yield LimitProblem(key, message)
        request = replace(request, nodes=1, spare_nodes=0)  # report the number of nodes once
    if partition.nodes:
        yield from _node_problems(request, partition)


def _qos_of(request: ResourceRequest, cluster: Cluster) -> Qos | None:
    """The requested QOS; an unknown one may override any limit."""
    if request.qos is None:
        return None
    unknown = Qos(request.qos, overrides=None)
    return next((item for item in cluster.qos or () if _is_in(request.qos, [item.name])), unknown)


def _applies(limit: Literal["time", "nodes"], qos: Qos | None) -> bool:
    """Whether a limit of the partition is known to apply to the jobs of a QOS."""
    return qos is None or (qos.overrides is not None and limit not in qos.overrides)


def _too_many_nodes(request: ResourceRequest, limit: int) -> tuple[str, str]:
    """The key that requests more nodes than `limit`, and the start of its message."""
    if request.nodes > limit:
        return "resources.nodes", f"is {request.nodes}"
    shown = f"is {request.spare_nodes}: {request.nodes} + {request.spare_nodes} = {request.all_nodes} nodes"
    return "resources.spare_nodes", shown


def _time_problems(
    request: ResourceRequest, cluster: Cluster, partition: Partition
) -> Iterator[LimitProblem]:
    if request.time is None:
        return
    qos, requested_s = _qos_of(request, cluster), time_limit_s(request.time)
    limits = [(qos.max_time_s, f"QOS {qos.name}")] if qos is not None else []
    if _applies("time", qos):
        limits.append((partition.max_time_s, f"partition {partition.name}"))
    known = [(limit_s, owner) for limit_s, owner in limits if limit_s is not None]
    limit_s, owner = min(known, default=(None, ""))
    if limit_s is None or (requested_s is not None and requested_s <= limit_s):
        return
    shown = "sets no limit" if requested_s is None else f"is {request.time}"
    message = f"{shown}, but {owner} allows at most {time_text(limit_s)}"
    yield LimitProblem("resources.time", message, f"--time {time_text(limit_s)} fits")


def _node_problems(request: ResourceRequest, partition: Partition) -> Iterator[LimitProblem]:
    constraint, gpu_type = request.constraint, request.needed_gpu_type
    known = list(dict.fromkeys(name for kind in partition.nodes for name in kind.features))
    for name in features_of(constraint):
        if name not in known:
            hint = f"{did_you_mean(name, known)}they have {listed(known) or 'no features'}"
            message = f"names {name}, but no node of partition {partition.name} has that feature"
            yield LimitProblem("resources.constraint", message, hint)
            constraint = None  # check the sizes without it
    types = list(dict.fromkeys(name for kind in partition.nodes for name in kind.gpus if name))
    if gpu_type is not None and gpu_type not in types:
        hint = f"{did_you_mean(gpu_type, types)}they have {listed(types) or 'GPUs without a type, or none'}"
        message = f"is {gpu_type}, but no node of partition {partition.name} has such a GPU"
        yield LimitProblem("resources.gpu_type", message, hint)
        gpu_type = None
    request = replace(request, constraint=constraint, gpu_type=gpu_type)
    kinds = matching_nodes(partition, constraint, gpu_type)
    if not kinds:
        gpus = f" with {gpu_type} GPUs" if gpu_type else ""
        message = (
            f"is {constraint}, but no node of partition {partition.name}{gpus} has all of these features"
        )
        yield LimitProblem("resources.constraint", message)
        return
    too_large = list(_node_size_problems(request, partition, kinds))
    yield from too_large
    count = _num_fitting(request, partition, kinds)
    if not too_large and count < request.all_nodes:
        key, shown = _too_many_nodes(request, count)
        message = f"{shown}, but partition {partition.name} has {plural(count, 'node')}"
        if count < partition.num_nodes:
            message += f" with {_requirements(request)}"
        yield LimitProblem(key, message)


def _node_size_problems(
    request: ResourceRequest, partition: Partition, kinds: Sequence[NodeKind]
) -> Iterator[LimitProblem]:
    """The amounts per node that no node has, each checked separately."""
    nodes_have = f"the nodes of partition {partition.name} have"
    workers = request.workers_per_node
    max_gpus = max(kind.num_gpus(request.gpu_type) for kind in kinds)
    too_many_gpus = (request.gpus_per_node or 0) > max_gpus
    if too_many_gpus:
        available = f"at most {plural(max_gpus, 'GPU')}" if max_gpus else "no GPUs"
        message = f"is {request.gpus_per_node}, but {nodes_have} {available}"
        hint = (
            f"request at most --gpus-per-node {max_gpus}; more --nodes give as many GPUs" if max_gpus else ""
        )
        yield LimitProblem("resources.gpus_per_node", message, hint if max_gpus else "")
    cpus = [partition.usable_cpus(kind) for kind in kinds]
    max_cpus = None if None in cpus else max(number for number in cpus if number is not None)
    if not too_many_gpus and max_cpus is not None and (request.cpus_per_node or 0) > max_cpus:
        if request.cpus_per_node == workers:
            message = f"is {workers}, but {nodes_have} {max_cpus} CPUs and every process needs one"
            yield LimitProblem("resources.gpus_per_node", message)
        else:
            each = (request.cpus_per_node or 0) // workers
            message = f"is {each}: {workers} x {each} = {request.cpus_per_node} CPUs per node"
            yield LimitProblem("resources.cpus_per_gpu", f"{message}, but {nodes_have} {max_cpus}")
    mem = None if request.mem is None else memory_mib(request.mem)
    sizes = [kind.mem_mib for kind in kinds]
    max_mem = None if None in sizes else max(size for size in sizes if size is not None)
    if mem is not None and max_mem is not None and mem > max_mem:
        message = f"is {request.mem}, but {nodes_have} {memory_text(max_mem)}"
        yield LimitProblem("resources.mem", message)


def _requirements(request: ResourceRequest) -> str:
    parts = []
    if request.gpus_per_node:
        of_type = f" of type {request.gpu_type}" if request.gpu_type else ""
        parts.append(f"{plural(request.gpus_per_node, 'GPU')}{of_type}")
    if request.cpus_per_node:
        parts.append(plural(request.cpus_per_node, "CPU"))
    if request.mem:
        parts.append(f"{request.mem} of memory")
    return listed([*parts, *(f"feature {name}" for name in features_of(request.constraint))])


def _partition_suggestion(request: ResourceRequest, cluster: Cluster, refused: Partition) -> str:
    """Suggest other partitions that can run the job unchanged."""
    fitting = [
        item.name
        for item in cluster.partitions
        if item is not refused
        and item.is_up
        and not item.is_hidden
        and next(_violations(request, cluster, item), None) is None
    ]
    return f"--partition {listed(fitting, 'or')} fits without other changes" if fitting else ""
