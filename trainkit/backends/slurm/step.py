"""The step in a Slurm job: its command line, tasks and rendezvous, and which processes Slurm signals.

At the rendezvous, the first task publishes the port on which rank 0 listens. The batch shell also has
SLURM_PROCID=0, although it is not a task in a step. Only SLURM_STEP_ID distinguishes the batch shell from
tasks: it is not set in the batch shell before Slurm 26.05, and is a special step number there since then.
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
"""The lowest number that denotes a special step. The numbers from FIRST_SPECIAL_STEP to -1 denote the batch,
extern and interactive steps, which have no ranks.

Step numbers have 32 bits. Slurm 26.05 writes -6 where older versions write 4294967290.
"""
BATCH_STEP = -5
RESOLVE_PATIENCE_S = 20.0
RESOLVE_RETRY_S = 2.0
PATIENCE_S = 0.5
"""Seconds by which ranks may receive a signal later than their agent if Slurm signals both."""


def slurm_job_id(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the id of this process's Slurm job (``123_4`` for an array task), or None outside a job."""
    if environ.get("SLURM_ARRAY_JOB_ID") and environ.get("SLURM_ARRAY_TASK_ID"):
        return f"{environ['SLURM_ARRAY_JOB_ID']}_{environ['SLURM_ARRAY_TASK_ID']}"
    return environ.get("SLURM_JOB_ID")


def step_argv(
    step: Sequence[str], plan: LaunchPlan, hosts: Sequence[str], overlap: bool = False
) -> list[str]:
    """Return the command line that starts the ranks on the first of `hosts`.

    `step` is the step's command line in the batch script. Without spare nodes or a range of node counts, the
    step uses all hosts of the job, so its command line stays unchanged. A step on an unreachable host cannot
    be killed, so Slurm may still consider it running and its memory in use. Set `overlap` if a step on an
    unreachable host may still be running. Raises TrainkitError if there are fewer hosts than nodes in the
    plan, or if the step does not start with srun.
    """
    if len(hosts) < plan.num_nodes:
        good = f"{len(hosts)} of the job's hosts are usable: {','.join(hosts) or 'none'}"
        raise TrainkitError(f"the step needs {plan.num_nodes} nodes, but only {good}")
    options = ["--overlap", "--mem=0"] if overlap else []
    if plan.may_lose_nodes:
        options.append(f"--nodelist={','.join(hosts[: plan.num_nodes])}")
    if plan.sizes and plan.slurm is not None:
        # The script contains the options for the largest node count; if an option is repeated, Slurm uses its
        # last value.
        sized = {f"--{name}=": plan.slurm.srun[name] for name in ("nodes", "ntasks")}
        step = [word for word in step if not word.startswith(tuple(sized))]
        options += [f"{name}{value}" for name, value in sized.items()]
    if not options:
        return list(step)
    srun = next((index for index, word in enumerate(step) if PurePath(word).name == "srun"), None)
    if srun is None:
        raise TrainkitError(
            f"the step in the script does not use srun: {' '.join(step)}",
            hint="a step can be restarted or moved to other hosts only if srun starts it",
        )
    return [*step[: srun + 1], *options, *step[srun + 1 :]]


class StepListener:
    """A child process of the agent that records stop signals.

    Slurm sends the same signals to the listener and the ranks. Which processes Slurm signals depends on
    `ProctrackType`, the Slurm version and the kind of request.
    """

    def __init__(self) -> None:
        """Start the listener; call this after starting the ranks, while the stop signals are blocked."""
        self._reader, writer = os.pipe()
        self._heard: set[int] = set()
        before_listening = processes.dies_with(os.getpid(), signal.SIGKILL)
        if os.fork() == 0:
            try:
                os.setpgid(0, 0)  # like each rank, the listener has its own process group
                before_listening()
                # Close inherited file descriptors; otherwise, the agent's connections would stay open until
                # this process exits.
                for file in list(Path("/proc/self/fd").iterdir()):
                    if int(file.name) > 2 and int(file.name) != writer:
                        # The list includes the descriptor that was used to list the directory, which is
                        # already closed.
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
    """One task in a Slurm step."""

    job_id: str
    """The job id, such as ``123``, or ``123_4`` for an array task."""
    step_id: str
    restart_count: int
    task: int
    """The index of the task in the step (SLURM_PROCID)."""
    node_rank: int
    local_task: int
    tasks: tuple[int, ...]
    """The number of tasks on each node."""
    hosts: tuple[str, ...]
    """The hosts in node rank order, which need not be alphabetical."""
    launcher_port: str = ""
    """The port of the step's srun, which distinguishes steps even if Slurm has reset its job ids."""

    @property
    def rank(self) -> int:
        # Ranks are numbered node by node, regardless of how srun orders its tasks.
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
        """Kill all tasks in the step; raise TrainkitError if Slurm does not kill them."""
        kill_steps([(self.job_id, self.step_id)], "TERM")

    def listen(self) -> StepListener:
        return StepListener()


def reason_not_a_task(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return why this process is not a task in a Slurm step, or None if it is one.

    Raises UsageError if SLURM_STEP_ID is not a number.
    """
    if "SLURM_JOB_ID" not in environ:
        return "this process is not in a Slurm job"
    step = _number(environ, "SLURM_STEP_ID") if "SLURM_STEP_ID" in environ else BATCH_STEP
    step -= 2**32 if step >= 2**31 else 0
    if step == BATCH_STEP:
        return "this is the batch shell of a Slurm job, not a task of a step: start tasks with srun"
    if FIRST_SPECIAL_STEP <= step < 0:
        return "this is the interactive shell of an allocation, not a task of a step: start tasks with srun"
    return None


def find_slurm_task(environ: Mapping[str, str] = os.environ) -> SlurmTask | None:
    """Return this process as a Slurm task, or None if the process is not a task in a Slurm step.

    Raises UsageError if Slurm's variables are incomplete or contradictory, or if the step spans several
    components of a heterogeneous job.
    """
    if reason_not_a_task(environ) is not None:
        return None
    if int(environ.get("SLURM_HET_SIZE") or 1) > 1 and not _is_in_one_component(environ):
        raise UsageError(
            "this step spans components of a heterogeneous job, which trainkit does not support",
            hint="request nodes of one kind, or use srun --het-group=0 to start the ranks in one component",
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
            hint="environment variables of another job may have been exported to this job",
        )
    return found


def step_task() -> SlurmTask:
    """Return this process as a Slurm task; raise NotATask if it is not a task in a Slurm step.

    Raises UsageError for the same reasons as `find_slurm_task`.
    """
    if (task := find_slurm_task()) is None:
        raise NotATask(f"this is not a task of a Slurm step: {reason_not_a_task()}")
    return task


def _is_in_one_component(environ: Mapping[str, str]) -> bool:
    """Return whether all nodes in this step belong to a single component of the heterogeneous job."""
    hosts = expand_hosts(_text(environ, "SLURM_STEP_NODELIST"))
    components = [
        expand_hosts(nodes) for name, nodes in environ.items() if name.startswith("SLURM_NODELIST_HET_GROUP_")
    ]
    # If two components share a node, the host list of a step that spans both components contains this node
    # twice.
    return len(set(hosts)) == len(hosts) and any(set(hosts) <= set(nodes) for nodes in components)


def _text(environ: Mapping[str, str], name: str) -> str:
    if not environ.get(name):
        raise UsageError(
            f"SLURM_STEP_ID is set, but {name} is not",
            hint="environment variables of another job may have been exported to this job",
        )
    return environ[name]


def _number(environ: Mapping[str, str], name: str) -> int:
    text = _text(environ, name)
    if not text.removeprefix("-").isdigit():
        raise UsageError(
            f"{name}={text!r} is not a whole number",
            hint="environment variables of another job may have been exported to this job",
        )
    return int(text)


def slurm_rendezvous(attempt: AttemptDir, plan: LaunchPlan, task: SlurmTask) -> Rendezvous:
    """Return the rendezvous for an agent in a Slurm step; wait until rank 0's port is published.

    Raises TrainkitError if the step does not match the plan or the port is not published in time, and
    StopSignalReceived if a stop signal arrives while waiting.
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
    """Return whether a name or address can be resolved on this host."""
    try:
        return bool(socket.getaddrinfo(name, None))
    except (OSError, UnicodeError):
        return False


def master_address(task: SlurmTask, published: str | None = None) -> str:
    """Return an address of the step's first host that this host can resolve.

    The address is the host's name or, if that does not resolve, `published`, the address that the first task
    published, or else the host's NodeAddr. With a single node, the address is 127.0.0.1. Raises TrainkitError
    if no address can be resolved, and StopSignalReceived if a stop signal arrives while resolving.
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
        problem = f", and Slurm does not report its NodeAddr: {error.message}"
    if addr is not None:
        problem = f", and neither does its NodeAddr {addr}" if addr != name else ", which is its NodeAddr too"
    # The name server may be temporarily unavailable.
    deadline_s = time.monotonic() + RESOLVE_PATIENCE_S
    while True:
        for candidate in (addr, name):
            if candidate is not None and resolves(candidate):
                return candidate
        if time.monotonic() >= deadline_s:
            raise TrainkitError(
                f"the node name {name} does not resolve on {socket.gethostname()}{problem}",
                hint=f"`getent hosts {name}` and `scontrol show node {name}` "
                "must print an address on that host",
            )
        pause(RESOLVE_RETRY_S)


def _peer_address(name: str) -> str:
    """Return another host's name if it resolves, else the host's NodeAddr.

    The result is used to find the interface on the route to that host.
    """
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
            hint="use the srun line that trainkit writes: it starts the tasks described in plan.json",
        )


def _shape(tasks: tuple[int, ...]) -> str:
    is_even = len(set(tasks)) == 1
    counts = f"{plural(tasks[0], 'task')} each" if is_even else f"{','.join(map(str, tasks))} tasks"
    return f"{plural(len(tasks), 'node')} with {counts}"


def publish_port(attempt: AttemptDir, task: SlurmTask, addr: str) -> RendezvousRecord:
    """Choose a free port on this host, where rank 0 runs, and publish it for the other tasks.

    Only this user can read the file that contains the port.
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
    """Wait until the step's first task publishes its port; return the content of the rendezvous file.

    Raises TrainkitError on timeout or, in a step without a supervisor, if another task has failed.
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
            hint=f"check {attempt.node_log(0)}; the run folder must be on a filesystem that all nodes share",
        ) from None
    return read_record(RendezvousRecord, record)
