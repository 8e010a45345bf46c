"""The rendezvous of an attempt: the node and ranks of each agent, and the address on which rank 0 listens."""

from __future__ import annotations

import contextlib
import secrets
import signal
import socket
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from trainkit.errors import TrainkitError
from trainkit.job import processes
from trainkit.plan.launch import LaunchPlan
from trainkit.run.events import log_event, read_events
from trainkit.run.files import wait_for_json
from trainkit.run.rundir import AttemptDir

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
FAILURE_POLL_S = 2.0
VISIBLE_TIMEOUT_S = 65.0
"""An NFS client may remember for a minute that a name is missing."""


class StopSignalReceived(Exception):
    """A notice signal arrived before the workers had started."""

    def __init__(self, received: signal.Signals) -> None:
        super().__init__(received.name)
        self.received = received


class NotATask(TrainkitError):
    """This process is not a task of a scheduler's step."""


class Listener(Protocol):
    """Notes the stop signals that the ranks of an agent receive."""

    def has_heard(self, number: signal.Signals) -> bool:
        """Whether the ranks have received a signal that the agent has just received."""


class Task(ABC):
    """The role of an agent: a task in the step of a scheduler, or a rank of another launcher."""

    has_scheduler = True
    """Whether no other start has the same key, and a signal reaches all tasks."""
    task: int
    """Its index among all tasks."""
    node_rank: int
    local_task: int
    """Its index among the tasks of its node."""
    tasks: tuple[int, ...]
    """Number of tasks on each node."""

    @property
    def num_tasks(self) -> int:
        return sum(self.tasks)

    @property
    def num_nodes(self) -> int:
        return len(self.tasks)

    @property
    def is_first(self) -> bool:
        """Whether it is the first task of the step, which speaks for all."""
        return self.task == 0

    @property
    @abstractmethod
    def rank(self) -> int:
        """The rank of the first task of its node, and how many tasks of the node come before it."""

    @property
    @abstractmethod
    def first(self) -> str:
        """The task that announces the run, in words."""

    @property
    @abstractmethod
    def key(self) -> str:
        """A string that identifies this start of this step."""

    @abstractmethod
    def meet(self, attempt: AttemptDir, plan: LaunchPlan) -> Rendezvous:
        """The rendezvous of its agent; waits until the first task has published it.

        Raises TrainkitError when the step does not match the plan or nothing is published in time, and
        StopSignalReceived when a notice signal arrives meanwhile.
        """

    def listen(self) -> Listener | None:
        """Start to listen, if the ranks may be signalled too; call after them, with the signals blocked."""
        return None


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
    task: Task | None = None
    """What its agent is; None for a local run, whose supervisor starts and signals all agents."""

    @property
    def has_rank_0(self) -> bool:
        """Whether rank 0 is one of the agent's workers."""
        return self.node_rank == 0 and 0 in self.local_ranks


def record_notice(attempt: AttemptDir, received: signal.Signals, task: Task, time: str = "") -> None:
    """Record a signal for the supervisor of a step, or for rank 0 of another launcher."""
    if task.has_scheduler and not task.is_first:
        return  # the scheduler has signalled all tasks
    if not task.has_scheduler and any(attempt.errors_dir.glob("rank-*.json")):
        return  # a launcher ends the other ranks with a signal
    with contextlib.suppress(OSError):  # the ranks have received it, even if the disk is full
        more = {"time": time} if time else {}
        log_event(attempt.run, attempt.number, "signal", signal=received.name, **more)


def recorded_notices(attempt: AttemptDir) -> list[signal.Signals]:
    """The signals of `record_notice`."""
    events = read_events(attempt.run, "signal", attempt=attempt.number)
    return [signal.Signals[str(event.values["signal"])] for event in events]


def await_plan(attempt: AttemptDir, timeout_s: float = VISIBLE_TIMEOUT_S) -> LaunchPlan:
    """Wait until this host sees the plan of the attempt, and return it.

    Raises TrainkitError after the timeout, and StopSignalReceived when a notice signal arrives meanwhile.
    """
    try:
        return LaunchPlan.from_dict(wait_for_json(attempt.plan_file, timeout_s, pause=pause))
    except TimeoutError as error:
        raise TrainkitError(
            f"cannot read {attempt.plan_file} on {socket.gethostname()}: {error}",
            hint="all nodes must share the filesystem of the run folder",
        ) from error


def pause(seconds: float) -> None:
    """Wait; raises StopSignalReceived when a notice signal arrives meanwhile."""
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


class PauseUntilFailure:
    """Pauses while a task waits for others, which may be gone.

    Raises TrainkitError when one has failed, and StopSignalReceived after a notice signal to any.
    """

    def __init__(self, attempt: AttemptDir) -> None:
        self._attempt = attempt
        self._next_s = time.monotonic() + FAILURE_POLL_S

    def __call__(self, seconds: float) -> None:
        pause(seconds)
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
