"""The step of a Slurm job: its argv, the task of this process, and whom Slurm signals.

The batch shell has SLURM_PROCID=0 too, but it is not a task of a step: only SLURM_STEP_ID tells them apart.
Before Slurm 26.05 it has none; since then the shells of a job have the numbers of their special steps.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from trainkit.errors import TrainkitError, UsageError
from trainkit.job import processes
from trainkit.job.signals import NOTICE_SIGNALS
from trainkit.plan.launch import LaunchPlan
from trainkit.slurm.hosts import expand_hosts, tasks_per_node

FIRST_SPECIAL_STEP = -16
"""Step numbers from here to -1 are batch, extern and interactive steps, whose only process is not a rank.

They are 32 bits long: Slurm 26.05 writes -6 where older versions write 4294967290.
"""
BATCH_STEP = -5


@dataclass(frozen=True)
class SlurmTask:
    """One task of a step."""

    job_id: str
    """``123``, or ``123_4`` for a task of an array."""
    step_id: str
    restart_count: int
    task: int
    """Index of the task in the step (SLURM_PROCID)."""
    node_rank: int
    local_task: int
    tasks: tuple[int, ...]
    """Number of tasks on each node."""
    hosts: tuple[str, ...]
    """By node rank; not necessarily in alphabetical order."""
    launcher_port: str = ""
    """The port of the step's srun: distinguishes steps even after Slurm has reset its job ids."""

    @property
    def num_tasks(self) -> int:
        return sum(self.tasks)

    @property
    def num_nodes(self) -> int:
        return len(self.tasks)

    @property
    def first(self) -> str:
        """The task that announces the run, in words."""
        return f"task 0 of step {self.job_id}.{self.step_id}"

    @property
    def key(self) -> str:
        """A string that identifies this start of this step."""
        return f"{self.job_id}.{self.step_id}.{self.restart_count}.{self.launcher_port}"


def slurm_job_id(environ: Mapping[str, str] = os.environ) -> str | None:
    """The id of this process's job, ``123_4`` for a task of an array; None outside of a job."""
    if environ.get("SLURM_ARRAY_JOB_ID") and environ.get("SLURM_ARRAY_TASK_ID"):
        return f"{environ['SLURM_ARRAY_JOB_ID']}_{environ['SLURM_ARRAY_TASK_ID']}"
    return environ.get("SLURM_JOB_ID")


def reason_not_a_task(environ: Mapping[str, str] = os.environ) -> str | None:
    """Why this process is not a task of a Slurm step; None when it is one.

    Raises UsageError when the number of the step is not one.
    """
    if "SLURM_JOB_ID" not in environ:
        return "this process is not in a Slurm job"
    step = _number(environ, "SLURM_STEP_ID") if "SLURM_STEP_ID" in environ else BATCH_STEP
    step -= 2**32 if step >= 2**31 else 0
    if step == BATCH_STEP:
        return "this is the batch shell of a Slurm job, not a task of a step: srun starts tasks"
    if FIRST_SPECIAL_STEP <= step < 0:
        return "this is the interactive shell of an allocation: srun starts tasks from it"
    return None


def find_slurm_task(environ: Mapping[str, str] = os.environ) -> SlurmTask | None:
    """The step task that this process runs as; None if it is not one.

    Raises UsageError when Slurm's variables are incomplete, contradict each other, or describe a step across
    components of a heterogeneous job.
    """
    if reason_not_a_task(environ) is not None:
        return None
    if int(environ.get("SLURM_HET_SIZE") or 1) > 1 and not _is_in_one_component(environ):
        raise UsageError(
            "this step spans components of a heterogeneous job, which trainkit does not support",
            hint="request nodes of one kind, or start the ranks in one component with srun --het-group=0",
        )
    tasks = tuple(tasks_per_node(_text(environ, "SLURM_STEP_TASKS_PER_NODE")))
    found = SlurmTask(
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
    num_tasks = _number(environ, "SLURM_STEP_NUM_TASKS")
    fits = (
        found.node_rank < found.num_nodes
        and found.local_task < tasks[found.node_rank]
        and found.task < num_tasks
    )
    if found.num_tasks != num_tasks or len(found.hosts) != found.num_nodes or not fits:
        raise UsageError(
            f"Slurm's variables contradict each other: {num_tasks} tasks, SLURM_STEP_TASKS_PER_NODE="
            f"{environ['SLURM_STEP_TASKS_PER_NODE']} on {environ['SLURM_STEP_NODELIST']}, and this is task "
            f"{found.task}, node {found.node_rank}, local task {found.local_task}",
            hint="variables of another job may have been exported into this one",
        )
    return found


def _is_in_one_component(environ: Mapping[str, str]) -> bool:
    """Whether all nodes of this step belong to one component of the heterogeneous job."""
    hosts = expand_hosts(_text(environ, "SLURM_STEP_NODELIST"))
    components = [
        expand_hosts(nodes) for name, nodes in environ.items() if name.startswith("SLURM_NODELIST_HET_GROUP_")
    ]
    # Components can share a node, which a step across them lists twice.
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
    if not text.removeprefix("-").isdigit():
        raise UsageError(f"{name}={text!r} is not a whole number")
    return int(text)


def step_argv(
    step: Sequence[str], plan: LaunchPlan, hosts: Sequence[str], overlap: bool = False
) -> list[str]:
    """The argv that starts the ranks on the first of these hosts, derived from the step in the batch script.

    Without spare nodes or a range of nodes the step uses all hosts of the job, and its argv is
    unchanged. Set `overlap` when Slurm may still count an earlier step as running, which then occupies the
    job's memory: a step on an unreachable host cannot be ended.
    Raises TrainkitError when there are fewer hosts than the plan has nodes, or the step does not use srun.
    """
    if len(hosts) < plan.num_nodes:
        good = f"{len(hosts)} of the job's are good: {','.join(hosts) or 'none'}"
        raise TrainkitError(f"the step needs {plan.num_nodes} nodes, but only {good}")
    options = ["--overlap", "--mem=0"] if overlap else []
    if plan.may_lose_nodes:
        options.append(f"--nodelist={','.join(hosts[: plan.num_nodes])}")
    if plan.sizes and plan.slurm is not None:
        # The script has those of the most nodes, and the last of two options counts.
        sized = {f"--{name}=": plan.slurm.srun[name] for name in ("nodes", "ntasks")}
        step = [word for word in step if not word.startswith(tuple(sized))]
        options += [f"{name}{value}" for name, value in sized.items()]
    if not options:
        return list(step)
    srun = next((index for index, word in enumerate(step) if PurePath(word).name == "srun"), None)
    if srun is None:
        raise TrainkitError(
            f"the step of the script has no srun: {' '.join(step)}",
            hint="a step can only be restarted, or moved to other hosts, when srun starts it",
        )
    return [*step[: srun + 1], *options, *step[srun + 1 :]]


PATIENCE_S = 0.5
"""How long after the agent its ranks may receive a signal that Slurm sends to both."""


class StepListener:
    """A child of the agent that notes the notices it receives: its ranks have received the same.

    Whom Slurm signals depends on its `ProctrackType`, on the version and on how it was asked.
    """

    def __init__(self) -> None:
        """Start it; call after the ranks, with the notice signals blocked."""
        self._reader, writer = os.pipe()
        self._heard: set[int] = set()
        before_listening = processes.dies_with(os.getpid(), signal.SIGKILL)
        if os.fork() == 0:
            try:
                os.setpgid(0, 0)  # as the ranks
                before_listening()
                # A connection of the agent ends when the last process that has it closes it.
                for file in list(Path("/proc/self/fd").iterdir()):
                    if int(file.name) > 2 and int(file.name) != writer:
                        with contextlib.suppress(OSError):  # that of the listing itself
                            os.close(int(file.name))
                while True:
                    os.write(writer, bytes([signal.sigwait(NOTICE_SIGNALS)]))
            finally:
                os._exit(1)
        os.close(writer)

    def has_heard(self, number: signal.Signals) -> bool:
        """Whether the ranks have received a signal that the agent has just received."""
        deadline_s = time.monotonic() + PATIENCE_S
        while number not in self._heard and (left_s := deadline_s - time.monotonic()) > 0:
            if select.select([self._reader], [], [], left_s)[0]:
                received = os.read(self._reader, 64)
                if not received:
                    return False  # it was killed
                self._heard.update(received)
        return number in self._heard
