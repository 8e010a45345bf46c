"""Where an agent stands: its node, the workers that are its own, and where rank 0 listens."""

from __future__ import annotations

import contextlib
import hashlib
import signal
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from trainkit.errors import EXIT_NO_RESTART, TrainkitError
from trainkit.job import processes
from trainkit.job.node.slurm_step import SlurmPlace
from trainkit.plan.launch import LaunchPlan
from trainkit.rundir import AttemptDir, read_json, write_json

LOCAL_ADDR = "127.0.0.1"
"""Where rank 0 listens when all nodes are this machine."""

NUM_CANDIDATES = 64
LOWEST_PORT = 10_000
HIGHEST_PORT = 65_000
DEFAULT_EPHEMERAL = (32_768, 60_999)


def ephemeral_range(path: str = "/proc/sys/net/ipv4/ip_local_port_range") -> tuple[int, int]:
    """The ports that the kernel gives to outgoing connections, both ends included."""
    try:
        low, high = Path(path).read_text().split()
        return int(low), int(high)
    except (OSError, ValueError):
        return DEFAULT_EPHEMERAL


def port_pool(ephemeral: tuple[int, int]) -> list[int]:
    """All ports outside the ephemeral range that ranks may meet at."""
    low, high = ephemeral
    return [port for port in range(LOWEST_PORT, HIGHEST_PORT) if not low <= port <= high]


def candidate_ports(job_id: str, attempt: int, ephemeral: tuple[int, int]) -> list[int]:
    """Ports outside the ephemeral range, in an order that differs from job to job and attempt to attempt.

    Empty when the ephemeral range leaves none.
    """
    pool = port_pool(ephemeral)
    if not pool:
        return []
    digest = hashlib.sha256(f"{job_id}/{attempt}".encode()).digest()
    start = int.from_bytes(digest[:8], "big")
    return [pool[(start + 101 * index) % len(pool)] for index in range(NUM_CANDIDATES)]


def is_free(port: int) -> bool:
    """Whether rank 0 could listen here; torch's store binds all addresses, so this does too."""
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def choose_port(job_id: str, attempt: int) -> int:
    """A free port for this attempt's rendezvous on this machine."""
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


MEET_TIMEOUT_S = 300.0
SEE_TIMEOUT_S = 65.0
"""A host of a network filesystem may see a folder for a minute as it was."""
POLL_S = 0.05


class ToldToStop(Exception):
    """A notice signal came before there was anything to pass it on to."""

    def __init__(self, received: signal.Signals) -> None:
        super().__init__(received.name)
        self.received = received


@dataclass(frozen=True)
class Station:
    """The place of one agent."""

    node_rank: int
    local_ranks: tuple[int, ...]
    master_addr: str
    master_port: int
    peer: str | None
    """Another host of the job; None when all ranks are on this one."""

    @property
    def leads(self) -> bool:
        """Whether rank 0 is one of its workers."""
        return self.node_rank == 0 and 0 in self.local_ranks


def await_plan(attempt: AttemptDir, timeout_s: float = SEE_TIMEOUT_S) -> LaunchPlan:
    """The plan of the attempt, once this host sees it: a network filesystem may show an older folder.

    Raises TrainkitError when it does not show up, and ToldToStop when a notice comes meanwhile.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            return LaunchPlan.from_dict(read_json(attempt.plan_file))
        except (OSError, ValueError) as error:
            if time.monotonic() > deadline_s:
                raise TrainkitError(
                    f"{attempt.plan_file} cannot be read here: {error}",
                    hint="all nodes must share the filesystem of the run folder",
                ) from error
        with contextlib.suppress(OSError):
            # Listing the folder makes a network filesystem look again.
            list(attempt.run.attempts_dir.iterdir())
        received = processes.wait_for_signal(POLL_S)
        if received is not None and received != signal.SIGCHLD:
            raise ToldToStop(received)


def local_station(plan: LaunchPlan, node_rank: int, master_port: int) -> Station:
    """The place of an agent in a job whose nodes are all this machine."""
    return Station(node_rank, tuple(range(plan.workers_of(node_rank))), LOCAL_ADDR, master_port, None)


def slurm_station(attempt: AttemptDir, plan: LaunchPlan, place: SlurmPlace) -> Station:
    """The place of the agent that runs as a task of a Slurm step, once rank 0's port is known.

    Raises TrainkitError when the step is not what the plan asks for or nobody publishes a port, and
    ToldToStop when a notice signal comes meanwhile.
    """
    check_step(plan, place)
    per_gpu = plan.per == "gpu"
    mine = (place.local_task,) if per_gpu else tuple(range(plan.workers_of(place.node_rank)))
    own_host = place.hosts[place.node_rank]
    others = [host for host in (place.hosts[0], *place.hosts[1:2]) if host != own_host]
    addr = LOCAL_ADDR if place.num_nodes == 1 else place.hosts[0]
    first = place.node_rank == 0 and place.local_task == 0
    port = publish_port(attempt, place, addr) if first else await_port(attempt, place)
    return Station(place.node_rank, mine, addr, port, others[0] if others else None)


def check_step(plan: LaunchPlan, place: SlurmPlace) -> None:
    """Raise TrainkitError (exit code 78) when Slurm gave another step than the plan asks for."""
    wanted = tuple(plan.workers_of(node) if plan.per == "gpu" else 1 for node in range(plan.num_nodes))
    if place.tasks != wanted:
        raise TrainkitError(
            f"the plan asks for {_shape(wanted)} (--per {plan.per}), but Slurm gave {_shape(place.tasks)}: "
            f"step {place.job_id}.{place.step_id} on {','.join(place.hosts)}",
            hint="the srun line must start the tasks that plan.json counts: let trainkit write it",
            exit_code=EXIT_NO_RESTART,
        )


def _shape(tasks: tuple[int, ...]) -> str:
    nodes = f"{len(tasks)} node{'s' if len(tasks) != 1 else ''}"
    if len(set(tasks)) == 1:
        return f"{nodes} with {tasks[0]} task{'s' if tasks[0] != 1 else ''} each"
    return f"{nodes} with {','.join(map(str, tasks))} tasks"


def publish_port(attempt: AttemptDir, place: SlurmPlace, addr: str) -> int:
    """Choose a free port on this host, which is rank 0's, and tell the other tasks."""
    port = choose_port(place.key, attempt.number)
    told = {"step": place.key, "step_id": place.step_id, "addr": addr, "port": port}
    write_json(attempt.rendezvous_file, {**told, "hosts": list(place.hosts)})
    return port


def await_port(attempt: AttemptDir, place: SlurmPlace, timeout_s: float = MEET_TIMEOUT_S) -> int:
    """The port that the step's first task has published."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        # Listing the folder makes a network filesystem look again for a file that was not there.
        if attempt.rendezvous_file in list(attempt.path.iterdir()):
            try:
                found = read_json(attempt.rendezvous_file)
            except (OSError, ValueError):
                found = {}
            if found.get("step") == place.key:
                return int(found["port"])
        if time.monotonic() > deadline_s:
            raise TrainkitError(
                f"the first task of step {place.job_id}.{place.step_id}, on {place.hosts[0]}, "
                f"has not published {attempt.rendezvous_file} within {timeout_s:g} s",
                hint=f"look at {attempt.node_log(0)}; all nodes must share the filesystem of the run folder",
            )
        received = processes.wait_for_signal(POLL_S)
        if received is not None and received != signal.SIGCHLD:
            raise ToldToStop(received)
