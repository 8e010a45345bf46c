"""Determines which attempt a start of a Slurm job executes, and claims this attempt."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from shlex import quote

from trainkit.errors import TrainkitError
from trainkit.job.processes import log_line
from trainkit.plan.launch import LaunchPlan
from trainkit.run.end import is_over, read_end
from trainkit.run.events import log_event
from trainkit.run.files import refresh_listing, wait_for_json
from trainkit.run.record import (
    AUTO_RESTART,
    AttemptRecord,
    JobRecord,
    add_slurm_attempt,
    claim_entry,
    claimed_by,
    job_of,
    read_job_to_change,
    reopen_attempt,
    set_follow_ups,
)
from trainkit.run.rundir import AttemptDir, RunDir, is_supervised, refuse_missing, run_lock
from trainkit.scheduler import JobState
from trainkit.slurm.client import SlurmRefused
from trainkit.slurm.environment import cluster_name
from trainkit.slurm.jobs import job_details

ENTRY_TIMEOUT_S = 20.0
"""Seconds that the submitting command may take to record the job id in job.json."""


@dataclass(frozen=True)
class NothingToDo:
    """The reason why a job that has just started does not run an attempt."""

    reason: str
    cancelled: AttemptDir | None = None
    """The attempt to close if the job was cancelled before it started any process, or else None."""


def claim_attempt(run: RunDir, job_id: str, lock_timeout_s: float | None = None) -> AttemptDir | NothingToDo:
    """Claim the attempt that this start of the job executes.

    Returns NothingToDo if the job was cancelled while pending, if it is a chained job and the run has ended,
    or if another job executes the run. Another job may execute the run if the script was submitted twice, or
    if an old job was requeued. Raises OSError, and RunLocked for the same reasons as `run_lock`. Raises
    UsageError if the run folder is gone or cannot be locked.
    """
    with contextlib.suppress(TimeoutError):
        wait_for_json(
            run.job_file,
            ENTRY_TIMEOUT_S,
            accept=lambda content: _names(job_of(run, content), job_id),
        )
    refuse_missing(run)
    while True:
        # Query Slurm without holding the run's lock, because `trainkit cancel` needs the lock.
        newest = (job := read_job_to_change(run)).newest
        carrier = None if newest is None else _carrier(run, job, newest, job_id)
        with run_lock(run, lock_timeout_s):
            job = read_job_to_change(run)
            if job.newest != newest:
                continue
            if carrier is None:
                return _claim(run, job, job_id)
            follow_ups = job.follow_ups or []
            if job_id in follow_ups:  # later chained jobs depend on this job
                set_follow_ups(run, follow_ups[: follow_ups.index(job_id)])
            path = quote(str(run.path))
            hint = f"`trainkit cancel {path}` cancels that job"
            return NothingToDo(f"job {carrier} is running or pending for this run; {hint}")


def _names(job: JobRecord, job_id: str) -> bool:
    """Return whether job.json lists the job, either as the job of an attempt or as a chained job."""
    return bool(job.of_job(job_id, cluster_name())) or job_id in (job.follow_ups or [])


def _carrier(run: RunDir, job: JobRecord, newest: AttemptRecord, job_id: str) -> str | None:
    """Return the other job that executes a run's newest attempt, or None if this job may execute it.

    If Slurm does not answer whether the other job is pending or running, the supervisor's lock decides. A
    chained job ignores the supervisor's lock, because its predecessor has finished, and a dead host may still
    hold the lock.
    """
    other = newest.job_id
    # For an array task that was found by its token, the recorded id lacks the array index.
    is_own = other in (job_id, job_id.partition("_")[0]) and newest.other_cluster is None
    if is_own or is_over(run.attempt(newest.attempt)):
        return None
    state = JobState.UNKNOWN
    if newest.backend is not None:
        try:
            state = job_details(newest.job).state
        except SlurmRefused:
            return None  # Slurm no longer knows the job
        except TrainkitError as error:
            log_line(f"cannot query job {other}: {error.message}")
    if state is JobState.UNKNOWN:
        return other if job_id not in (job.follow_ups or []) and is_supervised(run) else None
    # A completing job is about to exit, which releases its supervisor's lock.
    is_live = state.is_waiting or (state.is_active and state is not JobState.COMPLETING)
    return other if is_live else None


def _claim(run: RunDir, job: JobRecord, job_id: str) -> AttemptDir | NothingToDo:
    """Execute the part of `claim_attempt` that needs the lock. No other job may be executing the run."""
    refresh_listing(run.attempts_dir)
    own, newest = job.of_job(job_id, cluster_name()), run.attempt(run.attempt_numbers()[-1])
    follows, has_ended = not own and job_id in (job.follow_ups or []), is_over(newest)
    if any(entry.is_cancelled for entry in own):
        is_open = own[-1].is_cancelled and not has_ended
        closed = run.attempt(own[-1].attempt) if is_open else None
        return NothingToDo("the job was cancelled before it started", closed)
    if follows and has_ended:
        return NothingToDo("the run has ended")
    # After a preemption, Slurm 24.11 restarts a job that requeued itself, even if the job has already
    # finished.
    if own and (end := read_end(run.attempt(own[-1].attempt))) is not None and end.action == "finished":
        return NothingToDo("the run has finished")
    if own and own[-1].pid is None:
        claim_entry(run, own[-1].attempt, os.getpid())
        return run.attempt(own[-1].attempt)
    entry = job.of_attempt(newest.number)
    if entry.is_cancelled:
        # The run was cancelled while another job was executing the newest attempt.
        closed = None if own or has_ended else newest
        return NothingToDo("the run was cancelled; `trainkit resume` restarts the run", closed)
    if entry.attempt:
        newest = reopen_attempt(newest)
    # job.json does not list this start yet, because the job was requeued or Slurm never acknowledged the
    # submission.
    reason = AUTO_RESTART if own or follows else "submit"
    register_start(newest, job_id, reason)
    log_event(run, newest.number, "submitted", job_id=job_id, reason=reason)
    return newest


def register_start(attempt: AttemptDir, job_id: str, reason: str) -> None:
    """Record that this process of a Slurm job executes an attempt. The caller must hold the lock."""
    backend = LaunchPlan.read(attempt.plan_file).backend
    add_slurm_attempt(attempt.run, attempt.number, job_id, reason, backend, **claimed_by(os.getpid()))
