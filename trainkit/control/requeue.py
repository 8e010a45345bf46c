"""Starts a run again with the config and plan of its newest attempt; a running job saves first."""

from __future__ import annotations

import signal
from contextlib import suppress
from dataclasses import replace
from shlex import quote

from trainkit.backends import backend_of
from trainkit.backends.jobs import live_entry, recover_job_id, wait_until_out_of_queue
from trainkit.backends.slurm import print_note
from trainkit.config import read_effective
from trainkit.control.resume import note_dead_job
from trainkit.errors import UsageError
from trainkit.job.requeue import excludable
from trainkit.plan.launch import LaunchPlan
from trainkit.plan.slurm_request import with_excluded
from trainkit.run.end import read_end
from trainkit.run.lock import run_lock
from trainkit.run.record import AttemptRecord, mark_requeue_requested, read_job
from trainkit.run.rundir import RunDir
from trainkit.submit.create import start_attempt


def start_again(run: RunDir, reason: str) -> AttemptRecord:
    """Start the next attempt of a run that has ended, with the config and plan of its newest one.

    Call with the run's lock held. Raises UsageError for a run that was never started.
    """
    newest = read_job(run).newest
    if newest is None:
        hint = f"`trainkit resume {quote(str(run.path))}` starts it"
        raise UsageError(f"{run.path} was never started", hint=hint)
    attempt = run.attempt(newest.attempt)
    plan = LaunchPlan.read(attempt.plan_file)
    if not plan.has_supervisor:
        hint = f"`trainkit resume {quote(str(run.path))}` plans it anew"
        where = "in a step that srun started, or on hosts without Slurm"
        raise UsageError(f"{run.path} ran {where}", hint=hint)
    hosts = note_dead_job(run, print_note)
    if hosts and plan.slurm is not None:
        left_out = with_excluded(plan.slurm, excludable(hosts, plan.slurm, print_note))
        plan = replace(plan, slurm=left_out)
    return start_attempt(run, read_effective(attempt.config_file), plan, reason)


def requeue_run(run: RunDir) -> tuple[AttemptRecord, bool]:
    """Requeue a run; returns its job.json entry and whether a new attempt was started.

    A running job is signalled to save and requeue itself. Raises UsageError for a job that is still pending.
    """
    with run_lock(run):
        recover_job_id(run)
        wait_until_out_of_queue(run)
        entry = live_entry(run, "requeue")
        if entry is None:
            return start_again(run, "requeue"), True
        end = read_end(run.attempt(entry.attempt))
        if end is not None and end.resumes:
            # The run restarts anyway: there is nothing to signal.
            job = backend_of(entry).job(entry)
            outcome = "waiting" if job is not None and job.state.is_waiting else "restarting"
        else:
            with suppress(OSError):  # on a full disk the signal alone has to do
                mark_requeue_requested(run)
            outcome = backend_of(entry).signal(run, entry, signal.SIGUSR2)
            if outcome == "waiting":
                mark_requeue_requested(run, requested=False)  # else the job would requeue itself at its start
    if outcome == "waiting":
        raise UsageError(f"{entry.job_id} is already pending", hint="`trainkit status` shows the reason")
    return entry, False
