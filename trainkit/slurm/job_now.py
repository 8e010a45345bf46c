"""What Slurm says about a job that squeue does not show: preemption, requeue flag, end of its time."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime

from trainkit.frozen import dataclass
from trainkit.slurm.client import QUERY_PATIENCE_S, QUERY_TIMEOUT_S, query
from trainkit.slurm.jobid import checked_job_id
from trainkit.slurm.records import time_of
from trainkit.slurm.states import JobState, state_in_queue

_PAIR = re.compile(r"(?:^|\s)(?P<name>[A-Z][A-Za-z/:_]*)=(?P<value>\S*)")


@dataclass(frozen=True)
class JobNow:
    """One job at this moment. Times are in UTC."""

    state: JobState
    slurm_state: str
    """Slurm's own word."""
    is_preempted: bool
    """Whether its nodes are being taken for another job."""
    restarts: int
    """How often Slurm has started it again."""
    may_requeue: bool
    """Whether it was submitted so that Slurm may start it again."""
    end_time: datetime | None
    """When its time is up."""
    reason: str = ""
    """Slurm's word for why it is so: TimeLimit, for one."""
    batch_host: str = ""
    """Where its batch shell runs."""


def ask_job(
    job_id: str,
    *,
    timeout_s: float = QUERY_TIMEOUT_S,
    patience_s: float = QUERY_PATIENCE_S,
    environ: Mapping[str, str] | None = None,
) -> JobNow:
    """What Slurm says about a job, or about the task of an array that `123_4` names.

    Raises SlurmUnreachable, and SlurmRefused for a job that it has forgotten.
    """
    argv = ["scontrol", "--oneliner", "show", "job", checked_job_id(job_id)]
    return parse_job(query(argv, timeout_s=timeout_s, patience_s=patience_s, environ=environ).stdout)


def parse_job(text: str) -> JobNow:
    """`scontrol show job`, whose words are `Name=value`; free text stands before UserId and at the end."""
    found: dict[str, str] = {}
    for match in _PAIR.finditer(text.partition(" UserId=")[2]):
        found.setdefault(match["name"], match["value"])
    word = found.get("JobState", "")
    restarts = int(found["Restarts"]) if found.get("Restarts", "").isdigit() else 0
    preempted = time_of(found.get("PreemptTime", "")) is not None
    return JobNow(
        state=state_in_queue(word, restarts),
        slurm_state=word,
        is_preempted=preempted or word == "PREEMPTED",
        may_requeue=found.get("Requeue") == "1",
        restarts=restarts,
        end_time=time_of(found.get("EndTime", "")),
        reason=found.get("Reason", ""),
        batch_host=found.get("BatchHost", ""),
    )
