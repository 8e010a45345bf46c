"""The model of a Slurm cluster: its partitions, nodes, accounts and QOS.

Discovery (from Slurm) and profiles (from a file) both produce it; limits, plans and queue estimates read it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


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
    in_service: int | None = field(default=None, compare=False)
    """Number of nodes that can run jobs now or soon: neither down nor drained."""
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
    allowed_accounts: tuple[str, ...] | None = None
    denied_accounts: tuple[str, ...] = ()
    allowed_qos: tuple[str, ...] | None = None
    denied_qos: tuple[str, ...] = ()
    allowed_groups: tuple[str, ...] | None = None

    @property
    def num_nodes(self) -> int:
        """All nodes, including those out of service."""
        return sum(kind.count for kind in self.nodes)

    @property
    def job_time_s(self) -> int | None:
        """Time limit of a job that requests none; None for no limit."""
        return self.max_time_s if self.default_time_s is None else self.default_time_s

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

    def requested_partitions(self, names: str | None) -> tuple[Partition, ...]:
        """The partitions in the comma-separated `resources.partition` that exist."""
        requested = [None] if names is None else [name.strip() for name in names.split(",")]
        found = (self.partition(name) for name in requested)
        return tuple(item for item in found if item is not None)
