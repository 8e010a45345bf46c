"""Starts the next attempt of a run without Slurm: under a supervisor process, or by this command itself."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

from trainkit.control.run_registry import register
from trainkit.job.processes import dies_with, module_argv
from trainkit.job.signals import NOTICE_SIGNALS
from trainkit.run.events import log_event
from trainkit.run.record import AttemptRecord, JobRecord, add_attempt, open_attempt, read_job
from trainkit.run.rundir import RunDir


def start_local_attempt(
    run: RunDir, config_text: str, plan_text: str, reason: str, foreground: bool = False
) -> AttemptRecord:
    """Start a run's next attempt and return its job.json entry; call with the run's lock held.

    The attempt survives the terminal, or with `foreground` saves and ends when this process dies.
    `reason` is one of ``submit run requeue resume``.
    """
    attempt = open_attempt(run, config_text, plan_text)
    argv = module_argv("trainkit.job.supervisor", str(run.path), "--attempt", str(attempt.number))
    job = read_job(run)
    # A stop signal stays pending while the supervisor's interpreter starts.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, NOTICE_SIGNALS)
    try:
        with attempt.supervisor_log.open("ab") as log:
            supervisor = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=_working_dir(job),
                start_new_session=True,
                preexec_fn=dies_with(os.getpid(), signal.SIGTERM) if foreground else None,
            )
        entry = add_attempt(run, attempt.number, supervisor.pid, reason)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    log_event(run, attempt.number, "submitted", job_id=entry.job_id, reason=reason)
    register(run, job.name)
    return entry


def open_hosts_attempt(run: RunDir, config_text: str, plan_text: str, reason: str) -> AttemptRecord:
    """Open a run's next attempt, which this process supervises on several hosts; returns its job.json entry.

    Call with the run's lock held; `reason` is ``run`` or ``resume``.
    """
    attempt = open_attempt(run, config_text, plan_text)
    entry = add_attempt(run, attempt.number, os.getpid(), reason)
    log_event(run, attempt.number, "submitted", job_id=entry.job_id, reason=reason)
    register(run, read_job(run).name)
    return entry


def _working_dir(job: JobRecord) -> str:
    """The folder the run was submitted from, so that its relative paths stay valid."""
    return job.cwd if job.cwd is not None and Path(job.cwd).is_dir() else str(Path.cwd())
