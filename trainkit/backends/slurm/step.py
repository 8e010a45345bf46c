"""The step of a Slurm job: its argv, its tasks, their rendezvous, and the processes that Slurm signals.

At the rendezvous the first task publishes the port on which rank 0 listens. The batch shell has
SLURM_PROCID=0 too, but it is not a task of a step. Only SLURM_STEP_ID distinguishes them: before Slurm 26.05
the batch shell has no SLURM_STEP_ID, and since then a job's shells have the numbers of special steps.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath

from trainkit.errors import FatalError, TrainkitError, UsageError
from trainkit.formats import plural
from trainkit.job import processes
from trainkit.job.node.rendezvous import (
    LOCAL_ADDR,
    RENDEZVOUS_TIMEOUT_S,
    NotATask,
    PauseUntilFailure,
    Rendezvous,
    Task,
    choose_port,
    new_nonce,
    pause,
)
from trainkit.job.signals import NOTICE_SIGNALS
from trainkit.plan.launch import LaunchPlan
from trainkit.run.files import read_record, wait_for_json, write_json_in_place
from trainkit.run.record import RendezvousRecord
from trainkit.run.rundir import AttemptDir
from trainkit.scheduler import expand_hosts
from trainkit.slurm.control import kill_steps
from trainkit.slurm.hosts import node_addr, tasks_per_node

FIRST_SPECIAL_STEP = -16
"""The lowest number of a special step. Steps from here to -1 are batch, extern and interactive steps without
ranks.

The numbers have 32 bits: Slurm 26.05 writes -6 where older versions write 4294967290.
"""
BATCH_STEP = -5
RESOLVE_PATIENCE_S = 20.0
RESOLVE_RETRY_S = 2.0
PATIENCE_S = 0.5
"""Seconds by which the ranks may receive a signal later than their agent, if Slurm sends it to both."""


def slurm_job_id(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the id of this process's job, ``123_4`` for a task of an array; None outside of a job."""
    if environ.get("SLURM_ARRAY_JOB_ID") and environ.get("SLURM_ARRAY_TASK_ID"):
        return f"{environ['SLURM_ARRAY_JOB_ID']}_{environ['SLURM_ARRAY_TASK_ID']}"
    return environ.get("SLURM_JOB_ID")


def step_argv(
    step: Sequence[str], plan: LaunchPlan, hosts: Sequence[str], overlap: bool = False
) -> list[str]:
    """Return the argv that starts the ranks on the first of these hosts, based on the script's step.

    Without spare nodes or a range of nodes, the step uses all hosts of the job and its argv is unchanged. A
    step on an unreachable host cannot be ended; Slurm may still count it as running and its memory as used.
    Set `overlap` in this case. Raises TrainkitError if there are fewer hosts than the plan has nodes, or if
    the step does not use srun.
    """
    if len(hosts) < plan.num_nodes:
        good = f"{len(hosts)} of the job's hosts are good: {','.join(hosts) or 'none'}"
        raise TrainkitError(f"the step needs {plan.num_nodes} nodes, but only {good}")
    options = ["--overlap", "--mem=0"] if overlap else []
    if plan.may_lose_nodes:
        options.append(f"--nodelist={','.join(hosts[: plan.num_nodes])}")
    if plan.sizes and plan.slurm is not None:
        # The script has the options for the largest node count. If options repeat, Slurm takes the last one.
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


class StepListener:
    """A child of the agent that records the stop signals it receives, because its ranks receive them too.

    The processes that Slurm signals depend on `ProctrackType`, on the Slurm version and on the kind of
    request.
    """

    def __init__(self) -> None:
        """Start the listener; call this after the ranks have started, with the stop signals blocked."""
        self._reader, writer = os.pipe()
        self._heard: set[int] = set()
        before_listening = processes.dies_with(os.getpid(), signal.SIGKILL)
        if os.fork() == 0:
            try:
                os.setpgid(0, 0)  # the ranks have separate process groups too
                before_listening()
                # Close inherited files, because an agent's connection stays open until every process has
                # closed it.
                for file in list(Path("/proc/self/fd").iterdir()):
                    if int(file.name) > 2 and int(file.name) != writer:
                        # The directory listing's own file is already closed.
                        with contextlib.suppress(OSError):
                            os.close(int(file.name))
                while True:
                    os.write(writer, bytes([signal.sigwait(NOTICE_SIGNALS)]))
            finally:
                os._exit(1)
        os.close(writer)

    def has_heard(self, number: signal.Signals) -> bool:
        deadline_s = time.monotonic() + PATIENCE_S
        while number not in self._heard and (remaining_s := deadline_s - time.monotonic()) > 0:
            if select.select([self._reader], [], [], remaining_s)[0]:
                received = os.read(self._reader, 64)
                if not received:
                    return False  # the listener was killed
                self._heard.update(received)
        return number in self._heard


@dataclass(frozen=True)
class SlurmTask(Task):
    """One task of a step."""

    job_id: str
    """The id of the job, such as ``123``, or ``123_4`` for a task of an array."""
    step_id: str
    restart_count: int
    task: int
    """The index of the task in the step (SLURM_PROCID)."""
    node_rank: int
    local_task: int
    tasks: tuple[int, ...]
    """The number of tasks on each node."""
    hosts: tuple[str, ...]
    """The hosts by node rank, not necessarily in alphabetical order."""
    launcher_port: str = ""
    """The port of the step's srun, which distinguishes steps even after Slurm has reset its job ids."""

    @property
    def rank(self) -> int:
        # Ranks are counted node by node, whatever the order of srun's tasks.
        return sum(self.tasks[: self.node_rank]) + self.local_task

    @property
    def first(self) -> str:
        return f"task 0 of step {self.job_id}.{self.step_id}"

    @property
    def key(self) -> str:
        return f"{self.job_id}.{self.step_id}.{self.restart_count}.{self.launcher_port}"

    def meet(self, attempt: AttemptDir, plan: LaunchPlan) -> Rendezvous:
        return slurm_rendezvous(attempt, plan, self)

    def end_step(self) -> None:
        """End all tasks of the step; raise TrainkitError if Slurm does not end them."""
        kill_steps([(self.job_id, self.step_id)], "TERM")

    def listen(self) -> StepListener:
        return StepListener()


def reason_not_a_task(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return why this process is not a task of a Slurm step; None if it is one.

    Raises UsageError if SLURM_STEP_ID is not a number.
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
    """Return the step task that this process runs as; None if this process is not a task.

    Raises UsageError if Slurm's variables are incomplete, contradict each other, or describe a step across
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


def step_task() -> SlurmTask:
    """Return the step task that this process runs as; raise NotATask if this process is not a task.

    Raises UsageError as `find_slurm_task` does.
    """
    if (task := find_slurm_task()) is None:
        raise NotATask(f"this is not a task of a Slurm step: {reason_not_a_task()}")
    return task


def _is_in_one_component(environ: Mapping[str, str]) -> bool:
    """Return whether all nodes of this step belong to one component of the heterogeneous job."""
    hosts = expand_hosts(_text(environ, "SLURM_STEP_NODELIST"))
    components = [
        expand_hosts(nodes) for name, nodes in environ.items() if name.startswith("SLURM_NODELIST_HET_GROUP_")
    ]
    # Components can share a node. A step across these components lists the node twice.
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
        raise UsageError(
            f"{name}={text!r} is not a whole number",
            hint="variables of another job may have been exported into this one",
        )
    return int(text)


def slurm_rendezvous(attempt: AttemptDir, plan: LaunchPlan, task: SlurmTask) -> Rendezvous:
    """Return the rendezvous of an agent that is a task of a Slurm step; wait for rank 0's port.

    Raises TrainkitError if the step does not match the plan or no port is published in time, and
    StopSignalReceived if a stop signal arrives in the meantime.
    """
    check_step(plan, task)
    per_gpu = plan.per == "gpu"
    local_ranks = (task.local_task,) if per_gpu else tuple(range(plan.workers_of(task.node_rank)))
    if task.task == 0:
        record = publish_port(attempt, task, master_address(task))
    else:
        record = await_port(attempt, task, is_supervised=plan.has_supervisor)
    assert record.port is not None
    addr = master_address(task, record.addr)
    peer = None if task.num_nodes == 1 else addr if task.node_rank else _peer_address(task.hosts[1])
    return Rendezvous(task.node_rank, local_ranks, addr, record.port, peer, record.nonce or "", task)


def resolves(name: str) -> bool:
    """Return whether a name or address resolves on this host."""
    try:
        return bool(socket.getaddrinfo(name, None))
    except (OSError, UnicodeError):
        return False


def master_address(task: SlurmTask, published: str | None = None) -> str:
    """Return the name of the step's first host if it resolves here, else its NodeAddr.

    `published` is the address that the first task uses, which saves a request to Slurm's controller. Raises
    TrainkitError if neither resolves, and StopSignalReceived if a stop signal arrives in the meantime.
    """
    if task.num_nodes == 1:
        return LOCAL_ADDR
    name = task.hosts[0]
    if resolves(name):
        return name
    if published not in (None, name) and resolves(str(published)):
        return str(published)
    addr, problem = None, ""
    try:
        addr = node_addr(name)
    except TrainkitError as error:
        problem = f", and Slurm does not give its NodeAddr: {error.message}"
    if addr is not None:
        problem = f", and neither does its NodeAddr {addr}" if addr != name else ", which is its NodeAddr too"
    # The name server may be unavailable for a moment.
    deadline_s = time.monotonic() + RESOLVE_PATIENCE_S
    while True:
        for candidate in (addr, name):
            if candidate is not None and resolves(candidate):
                return candidate
        if time.monotonic() >= deadline_s:
            raise TrainkitError(
                f"the node name {name} does not resolve on {socket.gethostname()}{problem}",
                hint=f"`getent hosts {name}` and `scontrol show node {name}` must print an address there",
            )
        pause(RESOLVE_RETRY_S)


def _peer_address(name: str) -> str:
    """Return the address of another host, to find the interface towards it; its name if unknown."""
    if resolves(name):
        return name
    try:
        return node_addr(name)
    except TrainkitError as error:
        processes.log_line(f"cannot query the NodeAddr of {name}: {error.message}")
        return name


def check_step(plan: LaunchPlan, task: SlurmTask) -> None:
    """Raise FatalError if the step does not match the plan."""
    planned = tuple(plan.workers_of(node) if plan.per == "gpu" else 1 for node in range(plan.num_nodes))
    if task.tasks != planned:
        raise FatalError(
            f"the plan needs {_shape(planned)} (--per {plan.per}), but Slurm started {_shape(task.tasks)}: "
            f"step {task.job_id}.{task.step_id} on {','.join(task.hosts)}",
            hint="use the srun line that trainkit writes: it starts the tasks of plan.json",
        )


def _shape(tasks: tuple[int, ...]) -> str:
    is_even = len(set(tasks)) == 1
    counts = f"{plural(tasks[0], 'task')} each" if is_even else f"{','.join(map(str, tasks))} tasks"
    return f"{plural(len(tasks), 'node')} with {counts}"


def publish_port(attempt: AttemptDir, task: SlurmTask, addr: str) -> RendezvousRecord:
    """Choose a free port on this host, on which rank 0 runs, and publish the port to the other tasks.

    Only the user can read the file.
    """
    port = choose_port()
    record = RendezvousRecord(task.key, task.step_id, addr, port, new_nonce(), list(task.hosts))
    write_json_in_place(attempt.rendezvous_file, asdict(record))
    return record


def await_port(
    attempt: AttemptDir,
    task: SlurmTask,
    timeout_s: float = RENDEZVOUS_TIMEOUT_S,
    *,
    is_supervised: bool = True,
) -> RendezvousRecord:
    """Wait for the port that the step's first task publishes; return the content of the rendezvous file.

    Raises TrainkitError after the timeout and, in a step without a supervisor, if another task has failed.
    """
    try:
        record = wait_for_json(
            attempt.rendezvous_file,
            timeout_s,
            accept=lambda record: bool(record["step"] == task.key),  # the file may be from an earlier start
            pause=pause if is_supervised else PauseUntilFailure(attempt),
            creates=True,
        )
    except TimeoutError:
        raise TrainkitError(
            f"the first task of step {task.job_id}.{task.step_id}, on {task.hosts[0]}, "
            f"has not published {attempt.rendezvous_file} within {timeout_s:g} s",
            hint=f"check {attempt.node_log(0)}; all nodes must share the filesystem of the run folder",
        ) from None
    return read_record(RendezvousRecord, record)
