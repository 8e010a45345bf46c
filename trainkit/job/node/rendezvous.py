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
"""The address of rank 0 if all nodes are this machine."""

NUM_CANDIDATES = 64
LOWEST_PORT = 10_000
HIGHEST_PORT = 65_000
EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
DEFAULT_EPHEMERAL = (32_768, 60_999)


def ephemeral_range() -> tuple[int, int]:
    """Return the kernel's port range for outgoing connections, as (first, last), both included."""
    try:
        low, high = EPHEMERAL_RANGE.read_text().split()
        return int(low), int(high)
    except (OSError, ValueError):
        return DEFAULT_EPHEMERAL


def candidate_ports() -> list[int]:
    """Return random ports that no outgoing connection uses; empty if the kernel may use all ports."""
    low, high = ephemeral_range()
    pool = [port for port in range(LOWEST_PORT, HIGHEST_PORT) if not low <= port <= high]
    return secrets.SystemRandom().sample(pool, min(NUM_CANDIDATES, len(pool)))


def is_free(port: int) -> bool:
    """Return whether rank 0 could listen on a port; binds to all addresses, as TCPStore does."""
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def choose_port() -> int:
    """Choose a free port on this machine for a rendezvous; raise TrainkitError if there is none."""
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
"""Seconds to wait for a file, because an NFS client may cache for a minute that the file is missing."""


class StopSignalReceived(Exception):
    """A stop signal arrived before the workers had started."""

    def __init__(self, received: signal.Signals) -> None:
        super().__init__(received.name)
        self.received = received


class NotATask(TrainkitError):
    """Raised if this process is not a task of a scheduler's step."""


class Listener(Protocol):
    """Records the stop signals that the ranks of an agent receive."""

    def has_heard(self, number: signal.Signals) -> bool:
        """Return whether the ranks have received a signal that the agent has just received."""


class Task(ABC):
    """The role of an agent: a task in the step of a scheduler, or a rank of another launcher."""

    has_scheduler = True
    """True if the key is unique to this start, and a signal reaches all tasks."""
    task: int
    """The index among all tasks."""
    node_rank: int
    local_task: int
    """The index among the tasks of the node."""
    tasks: tuple[int, ...]
    """The number of tasks on each node."""

    @property
    def num_tasks(self) -> int:
        return sum(self.tasks)

    @property
    def num_nodes(self) -> int:
        return len(self.tasks)

    @property
    def is_first(self) -> bool:
        """Return whether this is the first task of the step, which acts for all tasks."""
        return self.task == 0

    @property
    @abstractmethod
    def rank(self) -> int:
        """The task's rank; for a task per node, the rank of the node's first worker."""

    @property
    @abstractmethod
    def first(self) -> str:
        """The task that announces the run, as text for messages."""

    @property
    @abstractmethod
    def key(self) -> str:
        """A string that identifies this start of this step."""

    @abstractmethod
    def meet(self, attempt: AttemptDir, plan: LaunchPlan) -> Rendezvous:
        """Return the rendezvous of the task's agent; wait until the first task has published it.

        Raises TrainkitError if the step does not match the plan or nothing is published in time, and
        StopSignalReceived if a stop signal arrives in the meantime.
        """

    def listen(self) -> Listener | None:
        """Start a listener if the ranks may be signalled too.

        Call this after the ranks have started, with the signals blocked.
        """
        return None


@dataclass(frozen=True)
class Rendezvous:
    """The node and ranks of one agent, and the address of rank 0."""

    node_rank: int
    local_ranks: tuple[int, ...]
    master_addr: str
    master_port: int
    peer: str | None
    """Another host of the job; None if all ranks are on this host."""
    nonce: str = ""
    """A random value with which the ranks of an attempt recognize their rank 0 if another job uses the same
    address."""
    task: Task | None = None
    """The role of the agent; None for a local run, whose supervisor starts and signals all agents."""

    @property
    def has_rank_0(self) -> bool:
        """Return whether rank 0 is one of the agent's workers."""
        return self.node_rank == 0 and 0 in self.local_ranks


def record_notice(attempt: AttemptDir, received: signal.Signals, task: Task, time: str = "") -> None:
    """Record a signal for the supervisor of a step, or for rank 0 of another launcher."""
    if task.has_scheduler and not task.is_first:
        return  # the scheduler has signalled all tasks, and the first one records the signal
    if not task.has_scheduler and any(attempt.errors_dir.glob("rank-*.json")):
        return  # a launcher ends the other ranks with a signal after a failure
    with contextlib.suppress(OSError):  # the ranks have received the signal, even if the disk is full
        more = {"time": time} if time else {}
        log_event(attempt.run, attempt.number, "signal", signal=received.name, **more)


def recorded_notices(attempt: AttemptDir) -> list[signal.Signals]:
    """Return the signals that `record_notice` has recorded."""
    events = read_events(attempt.run, "signal", attempt=attempt.number)
    return [signal.Signals[str(event.values["signal"])] for event in events]


def await_plan(attempt: AttemptDir, timeout_s: float = VISIBLE_TIMEOUT_S) -> LaunchPlan:
    """Wait until this host sees the plan of the attempt, and return the plan.

    Raises TrainkitError after the timeout, and StopSignalReceived if a stop signal arrives in the meantime.
    """
    try:
        return LaunchPlan.from_dict(wait_for_json(attempt.plan_file, timeout_s, pause=pause))
    except TimeoutError as error:
        raise TrainkitError(
            f"cannot read {attempt.plan_file} on {socket.gethostname()}: {error}",
            hint="all nodes must share the filesystem of the run folder",
        ) from error


def pause(seconds: float) -> None:
    """Wait; raise StopSignalReceived if a stop signal arrives in the meantime."""
    received = processes.wait_for_signal(seconds)
    if received is not None and received != signal.SIGCHLD:
        raise StopSignalReceived(received)


def new_nonce() -> str:
    """Return a new nonce for an attempt; it must never be in a file that others can read."""
    return secrets.token_hex(16)


def local_rendezvous(plan: LaunchPlan, node_rank: int, master_port: int, nonce: str = "") -> Rendezvous:
    """Return the rendezvous of an agent of a local run, whose nodes are all this machine."""
    ranks = tuple(range(plan.workers_of(node_rank)))
    return Rendezvous(node_rank, ranks, LOCAL_ADDR, master_port, None, nonce)


class PauseUntilFailure:
    """Pauses while a task waits for other tasks, which may have ended.

    Raises TrainkitError if another task has failed, and StopSignalReceived if any task got a stop signal.
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
