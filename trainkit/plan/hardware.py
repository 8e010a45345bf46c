"""The type and number of GPUs a config would run on, where known. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from trainkit.cluster.machine import Machine
from trainkit.cluster.model import NodeKind, Target
from trainkit.cluster.resource_request import matching_nodes
from trainkit.config.schema import RunConfig
from trainkit.errors import UsageError
from trainkit.plan.gpus import Gpu, find_gpu, known_gpus


@dataclass(frozen=True)
class Hardware:
    """What a plan is made for."""

    gpu: Gpu
    num_gpus: int
    node_size: int
    """GPUs of one node."""

    @property
    def num_nodes(self) -> int:
        return self.num_gpus // self.node_size


def gpu_names(config: RunConfig, machine: Machine, target: Target) -> list[str]:
    """The types that a job may get, by any of their names; empty when that is not known."""
    if config.resources.gpu_type is not None:
        return [config.resources.gpu_type]
    if target.cluster is None:
        return list(dict.fromkeys(machine.gpu_names))
    return list(dict.fromkeys(kind for node in _nodes(config, target) for kind in node.gpus))


def known_gpu(names: list[str]) -> Gpu | None:
    """The one with most memory of several types; None when one of them is not known."""
    found = [find_gpu(name) for name in names]
    known = [gpu for gpu in found if gpu is not None]
    return max(known, key=lambda gpu: gpu.most_memory) if known and len(known) == len(found) else None


def find_hardware(
    config: RunConfig, machine: Machine, target: Target, gpu_type: str | None, num_gpus: int | None
) -> Hardware:
    """The hardware to plan for: from the command line, else what the config would run on.

    Raises UsageError when that is not known.
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
            f"--gpus {num_gpus} are not whole nodes of {size}",
            hint="--nodes N --gpus-per-node N says how they are spread",
        )
    return Hardware(gpu, num_gpus, size)


def _nodes(config: RunConfig, target: Target) -> tuple[NodeKind, ...]:
    """The kinds of nodes of a cluster that a job may get."""
    resources = config.resources
    partitions = () if target.cluster is None else target.cluster.requested_partitions(resources.partition)
    return tuple(
        node
        for partition in partitions
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
    hint = (
        f"--gpu-type takes the name that a driver or a cluster gives, such as {', '.join(known_gpus()[:8])}"
    )
    if gpu_type is not None:
        return UsageError(f"--gpu-type {gpu_type}: the memory of such a GPU is not known", hint=hint)
    if names:
        shown = ", ".join(name or "a GPU without a type" for name in names)
        return UsageError(f"the memory of the GPUs is not known: {shown}", hint=hint)
    message = f"which GPU to plan for is not known: resources.gpu_type is null, and {machine.gpu_reason}"
    return UsageError(message, hint=hint)
