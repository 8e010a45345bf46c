"""Starts attempts of a run with the backend of its plan: sbatch, submitit or this machine."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from shlex import quote
from types import FrameType
from typing import TYPE_CHECKING, Any

from trainkit.config import RunConfig, dump_effective, read_effective
from trainkit.control.jobs import (
    cancel_follow_ups,
    live_entry,
    recover_job_id,
    require_not_running,
    signal_job,
    slurm_job,
    wait_until_out_of_queue,
)
from trainkit.control.resume import note_dead_job
from trainkit.control.run_registry import register
from trainkit.errors import TrainkitError, UsageError
from trainkit.job.requeue import excludable
from trainkit.plan.launch import LaunchPlan
from trainkit.plan.slurm_request import with_excluded
from trainkit.run.end import read_end
from trainkit.run.events import log_event
from trainkit.run.files import write_atomic
from trainkit.run.lock import run_lock
from trainkit.run.record import (
    AttemptRecord,
    add_slurm_attempt,
    discard_attempt,
    mark_requeue_requested,
    next_attempt_number,
    open_attempt,
    read_job,
    submission_token,
)
from trainkit.run.rundir import AttemptDir, RunDir
from trainkit.submit.code.snapshot import renewed_code
from trainkit.submit.preflight_checks import refuse_leaks

if TYPE_CHECKING:
    from trainkit.submit.script import JobScript


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
    if plan.backend == "local":
        from trainkit.submit.local_backend import start_local_attempt

        return start_local_attempt(run, config_text, plan_text, reason, foreground)
    if plan.backend == "hosts":
        from trainkit.submit.local_backend import open_hosts_attempt

        return open_hosts_attempt(run, config_text, plan_text, reason)
    return _start_on_slurm(run, config, plan, reason)


def _start_on_slurm(run: RunDir, config: RunConfig, plan: LaunchPlan, reason: str) -> AttemptRecord:
    """Submit a run's next attempt and cancel its pending follow-up jobs.

    A rejected submission leaves the run unchanged. If the answer was lost, the attempt is kept: the job may
    exist. Raises UsageError when the run folder cannot be written.
    """
    from trainkit.submit.sbatch_backend import removed_unless_submitted, submit_file, submit_follow_ups

    assert plan.slurm is not None
    job = read_job(run)
    if job.cwd is None:
        raise UsageError(
            f"{run.job_file} cannot be read, so the working directory and the code of the run are unknown",
            hint=f"`trainkit resume {quote(str(run.path))} --as DIR` resumes in a new folder",
        )
    number = next_attempt_number(run)
    script = script_of_attempt(run, number, plan, config, Path(job.cwd), job.code)
    refuse_leaks(script.text, str(run.script_file), config.secrets, os.environ)
    cancel_follow_ups(run)
    attempt = _write_attempt(run, dump_effective(config), plan.to_text(), script)
    token = submission_token(run, attempt.number)
    try:
        with removed_unless_submitted(attempt.path, token):
            if plan.backend == "submitit":
                from trainkit.submit.submitit_backend import submit_with_submitit

                job_id = submit_with_submitit(run, script, token, _print)
            else:
                job_id = submit_file(attempt.script_file, token, run.path)
    except BaseException:
        if not attempt.path.exists():
            discard_attempt(attempt)
        raise
    try:
        entry = add_slurm_attempt(run, attempt.number, job_id, reason, plan.backend)
        log_event(run, attempt.number, "submitted", job_id=job_id, reason=reason)
        submit_follow_ups(attempt, job_id, plan.slurm, config.requeue.follow_ups, _print)
    except OSError as error:
        raise TrainkitError(
            f"{job_id} was submitted, but {run.path} cannot be written: {error.strerror}",
            hint=f"free disk space, which the job needs too, or cancel it with `scancel {job_id}`",
        ) from error
    register(run, read_job(run).name)
    return entry


def script_of_attempt(
    run: RunDir, attempt: int, plan: LaunchPlan, config: RunConfig, cwd: Path, code: Mapping[str, Any] | None
) -> JobScript:
    """The batch script of an attempt, with the text that the backend of the plan submits."""
    from trainkit.submit.script import script_for

    script = script_for(run, attempt, plan, config, cwd, code)
    if plan.backend != "submitit":
        return script
    from trainkit.submit.submitit_backend import submitit_text

    return replace(script, text=submitit_text(run, script))


def _write_attempt(run: RunDir, config_text: str, plan_text: str, script: JobScript) -> AttemptDir:
    """Write all files of the run's next attempt, or none."""
    attempt = run.attempt(next_attempt_number(run))
    try:
        open_attempt(run, config_text, plan_text)
        for file in (attempt.script_file, run.script_file):
            write_atomic(file, script.text)
    except FileExistsError:
        raise  # another command has just opened this attempt
    except OSError as error:
        discard_attempt(attempt)
        raise UsageError(
            f"{run.path} cannot be written: {error.strerror or error}; nothing was submitted",
            hint="check its disk and your quota, or choose another folder with --run-dir",
        ) from error
    return attempt


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


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
    hosts = note_dead_job(run, _print)
    if hosts and plan.slurm is not None:
        left_out = with_excluded(plan.slurm, excludable(hosts, plan.slurm, _print))
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
            job = slurm_job(entry) if entry.is_slurm else None
            outcome = "waiting" if job is not None and job.state.is_waiting else "restarting"
        else:
            with suppress(OSError):  # on a full disk the signal alone has to do
                mark_requeue_requested(run)
            outcome = signal_job(run, entry, signal.SIGUSR2)
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
