"""Parses Slurm's notation for tasks per node (`2(x3),1`), and queries the states and addresses of hosts."""

from __future__ import annotations

import re
from collections.abc import Sequence

from trainkit.errors import UsageError
from trainkit.scheduler import expand_hosts
from trainkit.slurm.client import FIELD, QUERY_PATIENCE_S, RECORD, query, records, safe_value
from trainkit.slurm.states import checked_job_id

_COUNT = re.compile(r"(?P<count>\d+)(?:\(x(?P<repeat>\d{1,6})\))?", re.ASCII)


def tasks_per_node(text: str) -> list[int]:
    """Parse the number of tasks or CPUs on each node: `2(x3),1` becomes [2, 2, 2, 1].

    Raises UsageError if the text does not have this form.
    """
    counts: list[int] = []
    for item in text.strip().split(","):
        match = _COUNT.fullmatch(item)
        if match is None:
            raise UsageError(f"not a Slurm list of counts: {text!r}", hint="for example 2(x3),1")
        counts += [int(match["count"])] * int(match["repeat"] or 1)
    return counts


HOSTS_TIMEOUT_S = 10.0
_NOT_RESPONDING = "*"
_DOWN = re.compile(r"down|fail|unk|error", re.IGNORECASE)
"""Matches the states of hosts that cannot run a step. The state of a draining host does not match, because
the host still runs its current jobs."""
_DRAINED = re.compile(r"drain|reboot|power|[@^!%]", re.IGNORECASE)


def node_states(hosts: Sequence[str]) -> dict[str, str]:
    """Return the state of each host as sinfo names it, such as ``allocated`` or ``down*``.

    Hosts that Slurm does not know are missing from the result. Raises SlurmUnreachable if Slurm does not
    answer.
    """
    argv = [
        "sinfo",
        "--all",
        "--Node",
        "--noheader",
        f"--nodes={','.join(hosts)}",
        f"--format=%N{FIELD}%T{RECORD}",
    ]
    return dict(records(query(argv, timeout_s=HOSTS_TIMEOUT_S), 2))


def is_unavailable(state: str) -> bool:
    """Return whether a host with this state is down, failed or not responding."""
    return _NOT_RESPONDING in state or _DOWN.search(state) is not None


def is_drained(state: str) -> bool:
    """Return whether an administrator is draining or rebooting a host with this state."""
    return _DRAINED.search(state) is not None


def is_down(state: str) -> bool:
    """Return whether a host with this state is down according to Slurm.

    A host that merely does not respond is not considered down, because it may be busy or being upgraded.
    """
    return _DOWN.search(state) is not None


def hosts_of_job(job_id: str) -> list[str]:
    """Return the job's current hosts. A job with --no-kill permanently loses a host that goes down.

    Raises SlurmUnreachable if Slurm does not answer, and SlurmRefused if Slurm no longer knows the job.
    """
    argv = ["squeue", "--noheader", "--states=all", "--format=%N", f"--jobs={checked_job_id(job_id)}"]
    answer = query(argv, timeout_s=HOSTS_TIMEOUT_S).strip()
    return expand_hosts(answer) if answer else []


_NODE_ADDR = re.compile(r"(?:^|\s)NodeAddr=(?P<addr>\S+)")


def node_addr(name: str, *, patience_s: float = QUERY_PATIENCE_S) -> str:
    """Return a node's NodeAddr, which is the node's name unless administrators set another address.

    Raises SlurmUnreachable if Slurm does not answer, and SlurmRefused if Slurm does not know the node.
    """
    argv = ["scontrol", "--oneliner", "show", "node", safe_value(name, "a node name")]
    answer = query(argv, timeout_s=HOSTS_TIMEOUT_S, patience_s=patience_s)
    found = _NODE_ADDR.search(answer)
    return name if found is None else found["addr"]
