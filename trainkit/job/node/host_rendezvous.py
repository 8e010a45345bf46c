"""The rendezvous of hosts without Slurm, on each of which the same command was started by hand.

They share the folder of the attempt, and nothing that comes over the network says what they run: there each
host writes that it has joined and how it ended, and holds a lock for as long as it is there. Only the ranks
connect to one another, by the address and port that every host is given.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import time

from trainkit.errors import EXIT_OK, EXIT_STOPPED, TrainkitError, UsageError
from trainkit.job import processes
from trainkit.job.node.rendezvous import (
    RENDEZVOUS_TIMEOUT_S,
    HostPlace,
    PauseUntilFailure,
    Rendezvous,
    new_nonce,
    record_notice,
)
from trainkit.job.node.worker_env import address_towards
from trainkit.job.signals import signal_exit_code
from trainkit.plan.launch import LaunchPlan
from trainkit.run.files import read_object, wait_for_json, write_json_in_place
from trainkit.run.rundir import AttemptDir, is_there

POLL_S = 0.5
LONGEST_EXIT_S = 60.0
"""How long the other hosts may take to end after a failure; an NFS client may see it a minute late."""


def refuse_wrong_master(place: HostPlace) -> None:
    """Raise UsageError on node 0 when rank 0 could not listen at the address and port of the hosts."""
    shown, here = f"{place.master_addr}:{place.master_port}", socket.gethostname()
    try:
        found = socket.getaddrinfo(place.master_addr, place.master_port, type=socket.SOCK_STREAM)
        family, address = found[0][0], found[0][4][:2]
        socket.create_server((str(address[0]), place.master_port), family=family).close()
    except OSError as error:
        if isinstance(error, socket.gaierror):
            message = f"--master-addr {place.master_addr} does not resolve on {here}: {error.strerror}"
        elif error.errno == errno.EADDRNOTAVAIL:
            message = f"--master-addr {place.master_addr} is not an address of this host, {here}"
        else:
            message = f"rank 0 cannot listen at {shown}: {os.strerror(error.errno or 0)}"
        hint = "give an address and a free port of the host of node rank 0, the same on every host"
        raise UsageError(message, hint) from None


def host_rendezvous(attempt: AttemptDir, plan: LaunchPlan, place: HostPlace) -> Rendezvous:
    """The rendezvous of this host's agent, which has claimed its place; waits until all hosts have joined.

    Raises TrainkitError when this host or another cannot take part, and when one is missing after the
    timeout; StopSignalReceived when a notice signal arrives meanwhile, on this host or another.
    """
    own = {"host": socket.gethostname(), "address": address_towards(place.master_addr)}
    write_json_in_place(attempt.host_file(place.node_rank), own)
    if place.node_rank == 0:
        nonce, peer = _publish(attempt, place)
    else:
        nonce, peer = _await_start(attempt, place), place.master_addr
    ranks = tuple(range(plan.workers_of(place.node_rank)))
    return Rendezvous(place.node_rank, ranks, place.master_addr, place.master_port, peer, nonce, place)


def _publish(attempt: AttemptDir, place: HostPlace) -> tuple[str, str | None]:
    """Wait for the other hosts and let all start; returns the nonce, and an address of another host."""
    pause, deadline_s = PauseUntilFailure(attempt), time.monotonic() + RENDEZVOUS_TIMEOUT_S
    hosts, peer, missing, nonce = [socket.gethostname()], None, [], new_nonce()
    for node in place.others:
        try:
            left_s = deadline_s - time.monotonic()
            joined = wait_for_json(attempt.host_file(node), left_s, pause=pause, creates=True)
        except TimeoutError:
            missing.append(str(node))
            continue
        hosts.append(str(joined["host"]))
        peer = peer or joined["address"]
    if missing:
        raise TrainkitError(
            f"node rank {', '.join(missing)} of {place.num_nodes} did not join within "
            f"{RENDEZVOUS_TIMEOUT_S:g} s",
            hint="start the same command with that --node-rank on its host, in the same shared folder",
        )
    record = {"addr": place.master_addr, "port": place.master_port, "nonce": nonce, "hosts": hosts}
    write_json_in_place(attempt.rendezvous_file, record)
    return nonce, peer


def _await_start(attempt: AttemptDir, place: HostPlace) -> str:
    """Wait until all hosts have joined; returns the nonce of the attempt."""
    try:
        record = wait_for_json(
            attempt.rendezvous_file,
            RENDEZVOUS_TIMEOUT_S + LONGEST_EXIT_S,
            pause=PauseUntilFailure(attempt),
            creates=True,
        )
    except TimeoutError:
        raise TrainkitError(f"{place.first} has not started the ranks", hint="see its output") from None
    return str(record["nonce"])


def record_exit(attempt: AttemptDir, node_rank: int, code: int) -> None:
    """Record how the agent of this host ended. Raises OSError."""
    joined = read_object(attempt.host_file(node_rank))
    write_json_in_place(attempt.host_file(node_rank), {**joined, "exit": code})


def lost_host(attempt: AttemptDir, node_rank: int) -> str | None:
    """The name of a host that has joined and is gone without a record of its exit; None if it is not lost."""
    if is_there(attempt, node_rank):
        return None
    joined = read_object(attempt.host_file(node_rank))
    return str(joined["host"]) if "host" in joined and "exit" not in joined else None


def await_exits(attempt: AttemptDir, place: HostPlace, code: int) -> list[tuple[int, int]]:
    """Wait until the agents of the other hosts have ended; returns their node ranks and exit codes.

    A host that is lost, or has not ended long after this one has failed with `code`, counts as killed.
    """
    has_failed = code not in (EXIT_OK, EXIT_STOPPED)
    deadline_s = time.monotonic() + (LONGEST_EXIT_S if has_failed else float("inf"))
    exits = []
    for node in place.others:
        while "exit" not in (joined := read_object(attempt.host_file(node))) and "host" in joined:
            if lost_host(attempt, node) is not None or time.monotonic() > deadline_s:
                joined["exit"] = signal_exit_code(signal.SIGKILL)
                break
            pause_for_notice(attempt, place)
        if "exit" in joined:
            exits.append((node, int(joined["exit"])))
    return exits


def pause_for_notice(attempt: AttemptDir, place: HostPlace) -> None:
    """Wait for a moment; a notice signal is recorded, for the agents that still run on other hosts."""
    received = processes.wait_for_signal(POLL_S)
    if received is not None and received != signal.SIGCHLD:
        record_notice(attempt, received, place)
