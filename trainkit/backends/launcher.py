"""Supports ranks that a launcher such as torchrun or mpirun started, usually on several hosts."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from urllib.parse import quote

from trainkit.backend import NewAttempt
from trainkit.backends.local.backend import LocalBackend
from trainkit.errors import TrainkitError, UsageError
from trainkit.job.node.rendezvous import (
    LOCAL_ADDR,
    RENDEZVOUS_TIMEOUT_S,
    PauseUntilFailure,
    Rendezvous,
    Task,
    choose_port,
    new_nonce,
)
from trainkit.job.node.worker_env import address_towards
from trainkit.job.rank_env import RUN_DIR_VARIABLE
from trainkit.plan.launch import LaunchPlan
from trainkit.run.events import log_event
from trainkit.run.files import read_record, wait_for_json, write_json_in_place
from trainkit.run.record import AttemptRecord, RendezvousRecord
from trainkit.run.rundir import AttemptDir, RunDir

LAUNCHERS = {
    "torchrun": ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    "mpirun": tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "LOCAL_RANK", "SIZE", "LOCAL_SIZE")),
}
"""Maps each launcher to its environment variables for rank, local rank, world size and local world size."""


@dataclass(frozen=True)
class LaunchedRank(Task):
    """One rank started by a launcher such as torchrun, which must assign consecutive ranks to each host."""

    launcher: str
    task: int
    """The rank, used in place of the index of a task in a Slurm step."""
    local_task: int
    tasks: tuple[int, ...]
    """The number of ranks on each host."""
    master_addr: str
    """The host in MASTER_ADDR, which all ranks can reach; usually the host of rank 0."""
    master_port: int
    has_scheduler = False

    @property
    def node_rank(self) -> int:  # type: ignore[override]
        return self.task // self.tasks[0]

    @property
    def rank(self) -> int:
        return self.task

    @property
    def first(self) -> str:
        return f"rank 0 of {self.launcher} at {self.master_addr}:{self.master_port}"

    @property
    def key(self) -> str:
        return f"{quote(self.master_addr, safe='')}.{self.master_port}"

    def meet(self, attempt: AttemptDir, plan: LaunchPlan) -> Rendezvous:
        if self.is_first:
            record = RendezvousRecord(self.key, None, _own_address(self), choose_port(), new_nonce())
            write_json_in_place(attempt.rendezvous_file, asdict(record))
        else:
            record = _await_address(attempt, self)
        assert record.addr is not None
        assert record.port is not None
        peer = None if self.num_nodes == 1 else record.addr if self.node_rank else self.master_addr
        nonce = record.nonce or ""
        return Rendezvous(self.node_rank, (self.local_task,), record.addr, record.port, peer, nonce, self)


def find_launched_rank(environ: Mapping[str, str] = os.environ) -> LaunchedRank | None:
    """Return the rank of this process if a launcher started it, or None if the world size is 1.

    Also returns None for a process that a trainkit rank started. Raises UsageError if a host's ranks are not
    consecutive, or if the number of ranks differs between hosts.
    """
    if RUN_DIR_VARIABLE in environ:
        return None
    for launcher, names in LAUNCHERS.items():
        given = [environ.get(name, "") for name in (*names, "MASTER_PORT")]
        if all(map(str.isdigit, given)) and "MASTER_ADDR" in environ:
            rank, local_rank, size, local_size, port = map(int, given)
            if size == 1:
                continue
            if not rank < size or local_size < 1 or size % local_size or rank % local_size != local_rank:
                raise UsageError(
                    " ".join(f"{name}={environ[name]}" for name in names)
                    + ": ranks must be numbered host by host, with the same number of ranks on every host",
                    hint="use torchrun with the same --nproc-per-node on every host, "
                    "or mpirun with --map-by ppr:N:node",
                )
            tasks = (local_size,) * (size // local_size)
            return LaunchedRank(launcher, rank, local_rank, tasks, environ["MASTER_ADDR"], port)
    return None


def _await_address(attempt: AttemptDir, task: LaunchedRank) -> RendezvousRecord:
    """Wait until rank 0 has published its address and port in a file in the shared run folder.

    MASTER_PORT cannot be reused, because the launcher itself may listen on it.
    """
    pause = PauseUntilFailure(attempt)
    try:
        found = wait_for_json(attempt.rendezvous_file, RENDEZVOUS_TIMEOUT_S, pause=pause, creates=True)
    except TimeoutError:
        raise TrainkitError(
            f"{task.first} has not published {attempt.rendezvous_file} within {RENDEZVOUS_TIMEOUT_S:g} s",
            hint=f"check {attempt.node_log(0)}; the run folder must be on a filesystem that all hosts share",
        ) from None
    return read_record(RendezvousRecord, found)


def _own_address(task: LaunchedRank) -> str:
    """Return the address of this host on its route to MASTER_ADDR. Other hosts can reach this address."""
    if task.num_nodes == 1:
        return LOCAL_ADDR
    own = address_towards(task.master_addr)
    here = f"MASTER_ADDR={task.master_addr}"
    if own is None:
        raise UsageError(
            f"{here} has no IPv4 address or route on {socket.gethostname()}",
            hint=f"`getent ahostsv4 {task.master_addr}` must print an address on that host",
        )
    if own.startswith("127.") and task.master_addr not in ("localhost", LOCAL_ADDR):
        raise UsageError(
            f"{here} is {own} on {socket.gethostname()}, an address that other hosts cannot reach",
            hint="use the host's network address, or 127.0.0.1 if all ranks are on this host",
        )
    return own


class LauncherBackend(LocalBackend):
    """The backend for a run whose ranks a launcher such as torchrun started.

    Rank 0 also supervises the run.
    """

    def start(self, run: RunDir, new: NewAttempt) -> AttemptRecord:
        entry = super().start(run, new)
        log_event(run, entry.attempt, "started", world_size=new.plan.world_size, nodes=new.plan.num_nodes)
        return entry

    def _supervisor(self, attempt: AttemptDir, new: NewAttempt) -> int:
        return os.getpid()
