"""The model of a Slurm cluster: its partitions, nodes, accounts and QOS.

Discovery (from Slurm) and profiles (from files) create the model; limits, plans and queue estimates use it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

SUBACCOUNTS_SINCE = (23, 2)
"""The first Slurm version where a partition's list of accepted or denied accounts also applies to the
descendants of these accounts.

If a site does not enforce accounts, Slurm ignores a partition's lists of accounts.
"""
PartitionLimit = Literal["time", "nodes", "min_nodes"]
"""A partition limit that a QOS may override."""
_NO_FEATURE = re.compile(r"[&|,()\[\]]|\*\d+")
_ANY_OF = re.compile(r"[|,\[(*]")


def features_of(constraint: str | None) -> tuple[str, ...]:
    """Return the feature names in a constraint such as ``[rack1*2&rack2]``."""
    return tuple(name.strip() for name in _NO_FEATURE.split(constraint or "") if name.strip())


@dataclass(frozen=True)
class NodeKind:
    """Nodes in a partition with the same hardware and features; None means unknown."""

    count: int
    cpus: int | None = None
    """The number of CPUs per node that jobs can use, excluding CPUs that Slurm reserves for itself."""
    mem_mib: int | None = None
    """The memory per node in MiB that jobs can use."""
    gpus: dict[str, int] = field(default_factory=dict)
    """The number of GPUs per node by type. The type is "" if the site does not name it."""
    features: tuple[str, ...] = ()

    def num_gpus(self, gpu_type: str | None = None) -> int:
        """Return the number of GPUs per node, for one type or for all types."""
        return sum(count for kind, count in self.gpus.items() if gpu_type in (None, kind))


@dataclass(frozen=True)
class Partition:
    """A partition, where None means unknown, unlimited or unrestricted."""

    name: str
    is_default: bool = False
    is_hidden: bool = False
    """True if Slurm lists the partition only with --all; jobs can still use it."""
    is_exclusive: bool = False
    """True if Slurm allocates only whole nodes in the partition, with all of their CPUs and GPUs."""
    is_up: bool = True
    max_time_s: int | None = None
    default_time_s: int | None = None
    """The time limit in seconds for a job that requests none, or None if it equals `max_time_s`."""
    min_nodes: int | None = None
    """The minimum number of nodes for a job."""
    max_nodes: int | None = None
    """The maximum number of nodes for a job."""
    max_cpus_per_node: int | None = None
    """The number of CPUs per node that jobs in the partition may use, or None if they may use all."""
    max_mem_mib: int | None = None
    """The memory per node in MiB that jobs in the partition may use, or None if they may use all."""
    max_mem_per_cpu_mib: int | None = None
    """The memory per CPU in MiB that jobs in the partition may use. A job that requests more memory per CPU
    gets additional CPUs."""
    nodes: tuple[NodeKind, ...] = ()
    """The nodes in the partition, grouped by kind; empty if unknown."""
    allowed_qos: tuple[str, ...] | None = None
    denied_qos: tuple[str, ...] = ()
    allowed_accounts: tuple[str, ...] | None = None
    denied_accounts: tuple[str, ...] = ()
    allowed_groups: tuple[str, ...] | None = None
    needs_reservation: bool = False
    """True if jobs in the partition must specify a reservation."""

    @property
    def num_nodes(self) -> int:
        """The number of nodes in the partition, including nodes that are out of service."""
        return sum(kind.count for kind in self.nodes)

    @property
    def job_time_s(self) -> int | None:
        """The time limit in seconds for a job that requests none, or None if it is unlimited."""
        return self.max_time_s if self.default_time_s is None else self.default_time_s

    def gpu_type(self, constraint: str | None = None) -> str | None:
        """Return the GPU type of the nodes that match `constraint`; None if there is no single type."""
        types = {name for kind in self.matching(constraint) for name in kind.gpus}
        return types.pop() if len(types) == 1 else None

    def matching(self, constraint: str | None, gpu_type: str | None = None) -> tuple[NodeKind, ...]:
        """Return the nodes that match the features in `constraint` and the GPU type.

        Only the operator ``&`` is evaluated; with any other operator, every node is considered a match.
        """
        needed = set() if _ANY_OF.search(constraint or "") else set(features_of(constraint))
        return tuple(
            kind
            for kind in self.nodes
            if needed <= set(kind.features) and (gpu_type is None or kind.num_gpus(gpu_type))
        )

    def usable_cpus(self, kind: NodeKind) -> int | None:
        """Return the CPUs per node of this kind that jobs in this partition may use, or None if unknown."""
        return _least(kind.cpus, self.max_cpus_per_node)

    def usable_mem_mib(self, kind: NodeKind) -> int | None:
        """Return the memory per node, in MiB, that jobs in this partition may use; None if unknown."""
        cpus, each_mib = self.usable_cpus(kind), self.max_mem_per_cpu_mib
        of_cpus = None if cpus is None or each_mib is None else cpus * each_mib
        return _least(kind.mem_mib, self.max_mem_mib, of_cpus)


def _least(*amounts: int | None) -> int | None:
    """Return the smallest known amount, or None if no amount is known."""
    return min((amount for amount in amounts if amount is not None), default=None)


@dataclass(frozen=True)
class Account:
    """An account that the user may charge; None means unrestricted or unknown."""

    name: str
    is_default: bool = False
    partitions: tuple[str, ...] | None = None
    qos: tuple[str, ...] | None = None
    parents: tuple[str, ...] | None = None
    """The account's ancestors, nearest first."""


@dataclass(frozen=True)
class Qos:
    """A quality of service (QOS)."""

    name: str
    max_time_s: int | None = None
    overrides: tuple[PartitionLimit, ...] | None = ()
    """The partition limits that do not apply to jobs with this QOS, or None if unknown."""


@dataclass(frozen=True)
class Cluster:
    """The known properties of a cluster, against which configs are checked before submission."""

    name: str
    partitions: tuple[Partition, ...] = ()
    """The partitions of the cluster; empty if unknown."""
    gpu_option: Literal["gpus-per-node", "gres"] = "gpus-per-node"
    """The sbatch option that requests GPUs."""
    accounts: tuple[Account, ...] | None = None
    """The user's accounts, or None if unknown or if Slurm does not check accounts."""
    qos: tuple[Qos, ...] | None = None
    """The cluster's QOS, or None if unknown."""
    slurm_version: tuple[int, ...] = ()
    containers: tuple[str, ...] = ()
    """The names of the installed container programs among pyxis, apptainer, singularity and enroot."""
    has_modules: bool = False
    reason: str = ""
    """Where this description of the cluster comes from, in one sentence."""
    out_of_date_hint: str = ""
    """A hint that explains how to update the description if it is out of date."""
    error: str = ""
    """Why the cluster is unknown: Slurm's error, or that Slurm did not answer."""
    expedited_requeue: bool | None = None
    """True if jobs use Slurm 25.11's expedited requeue, or None if the site has not enabled it."""
    groups: tuple[str, ...] | None = None
    """The user's groups, or None if unknown or if the user is root, whom Slurm allows in every partition."""
    bad_nodes: dict[str, str] = field(default_factory=dict)
    """Hosts that failed within the last 24 hours, each with the reason; most recent first."""
    forget_hint: str = ""
    """A hint that explains how to clear `bad_nodes`."""

    def partition(self, name: str | None) -> Partition | None:
        """Return the partition called `name` (None for the default one), or None if it does not exist."""
        if name is None:
            return next((item for item in self.partitions if item.is_default), None)
        return next((item for item in self.partitions if item.name == name), None)
