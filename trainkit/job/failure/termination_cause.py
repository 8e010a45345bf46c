"""Why a job was told to stop: what Slurm says, and where it says nothing, who was told."""

from __future__ import annotations

import signal
from datetime import datetime, timedelta, timezone

from trainkit.errors import TrainkitError
from trainkit.job.decision import COMEBACK_SIGNAL, Cause
from trainkit.slurm.client import QUERY_PATIENCE_S
from trainkit.slurm.jobs import JobDetails, ask_job
from trainkit.slurm.states import JobState

EARLY_S = 60.0
"""Slurm sends the signal that announces the end up to so much early."""
SLACK_S = 30.0
"""What may pass between a signal and the question to Slurm."""


def look_at_job(job_id: str, patience_s: float = QUERY_PATIENCE_S) -> JobDetails | None:
    """What Slurm says about the job now; None where it cannot be asked or has forgotten it."""
    try:
        return ask_job(job_id, patience_s=patience_s)
    except TrainkitError as error:
        print(f"Slurm does not say what it does with {job_id}: {error.message}", flush=True)
        return None


def termination_cause(
    request: str,
    job: JobDetails | None,
    grace_s: float,
    *,
    shell_was_told: bool,
    restarts: int,
    lost: bool,
    notice: str = COMEBACK_SIGNAL,
) -> Cause | None:
    """What stood behind a notice; None when a person wants the job to end.

    `shell_was_told` says that the batch shell got it too: while the grace time of a preemption lasts, Slurm
    tells only the steps. `restarts` is how often the job had been started again when this start began, and
    `lost` says that a host of it does not answer. `notice` is the signal that announces the end of its time.
    """
    if job is None:
        if request == COMEBACK_SIGNAL:
            return "timeout"
        return None if shell_was_told or request == signal.SIGINT.name else "preempted"
    if job.restarts > restarts or job.state.is_waiting:
        # Slurm starts it again by itself: preempted without grace, or a host was lost.
        return "node_fail" if lost else "preempted"
    if job.is_preempted:
        return "preempted"
    if job.state in (JobState.CANCELLED, JobState.COMPLETED, JobState.FAILED):
        return None
    if job.state is JobState.NODE_FAIL:
        return "node_fail"
    if job.state is JobState.TIMEOUT or job.reason == "TimeLimit":
        return "timeout"
    if request == COMEBACK_SIGNAL:
        return "timeout" if _is_nearly_over(job, grace_s) else "asked"
    return "timeout" if request == notice and not shell_was_told and _is_nearly_over(job, grace_s) else None


def is_ending(job: JobDetails, restarts: int, grace_s: float) -> bool:
    """Whether Slurm ends this start of a job, or is about to; `restarts` as for `termination_cause`."""
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
