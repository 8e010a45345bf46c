"""The resources that a job requests, per node and from Slurm. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from trainkit.cluster.model import NodeKind, Partition
from trainkit.cluster.units import memory_mib
from trainkit.config.running import ResourcesConfig
from trainkit.slurm.hosts import expand_without_slurm

_NO_FEATURE = re.compile(r"[&|,()\[\]]|\*\d+")
_ANY_OF = re.compile(r"[|,\[(*]")


@dataclass(frozen=True)
class ResourceRequest:
    """The resources that a job requests; None leaves the choice to Slurm."""

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
    spare_nodes: int = 0
    """Nodes in addition to those that train."""
    nodelist: str | None = None
    """The nodes that the job must get, as a host list."""

    @property
    def named_nodes(self) -> list[str]:
        """The nodes that the job must get; raises UsageError for text that is not a host list."""
        return [] if self.nodelist is None else expand_without_slurm(self.nodelist)

    @property
    def all_nodes(self) -> int:
        """Nodes of the job, spare nodes included."""
        return self.nodes + self.spare_nodes

    @property
    def needed_gpu_type(self) -> str | None:
        """The GPU type, for a job that uses GPUs."""
        return self.gpu_type if self.gpus_per_node else None

    def fits_node(self, partition: Partition, kind: NodeKind) -> bool:
        """Whether a node of the partition has enough GPUs, CPUs and memory, as far as that is known."""
        cpus, mem = partition.usable_cpus(kind), None if self.mem is None else memory_mib(self.mem)
        return (
            kind.num_gpus(self.gpu_type) >= (self.gpus_per_node or 0)
            and (cpus is None or cpus >= (self.cpus_per_node or 0))
            and (kind.mem_mib is None or kind.mem_mib >= (mem or 0))
        )


def resource_request(
    resources: ResourcesConfig, *, workers_per_node: int, device: str, threads: int | None, per: str
) -> ResourceRequest:
    """The request of a job, from the `resources` section and the values that the plan derived."""
    cpus = None if threads is None else threads * workers_per_node
    if cpus is None and per == "gpu":
        cpus = workers_per_node  # each task gets at least one CPU
    nodelist = resources.extra.get("nodelist")
    return ResourceRequest(
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
        spare_nodes=resources.spare_nodes,
        nodelist=nodelist if isinstance(nodelist, str) else None,
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
