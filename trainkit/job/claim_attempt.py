"""Claims the attempt that one start of a Slurm job runs."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from trainkit.job.record import (
    AUTO_RESTART,
    add_slurm_entry,
    claim_entry,
    find_entry,
    is_cancelled,
    read_job,
    reopen_attempt,
    run_lock,
)
from trainkit.plan.launch import LaunchPlan
from trainkit.rundir import AttemptDir, RunDir, log_event, read_end, read_json, wait_for_json, will_resume

ENTRY_TIMEOUT_S = 20.0
"""How long the command that submitted the job may take to record its id."""


def claim_attempt(run: RunDir, job_id: str) -> AttemptDir | None:
    """Claim the attempt that this start of the job runs; None when there is nothing to do.

    There is nothing to do when the job was cancelled while pending, and for a follow-up of an ended run.
    Raises UsageError when the run folder cannot be locked, and OSError.
    """
    with contextlib.suppress(TimeoutError):
        wait_for_json(
            run.job_file,
            ENTRY_TIMEOUT_S,
            accept=lambda _: bool(entries_of(run, job_id)) or is_follow_up(run, job_id),
        )
    with run_lock(run):
        own = entries_of(run, job_id)
        follows = not own and is_follow_up(run, job_id)
        if any("cancelled_at" in entry for entry in own) or (follows and _has_ended(run)):
            return None
        if own and "pid" not in own[-1]:
            claim_entry(run, own[-1]["attempt"], os.getpid())
            return run.attempt(own[-1]["attempt"])
        newest = run.attempt(run.attempt_numbers()[-1])
        entry = find_entry(run, newest.number)
        if entry is not None and "cancelled_at" in entry:
            return None  # cancelled while another job ran that attempt: this job must not open the next one
        if entry is not None:
            newest = reopen_attempt(newest)
        # This start is not in job.json yet: the job was requeued, or its submission was never acknowledged.
        reason = AUTO_RESTART if own or follows else "submit"
        register_start(newest, job_id, reason)
    log_event(run, newest.number, "submitted", job_id=job_id, reason=reason)
    return newest


def register_start(attempt: AttemptDir, job_id: str, reason: str) -> None:
    """Record that this process of a Slurm job runs an attempt; call with the lock held."""
    backend = LaunchPlan.from_dict(read_json(attempt.plan_file)).backend
    add_slurm_entry(attempt.run, attempt.number, job_id, reason, backend)
    claim_entry(attempt.run, attempt.number, os.getpid())


def _has_ended(run: RunDir) -> bool:
    """Whether the newest attempt has recorded its end and no restart follows."""
    end = read_end(run.attempt(run.attempt_numbers()[-1]))
    return end is not None and not will_resume(end)


def cancelled_attempt(run: RunDir, job_id: str) -> AttemptDir | None:
    """The attempt to close when a job was cancelled before it started any process; None without one."""
    own = entries_of(run, job_id)
    if own:
        return run.attempt(own[-1]["attempt"])
    newest = run.attempt(run.attempt_numbers()[-1])
    return newest if is_cancelled(newest) and not _has_ended(run) else None


def is_follow_up(run: RunDir, job_id: str) -> bool:
    """Whether a job was submitted as a follow-up, to continue the run after another job."""
    return job_id in read_job(run).get("follow_ups", [])


def entries_of(run: RunDir, job_id: str) -> list[dict[str, Any]]:
    """The attempts of a job in job.json, oldest first."""
    return [entry for entry in read_job(run)["attempts"] if entry["job_id"] == job_id]
