"""Starts attempts of a run with the backend of its plan: sbatch, submitit or this machine."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from shlex import quote
from types import FrameType

from trainkit.backends import BACKENDS, JobScript, NewAttempt, backend_of
from trainkit.backends.slurm import print_note
from trainkit.config import RunConfig, dump_effective, read_effective
from trainkit.control.jobs import live_entry, recover_job_id, require_not_running, wait_until_out_of_queue
from trainkit.control.resume import note_dead_job
from trainkit.control.run_registry import register
from trainkit.errors import UsageError
from trainkit.job.requeue import excludable
from trainkit.plan.launch import LaunchPlan
from trainkit.plan.slurm_request import with_excluded
from trainkit.run.end import read_end
from trainkit.run.lock import run_lock
from trainkit.run.record import (
    AttemptRecord,
    JobRecord,
    mark_requeue_requested,
    next_attempt_number,
    read_job,
)
from trainkit.run.rundir import RunDir
from trainkit.submit.code.snapshot import renewed_code
from trainkit.submit.preflight_checks import refuse_leaks


def start_run(run: RunDir, config: RunConfig, plan: LaunchPlan, reason: str) -> AttemptRecord:
    """Start the first attempt of a run that was just created and return its job.json entry.

    With the reason ``run`` a local run ends when this process does. The run folder is removed if the attempt
    cannot be started.
    """
    try:
        with run_lock(run):
            return start_attempt(run, config, plan, reason, foreground=reason == "run")
    except BaseException:
        if not run.attempt_numbers():
            shutil.rmtree(run.path, ignore_errors=True)
        raise


def start_attempt(
    run: RunDir, config: RunConfig, plan: LaunchPlan, reason: str, foreground: bool = False
) -> AttemptRecord:
    """Start a run's next attempt and return its job.json entry; call with the run's lock held.

    `reason` is one of ``submit run requeue resume``; `foreground` is for local runs only.
    """
    config_text, plan_text = dump_effective(config), plan.to_text()
    for text, where in ((config_text, run.config_file), (plan_text, run.plan_file)):
        refuse_leaks(text, str(where), config.secrets, os.environ)
    job, backend, script = read_job(run), BACKENDS[plan.backend], None
    if backend.template is not None:
        script = _script(run, job, config, plan)
        refuse_leaks(script.text, str(run.script_file), config.secrets, os.environ)
    new = NewAttempt(config_text, plan_text, plan, reason, script, config.requeue.follow_ups, foreground)
    entry = backend.start(run, new)
    register(run, job.name)
    return entry


def _script(run: RunDir, job: JobRecord, config: RunConfig, plan: LaunchPlan) -> JobScript:
    """The batch script of a run's next attempt."""
    from trainkit.submit.script import script_for

    if job.cwd is None:
        raise UsageError(
            f"{run.job_file} cannot be read, so the working directory and the code of the run are unknown",
            hint=f"`trainkit resume {quote(str(run.path))} --as DIR` resumes in a new folder",
        )
    return script_for(run, next_attempt_number(run), plan, config, Path(job.cwd), job.code)


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
        raise UsageError(f"{run.path} ran in a step that srun started", hint=hint)
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


def resume_run(run: RunDir, config: RunConfig, plan: LaunchPlan, new_code: bool) -> AttemptRecord:
    """Start the next attempt of a run that has ended, with this config and plan; returns its job.json entry.

    `new_code` replaces the run's copy of the code. Raises UsageError if the run is still running.
    """
    with run_lock(run):
        recover_job_id(run)
        require_not_running(run, "resume")  # under the lock: another command may have started it
        with renewed_code(run, config, plan) if new_code else nullcontext():
            return start_attempt(run, config, plan, "resume")


@contextmanager
def defer_sigint() -> Iterator[None]:
    """Defer the KeyboardInterrupt of a SIGINT to the end of the block; a second SIGINT raises it immediately.

    Only for the main thread. An ignored SIGINT stays ignored. Child processes in the terminal's foreground
    group receive Ctrl-C themselves.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield
        return
    interrupted = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        if interrupted:
            raise KeyboardInterrupt
        interrupted = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if interrupted:
        raise KeyboardInterrupt
