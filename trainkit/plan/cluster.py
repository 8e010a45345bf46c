"""What is known about a Slurm cluster: what its partitions have and allow."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Partition:
    """One partition; None where a value is not known or not limited."""

    name: str
    is_default: bool = False
    max_time_s: int | None = None
    num_nodes: int | None = None
    cpus_per_node: int | None = None
    mem_mib_per_node: int | None = None
    gpus_per_node: int = 0
    gpu_types: tuple[str, ...] = ()


@dataclass(frozen=True)
class Cluster:
    """What a config is held against before it is submitted."""

    name: str
    partitions: tuple[Partition, ...] = ()
    """Empty when nothing is known about them."""
    gpu_option: Literal["gpus-per-node", "gres"] = "gpus-per-node"
    """How this cluster wants GPUs to be asked for."""
    accounts: tuple[str, ...] = ()
    qos: tuple[str, ...] = ()
    """Empty when not known."""
    slurm_version: tuple[int, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    """Variables that every job here needs; a config's `launch.env` overrides them."""

    def partition(self, name: str | None) -> Partition | None:
        """A partition by its name, None for the default one; None when it is not known."""
        if name is None:
            return next((item for item in self.partitions if item.is_default), None)
        return next((item for item in self.partitions if item.name == name), None)


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
