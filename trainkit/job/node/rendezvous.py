"""The rendezvous of an attempt: the node and ranks of each agent, and the address on which rank 0 listens."""

from __future__ import annotations

import contextlib
import secrets
import signal
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from trainkit.errors import FatalError, TrainkitError
from trainkit.formats import plural
from trainkit.job import processes
from trainkit.job.node.launched_rank import LaunchedRank
from trainkit.job.node.slurm_step import SlurmTask
from trainkit.plan.launch import LaunchPlan
from trainkit.run.events import log_event, read_events
from trainkit.run.files import read_record, wait_for_json, write_json_in_place
from trainkit.run.record import RendezvousRecord
from trainkit.run.rundir import AttemptDir
from trainkit.slurm.hosts import node_addr

LOCAL_ADDR = "127.0.0.1"
"""The address of rank 0 when all nodes are this machine."""

NUM_CANDIDATES = 64
LOWEST_PORT = 10_000
HIGHEST_PORT = 65_000
EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
DEFAULT_EPHEMERAL = (32_768, 60_999)


def ephemeral_range() -> tuple[int, int]:
    """The range of ports that the kernel uses for outgoing connections, as (first, last), both included."""
    try:
        low, high = EPHEMERAL_RANGE.read_text().split()
        return int(low), int(high)
    except (OSError, ValueError):
        return DEFAULT_EPHEMERAL


def candidate_ports() -> list[int]:
    """Random ports that no outgoing connection gets; empty if the kernel uses all ports for these."""
    low, high = ephemeral_range()
    pool = [port for port in range(LOWEST_PORT, HIGHEST_PORT) if not low <= port <= high]
    return secrets.SystemRandom().sample(pool, min(NUM_CANDIDATES, len(pool)))


def is_free(port: int) -> bool:
    """Whether rank 0 could listen on a port; binds to all addresses, as TCPStore does."""
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def choose_port() -> int:
    """A free port on this machine for the rendezvous of an attempt; raises TrainkitError if there is none."""
    candidates = candidate_ports()
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
RESOLVE_PATIENCE_S = 20.0
RESOLVE_RETRY_S = 2.0
FAILURE_POLL_S = 2.0
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
    nonce: str = ""
    """Random: by it the ranks of an attempt tell its rank 0 from that of another job."""
    task: SlurmTask | LaunchedRank | None = None
    """What its agent is; None for a local run, whose supervisor starts and signals all agents."""

    @property
    def has_rank_0(self) -> bool:
        """Whether rank 0 is one of the agent's workers."""
        return self.node_rank == 0 and 0 in self.local_ranks


def record_notice(
    attempt: AttemptDir, received: signal.Signals, task: SlurmTask | LaunchedRank, time: str = ""
) -> None:
    """Record a signal for the supervisor of a step, or for rank 0, which may not have received it."""
    if isinstance(task, SlurmTask):
        if task.task != 0:
            return  # Slurm has signalled all tasks
    elif any(attempt.errors_dir.glob("rank-*.json")):
        return  # its launcher ends the other ranks with a signal
    more: dict[str, object] = {}
    with contextlib.suppress(OSError):  # the ranks have received it, even if the disk is full
        more |= {"time": time} if time else {}
        log_event(attempt.run, attempt.number, "signal", signal=received.name, **more)


def recorded_notices(attempt: AttemptDir) -> list[signal.Signals]:
    """The signals of `record_notice`."""
    events = read_events(attempt.run, "signal", attempt=attempt.number)
    return [signal.Signals[event.values["signal"]] for event in events]


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


def new_nonce() -> str:
    """The nonce of an attempt; it must reach no file that others can read."""
    return secrets.token_hex(16)


def local_rendezvous(plan: LaunchPlan, node_rank: int, master_port: int, nonce: str = "") -> Rendezvous:
    """The rendezvous of an agent of a local run, in which all nodes are this machine."""
    ranks = tuple(range(plan.workers_of(node_rank)))
    return Rendezvous(node_rank, ranks, LOCAL_ADDR, master_port, None, nonce)


def slurm_rendezvous(attempt: AttemptDir, plan: LaunchPlan, task: SlurmTask) -> Rendezvous:
    """The rendezvous of an agent that is a task of a Slurm step; waits for rank 0's port.

    Raises TrainkitError when the step does not match the plan or no port is published in time, and
    StopSignalReceived when a notice signal arrives meanwhile.
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
    """Whether a name or address has an address here."""
    try:
        return bool(socket.getaddrinfo(name, None))
    except (OSError, UnicodeError):
        return False


def master_address(task: SlurmTask, published: str | None = None) -> str:
    """The name or address of the step's first host: its NodeName if that resolves here, else its NodeAddr.

    `published` is the address that the first task uses, which saves a request to Slurm's controller. Raises
    TrainkitError when neither resolves, and StopSignalReceived when a notice signal arrives meanwhile.
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
                hint=f"`getent hosts {name}` and `scontrol show node {name}` there must give an address",
            )
        _pause(RESOLVE_RETRY_S)


def _peer_address(name: str) -> str:
    """The address of another host, to find the interface towards it; its name when none is known."""
    if resolves(name):
        return name
    try:
        return node_addr(name)
    except TrainkitError as error:
        processes.log_line(f"cannot query the NodeAddr of {name}: {error.message}")
        return name


def check_step(plan: LaunchPlan, task: SlurmTask) -> None:
    """Raise FatalError when the step does not match the plan."""
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
    """Choose a free port on this host, on which rank 0 runs, and publish it to the other tasks.

    Only the user can read the file.
    """
    port = choose_port()
    record = RendezvousRecord(task.key, task.step_id, addr, port, new_nonce(), list(task.hosts))
    write_json_in_place(attempt.rendezvous_file, asdict(record))
    return record


class PauseUntilFailure:
    """Pauses while a task waits for others, which may be gone.

    Raises TrainkitError when one has failed, and StopSignalReceived after a notice signal to any.
    """

    def __init__(self, attempt: AttemptDir) -> None:
        self._attempt = attempt
        self._next_s = time.monotonic() + FAILURE_POLL_S

    def __call__(self, seconds: float) -> None:
        _pause(seconds)
        if time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + FAILURE_POLL_S
        failed = sorted(self._attempt.errors_dir.glob("rank-*.json"))
        if failed:
            raise TrainkitError(
                "another rank failed before the rendezvous", hint=f"its record is {failed[0]}"
            )
        for received in recorded_notices(self._attempt):
            raise StopSignalReceived(received)


def await_port(
    attempt: AttemptDir,
    task: SlurmTask,
    timeout_s: float = RENDEZVOUS_TIMEOUT_S,
    *,
    is_supervised: bool = True,
) -> RendezvousRecord:
    """Wait for the port that the first task of the step publishes; returns the rendezvous file's content.

    Raises TrainkitError after the timeout and, in a step without a supervisor, when another task has failed.
    """
    try:
        record = wait_for_json(
            attempt.rendezvous_file,
            timeout_s,
            accept=lambda record: bool(record["step"] == task.key),  # not from an earlier start
            pause=_pause if is_supervised else PauseUntilFailure(attempt),
            creates=True,
        )
    except TimeoutError:
        raise TrainkitError(
            f"the first task of step {task.job_id}.{task.step_id}, on {task.hosts[0]}, "
            f"has not published {attempt.rendezvous_file} within {timeout_s:g} s",
            hint=f"check {attempt.node_log(0)}; all nodes must share the filesystem of the run folder",
        ) from None
    return read_record(RendezvousRecord, record)
