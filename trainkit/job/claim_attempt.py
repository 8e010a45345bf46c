"""Which attempt of its run a start of a Slurm job is."""

from __future__ import annotations

import os
import time
from typing import Any

from trainkit.job.record import (
    COMEBACK,
    add_slurm_entry,
    claim_entry,
    find_entry,
    is_cancelled,
    open_attempt,
    read_job,
    run_lock,
)
from trainkit.plan.launch import LaunchPlan
from trainkit.rundir import AttemptDir, RunDir, goes_on, log_event, read_end, read_json

ENTRY_TIMEOUT_S = 20.0
"""How long the command that submitted us may take to write our job id down."""
POLL_S = 0.05


def claim_attempt(run: RunDir, job_id: str) -> AttemptDir | None:
    """The attempt that this start of the job is; None when there is nothing left to do for it.

    That is so when it was cancelled while it waited, and for a follow-up of a run that has ended meanwhile.
    """
    deadline_s = time.monotonic() + ENTRY_TIMEOUT_S
    while not (entries_of(run, job_id) or is_follow_up(run, job_id)) and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
    with run_lock(run):
        mine = entries_of(run, job_id)
        follows = not mine and is_follow_up(run, job_id)
        if any("cancelled_at" in entry for entry in mine) or (follows and _has_ended(run)):
            return None
        if mine and "pid" not in mine[-1]:
            claim_entry(run, mine[-1]["attempt"], os.getpid())
            return run.attempt(mine[-1]["attempt"])
        newest = run.attempt(run.attempt_numbers()[-1])
        entry = find_entry(run, newest.number)
        if entry is not None and "cancelled_at" in entry:
            return None  # told to whoever carried it before: this job had no attempt yet
        if entry is not None:
            newest = _reopen(newest)
        # Not in job.json yet: the job came back, or the command that submitted it never learned its id.
        reason = COMEBACK if mine or follows else "submit"
        backend = LaunchPlan.from_dict(read_json(newest.plan_file)).backend
        add_slurm_entry(run, newest.number, job_id, reason, backend)
        claim_entry(run, newest.number, os.getpid())
    log_event(run, newest.number, "submitted", job_id=job_id, reason=reason)
    return newest


def claim_next_attempt(attempt: AttemptDir, job_id: str) -> AttemptDir | None:
    """The attempt in which the same start of the job goes on; None when it was cancelled meanwhile."""
    run = attempt.run
    with run_lock(run):
        if is_cancelled(attempt):
            return None
        following = _reopen(attempt)
        backend = LaunchPlan.from_dict(read_json(following.plan_file)).backend
        add_slurm_entry(run, following.number, job_id, COMEBACK, backend)
        claim_entry(run, following.number, os.getpid())
    log_event(run, following.number, "submitted", job_id=job_id, reason=COMEBACK)
    log_event(run, following.number, "restart")
    return following


def _reopen(attempt: AttemptDir) -> AttemptDir:
    """The next attempt, with the config and plan of this one."""
    texts = [file.read_text(encoding="utf-8") for file in (attempt.config_file, attempt.plan_file)]
    return open_attempt(attempt.run, *texts)


def _has_ended(run: RunDir) -> bool:
    """Whether the newest attempt has written an end after which nothing follows."""
    end = read_end(run.attempt(run.attempt_numbers()[-1]))
    return end is not None and not goes_on(end)


def cancelled_number(run: RunDir, job_id: str) -> int | None:
    """The attempt that ends with a job that was cancelled before it had anything to do; None without one."""
    mine = entries_of(run, job_id)
    if mine:
        return int(mine[-1]["attempt"])
    newest = run.attempt(run.attempt_numbers()[-1])
    return newest.number if is_cancelled(newest) and not _has_ended(run) else None


def is_follow_up(run: RunDir, job_id: str) -> bool:
    """Whether a job was submitted to carry the run on after another."""
    return job_id in read_job(run).get("follow_ups", [])


def entries_of(run: RunDir, job_id: str) -> list[dict[str, Any]]:
    """The attempts in job.json that a job carries, oldest first."""
    return [entry for entry in read_job(run)["attempts"] if entry["job_id"] == job_id]
