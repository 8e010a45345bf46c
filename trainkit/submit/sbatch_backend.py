"""Starts the next attempt of a run as a Slurm job."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainkit.control.follow_ups import cancel_follow_ups, submit_follow_ups
from trainkit.control.run_registry import register
from trainkit.errors import TrainkitError, UsageError
from trainkit.job.record import (
    add_slurm_entry,
    discard_attempt,
    next_attempt_number,
    open_attempt,
    read_job,
    submission_token,
)
from trainkit.plan.launch import LaunchPlan
from trainkit.rundir import AttemptDir, RunDir, log_event, write_atomic
from trainkit.slurm.client import SlurmUnreachable
from trainkit.slurm.control import cancel
from trainkit.slurm.submit import find_marked, submit_script, would_start
from trainkit.submit.create import plan_text
from trainkit.submit.script import JobScript


def start_slurm_attempt(
    run: RunDir,
    config_text: str,
    plan: LaunchPlan,
    script: JobScript,
    reason: str,
    follow_ups: int = 0,
) -> dict[str, Any]:
    """Submit a run's next attempt and give its job.json entry; call with the run's lock held.

    `follow_ups` more jobs wait in the queue to go on after it; those of earlier attempts are taken out of it.
    A refused submission leaves the run as it was. One whose answer was lost leaves the attempt: the job may
    exist. Raises UsageError when the run folder cannot be written.
    """
    assert plan.slurm is not None
    cancel_follow_ups(run)
    attempt = _write_attempt(run, config_text, plan_text(plan), script)
    mark = submission_token(run, attempt.number)
    try:
        with removed_unless_submitted(attempt.path, mark):
            if plan.backend == "submitit":
                from trainkit.submit.submitit_backend import submit_with_submitit

                job_id = submit_with_submitit(run, script, mark, _say)
            else:
                job_id = submit_file(attempt.script_file, mark, run.path)
    except BaseException:
        if not attempt.path.exists():
            discard_attempt(attempt)
        raise
    try:
        entry = add_slurm_entry(run, attempt.number, job_id, reason, plan.backend)
        log_event(run, attempt.number, "submitted", job_id=job_id, reason=reason)
        submit_follow_ups(attempt, job_id, plan.slurm, follow_ups, _say)
    except OSError as error:
        raise TrainkitError(
            f"{job_id} was submitted, but {run.path} cannot be written: {error.strerror}",
            hint=f"make space there: the job needs it too; `scancel {job_id}` takes it back",
        ) from error
    register(run, str(read_job(run)["name"]))
    return entry


def _write_attempt(run: RunDir, config_text: str, plan_text: str, script: JobScript) -> AttemptDir:
    """The run's next attempt with all its files; nothing of it is left when they cannot be written."""
    attempt = run.attempt(next_attempt_number(run))
    try:
        open_attempt(run, config_text, plan_text)
        for file in (attempt.script_file, run.script_file):
            write_atomic(file, script.text)
    except FileExistsError:
        raise  # another command was faster: it is not ours
    except OSError as error:
        discard_attempt(attempt)
        raise UsageError(
            f"{run.path} cannot be written: {error.strerror or error}; nothing was submitted",
            hint="check its disk and your quota, or name another place with --run-dir",
        ) from error
    return attempt


def submit_file(script: Path, mark: str, cwd: Path) -> str:
    """Submit a script once and give its job id; what takes long is said on stderr."""
    return submit_script(script, mark=mark, environ=os.environ, cwd=cwd, notify=_say)


@contextmanager
def removed_unless_submitted(folder: Path, mark: str) -> Iterator[None]:
    """Remove a folder when the job that is submitted within surely does not exist; pass the error on."""
    began = time.time()
    try:
        yield
    except BaseException as error:
        arrived = isinstance(error, SlurmUnreachable) and error.may_have_arrived
        if isinstance(error, KeyboardInterrupt):
            arrived = not _taken_back(mark, began)
        if not arrived:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _taken_back(mark: str, since: float) -> bool:
    """After Ctrl-C: whether it is sure that no job with the mark is left."""
    try:
        found = find_marked(mark, since=since)
        if found is not None:
            cancel([found])
            _say(f"{found} had been submitted already, and is cancelled")
    except TrainkitError as error:
        _say(f"whether the job was submitted is not known: {error.message}")
        return False
    return True


def ask_slurm_about(script: str) -> str:
    """What Slurm expects of a script that is not submitted, in one sentence.

    Raises SlurmRefused when it would not take it.
    """
    with tempfile.TemporaryDirectory(prefix="trainkit-") as folder:
        path = Path(folder) / "submit.sbatch"
        path.write_text(script, encoding="utf-8", errors="surrogateescape")
        return would_start(path, environ=os.environ, cwd=Path(folder)).message
