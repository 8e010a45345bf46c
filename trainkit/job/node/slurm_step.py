"""Where this process stands in a Slurm step, from the variables that srun sets.

The batch shell has SLURM_PROCID=0 too, but it is no task of a step: only SLURM_STEP_ID tells.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from trainkit.errors import UsageError
from trainkit.slurm.hosts import expand_hosts, tasks_per_node

FIRST_SPECIAL_STEP = 4_294_967_280
"""Step numbers from here on stand for batch, extern and interactive steps, whose only process is no rank."""


@dataclass(frozen=True)
class SlurmPlace:
    """One task of a step."""

    job_id: str
    """With its index for a task of an array: ``123_4``."""
    step_id: str
    restart_count: int
    task: int
    """Number of the task in the whole step."""
    node_rank: int
    local_task: int
    tasks: tuple[int, ...]
    """Tasks of each node."""
    hosts: tuple[str, ...]
    """In the order of the step, which need not be alphabetical."""
    launcher_port: str = ""
    """Where the step's srun listens: differs from step to step even where job ids begin at 1 again."""

    @property
    def num_tasks(self) -> int:
        return sum(self.tasks)

    @property
    def num_nodes(self) -> int:
        return len(self.tasks)

    @property
    def key(self) -> str:
        """Names this start of this step, and no other."""
        return f"{self.job_id}.{self.step_id}.{self.restart_count}.{self.launcher_port}"


def slurm_job_id(environ: Mapping[str, str] = os.environ) -> str | None:
    """The id of the job that this process belongs to; of an array's task with its index."""
    if environ.get("SLURM_ARRAY_JOB_ID") and environ.get("SLURM_ARRAY_TASK_ID"):
        return f"{environ['SLURM_ARRAY_JOB_ID']}_{environ['SLURM_ARRAY_TASK_ID']}"
    return environ.get("SLURM_JOB_ID")


def why_no_task(environ: Mapping[str, str] = os.environ) -> str | None:
    """Why this process is no task of a Slurm step; None when it is one."""
    if "SLURM_JOB_ID" not in environ:
        return "this process is not in a Slurm job"
    step = environ.get("SLURM_STEP_ID")
    if step is None:
        return "this is the shell of a Slurm job and not a task of a step: srun starts those"
    if step.isdigit() and int(step) >= FIRST_SPECIAL_STEP:
        return "this is the interactive shell of an allocation: srun starts tasks from it"
    return None


def find_slurm_place(environ: Mapping[str, str] = os.environ) -> SlurmPlace | None:
    """The place of this process in its step; None where it is no task.

    Raises UsageError when Slurm's variables are incomplete, contradict each other, or tell of a
    heterogeneous job.
    """
    if why_no_task(environ) is not None:
        return None
    if int(environ.get("SLURM_HET_SIZE") or 1) > 1 and not _is_in_one_component(environ):
        raise UsageError(
            "this step spans components of a heterogeneous job, which trainkit cannot train across",
            hint="ask for nodes of one kind, or start the ranks in one component with srun --het-group=0",
        )
    tasks = tuple(tasks_per_node(_text(environ, "SLURM_STEP_TASKS_PER_NODE")))
    place = SlurmPlace(
        job_id=str(slurm_job_id(environ)),
        step_id=_text(environ, "SLURM_STEP_ID"),
        restart_count=int(environ.get("SLURM_RESTART_COUNT") or 0),
        task=_number(environ, "SLURM_PROCID"),
        node_rank=_number(environ, "SLURM_NODEID"),
        local_task=_number(environ, "SLURM_LOCALID"),
        tasks=tasks,
        hosts=tuple(expand_hosts(_text(environ, "SLURM_STEP_NODELIST"))),
        launcher_port=environ.get("SLURM_STEP_LAUNCHER_PORT", ""),
    )
    asked = _number(environ, "SLURM_STEP_NUM_TASKS")
    fits = (
        place.node_rank < place.num_nodes and place.local_task < tasks[place.node_rank] and place.task < asked
    )
    if place.num_tasks != asked or len(place.hosts) != place.num_nodes or not fits:
        raise UsageError(
            f"Slurm's variables contradict each other: {asked} tasks, SLURM_STEP_TASKS_PER_NODE="
            f"{environ['SLURM_STEP_TASKS_PER_NODE']} on {environ['SLURM_STEP_NODELIST']}, and this is task "
            f"{place.task}, node {place.node_rank}, local task {place.local_task}",
            hint="variables of another job may have been exported into this one",
        )
    return place


def _is_in_one_component(environ: Mapping[str, str]) -> bool:
    """Whether the step of a heterogeneous job is on nodes of one component: then it is like any other."""
    hosts = expand_hosts(_text(environ, "SLURM_STEP_NODELIST"))
    components = [
        expand_hosts(nodes) for name, nodes in environ.items() if name.startswith("SLURM_NODELIST_HET_GROUP_")
    ]
    # Components can share a node; a step across them then names it twice.
    return len(set(hosts)) == len(hosts) and any(set(hosts) <= set(nodes) for nodes in components)


def _text(environ: Mapping[str, str], name: str) -> str:
    if not environ.get(name):
        raise UsageError(
            f"SLURM_STEP_ID is set, but {name} is not",
            hint="variables of another job may have been exported into this one",
        )
    return environ[name]


def _number(environ: Mapping[str, str], name: str) -> int:
    text = _text(environ, name)
    if not text.isdigit():
        raise UsageError(f"{name}={text!r} is not a whole number")
    return int(text)
