"""Why a job of Slurm received a stop signal. Pure, but for the time of day.

It is inferred from the state of the job in Slurm, else from the processes that got the signal.
"""

from __future__ import annotations

import signal
from datetime import datetime, timedelta, timezone

from trainkit.job.decision import RESTART_SIGNAL
from trainkit.run.end import Cause
from trainkit.scheduler import JobState
from trainkit.slurm.jobs import JobDetails

EARLY_S = 60.0
"""How much earlier than requested Slurm may send the signal before the time limit."""
SLACK_S = 30.0
"""How much time may pass between a signal and the query, or between the start of a step and a signal."""


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
        return "timeout" if is_nearly_over(job, grace_s) else "asked"
    return (
        "timeout"
        if stop_signal == notice and not supervisor_was_signalled and is_nearly_over(job, grace_s)
        else None
    )


def is_ending(job: JobDetails, restarts: int, grace_s: float) -> bool:
    """Whether Slurm is ending this start of a job or soon will; `restarts` as in `termination_cause`."""
    return is_taken(job, restarts) or is_nearly_over(job, grace_s)


def is_taken(job: JobDetails | None, restarts: int) -> bool:
    """Whether Slurm is ending this start of a job: preempted, cancelled, out of time, or requeued."""
    if job is None:
        return False
    return job.state is not JobState.RUNNING or job.restarts > restarts or job.is_preempted


def is_nearly_over(job: JobDetails | None, grace_s: float) -> bool:
    """Whether a job has no more time than its notice leaves, or nearly so; False if that is unknown."""
    if job is None or job.end_time is None:
        return False
    return job.end_time - datetime.now(timezone.utc) < timedelta(seconds=grace_s + EARLY_S + SLACK_S)
