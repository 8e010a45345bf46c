"""Submits, finds and cancels the Slurm jobs that evaluate checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

from trainkit.capabilities.evaluations.records import folder_of
from trainkit.job.processes import module_argv
from trainkit.plan.launch import option_argv
from trainkit.quoting import directive, log_path, words
from trainkit.run.files import write_atomic
from trainkit.run.record import read_job
from trainkit.run.rundir import RunDir
from trainkit.scheduler import JobState
from trainkit.slurm.control import cancel_waiting
from trainkit.slurm.jobs import query_jobs
from trainkit.slurm.submit import submit_script

GONE = (JobState.UNKNOWN,)


def script_of(run: RunDir, step: int, options: Mapping[str, str | int | bool], token: str) -> str:
    """Return the batch script of an evaluation."""
    folder = folder_of(run, step)
    own: dict[str, str | int | bool] = {
        "job-name": f"{run.name}-eval-{step}",
        "nodes": 1,
        "ntasks": 1,
        "comment": token,
    }
    own |= {"output": log_path(str(folder / "evaluator.log")), "open-mode": "append"}
    lines = [
        option if "=" not in option else f"{option.partition('=')[0]}={directive(option.partition('=')[2])}"
        for option in option_argv({**own, **options})
    ]
    argv = module_argv("trainkit.capabilities.evaluations.evaluator", str(run.path), str(step))
    return "\n".join(["#!/bin/bash", *(f"#SBATCH {line}" for line in lines), f"exec {words(argv)}", ""])


def submit_job(
    run: RunDir,
    step: int,
    start: int,
    options: Mapping[str, str | int | bool],
    notify: Callable[[str], None],
) -> str:
    """Submit the evaluation of a checkpoint, and return the job id.

    `start` is the number of this start, beginning with 1. Raises the same errors as `submit_script`.
    """
    token = f"trainkit-eval:{run.path.stat().st_ino}.{step}.{start}"
    file = folder_of(run, step) / "submit.sbatch"
    write_atomic(file, script_of(run, step, options, token))
    cwd = Path(read_job(run).cwd or run.path)
    return submit_script(
        file, token=token, cwd=cwd if cwd.is_dir() else run.path, is_only_job=False, notify=notify
    )


def jobs_in_queue(job_ids: Iterable[str]) -> Collection[str]:
    """Return the jobs that wait or run; raise SlurmError if Slurm does not answer."""
    known = query_jobs(job_ids)
    return {job_id for job_id, job in known.items() if not job.state.is_terminal and job.state not in GONE}


def cancel_job(job_id: str) -> None:
    """Cancel a job unless it has started; raise SlurmError if Slurm does not answer."""
    cancel_waiting([job_id])
