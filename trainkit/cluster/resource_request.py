"""What a job asks of the nodes that it gets. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from trainkit.cluster.model import NodeKind, Partition
from trainkit.config.running import ResourcesConfig

_NO_FEATURE = re.compile(r"[&|,()\[\]]|\*\d+")
_ANY_OF = re.compile(r"[|,\[(*]")


@dataclass(frozen=True)
class ResourceRequest:
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
    spare_nodes: int = 0
    """Nodes beyond those that train."""

    @property
    def all_nodes(self) -> int:
        return self.nodes + self.spare_nodes


def resource_request(
    resources: ResourcesConfig, *, workers_per_node: int, device: str, threads: int | None, per: str
) -> ResourceRequest:
    """What a job asks for: its section of the config, and what was derived from it."""
    cpus = None if threads is None else threads * workers_per_node
    if cpus is None and per == "gpu":
        cpus = workers_per_node  # a task gets at least one
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
    )


def features_of(constraint: str | None) -> tuple[str, ...]:
    """The names of features in a constraint such as ``[rack1*2&rack2]``."""
    return tuple(word.strip() for word in _NO_FEATURE.split(constraint or "") if word.strip())


def fitting_nodes(partition: Partition, constraint: str | None, gpu_type: str | None) -> tuple[NodeKind, ...]:
    """The nodes of a partition that a job may get, as far as its constraint can be told without Slurm."""
    # With an "or" any node may do; all features together are asked for with "and" only.
    needed = set() if _ANY_OF.search(constraint or "") else set(features_of(constraint))
    return tuple(
        kind
        for kind in partition.nodes
        if needed <= set(kind.features) and (gpu_type is None or kind.num_gpus(gpu_type))
    )
