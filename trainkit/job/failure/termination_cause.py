"""Infers why a job received a stop signal: from its state in Slurm, else from the processes that got it."""

from __future__ import annotations

import signal
from datetime import datetime, timedelta, timezone

from trainkit.errors import TrainkitError
from trainkit.job.decision import (
    RESTART_SIGNAL,
)
from trainkit.run.end import Cause
from trainkit.slurm.client import JOB_TIMEOUT_S, QUERY_PATIENCE_S
from trainkit.slurm.jobs import JobDetails, job_details
from trainkit.slurm.states import JobState

EARLY_S = 60.0
"""How much earlier than requested Slurm may send the signal before the time limit."""
SLACK_S = 30.0
"""How much time may pass between a signal and the query."""


def query_job(job_id: str, patience_s: float = QUERY_PATIENCE_S) -> JobDetails | None:
    """The job's current state in Slurm; None when Slurm does not respond or no longer knows the job."""
    try:
        return job_details(job_id, timeout_s=JOB_TIMEOUT_S, patience_s=patience_s)
    except TrainkitError as error:
        print(f"cannot query job {job_id}: {error.message}", flush=True)
        return None


def termination_cause(
    stop_signal: str,
    job: JobDetails | None,
    grace_s: float,
    *,
    supervisor_was_signalled: bool,
    restarts: int,
    lost: bool,
    notice: str = RESTART_SIGNAL,
) -> Cause | None:
    """The cause of a stop signal; None when a person cancelled the job.

    `supervisor_was_signalled` means that the batch shell received the signal too: during the grace time of a
    preemption Slurm signals only the steps. `restarts` is the job's restart count when this start began,
    `lost` whether one of its hosts does not respond, and `notice` the signal before the time limit.
    """
    if job is None:
        if stop_signal == RESTART_SIGNAL:
            return "timeout"
        return None if supervisor_was_signalled or stop_signal == signal.SIGINT.name else "preempted"
    if job.restarts > restarts or job.state.is_waiting:
        # Slurm is requeuing the job: it was preempted without grace time, or lost a host.
        return "node_fail" if lost else "preempted"
    if job.is_preempted:
        return "preempted"
    if job.state in (JobState.CANCELLED, JobState.COMPLETED, JobState.FAILED):
        return None
    if job.state is JobState.NODE_FAIL:
        return "node_fail"
    if job.state is JobState.TIMEOUT or job.reason == "TimeLimit":
        return "timeout"
    if stop_signal == RESTART_SIGNAL:
        return "timeout" if _is_nearly_over(job, grace_s) else "asked"
    return (
        "timeout"
        if stop_signal == notice and not supervisor_was_signalled and _is_nearly_over(job, grace_s)
        else None
    )


def is_ending(job: JobDetails, restarts: int, grace_s: float) -> bool:
    """Whether Slurm is ending this start of a job or soon will; `restarts` as in `termination_cause`."""
    return (
        job.state is not JobState.RUNNING
        or job.restarts > restarts
        or job.is_preempted
        or _is_nearly_over(job, grace_s)
    )


def _is_nearly_over(job: JobDetails, grace_s: float) -> bool:
    if job.end_time is None:
        return False
    return job.end_time - datetime.now(timezone.utc) < timedelta(seconds=grace_s + EARLY_S + SLACK_S)
