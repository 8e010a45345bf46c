"""What Slurm says about hosts, and which of them a job still has."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from trainkit.slurm.client import QUERY_PATIENCE_S, query
from trainkit.slurm.hosts import expand_hosts
from trainkit.slurm.jobid import checked_job_id
from trainkit.slurm.records import FIELD, RECORD, records

ASK_TIMEOUT_S = 10.0
_NOT_RESPONDING = "*"
_OUT = re.compile(r"down|fail|unk|error", re.IGNORECASE)
"""States in which no step can run. A host that drains goes on with the job that it has."""


def node_states(
    hosts: Sequence[str],
    *,
    timeout_s: float = ASK_TIMEOUT_S,
    patience_s: float = QUERY_PATIENCE_S,
    environ: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """sinfo's word for the state of each host, such as ``allocated`` or ``down*``; what it does not know is
    left out.

    Raises SlurmUnreachable.
    """
    argv = [
        *("sinfo", "--all", "--Node", "--noheader", f"--nodes={','.join(hosts)}"),
        f"--format=%N{FIELD}%T{RECORD}",
    ]
    answer = query(argv, timeout_s=timeout_s, patience_s=patience_s, environ=environ)
    return parse_node_states(answer.stdout)


def parse_node_states(text: str) -> dict[str, str]:
    """What sinfo printed: a host stands there once for each of its partitions."""
    return {record[0]: record[1] for record in records(text, 2)}


def is_out(state: str) -> bool:
    """Whether a host in this state has left Slurm's hands: it is down, failed, or does not answer."""
    return _NOT_RESPONDING in state or _OUT.search(state) is not None


def is_down(state: str) -> bool:
    """Whether Slurm has given a host up: one that does not answer just now may be busy, or being upgraded."""
    return _OUT.search(state) is not None


def hosts_of_job(
    job_id: str,
    *,
    timeout_s: float = ASK_TIMEOUT_S,
    patience_s: float = QUERY_PATIENCE_S,
    environ: Mapping[str, str] | None = None,
) -> list[str]:
    """The hosts that a job has now: one that was down for a moment is taken from a --no-kill job for good.

    Raises SlurmUnreachable, and SlurmRefused for a job that Slurm has forgotten.
    """
    argv = ["squeue", "--noheader", "--states=all", "--format=%N", f"--jobs={checked_job_id(job_id)}"]
    answer = query(argv, timeout_s=timeout_s, patience_s=patience_s, environ=environ).stdout.strip()
    return expand_hosts(answer, environ) if answer else []
