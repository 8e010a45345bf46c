"""The rendezvous of an attempt: the node and ranks of each agent, and the address on which rank 0 listens."""

from __future__ import annotations

import hashlib
import signal
import socket
from dataclasses import dataclass
from pathlib import Path

from trainkit.errors import EXIT_NO_RESTART, TrainkitError
from trainkit.job import processes
from trainkit.job.node.slurm_step import SlurmTask
from trainkit.plan.launch import LaunchPlan
from trainkit.rundir import AttemptDir, read_json, wait_for_json, write_json_in_place

LOCAL_ADDR = "127.0.0.1"
"""The address of rank 0 when all nodes are this machine."""

NUM_CANDIDATES = 64
LOWEST_PORT = 10_000
HIGHEST_PORT = 65_000
DEFAULT_EPHEMERAL = (32_768, 60_999)


def ephemeral_range(path: str = "/proc/sys/net/ipv4/ip_local_port_range") -> tuple[int, int]:
    """The range of ports that the kernel uses for outgoing connections, as (first, last), both included."""
    try:
        low, high = Path(path).read_text().split()
        return int(low), int(high)
    except (OSError, ValueError):
        return DEFAULT_EPHEMERAL


def port_pool(ephemeral: tuple[int, int]) -> list[int]:
    """The ports that a rendezvous may use: all those outside the ephemeral range."""
    low, high = ephemeral
    return [port for port in range(LOWEST_PORT, HIGHEST_PORT) if not low <= port <= high]


def candidate_ports(job_id: str, attempt: int, ephemeral: tuple[int, int]) -> list[int]:
    """Ports outside the ephemeral range, in an order that depends on the job and the attempt.

    Empty if the ephemeral range covers all ports.
    """
    pool = port_pool(ephemeral)
    if not pool:
        return []
    digest = hashlib.sha256(f"{job_id}/{attempt}".encode()).digest()
    start = int.from_bytes(digest[:8], "big")
    return [pool[(start + 101 * index) % len(pool)] for index in range(NUM_CANDIDATES)]


def is_free(port: int) -> bool:
    """Whether rank 0 could listen on a port; binds to all addresses, as TCPStore does."""
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def choose_port(job_id: str, attempt: int) -> int:
    """A free port on this machine for the rendezvous of an attempt; raises TrainkitError if there is none."""
    candidates = candidate_ports(job_id, attempt, ephemeral_range())
    if not candidates:
        with socket.socket() as probe:
            probe.bind(("", 0))
            return int(probe.getsockname()[1])
    for port in candidates:
        if is_free(port):
            return port
    raise TrainkitError(
        f"no free port for the rendezvous: tried {len(candidates)} "
        f"between {min(candidates)} and {max(candidates)}",
        hint="`ss -ltn` shows what listens on this machine",
    )


RENDEZVOUS_TIMEOUT_S = 300.0
VISIBLE_TIMEOUT_S = 65.0
"""An NFS client may remember for a minute that a name is missing."""


class StopSignalReceived(Exception):
    """A notice signal arrived before the workers had started."""

    def __init__(self, received: signal.Signals) -> None:
        super().__init__(received.name)
        self.received = received


@dataclass(frozen=True)
class Rendezvous:
    """The node and ranks of one agent, and the address of rank 0."""

    node_rank: int
    local_ranks: tuple[int, ...]
    master_addr: str
    master_port: int
    peer: str | None
    """Another host of the job; None when all ranks are on this host."""

    @property
    def has_rank_0(self) -> bool:
        """Whether rank 0 is one of the agent's workers."""
        return self.node_rank == 0 and 0 in self.local_ranks


def await_plan(attempt: AttemptDir, timeout_s: float = VISIBLE_TIMEOUT_S) -> LaunchPlan:
    """Wait until this host sees the plan of the attempt, and return it.

    Raises TrainkitError after the timeout, and StopSignalReceived when a notice signal arrives meanwhile.
    """
    try:
        return LaunchPlan.from_dict(wait_for_json(attempt.plan_file, timeout_s, pause=_pause))
    except TimeoutError as error:
        raise TrainkitError(
            f"cannot read {attempt.plan_file} on {socket.gethostname()}: {error}",
            hint="all nodes must share the filesystem of the run folder",
        ) from error


def _pause(seconds: float) -> None:
    received = processes.wait_for_signal(seconds)
    if received is not None and received != signal.SIGCHLD:
        raise StopSignalReceived(received)


def local_rendezvous(plan: LaunchPlan, node_rank: int, master_port: int) -> Rendezvous:
    """The rendezvous of an agent of a local run, in which all nodes are this machine."""
    return Rendezvous(node_rank, tuple(range(plan.workers_of(node_rank))), LOCAL_ADDR, master_port, None)


def slurm_rendezvous(attempt: AttemptDir, plan: LaunchPlan, task: SlurmTask) -> Rendezvous:
    """The rendezvous of an agent that is a task of a Slurm step; waits for rank 0's port.

    Raises TrainkitError when the step does not match the plan or no port is published in time, and
    StopSignalReceived when a notice signal arrives meanwhile.
    """
    check_step(plan, task)
    per_gpu = plan.per == "gpu"
    local_ranks = (task.local_task,) if per_gpu else tuple(range(plan.workers_of(task.node_rank)))
    own_host = task.hosts[task.node_rank]
    others = [host for host in (task.hosts[0], *task.hosts[1:2]) if host != own_host]
    addr = LOCAL_ADDR if task.num_nodes == 1 else task.hosts[0]
    is_first = task.node_rank == 0 and task.local_task == 0
    port = publish_port(attempt, task, addr) if is_first else await_port(attempt, task)
    return Rendezvous(task.node_rank, local_ranks, addr, port, others[0] if others else None)


def check_step(plan: LaunchPlan, task: SlurmTask) -> None:
    """Raise TrainkitError (exit code 78) when the step does not match the plan."""
    planned = tuple(plan.workers_of(node) if plan.per == "gpu" else 1 for node in range(plan.num_nodes))
    if task.tasks != planned:
        raise TrainkitError(
            f"the plan needs {_shape(planned)} (--per {plan.per}), but Slurm started {_shape(task.tasks)}: "
            f"step {task.job_id}.{task.step_id} on {','.join(task.hosts)}",
            hint="use the srun line that trainkit writes: it starts the tasks of plan.json",
            exit_code=EXIT_NO_RESTART,
        )


def _shape(tasks: tuple[int, ...]) -> str:
    nodes = f"{len(tasks)} node{'s' if len(tasks) != 1 else ''}"
    if len(set(tasks)) == 1:
        return f"{nodes} with {tasks[0]} task{'s' if tasks[0] != 1 else ''} each"
    return f"{nodes} with {','.join(map(str, tasks))} tasks"


def publish_port(attempt: AttemptDir, task: SlurmTask, addr: str) -> int:
    """Choose a free port on this host, on which rank 0 runs, and publish it to the other tasks."""
    port = choose_port(task.key, attempt.number)
    record = {"step": task.key, "step_id": task.step_id, "addr": addr, "port": port}
    write_json_in_place(attempt.rendezvous_file, {**record, "hosts": list(task.hosts)})
    return port


def await_port(attempt: AttemptDir, task: SlurmTask, timeout_s: float = RENDEZVOUS_TIMEOUT_S) -> int:
    """Wait for the port that the first task of the step publishes; raises TrainkitError after the timeout."""

    def is_from_this_step(record: dict[str, object]) -> bool:
        return record.get("step") == task.key

    try:
        record = wait_for_json(
            attempt.rendezvous_file, timeout_s, accept=is_from_this_step, pause=_pause, creates=True
        )
    except TimeoutError:
        raise TrainkitError(
            f"the first task of step {task.job_id}.{task.step_id}, on {task.hosts[0]}, "
            f"has not published {attempt.rendezvous_file} within {timeout_s:g} s",
            hint=f"check {attempt.node_log(0)}; all nodes must share the filesystem of the run folder",
        ) from None
    return int(record["port"])


def has_rendezvous(attempt: AttemptDir) -> bool:
    """Whether the first task of an attempt has published its port, so that its ranks start."""
    try:
        return "port" in read_json(attempt.rendezvous_file)
    except (OSError, ValueError):
        return False
