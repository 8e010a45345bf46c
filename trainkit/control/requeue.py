"""Restarts a run without changes, using the config and plan of its newest attempt."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from trainkit.backend import backend_of
from trainkit.backends.jobs import live_entry, read_whole_job, wait_until_out_of_queue
from trainkit.control.changed_config import refuse_finished, run_so_far
from trainkit.errors import UsageError, print_note
from trainkit.launch.create import start_attempt
from trainkit.launch.repeat import refuse_by_hand
from trainkit.run.end import is_over, read_end
from trainkit.run.files import utc_now
from trainkit.run.record import AttemptRecord, JobRecord, change_newest
from trainkit.run.rundir import RunDir, run_lock


@dataclass(frozen=True)
class Requeued:
    """The result of `requeue_run`."""

    job: JobRecord
    """The content of job.json before the requeue."""
    entry: AttemptRecord
    """The attempt that was started, or that was asked to save."""
    is_started: bool


def requeue_run(run: RunDir) -> Requeued:
    """Requeue a run; if its job is running, signal the job to save and to requeue itself.

    Raises UsageError if the job is pending, or is being cancelled but has not ended yet.
    """
    refuse_by_hand(run)
    with run_lock(run):
        job = read_whole_job(run)
        wait_until_out_of_queue(run, job)
        entry = live_entry(run, job, "requeue")
        if entry is None:
            return Requeued(job, start_again(run, job, "requeue"), True)
        if entry.is_cancelled:
            raise UsageError(
                f"{run.shown} is being cancelled: {entry.job_id} was asked to save a checkpoint and to exit",
                hint=f"`trainkit cancel {run.quoted} --wait` returns once the run has stopped; requeue the "
                "run afterwards",
            )
        end = read_end(run.attempt(entry.attempt))
        if end is not None and end.resumes:
            # The run will restart anyway, so do not signal the job.
            own = backend_of(entry).job(entry)
            outcome = "waiting" if own is not None and own.state.is_waiting else "restarting"
        else:
            # Between two steps of a job, no process receives the signal, so record the request in job.json,
            # too.
            with suppress(OSError):  # if the disk is full, only the signal is sent
                change_newest(run, requeue_requested_at=utc_now())
            outcome = backend_of(entry).signal(run, entry, signal.SIGUSR2)
            if outcome == "waiting":
                # Withdraw the request; otherwise, the pending job would requeue itself when it starts.
                change_newest(run, requeue_requested_at=None)
    if outcome == "waiting":
        raise UsageError(
            f"{entry.job_id} is already pending", hint="`trainkit status` shows why the job is pending"
        )
    return Requeued(job, entry, False)


def start_again(run: RunDir, job: JobRecord, reason: str) -> AttemptRecord:
    """Start the next attempt of an ended run, using the config and plan of its newest attempt.

    The caller must hold the run's lock. Raises UsageError if the run was never started, or if the trainer has
    finished all steps. A finished command can be started again, because only the user knows whether work
    remains.
    """
    newest = job.newest
    if newest is None:
        hint = f"`trainkit resume {run.quoted}` starts the run"
        raise UsageError(f"{run.shown} was never started", hint=hint)
    so_far = run_so_far(run, job, run.attempt(newest.attempt))
    config, plan = so_far.config, so_far.plan
    if not plan.workload.is_command:
        refuse_finished(so_far, config)
    if not plan.has_supervisor or plan.attended_in is not None:
        step = "step that srun started, or under another launcher"
        where = f"a {plan.attended_in if plan.has_supervisor else step}"
        raise UsageError(
            f"{run.shown} ran in {where}", hint=f"`trainkit resume {run.quoted}` creates a new plan"
        )
    hosts = note_dead_job(run, job, print_note)
    plan = backend_of(newest).without_hosts(plan, hosts, print_note)
    return start_attempt(run, job, config, plan, reason)


def note_dead_job(run: RunDir, record: JobRecord, warn: Callable[[str], None]) -> list[str]:
    """Exclude the hosts where the run's newest job ended before its supervisor began.

    Returns the hosts that are now excluded. Raises SlurmUnreachable if Slurm does not answer.
    """
    entry = _dead_job(run, record)
    return [] if entry is None else backend_of(entry).note_bad_hosts(run, record, entry, warn)


def hosts_of_dead_job(run: RunDir, record: JobRecord) -> list[str]:
    """Return the hosts that `note_dead_job` would exclude; raise SlurmUnreachable without an answer."""
    entry = _dead_job(run, record)
    return [] if entry is None else backend_of(entry).bad_hosts(run, record, entry)


def _dead_job(run: RunDir, record: JobRecord) -> AttemptRecord | None:
    entry = record.newest
    return None if entry is None or is_over(run.attempt(entry.attempt)) else entry
