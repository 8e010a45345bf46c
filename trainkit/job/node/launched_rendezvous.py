"""The rendezvous of the ranks of another launcher, which share the folder of the attempt.

Rank 0 writes the address and port at which it listens there: the launcher may listen at its own port itself.
"""

from __future__ import annotations

import socket
from dataclasses import asdict

from trainkit.errors import TrainkitError, UsageError
from trainkit.job.node.launched_rank import LaunchedRank
from trainkit.job.node.rendezvous import (
    LOCAL_ADDR,
    RENDEZVOUS_TIMEOUT_S,
    PauseUntilFailure,
    Rendezvous,
    choose_port,
    new_nonce,
)
from trainkit.job.node.worker_env import address_towards
from trainkit.run.files import read_record, wait_for_json, write_json_in_place
from trainkit.run.record import RendezvousRecord
from trainkit.run.rundir import AttemptDir


def launched_rendezvous(attempt: AttemptDir, task: LaunchedRank) -> Rendezvous:
    """The rendezvous of the agent of a launched rank; waits for the address and port of rank 0.

    Raises TrainkitError when none is published in time or another rank has failed, and StopSignalReceived
    when a notice signal arrives meanwhile.
    """
    if task.task == 0:
        record = RendezvousRecord(task.key, None, _own_address(task), choose_port(), new_nonce())
        write_json_in_place(attempt.rendezvous_file, asdict(record))
    else:
        try:
            found = wait_for_json(
                attempt.rendezvous_file, RENDEZVOUS_TIMEOUT_S, pause=PauseUntilFailure(attempt), creates=True
            )
        except TimeoutError:
            raise TrainkitError(
                f"{task.first} has not published {attempt.rendezvous_file} within {RENDEZVOUS_TIMEOUT_S:g} s",
                hint=f"check {attempt.node_log(0)}; all hosts must share the filesystem of the run folder",
            ) from None
        record = read_record(RendezvousRecord, found)
    assert record.addr is not None
    assert record.port is not None
    peer = None if task.num_nodes == 1 else record.addr if task.node_rank else task.master_addr
    return Rendezvous(
        task.node_rank, (task.local_task,), record.addr, record.port, peer, record.nonce or "", task
    )


def _own_address(task: LaunchedRank) -> str:
    """The address at which the other hosts reach this one, on its route to the launcher's host."""
    if task.num_nodes == 1:
        return LOCAL_ADDR
    own = address_towards(task.master_addr)
    here = f"MASTER_ADDR={task.master_addr}"
    if own is None:
        raise UsageError(
            f"{here} has no IPv4 address or route on {socket.gethostname()}",
            hint=f"`getent ahostsv4 {task.master_addr}` there must give an address",
        )
    if own.startswith("127.") and task.master_addr not in ("localhost", LOCAL_ADDR):
        raise UsageError(
            f"{here} is {own} on {socket.gethostname()}, where other hosts cannot reach rank 0",
            hint="name the host by its address in the network, or 127.0.0.1 if all ranks are on this host",
        )
    return own
