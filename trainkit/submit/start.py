"""Starts attempts of a run with the backend of its plan: sbatch, submitit or this machine."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from types import FrameType

from trainkit.backends import JobScript, NewAttempt, backend_named
from trainkit.config import RunConfig, dump_effective
from trainkit.errors import UsageError
from trainkit.plan.launch import LaunchPlan
from trainkit.run.lock import run_lock
from trainkit.run.record import (
    AttemptRecord,
    JobRecord,
    next_attempt_number,
    read_job,
)
from trainkit.run.registry import register
from trainkit.run.rundir import RunDir
from trainkit.submit.secrets import refuse_leaks


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
    job, backend, script = read_job(run), backend_named(plan.backend), None
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
