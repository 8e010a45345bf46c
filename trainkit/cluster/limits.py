"""Checks a job's request against the limits of a cluster, without running a command.

sbatch rejects only a few requests that exceed limits; most of these jobs are accepted and then stay pending
forever.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from trainkit.cluster.model import (
    SUBACCOUNTS_SINCE,
    Account,
    Cluster,
    NodeKind,
    Partition,
    PartitionLimit,
    Qos,
    features_of,
)
from trainkit.config.running import ResourcesConfig
from trainkit.errors import KeyProblem
from trainkit.formats import did_you_mean, memory_mib, memory_text, plural, time_limit_s, time_text
from trainkit.scheduler import expand_hosts


@dataclass(frozen=True)
class ResourceRequest:
    """The resources that a job requests, in the units of the limits; None means that Slurm chooses."""

    nodes: int
    names: Mapping[str | None, Partition | None]
    """Maps each requested partition name (None for the default partition) to the partition, or to None if it
    does not exist."""
    workers_per_node: int = 1
    gpus_per_node: int | None = None
    gpu_type: str | None = None
    gpu_types: tuple[str, ...] = ()
    """The acceptable GPU types, if there are several. The type depends on the partition where the job
    starts."""
    cpus_per_node: int | None = None
    mem_mib: float | None = None
    time_s: float | None = None
    """The time limit in seconds; infinite if the job has no time limit."""
    time_min_s: float | None = None
    """The shortest time limit in seconds that the job accepts in order to start sooner, or None if it needs
    `time_s`."""
    is_sliced: bool = False
    """True if `time_s` is the value of ``resources.slice``."""
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    spare_nodes: int = 0
    """The number of extra nodes, in addition to the nodes that train."""
    extra: Mapping[str, str | int | bool] = field(default_factory=dict)
    """Further sbatch options."""

    @classmethod
    def of(cls, resources: ResourcesConfig, cluster: Cluster) -> ResourceRequest:
        """Return the request for the config section `resources`; a plan adds the workers per node."""
        types = resources.gpu_types
        names: Iterable[str | None] = (None,)
        if resources.partition is not None:
            names = map(str.strip, resources.partition.split(","))
        elif len(types) > 1:
            names = [item.name for item in cluster.partitions if item.is_up and not item.is_hidden]
        partitions = {name: cluster.partition(name) for name in names}
        if len(types) > 1:
            # All nodes of a job are in one partition, so the partition determines the GPU type.
            one_type: dict[str | None, Partition | None] = {
                name: item
                for name, item in partitions.items()
                if item is not None and item.gpu_type(resources.constraint) in types
            }
            if one_type:
                partitions = one_type
        return cls(
            nodes=resources.most_nodes,
            spare_nodes=resources.spare_nodes,
            gpu_type=resources.gpu_type if len(types) == 1 else None,
            gpu_types=types if len(types) > 1 else (),
            mem_mib=None if resources.mem is None else memory_mib(resources.mem),
            time_s=None if resources.job_time is None else time_limit_s(resources.job_time) or math.inf,
            time_min_s=None if resources.time_min is None else time_limit_s(resources.time_min),
            is_sliced=resources.slice is not None,
            names=partitions,
            account=resources.account,
            qos=resources.qos,
            constraint=resources.constraint,
            reservation=resources.reservation,
            extra=resources.extra,
        )

    @property
    def partitions(self) -> list[Partition]:
        """The requested partitions that exist."""
        return [item for item in self.names.values() if item is not None]

    @property
    def gpu_nodes(self) -> list[NodeKind]:
        """The kinds of GPU nodes that the job may get."""
        found = (kind for item in self.partitions for kind in item.matching(self.constraint, self.gpu_type))
        return [kind for kind in found if kind.num_gpus()]

    @property
    def named_nodes(self) -> list[str]:
        """The nodes that the job must get (--nodelist); raises UsageError if the text is not a host list."""
        nodelist = self.extra.get("nodelist")
        return expand_hosts(nodelist) if isinstance(nodelist, str) else []

    @property
    def all_nodes(self) -> int:
        """The total number of nodes of the job, including spare nodes."""
        return self.nodes + self.spare_nodes

    @property
    def needed_gpu_type(self) -> str | None:
        """The requested GPU type, or None if the job does not use GPUs."""
        return self.gpu_type if self.gpus_per_node else None

    def exceeds(self, partition: Partition) -> bool:
        """Return whether the requested time or nodes exceed a partition limit that a QOS might override."""
        max_time_s, max_nodes = partition.max_time_s or math.inf, partition.max_nodes or math.inf
        return (self.time_s or 0) > max_time_s or self.all_nodes > max_nodes

    def with_workers(self, count: int, device: str, threads: int | None, per: str) -> ResourceRequest:
        """Return the request with a plan's workers per node, and the GPUs and CPUs that they need."""
        # If the plan does not set the number of threads, each task still gets one CPU.
        each = 1 if threads is None and per == "gpu" else threads
        return replace(
            self,
            workers_per_node=count,
            gpus_per_node=count if device == "cuda" else None,
            cpus_per_node=None if each is None or "overcommit" in self.extra else each * count,
        )


def limit_problems(request: ResourceRequest, cluster: Cluster) -> Iterator[KeyProblem]:
    """Yield a problem for each key in a request that the cluster cannot satisfy."""
    for key, message, hint in _problems(request, cluster) if cluster.partitions else ():
        yield key, message, "; ".join(filter(None, (hint, cluster.out_of_date_hint)))


def _problems(request: ResourceRequest, cluster: Cluster) -> Iterator[KeyProblem]:
    yield from _unknown_partitions(request, cluster)
    yield from _account_problems(request, cluster)
    yield from _gpu_types_problems(request, cluster)
    visible = [item for item in cluster.partitions if not item.is_hidden]
    if not request.partitions and visible:
        # If none of the requested partitions exists, still report a requested time limit that exceeds the
        # limits of all partitions.
        longest = max(visible, key=lambda item: item.max_time_s or math.inf)
        yield from _time_problems(request, cluster, longest)
    found = [list(partition_problems(request, cluster, item)) for item in request.partitions]
    # A request for several partitions is valid if the job can start in at least one of them.
    if found and all(found):
        yield from found[0]


def _gpu_types_problems(request: ResourceRequest, cluster: Cluster) -> Iterator[KeyProblem]:
    """Yield a problem if several GPU types are requested and every partition has several GPU types."""
    types, constraint = request.gpu_types, request.constraint
    if not (types and request.gpus_per_node and request.partitions):
        return
    if any(item.gpu_type(constraint) in types for item in request.partitions):
        return
    have = [
        f"{item.name} has {listed(dict.fromkeys(name for kind in item.nodes for name in kind.gpus))}"
        for item in request.partitions
        if any(kind.gpus for kind in item.nodes)
    ]
    message = f"is {','.join(types)}, but no partition of {cluster.name} has GPUs of only one of these types"
    yield "resources.gpu_type", message, f"{'; '.join(have) or 'none has GPUs'}: request a single type"


def partition_refusals(request: ResourceRequest, cluster: Cluster) -> dict[str, KeyProblem]:
    """Return the first problem for each requested partition where the job can never start."""
    found = {item.name: next(partition_problems(request, cluster, item), None) for item in request.partitions}
    return {name: problem for name, problem in found.items() if problem is not None}


def spare_capacity(request: ResourceRequest) -> int | None:
    """Return how many suitable nodes exist beyond the number that the job needs, or None if unknown."""
    if not request.partitions or not all(partition.nodes for partition in request.partitions):
        return None
    counts = [
        _num_fitting(request, item, item.matching(request.constraint, request.needed_gpu_type))
        for item in request.partitions
    ]
    return max(0, max(counts) - request.all_nodes)


def _num_fitting(request: ResourceRequest, partition: Partition, kinds: Iterable[NodeKind]) -> int:
    """Return how many nodes have enough GPUs, CPUs and memory; unknown amounts are considered sufficient."""
    gpus, cpus, mem_mib = request.gpus_per_node or 0, request.cpus_per_node or 0, request.mem_mib or 0
    return sum(
        kind.count
        for kind in kinds
        if kind.num_gpus(request.gpu_type) >= gpus
        and ((usable := partition.usable_cpus(kind)) is None or usable >= cpus)
        and ((mem := partition.usable_mem_mib(kind)) is None or mem >= mem_mib)
    )


# Checks of names: partitions, accounts and QOS.


def _unknown_partitions(request: ResourceRequest, cluster: Cluster) -> Iterator[KeyProblem]:
    """Yield a problem for each requested partition that does not exist."""
    listing = f"{cluster.name} has {listed(item.name for item in cluster.partitions if not item.is_hidden)}"
    for name in (name for name, found in request.names.items() if found is None):
        if name is None:
            message = f"is not set, and {cluster.name} has no default partition"
            yield "resources.partition", message, listing
        else:
            hint = f"{did_you_mean(name, [item.name for item in cluster.partitions])}{listing}"
            yield "resources.partition", f"is {name}, but {cluster.name} has no such partition", hint


def _account_problems(request: ResourceRequest, cluster: Cluster) -> Iterator[KeyProblem]:
    """Yield a problem if the account or QOS does not exist, or if the user may not use it."""
    account = _account_of(request, cluster)
    if request.account is not None and cluster.accounts is not None and account is None:
        names = [item.name for item in cluster.accounts]
        hint = f"{did_you_mean(request.account, names)}your accounts: {listed(names) or 'none'}"
        message = f"is {request.account}, but you have no such account on {cluster.name}"
        yield "resources.account", message, hint
    if request.qos is None:
        return
    known = None if cluster.qos is None else [item.name for item in cluster.qos]
    if known is not None and not _is_in(request.qos, known):
        hint = f"{did_you_mean(request.qos, known)}{cluster.name} has {listed(known)}"
        yield "resources.qos", f"is {request.qos}, but {cluster.name} has no such QOS", hint
    elif account is not None and account.qos is not None and not _is_in(request.qos, account.qos):
        message = f"is {request.qos}, which account {account.name} may not use"
        yield "resources.qos", message, f"the account may use {listed(account.qos) or 'none'}"


def _permission_problems(
    request: ResourceRequest, cluster: Cluster, partition: Partition
) -> Iterator[KeyProblem]:
    """Yield a problem if a partition is known to exclude the user, the account or the QOS."""
    groups = partition.allowed_groups
    if groups is not None and cluster.groups is not None and not {*groups} & {*cluster.groups}:
        message = f"is {partition.name}, which only members of {listed(groups, 'or')} may use"
        yield "resources.partition", message, f"your groups: {listed(cluster.groups) or 'none'}"
    account = _account_of(request, cluster)
    if account is not None and not _is_in(partition.name, account.partitions):
        message = f"is {partition.name}, which account {account.name} may not use"
        yield "resources.partition", message, f"the account may use {listed(account.partitions or ())}"
    charged, allowed = request.account if account is None else account.name, partition.allowed_accounts
    is_nested = account is not None and cluster.slurm_version >= SUBACCOUNTS_SINCE
    above = account.parents if account is not None and is_nested else ()
    if charged is not None and not _accepts(partition, charged, above):
        hint = f"it accepts {listed(allowed)}" if allowed else ""
        yield "resources.account", f"is {charged}, which partition {partition.name} does not accept", hint
    if partition.needs_reservation and request.reservation is None:
        message = f"is not set, but partition {partition.name} accepts only jobs with a reservation"
        yield "resources.reservation", message, "`scontrol show reservation` lists the reservations"
    if request.qos is None:
        return
    denied = _is_in(request.qos, partition.denied_qos)
    if denied if partition.allowed_qos is None else not _is_in(request.qos, partition.allowed_qos):
        hint = f"it accepts {listed(partition.allowed_qos)}" if partition.allowed_qos else ""
        yield "resources.qos", f"is {request.qos}, which partition {partition.name} does not accept", hint


def _accepts(partition: Partition, account: str, above: tuple[str, ...] | None) -> bool:
    """Return whether a partition may accept an account.

    `above` lists the account's ancestors, or is None if they are unknown.
    """
    names = (account, *(above or ()))
    if partition.allowed_accounts is None:
        return not any(_is_in(name, partition.denied_accounts) for name in names)
    return above is None or any(_is_in(name, partition.allowed_accounts) for name in names)


def _is_in(name: str, names: Iterable[str] | None) -> bool:
    """Return whether a name is in `names`, ignoring case as Slurm does; True if `names` is None."""
    return names is None or name.lower() in {item.lower() for item in names}


def _account_of(request: ResourceRequest, cluster: Cluster) -> Account | None:
    """Return the account to which the job is charged, or None if unknown."""
    return next(
        (
            item
            for item in cluster.accounts or ()
            if (item.is_default if request.account is None else _is_in(request.account, [item.name]))
        ),
        None,
    )


def listed(names: Iterable[str], last: str = "and") -> str:
    """Join names in the form ``a, b and c``."""
    items = list(names)
    return f" {last} ".join(filter(None, (", ".join(items[:-1]), *items[-1:])))


# Checks of amounts: time, nodes, GPUs, CPUs and memory.


def partition_problems(
    request: ResourceRequest, cluster: Cluster, partition: Partition
) -> Iterator[KeyProblem]:
    """Yield each problem that prevents a job from ever starting in a partition, with the exceeded limit."""
    yield from _permission_problems(request, cluster, partition)
    yield from _time_problems(request, cluster, partition)
    max_nodes = partition.max_nodes if _applies("nodes", _qos_of(request, cluster)) else None
    if max_nodes is not None and request.all_nodes > max_nodes:
        key, shown = _too_many_nodes(request, max_nodes)
        limit = plural(max_nodes, "node")
        yield key, f"{shown}, but a job in partition {partition.name} can have at most {limit}", ""
        request = replace(request, nodes=1, spare_nodes=0)  # the excessive number of nodes is reported above
    min_nodes = partition.min_nodes if _applies("min_nodes", _qos_of(request, cluster)) else None
    if min_nodes is not None and request.all_nodes < min_nodes:
        message = (
            f"is {request.nodes}, but a job in partition {partition.name} needs at least {min_nodes} nodes"
        )
        yield "resources.nodes", message, f"--nodes {min_nodes - request.spare_nodes} is enough"
    if partition.nodes:
        yield from _node_problems(request, partition)


def _qos_of(request: ResourceRequest, cluster: Cluster) -> Qos | None:
    """Return the requested QOS; if it is unknown, return a QOS that may override any limit."""
    if request.qos is None:
        return None
    unknown = Qos(request.qos, overrides=None)
    return next((item for item in cluster.qos or () if _is_in(request.qos, [item.name])), unknown)


def _applies(limit: PartitionLimit, qos: Qos | None) -> bool:
    """Return whether a partition limit is known to apply to jobs with a given QOS."""
    return qos is None or (qos.overrides is not None and limit not in qos.overrides)


def _too_many_nodes(request: ResourceRequest, limit: int) -> tuple[str, str]:
    """Return the key that requests more than `limit` nodes, and the beginning of the error message."""
    if request.nodes > limit:
        return "resources.nodes", f"is {request.nodes}"
    shown = f"is {request.spare_nodes}: {request.nodes} + {request.spare_nodes} = {request.all_nodes} nodes"
    return "resources.spare_nodes", shown


def longest_time_s(request: ResourceRequest, cluster: Cluster, partition: Partition) -> tuple[float, str]:
    """Return the longest time limit that a job in a partition can have, and what imposes the limit."""
    qos = _qos_of(request, cluster)
    limits = [(qos.max_time_s, f"QOS {qos.name}")] if qos is not None else []
    if _applies("time", qos):
        limits.append((partition.max_time_s, f"partition {partition.name}"))
    known = [(limit_s, owner) for limit_s, owner in limits if limit_s is not None]
    return min(known, default=(math.inf, ""))


def _time_problems(request: ResourceRequest, cluster: Cluster, partition: Partition) -> Iterator[KeyProblem]:
    time_s, option = request.time_s, "slice" if request.is_sliced else "time"
    limit_s, owner = longest_time_s(request, cluster, partition)
    if time_s is None or time_s <= limit_s:
        return
    shown = "sets no limit" if time_s == math.inf else f"is {time_text(int(time_s))}"
    message = f"{shown}, but {owner} allows at most {time_text(int(limit_s))}"
    yield f"resources.{option}", message, f"--{option} {time_text(int(limit_s))} fits"


def _node_problems(request: ResourceRequest, partition: Partition) -> Iterator[KeyProblem]:
    constraint, gpu_type = request.constraint, request.needed_gpu_type
    known = list(dict.fromkeys(name for kind in partition.nodes for name in kind.features))
    for name in features_of(constraint):
        if name not in known:
            hint = f"{did_you_mean(name, known)}they have {listed(known) or 'no features'}"
            message = f"contains {name}, but no node of partition {partition.name} has this feature"
            yield "resources.constraint", message, hint
            constraint = None  # Ignore the constraint's features when checking the sizes of nodes.
    types = list(dict.fromkeys(name for kind in partition.nodes for name in kind.gpus if name))
    if gpu_type is not None and gpu_type not in types:
        hint = f"{did_you_mean(gpu_type, types)}they have {listed(types) or 'GPUs without a type, or none'}"
        message = f"is {gpu_type}, but no node of partition {partition.name} has such a GPU"
        yield "resources.gpu_type", message, hint
        gpu_type = None
    request = replace(request, constraint=constraint, gpu_type=gpu_type)
    kinds = partition.matching(constraint, gpu_type)
    if not kinds:
        gpus = f" with {gpu_type} GPUs" if gpu_type else ""
        message = (
            f"is {constraint}, but no node of partition {partition.name}{gpus} has all of these features"
        )
        yield "resources.constraint", message, ""
        return
    too_large = list(_node_size_problems(request, partition, kinds))
    yield from too_large
    count = _num_fitting(request, partition, kinds)
    if not too_large and count < request.all_nodes:
        key, shown = _too_many_nodes(request, count)
        message = f"{shown}, but partition {partition.name} has {plural(count, 'node')}"
        if count < partition.num_nodes:
            message += f" with {_requirements(request)}"
        yield key, message, ""


def _node_size_problems(
    request: ResourceRequest, partition: Partition, kinds: Sequence[NodeKind]
) -> Iterator[KeyProblem]:
    """Yield a problem for each requested amount per node that no node has, checking each one separately."""
    nodes_have = f"the nodes of partition {partition.name} have"
    workers, gpus, cpus = request.workers_per_node, request.gpus_per_node or 0, request.cpus_per_node or 0
    max_gpus = max(kind.num_gpus(request.gpu_type) for kind in kinds)
    if gpus > max_gpus:
        available = f"at most {plural(max_gpus, 'GPU')}" if max_gpus else "no GPUs"
        hint = f"request at most --gpus-per-node {max_gpus}, and more --nodes for the same total"
        message = f"is {gpus}, but {nodes_have} {available}"
        yield "resources.gpus_per_node", message, hint if max_gpus else ""
    max_cpus = _maximum(partition.usable_cpus(kind) for kind in kinds)
    if gpus <= max_gpus and cpus > max_cpus:
        if cpus == workers:
            message = f"is {workers}, but {nodes_have} {max_cpus} CPUs, and every process needs one CPU"
            yield "resources.gpus_per_node", message, ""
        else:
            each = cpus // workers
            message = f"is {each}: {workers} x {each} = {cpus} CPUs per node, but {nodes_have} {max_cpus}"
            yield "resources.cpus_per_gpu", message, ""
    max_mem = _maximum(partition.usable_mem_mib(kind) for kind in kinds)
    if request.mem_mib is not None and request.mem_mib > max_mem:
        is_limit = max_mem < _maximum(kind.mem_mib for kind in kinds)
        whose = f"a job in partition {partition.name} can use at most" if is_limit else nodes_have
        a_node = " of a node" if is_limit else ""
        message = f"is {memory_text(request.mem_mib)}, but {whose} {memory_text(max_mem)}{a_node}"
        yield "resources.mem", message, ""


def _maximum(amounts: Iterable[int | None]) -> float:
    """Return the largest amount, or infinity if any amount is unknown."""
    return max(math.inf if amount is None else amount for amount in amounts)


def _requirements(request: ResourceRequest) -> str:
    parts = []
    if request.gpus_per_node:
        of_type = f" of type {request.gpu_type}" if request.gpu_type else ""
        parts.append(f"{plural(request.gpus_per_node, 'GPU')}{of_type}")
    if request.cpus_per_node:
        parts.append(plural(request.cpus_per_node, "CPU"))
    if request.mem_mib:
        parts.append(f"{memory_text(request.mem_mib)} of memory")
    return listed([*parts, *(f"feature {name}" for name in features_of(request.constraint))])
