"""What is known about a Slurm cluster: what its partitions have and allow, and what you may charge."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class NodeKind:
    """Nodes of a partition that are alike; None where a value is not known."""

    count: int
    cpus: int | None = None
    mem_mib: int | None = None
    gpus: dict[str, int] = field(default_factory=dict)
    """How many GPUs a node has, by type; the type is empty where the site names none."""
    features: tuple[str, ...] = ()

    def num_gpus(self, gpu_type: str | None = None) -> int:
        """GPUs a node, of one type or of all."""
        return sum(count for kind, count in self.gpus.items() if gpu_type in (None, kind))


@dataclass(frozen=True)
class Partition:
    """One partition; None where a value is not known, not limited, or for everybody."""

    name: str
    is_default: bool = False
    is_hidden: bool = False
    """Slurm does not list it unless asked; jobs can name it."""
    is_up: bool = True
    max_time_s: int | None = None
    default_time_s: int | None = None
    """The time limit of a job that asks for none; None where that is `max_time_s`."""
    max_nodes: int | None = None
    """Most nodes of one job."""
    max_cpus_per_node: int | None = None
    """Most CPUs of a node that its jobs may use, where that is less than a node has."""
    nodes: tuple[NodeKind, ...] = ()
    """Empty when not known."""
    allowed_accounts: tuple[str, ...] | None = None
    denied_accounts: tuple[str, ...] = ()
    allowed_qos: tuple[str, ...] | None = None
    denied_qos: tuple[str, ...] = ()
    allowed_groups: tuple[str, ...] | None = None

    @property
    def num_nodes(self) -> int:
        """All nodes, those out of service too."""
        return sum(kind.count for kind in self.nodes)

    @property
    def job_time_s(self) -> int | None:
        """The time limit of a job that asks for none; None for no limit."""
        return self.max_time_s if self.default_time_s is None else self.default_time_s


@dataclass(frozen=True)
class Account:
    """An account that you may charge, and with what; None where anything goes or nothing is known."""

    name: str
    is_default: bool = False
    partitions: tuple[str, ...] | None = None
    qos: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Qos:
    """A quality of service."""

    name: str
    max_time_s: int | None = None
    overrides: tuple[Literal["time", "nodes"], ...] | None = ()
    """Which limits of a partition do not hold for its jobs; None when not known."""


@dataclass(frozen=True)
class Cluster:
    """What a config is held against before it is submitted."""

    name: str
    partitions: tuple[Partition, ...] = ()
    """Empty when nothing is known about them."""
    gpu_option: Literal["gpus-per-node", "gres"] = "gpus-per-node"
    """How this cluster wants GPUs to be asked for."""
    accounts: tuple[Account, ...] | None = None
    """None when not known, or where any account is taken."""
    qos: tuple[Qos, ...] | None = None
    """None when not known."""
    slurm_version: tuple[int, ...] = ()
    containers: tuple[str, ...] = ()
    """Which of pyxis, apptainer, singularity and enroot it has."""
    has_modules: bool = False
    reason: str = ""
    """Where all this is known from, in one sentence."""
    out_of_date_hint: str = ""
    """What to do should it not be true any more."""
    trouble: str = ""
    """Why nothing is known: what Slurm said, or that it did not answer."""
    expedited_requeue: bool | None = None
    """Whether jobs ask for the expedited requeue of Slurm 25.11; None where the site has not enabled it."""
    bad_nodes: dict[str, str] = field(default_factory=dict)
    """Hosts that failed here a short while ago, with the reason; the newest first."""
    forget_hint: str = ""
    """What to do to have them used again."""

    def partition(self, name: str | None) -> Partition | None:
        """A partition by its name, None for the default one; None when it is not known."""
        if name is None:
            return next((item for item in self.partitions if item.is_default), None)
        return next((item for item in self.partitions if item.name == name), None)

    def asked(self, names: str | None) -> tuple[Partition, ...]:
        """The partitions of `resources.partition`, where several stand with commas; those that exist."""
        words: list[str | None] = [None]
        if names is not None:
            words = [name.strip() for name in names.split(",")]
        found = (self.partition(name) for name in words)
        return tuple(item for item in found if item is not None)


@dataclass(frozen=True)
class Target:
    """Where a job is going to run."""

    backend: Literal["local", "sbatch", "submitit", "srun"]
    reason: str
    """Why this backend, in one sentence."""
    cluster: Cluster | None = None
    """None for the local backend."""
    node_sizes: tuple[int, ...] | None = None
    """Workers of each node of a step that is there already (``srun``)."""
    per: Literal["gpu", "node"] | None = None
    """What a task of that step stands for."""


LOCAL = Target("local", "this machine")
