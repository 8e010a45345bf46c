"""Start a run again unchanged, with the config and plan of its newest attempt."""

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
    """Requeue a run; a running job is signalled to save and requeue itself.

    Raises UsageError for a pending job, and for a job that is being cancelled, because it has to end first.
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
                f"{run.shown} is being cancelled: {entry.job_id} saves and ends",
                hint=f"`trainkit cancel {run.word} --wait` returns once it has ended; requeue it then",
            )
        end = read_end(run.attempt(entry.attempt))
        if end is not None and end.resumes:
            # The run restarts anyway, so it needs no signal.
            own = backend_of(entry).job(entry)
            outcome = "waiting" if own is not None and own.state.is_waiting else "restarting"
        else:
            # The signal alone can be lost, because no process receives it between two steps. So record the
            # request too.
            with suppress(OSError):  # on a full disk the signal has to suffice
                change_newest(run, requeue_requested_at=utc_now())
            outcome = backend_of(entry).signal(run, entry, signal.SIGUSR2)
            if outcome == "waiting":
                # Withdraw the request, because the pending job would requeue itself at its start.
                change_newest(run, requeue_requested_at=None)
    if outcome == "waiting":
        raise UsageError(f"{entry.job_id} is already pending", hint="`trainkit status` shows the reason")
    return Requeued(job, entry, False)


def start_again(run: RunDir, job: JobRecord, reason: str) -> AttemptRecord:
    """Start the next attempt of a run that has ended, with the config and plan of its newest one.

    Call with the run's lock held. Raises UsageError for a run that was never started, and for a run of the
    trainer that has finished all its steps. A finished command may be started again, because only its user
    knows whether work remains.
    """
    newest = job.newest
    if newest is None:
        hint = f"`trainkit resume {run.word}` starts it"
        raise UsageError(f"{run.shown} was never started", hint=hint)
    so_far = run_so_far(run, job, run.attempt(newest.attempt))
    config, plan = so_far.config, so_far.plan
    if not plan.workload.is_command:
        refuse_finished(so_far, config)
    if not plan.has_supervisor or plan.attended_in is not None:
        step = "step that srun started, or under another launcher"
        where = f"a {plan.attended_in if plan.has_supervisor else step}"
        raise UsageError(f"{run.shown} ran in {where}", hint=f"`trainkit resume {run.word}` plans it again")
    hosts = note_dead_job(run, job, print_note)
    plan = backend_of(newest).without_hosts(plan, hosts, print_note)
    return start_attempt(run, job, config, plan, reason)


def note_dead_job(run: RunDir, record: JobRecord, warn: Callable[[str], None]) -> list[str]:
    """Make the run avoid the hosts where its newest job ended before the supervisor began.

    Returns these hosts. Raises SlurmUnreachable.
    """
    entry = record.newest
    if entry is None or is_over(run.attempt(entry.attempt)):
        return []
    return backend_of(entry).note_bad_hosts(run, record, entry, warn)
