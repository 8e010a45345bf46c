"""The rendezvous of an attempt: each agent's node and ranks, and the address where rank 0 listens."""

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
"""The address of rank 0 if the run uses only this machine."""

NUM_CANDIDATES = 64
LOWEST_PORT = 10_000
HIGHEST_PORT = 65_000
EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
DEFAULT_EPHEMERAL = (32_768, 60_999)


def ephemeral_range() -> tuple[int, int]:
    """Return the first and last port, both inclusive, of the kernel's range for outgoing connections."""
    try:
        low, high = EPHEMERAL_RANGE.read_text().split()
        return int(low), int(high)
    except (OSError, ValueError):
        return DEFAULT_EPHEMERAL


def candidate_ports() -> list[int]:
    """Return random ports outside the range for outgoing connections; empty if there are none."""
    low, high = ephemeral_range()
    pool = [port for port in range(LOWEST_PORT, HIGHEST_PORT) if not low <= port <= high]
    return secrets.SystemRandom().sample(pool, min(NUM_CANDIDATES, len(pool)))


def is_free(port: int) -> bool:
    """Return whether rank 0 could listen on a port. Like TCPStore, this function tests all addresses."""
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
        f"no free port for the rendezvous: tried {len(candidates)} ports "
        f"between {min(candidates)} and {max(candidates)}",
        hint="`ss -ltn` shows which ports of this machine are in use",
    )


RENDEZVOUS_TIMEOUT_S = 300.0
FAILURE_POLL_S = 2.0
VISIBLE_TIMEOUT_S = 65.0
"""Seconds to wait for a file to appear. An NFS client may cache the file's absence for a minute."""


class StopSignalReceived(Exception):
    """Raised if a stop signal arrives before the workers have started."""

    def __init__(self, received: signal.Signals) -> None:
        super().__init__(received.name)
        self.received = received


class NotATask(TrainkitError):
    """Raised if this process is not a task of a Slurm step."""


class Listener(Protocol):
    """Records the stop signals received by an agent's ranks."""

    def has_heard(self, number: signal.Signals) -> bool:
        """Return whether the ranks have also received the signal that the agent just received."""


class Task(ABC):
    """What an agent runs as: a task of a scheduler's step, or a rank started by a launcher."""

    has_scheduler = True
    """True if `key` is unique to this start of the step and signals reach all tasks."""
    task: int
    """The index of this task among all tasks."""
    node_rank: int
    local_task: int
    """The index of this task among the tasks on its node."""
    tasks: tuple[int, ...]
    """The number of tasks on each node of the step."""

    @property
    def num_tasks(self) -> int:
        return sum(self.tasks)

    @property
    def num_nodes(self) -> int:
        return len(self.tasks)

    @property
    def is_first(self) -> bool:
        """Return whether this is the first task of the step, which acts on behalf of all tasks."""
        return self.task == 0

    @property
    @abstractmethod
    def rank(self) -> int:
        """The rank of the task; with one task per node, the rank of the node's first worker."""

    @property
    @abstractmethod
    def first(self) -> str:
        """The name of the first task in messages. The first task announces the run."""

    @property
    @abstractmethod
    def key(self) -> str:
        """A string that identifies this particular start of the step."""

    @abstractmethod
    def meet(self, attempt: AttemptDir, plan: LaunchPlan) -> Rendezvous:
        """Return the rendezvous of this task's agent, based on what the first task publishes.

        Raises TrainkitError if the step does not match the plan or the rendezvous is not published in time,
        and StopSignalReceived if a stop signal arrives during the wait.
        """

    def listen(self) -> Listener | None:
        """Start a listener for signals if Slurm may also signal the ranks directly.

        Must be called after the ranks have started, with the signals blocked.
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
    """Another host of the job, or None if all ranks are on this host."""
    nonce: str = ""
    """A random value by which ranks recognize rank 0 of their own attempt, in case another job uses the same
    address."""
    task: Task | None = None
    """The agent's task; None in a local run, where the supervisor starts and signals all agents."""

    @property
    def has_rank_0(self) -> bool:
        """Return whether rank 0 is one of the agent's workers."""
        return self.node_rank == 0 and 0 in self.local_ranks


def record_notice(attempt: AttemptDir, received: signal.Signals, task: Task, time: str = "") -> None:
    """Record a stop signal for the step's supervisor or, if a launcher started the ranks, for rank 0."""
    if task.has_scheduler and not task.is_first:
        return  # the scheduler signals all tasks, and the first task records the signal
    if not task.has_scheduler and any(attempt.errors_dir.glob("rank-*.json")):
        return  # after a failure, the launcher kills the other ranks, so this is not a stop signal
    with contextlib.suppress(OSError):  # the ranks have received the signal even if it cannot be recorded
        more = {"time": time} if time else {}
        log_event(attempt.run, attempt.number, "signal", signal=received.name, **more)


def recorded_notices(attempt: AttemptDir) -> list[signal.Signals]:
    """Return the stop signals recorded for an attempt by `record_notice`."""
    events = read_events(attempt.run, "signal", attempt=attempt.number)
    return [signal.Signals[str(event.values["signal"])] for event in events]


def await_plan(attempt: AttemptDir, timeout_s: float = VISIBLE_TIMEOUT_S) -> LaunchPlan:
    """Wait until the attempt's plan is visible on this host, and return the plan.

    Raises TrainkitError after the timeout, and StopSignalReceived if a stop signal arrives during the wait.
    """
    try:
        return LaunchPlan.from_dict(wait_for_json(attempt.plan_file, timeout_s, pause=pause))
    except TimeoutError as error:
        raise TrainkitError(
            f"cannot read {attempt.plan_file} on {socket.gethostname()}: {error}",
            hint="the run folder must be on a filesystem that all nodes share",
        ) from error


def pause(seconds: float) -> None:
    """Sleep for `seconds`; raise StopSignalReceived if a stop signal arrives during the sleep."""
    received = processes.wait_for_signal(seconds)
    if received is not None and received != signal.SIGCHLD:
        raise StopSignalReceived(received)


def new_nonce() -> str:
    """Return a new random nonce for an attempt; never write the nonce to a file that other users can read."""
    return secrets.token_hex(16)


def local_rendezvous(plan: LaunchPlan, node_rank: int, master_port: int, nonce: str = "") -> Rendezvous:
    """Return the rendezvous for one agent of a local run, where every node is this machine."""
    ranks = tuple(range(plan.workers_of(node_rank)))
    return Rendezvous(node_rank, ranks, LOCAL_ADDR, master_port, None, nonce)


class PauseUntilFailure:
    """Pauses while this task waits for other tasks, any of which may fail in the meantime.

    Raises TrainkitError if another task has failed, and StopSignalReceived if any task received a stop
    signal.
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
                "another rank failed before the rendezvous", hint=f"its failure record is {failed[0]}"
            )
        for received in recorded_notices(self._attempt):
            raise StopSignalReceived(received)
