"""The type and number of GPUs that a config would run on, if known. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainkit.cluster.machine import Machine
from trainkit.cluster.target import Target
from trainkit.config.schema import RunConfig
from trainkit.errors import UsageError
from trainkit.plan.gpus import Gpu, find_gpu, known_gpus

if TYPE_CHECKING:
    from trainkit.cluster.model import NodeKind

EXAMPLE = "h100"
"""The GPU type that messages give as an example."""


@dataclass(frozen=True)
class Hardware:
    """The GPUs that a plan is made for."""

    gpu: Gpu
    num_gpus: int
    node_size: int
    """GPUs per node."""

    @property
    def num_nodes(self) -> int:
        return self.num_gpus // self.node_size


def gpu_names(config: RunConfig, machine: Machine, target: Target) -> list[str]:
    """The names of the GPU types that a job may get; empty if unknown."""
    if config.resources.gpu_type is not None:
        return [config.resources.gpu_type]
    if target.cluster is None:
        return list(dict.fromkeys(machine.gpu_names))
    return list(dict.fromkeys(kind for node in _nodes(config, target) for kind in node.gpus))


def known_gpu(names: list[str]) -> Gpu | None:
    """The GPU type with the most memory among `names`; None if any of them is unknown."""
    found = [find_gpu(name) for name in names]
    known = [gpu for gpu in found if gpu is not None]
    return max(known, key=lambda gpu: gpu.most_memory) if known and len(known) == len(found) else None


def find_hardware(
    config: RunConfig, machine: Machine, target: Target, gpu_type: str | None, num_gpus: int | None
) -> Hardware:
    """The hardware to plan for: that of the command line, else that of the config's target.

    Raises UsageError if it is unknown.
    """
    names = [gpu_type] if gpu_type is not None else gpu_names(config, machine, target)
    gpu = known_gpu(names)
    if gpu is None:
        raise _unknown(gpu_type, names, machine)
    size = _node_size(config, machine, target, gpu)
    if num_gpus is None:
        return Hardware(gpu, config.resources.nodes * size, size)
    size = min(size, num_gpus)
    if num_gpus % size:
        raise UsageError(
            f"--gpus {num_gpus} is not a multiple of {size} GPUs per node",
            hint="use --nodes N --gpus-per-node N instead",
        )
    return Hardware(gpu, num_gpus, size)


def _nodes(config: RunConfig, target: Target) -> tuple[NodeKind, ...]:
    """The kinds of GPU nodes that a job may get."""
    if target.cluster is None:
        return ()
    # Imported only for Slurm: a dry run on this machine needs no model of a cluster.
    from trainkit.cluster.model import matching_nodes

    resources = config.resources
    return tuple(
        node
        for partition in target.cluster.requested_partitions(resources.partition)
        for node in matching_nodes(partition, resources.constraint, resources.gpu_type)
        if node.num_gpus()
    )


def _node_size(config: RunConfig, machine: Machine, target: Target, gpu: Gpu) -> int:
    requested = config.resources.gpus_per_node
    if requested != "auto":
        return requested
    on_cluster = [node.num_gpus() for node in _nodes(config, target)]
    if on_cluster:
        return max(on_cluster)
    if target.cluster is None and machine.num_gpus:
        return max(1, machine.num_gpus // config.resources.nodes)
    return gpu.node_size


def _unknown(gpu_type: str | None, names: list[str], machine: Machine) -> UsageError:
    hint = f"--gpu-type takes a name from the driver or from Slurm, such as {', '.join(known_gpus()[:8])}"
    if gpu_type is not None:
        return UsageError(f"--gpu-type {gpu_type}: unknown GPU type", hint=hint)
    if names:
        return UsageError(f"unknown GPU type: {_shown(names)}", hint=hint)
    message = f"no GPU type to plan for: resources.gpu_type is null, and {machine.gpu_reason}"
    return UsageError(message, hint=hint)


def _shown(names: list[str]) -> str:
    return ", ".join(name or "a GPU without a type" for name in names)


def unchecked_memory(config: RunConfig, names: list[str]) -> str:
    """The warning for GPUs of unknown memory; `names` are those of `gpu_names`."""
    hint = f"`trainkit plan CONFIG --gpu-type {EXAMPLE}` checks it for a type that you name"
    if config.resources.gpu_type is not None:
        reason = f"resources.gpu_type is {config.resources.gpu_type}, a type of unknown memory"
    elif names:
        reason = f"their memory is unknown ({_shown(names)})"
    else:
        reason = "resources.gpu_type is null, and their type is unknown"
        hint = f"set resources.gpu_type to their type in Slurm, such as {EXAMPLE}, or {hint}"
    return f"whether the run fits in the memory of its GPUs was not checked: {reason}; {hint}"
