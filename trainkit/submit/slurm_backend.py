"""Starts the next attempt of a run as a Slurm job."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from trainkit.job.record import add_slurm_entry, open_attempt, read_job
from trainkit.rundir import RunDir, log_event, write_atomic
from trainkit.slurm.client import SlurmUnreachable
from trainkit.slurm.submit import submit_script, would_start
from trainkit.submit.index import register
from trainkit.submit.slurm_script import JobScript, job_mark


def start_slurm_attempt(
    run: RunDir, config_text: str, plan_text: str, script: JobScript, reason: str, backend: str
) -> dict[str, Any]:
    """Submit a run's next attempt and give its job.json entry; call with the run's lock held.

    A refused submission leaves no attempt behind. One whose answer was lost leaves it: the job may exist.
    """
    attempt = open_attempt(run, config_text, plan_text)
    try:
        for file in (attempt.script_file, run.script_file):
            write_atomic(file, script.text)
        mark = job_mark(run, attempt.number)
        if backend == "submitit":
            from trainkit.submit.submitit_backend import submit_with_submitit

            job_id = submit_with_submitit(run, script, mark)
        else:
            job_id = submit_script(attempt.script_file, mark=mark, environ=os.environ, cwd=run.path)
    except BaseException as error:
        if not (isinstance(error, SlurmUnreachable) and error.may_have_arrived):
            shutil.rmtree(attempt.path, ignore_errors=True)
        raise
    entry = add_slurm_entry(run, attempt.number, job_id, reason, backend)
    log_event(run, attempt.number, "submitted", job_id=job_id, reason=reason)
    register(run, str(read_job(run)["name"]))
    return entry


def ask_slurm_about(script: str) -> str:
    """What Slurm expects of a script that is not submitted, in one sentence.

    Raises SlurmRefused when it would not take it.
    """
    with tempfile.TemporaryDirectory(prefix="trainkit-") as folder:
        path = Path(folder) / "submit.sbatch"
        path.write_text(script, encoding="utf-8", errors="surrogateescape")
        return would_start(path, environ=os.environ, cwd=Path(folder)).message
