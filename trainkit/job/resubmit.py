"""A run goes on as a new job, where Slurm does not start the same one again."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from trainkit.errors import TrainkitError
from trainkit.job.bad_nodes import excludable
from trainkit.job.children import say
from trainkit.job.mark import job_mark
from trainkit.job.record import (
    COMEBACK,
    add_slurm_entry,
    discard_attempt,
    is_cancelled,
    open_attempt,
    run_lock,
)
from trainkit.job.space import when_disk_allows
from trainkit.job.submitit_shell import give_submitit_files, submitit_file
from trainkit.plan.launch import LaunchPlan
from trainkit.plan.slurm_request import with_excluded
from trainkit.rundir import AttemptDir, RunDir, log_event, read_json, write_atomic
from trainkit.rungroup import group_of
from trainkit.slurm.client import SlurmUnreachable
from trainkit.slurm.submit import submit_script


def resubmit(run: RunDir, job_id: str, exclude: Sequence[str] = ()) -> str:
    """Submit the run's next attempt, with the bytes of its own script; the id of the new job.

    Called in the batch shell of the job that ends, which the new one waits for. Of an array only this task
    starts again. Hosts in `exclude` are left out where Slurm could start the job without them.
    Raises TrainkitError when the run was cancelled or Slurm does not take the job, OSError when the run
    folder cannot be written.
    """
    with run_lock(run):
        newest = run.attempt(run.attempt_numbers()[-1])
        if is_cancelled(newest):
            raise TrainkitError("it was cancelled meanwhile")
        script = script_of_job(run, job_id).read_text(encoding="utf-8")
        texts = [file.read_text(encoding="utf-8") for file in (newest.config_file, newest.plan_file)]
        plan = LaunchPlan.from_dict(read_json(newest.plan_file))
        following = when_disk_allows(lambda: open_attempt(run, *texts), say)
        try:
            write_atomic(following.script_file, script)
            new_id = _submit(following, job_id, plan, exclude)
        except BaseException as error:
            if not (isinstance(error, SlurmUnreachable) and error.may_have_arrived):
                discard_attempt(following)
            raise
        when_disk_allows(lambda: add_slurm_entry(run, following.number, new_id, COMEBACK, plan.backend), say)
    log_event(run, following.number, "submitted", job_id=new_id, reason=COMEBACK)
    return new_id


def script_of_job(run: RunDir, job_id: str) -> Path:
    """The batch script of a job of the run.

    Raises TrainkitError when it is not there.
    """
    point = group_of(run) if "_" in job_id else None
    own = submitit_file(run, job_id, "submission.sh")
    script = point[0].script_file if point is not None else own if own.exists() else run.script_file
    if not script.is_file():
        raise TrainkitError(f"{script}, the script of job {job_id}, is not there")
    return script


def _submit(following: AttemptDir, job_id: str, plan: LaunchPlan, exclude: Sequence[str]) -> str:
    assert plan.slurm is not None
    run, request = following.run, plan.slurm
    mark = job_mark(run, following.number)
    comment = " ".join(filter(None, (mark, str(request.sbatch.get("comment") or ""))))
    options = [f"--comment={comment}", f"--dependency=afterany:{job_id}"]
    try:
        bad = excludable(exclude, request)
    except TrainkitError as error:
        print(f"{', '.join(exclude)} cannot be left out: {error.message}", flush=True)
        bad = []
    if bad:
        options.append(f"--exclude={with_excluded(request, bad).sbatch['exclude']}")
    task = job_id.partition("_")[2]
    if task:
        options.append(f"--array={task}")
    new_id = submit_script(
        following.script_file,
        mark=mark,
        environ=os.environ,
        cwd=run.path,
        extra_argv=options,
        notify=lambda text: print(text, flush=True),
    )
    give_submitit_files(run, job_id, new_id)
    return f"{new_id}_{task}" if task else new_id
