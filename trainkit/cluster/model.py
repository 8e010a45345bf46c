"""The model of a Slurm cluster: its partitions, nodes, accounts and QOS, and what a job requests of it.

Discovery (from Slurm) and profiles (from a file) both produce it; limits, plans and queue estimates read it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from trainkit.config.running import ResourcesConfig
from trainkit.formats import memory_mib, time_limit_s
from trainkit.slurm.hosts import expand_hosts


@dataclass(frozen=True)
class NodeKind:
    """Nodes of a partition with the same hardware and features; None where a value is unknown."""

    count: int
    cpus: int | None = None
    """CPUs per node that jobs can use, without those that Slurm reserves for itself."""
    mem_mib: int | None = None
    """Memory per node that jobs can use."""
    gpus: dict[str, int] = field(default_factory=dict)
    """GPUs per node, by type; the type is empty if the site does not name it."""
    features: tuple[str, ...] = ()
    hosts: str = field(default="", compare=False)
    """The nodes as a Slurm host list."""

    def num_gpus(self, gpu_type: str | None = None) -> int:
        """GPUs per node, of one type or of all types."""
        return sum(count for kind, count in self.gpus.items() if gpu_type in (None, kind))


@dataclass(frozen=True)
class Partition:
    """A partition; None where a value is unknown, unlimited, or open to everyone."""

    name: str
    is_default: bool = False
    is_hidden: bool = False
    """Slurm lists it only with --all; jobs can name it."""
    is_up: bool = True
    max_time_s: int | None = None
    default_time_s: int | None = None
    """Time limit of a job that requests none; None if it is `max_time_s`."""
    max_nodes: int | None = None
    """Largest number of nodes of one job."""
    max_cpus_per_node: int | None = None
    """CPUs per node that its jobs may use, if fewer than a node has."""
    nodes: tuple[NodeKind, ...] = ()
    """Empty when unknown."""
    allowed_qos: tuple[str, ...] | None = None
    denied_qos: tuple[str, ...] = ()

    @property
    def num_nodes(self) -> int:
        """All nodes, including those out of service."""
        return sum(kind.count for kind in self.nodes)

    @property
    def job_time_s(self) -> int | None:
        """Time limit of a job that requests none; None for no limit."""
        return self.max_time_s if self.default_time_s is None else self.default_time_s

    def gpu_type(self, constraint: str | None = None) -> str | None:
        """The type of the GPUs of those nodes with the features; None if there is none, or several."""
        types = {name for kind in matching_nodes(self, constraint, None) for name in kind.gpus}
        return types.pop() if len(types) == 1 else None

    def usable_cpus(self, kind: NodeKind) -> int | None:
        """CPUs per node of this kind that jobs of this partition may use; None if unknown."""
        limits = [number for number in (kind.cpus, self.max_cpus_per_node) if number is not None]
        return min(limits, default=None)


@dataclass(frozen=True)
class Account:
    """An account that you may charge; None where it is unrestricted or the restriction is unknown."""

    name: str
    is_default: bool = False
    partitions: tuple[str, ...] | None = None
    qos: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Qos:
    """A quality of service (QOS)."""

    name: str
    max_time_s: int | None = None
    overrides: tuple[Literal["time", "nodes"], ...] | None = ()
    """The partition limits that do not apply to its jobs; None when unknown."""


@dataclass(frozen=True)
class Cluster:
    """A cluster as far as it is known; configs are checked against it before they are submitted."""

    name: str
    partitions: tuple[Partition, ...] = ()
    """Empty when unknown."""
    gpu_option: Literal["gpus-per-node", "gres"] = "gpus-per-node"
    """The sbatch option that requests GPUs."""
    accounts: tuple[Account, ...] | None = None
    """None when unknown, or where Slurm does not check accounts."""
    qos: tuple[Qos, ...] | None = None
    """None when unknown."""
    slurm_version: tuple[int, ...] = ()
    containers: tuple[str, ...] = ()
    """Which of pyxis, apptainer, singularity and enroot are installed."""
    has_modules: bool = False
    reason: str = ""
    """The source of this description, in one sentence."""
    out_of_date_hint: str = ""
    """How to update the description if it is out of date."""
    error: str = ""
    """Why the cluster is unknown: Slurm's error, or that it did not answer."""
    expedited_requeue: bool | None = None
    """Whether jobs use the expedited requeue of Slurm 25.11; None where the site has not enabled it."""
    bad_nodes: dict[str, str] = field(default_factory=dict)
    """Hosts that failed in the last 24 hours, each with the reason; the most recent first."""
    forget_hint: str = ""
    """How to clear that list."""

    def partition(self, name: str | None) -> Partition | None:
        """A partition by name, or the default one for None; None if there is no such partition."""
        if name is None:
            return next((item for item in self.partitions if item.is_default), None)
        return next((item for item in self.partitions if item.name == name), None)

    def resource_request(self, resources: ResourcesConfig) -> ResourceRequest:
        """What the section `resources` requests here, before a plan derives the workers of a node."""
        types = resources.gpu_types
        names: Iterable[str | None] = (None,)
        if resources.partition is not None:
            names = map(str.strip, resources.partition.split(","))
        elif len(types) > 1:
            names = [item.name for item in self.partitions if item.is_up and not item.is_hidden]
        partitions = {name: self.partition(name) for name in names}
        if len(types) > 1:
            # A job gets all its nodes from one partition, which therefore decides the type.
            one_type: dict[str | None, Partition | None] = {
                name: item
                for name, item in partitions.items()
                if item is not None and item.gpu_type(resources.constraint) in types
            }
            if one_type:
                partitions = one_type
        return ResourceRequest(
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
            extra=resources.extra,
        )


_NO_FEATURE = re.compile(r"[&|,()\[\]]|\*\d+")
_ANY_OF = re.compile(r"[|,\[(*]")


@dataclass(frozen=True)
class ResourceRequest:
    """What a job requests of a cluster, in the units of its limits; None leaves the choice to Slurm."""

    nodes: int
    names: Mapping[str | None, Partition | None]
    """The partitions by name, None for one that does not exist; the name None is the default one."""
    workers_per_node: int = 1
    gpus_per_node: int | None = None
    gpu_type: str | None = None
    gpu_types: tuple[str, ...] = ()
    """Several types, of which the partition that starts the job has one."""
    cpus_per_node: int | None = None
    mem_mib: float | None = None
    time_s: float | None = None
    """Infinite for a job without a limit."""
    time_min_s: float | None = None
    """The time that the job accepts if that lets it start sooner; None for no less than `time_s`."""
    is_sliced: bool = False
    """Whether `time_s` is ``resources.slice``."""
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    spare_nodes: int = 0
    """Nodes in addition to those that train."""
    extra: Mapping[str, str | int | bool] = field(default_factory=dict)
    """Other options of sbatch."""

    @property
    def partitions(self) -> list[Partition]:
        """The requested partitions that exist."""
        return [item for item in self.names.values() if item is not None]

    @property
    def named_nodes(self) -> list[str]:
        """The nodes that the job must get; raises UsageError for text that is not a host list."""
        nodelist = self.extra.get("nodelist")
        return expand_hosts(nodelist) if isinstance(nodelist, str) else []

    @property
    def all_nodes(self) -> int:
        """Nodes of the job, spare nodes included."""
        return self.nodes + self.spare_nodes

    @property
    def needed_gpu_type(self) -> str | None:
        """The GPU type, for a job that uses GPUs."""
        return self.gpu_type if self.gpus_per_node else None

    def exceeds(self, partition: Partition) -> bool:
        """Whether the time or the nodes are above a limit of the partition, which a QOS may override."""
        max_time_s, max_nodes = partition.max_time_s or math.inf, partition.max_nodes or math.inf
        return (self.time_s or 0) > max_time_s or self.all_nodes > max_nodes

    def with_workers(self, count: int, device: str, threads: int | None, per: str) -> ResourceRequest:
        """The request with the workers of a node that a plan derived, and their GPUs and CPUs."""
        # Without threads, each task gets at least one CPU.
        each = 1 if threads is None and per == "gpu" else threads
        return replace(
            self,
            workers_per_node=count,
            gpus_per_node=count if device == "cuda" else None,
            cpus_per_node=None if each is None or "overcommit" in self.extra else each * count,
        )


def features_of(constraint: str | None) -> tuple[str, ...]:
    """The feature names in a constraint such as ``[rack1*2&rack2]``."""
    return tuple(name.strip() for name in _NO_FEATURE.split(constraint or "") if name.strip())


def matching_nodes(
    partition: Partition, constraint: str | None, gpu_type: str | None
) -> tuple[NodeKind, ...]:
    """The nodes of a partition that have the features of a constraint and the GPU type.

    Only ``&`` is evaluated: with any other operator, every node counts as having the features.
    """
    needed = set() if _ANY_OF.search(constraint or "") else set(features_of(constraint))
    return tuple(
        kind
        for kind in partition.nodes
        if needed <= set(kind.features) and (gpu_type is None or kind.num_gpus(gpu_type))
    )
