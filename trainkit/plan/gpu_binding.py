"""Slurm options of a config that limit the GPUs of the step or bind them to its tasks. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainkit.config.schema import RunConfig

BOUND_GPU_WARNING = (
    "where a rank sees only its own GPU, NCCL may fail with `invalid device ordinal` or not use NVLink; "
    "`gpu-bind: none` in launch.srun_extra, or srun --gpu-bind=none, lets every task see all GPUs of its node"
)


@dataclass(frozen=True)
class Binding:
    """The GPUs that each task of a node sees."""

    num_gpus: int
    """GPUs per task, the fewest if tasks differ."""
    is_shared: bool = False
    """Whether tasks share some of these GPUs."""


def gpu_binding_problems(
    config: RunConfig, per: str, workers_per_node: int
) -> Iterator[tuple[str, str, str]]:
    """(key, message, hint) for each extra option with which a rank would have no GPU of its own.

    `per` is the unit of a task. Bindings that depend on the node, such as ``closest``, are left to the job.
    """
    num_tasks = 1 if per == "node" else workers_per_node
    for key, option, value in _extra_options(config):
        available = _gpus_per_node(option, value, config.resources.nodes)
        if available is not None and available < workers_per_node:
            message = f"is {value}, but the step needs {_count(workers_per_node)} per node"
            yield key, message, "remove it: the step gets all GPUs of the job"
        binding = find_binding(option, value, num_tasks)
        if binding is None or (binding.num_gpus >= workers_per_node and not binding.is_shared):
            continue
        if per == "node":
            message = (
                f"is {value}: a task would see {_count(binding.num_gpus)}, but it starts all "
                f"{workers_per_node} ranks of its node"
            )
            # A launcher such as torchrun always has one task per node.
            hint = "remove it, or set launch.per: gpu" if config.launch.per == "node" else "remove it"
            yield key, message, hint
        elif binding.is_shared:
            yield key, f"is {value}: ranks would share a GPU", "bind a different GPU to every task"
        elif binding.num_gpus != 1:
            message = f"is {value}: a task would see {_count(binding.num_gpus)}, but it is one rank"
            yield key, message, "bind one GPU to every task, or remove it"


def gpu_binding_warnings(config: RunConfig, per: str, workers_per_node: int) -> Iterator[str]:
    """A warning for each extra option that binds one GPU to each of several ranks of a node."""
    options = list(_extra_options(config))
    is_unbound = any(_binding_type(option, value)[0] == "none" for _, option, value in options)
    for key, option, value in options if per == "gpu" and workers_per_node > 1 and not is_unbound else ():
        if find_binding(option, value, workers_per_node) == Binding(1):
            yield f"{key} is {value}: {BOUND_GPU_WARNING}"


def find_binding(option: str, value: str, num_tasks: int) -> Binding | None:
    """The binding that an option makes for the tasks of a node; None if none, or if it is unknown."""
    kind, argument = _binding_type(option, value)
    if kind == "per_task":
        return Binding(_last_count(argument))
    if kind == "single":
        return Binding(1, is_shared=_last_count(argument) > 1 and num_tasks > 1)
    if kind in ("map_gpu", "mask_gpu"):
        return _listed_binding(argument, num_tasks, is_mask=kind == "mask_gpu")
    return None


def _extra_options(config: RunConfig) -> Iterator[tuple[str, str, str]]:
    """(key, option, value) for the extra options of sbatch, which srun inherits, and of srun."""
    for section, options in (
        ("resources.extra", config.resources.extra),
        ("launch.srun_extra", config.launch.srun_extra),
    ):
        for option, value in options.items():
            yield f"{section}.{option}", option, str(value)


def _gpus_per_node(option: str, value: str, num_nodes: int) -> int | None:
    """The GPUs per node that an option requests for the step; None for an option about others."""
    if option == "gpus":
        return _last_count(value) // num_nodes
    if option == "gpus-per-node":
        return _last_count(value)
    if option != "gres":
        return None
    counts = [_last_count(item) for item in value.split(",") if re.match(r"(gres/)?gpu\b", item)]
    return 0 if value == "none" else sum(counts) if counts else None


def _binding_type(option: str, value: str) -> tuple[str, str]:
    """The (type, argument) of ``--gpu-bind`` that an option amounts to; empty for other options."""
    if option == "gpus-per-task":
        return "per_task", value
    if option == "tres-per-task":
        gpus = [item for item in value.split(",") if re.match(r"gres/gpu\b", item)]
        return ("per_task", gpus[0]) if gpus else ("", "")
    if option == "ntasks-per-gpu":
        return "single", value
    if option not in ("gpu-bind", "tres-bind"):
        return "", ""
    kind, _, argument = re.sub(r"^(gres/gpu:)?((verbose|v|quiet|q),)?", "", value).partition(":")
    return kind, argument


def _listed_binding(listed: str, num_tasks: int, *, is_mask: bool) -> Binding | None:
    """The binding to a list of GPUs such as ``0,1*2``, repeated for the tasks after its end."""
    entries: list[frozenset[int]] = []
    for item in listed.split(","):
        text, _, times = item.partition("*")
        try:
            number = int(text, 16 if is_mask else 0)
            gpus = frozenset(_bits(number)) if is_mask else frozenset((number,))
            entries += [gpus] * min(int(times or 1), num_tasks)
        except ValueError:
            return None  # Slurm reports it
    if not entries:
        return None
    tasks = [entries[task % len(entries)] for task in range(num_tasks)]
    num_different, num_seen = len(frozenset().union(*tasks)), sum(map(len, tasks))
    sees_all = len(set(tasks)) == 1 and len(tasks[0]) >= num_tasks
    return Binding(min(map(len, tasks)), is_shared=num_different < num_seen and not sees_all)


def _bits(mask: int) -> Iterator[int]:
    return (bit for bit in range(mask.bit_length()) if mask >> bit & 1)


def _last_count(text: str) -> int:
    """The number at the end of ``4``, ``h100:4`` or ``gres/gpu=4``; 1 if there is none."""
    last = re.split(r"[:=]", text)[-1]
    return int(last) if last.isdigit() else 1


def _count(num_gpus: int) -> str:
    return "1 GPU" if num_gpus == 1 else f"{num_gpus} GPUs"
